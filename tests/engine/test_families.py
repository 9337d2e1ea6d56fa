"""Families beyond Llama's in the step loop: text as without drafts, with prompt lookup and with DFlash drafters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models.families import ASSISTANT, CONFIGS, WINDOW, text, write_assistant, write_family
from models.hybrid import HybridShape, write_hybrid
from models.hybrid import config_of as hybrid_config
from models.relatives import Spark, Walk, write_spark, write_walk
from models.tiny import Draft, Shape, write_drafter, write_target

from paceline import LLM, SamplingParams

from .harness import assert_idle, assert_same, assert_stats, watched

PARAMS = [
    SamplingParams(temperature=0.0, seed=1, max_tokens=24, logprobs=1, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=2, max_tokens=20, logprobs=2, n=2),
    SamplingParams(temperature=0.7, seed=4, max_tokens=24, stop_token_ids=[5, 6], min_tokens=3),
]


def open_llm(target: Path, speculative: dict[str, Any] | None, **options: Any) -> LLM:
    options = {"threads": 1, "dtype": "bfloat16", "speculative_config": speculative, **options}
    return watched(LLM(target, **options))


def prompts(vocab: int, *lengths: int) -> list[list[int]]:
    """Random ones that repeat themselves, so that prompt lookup finds something."""
    rng = np.random.default_rng(3)
    return [(rng.integers(0, vocab - 8, max(1, n // 3)).tolist() * 4)[:n] for n in lengths]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = {
        name: write_family(tmp_path_factory.mktemp("family"), c, sharp=2.0, tokenizer=True)
        for name, c in CONFIGS.items()
    }
    return out | {"qwen3_5": write_hybrid(tmp_path_factory.mktemp("family"), HYBRID, tokenizer=True)}


HYBRID = HybridShape()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in (*CONFIGS, "qwen3_5")),
        ("qwen3_moe", {"quantization": "int8", "kv_cache_dtype": "int8"}),
        ("gemma3", {"quantization": "int4", "kv_cache_dtype": "int8"}),
        ("mistral", {"quantization": "int8"}),
        ("phi4", {"quantization": "int4", "kv_cache_dtype": "int8"}),
        ("smollm3", {"quantization": "int4", "kv_cache_dtype": "int8"}),
        ("muse_glimmer", {"quantization": "int8", "kv_cache_dtype": "int8"}),
        ("qwen3_5", {"quantization": "int4", "kv_cache_dtype": "int8"}),
        ("qwen3_moe", {"dtype": "float32", "threads": 2}),
    ],
)
def test_text_is_that_of_plain_decoding(folders, tmp_path, name, options):
    """Greedy and sampled; prompts of 1, 2 and 8 windows, in chunks, beside each other, from the prefix cache."""
    c = hybrid_config(HYBRID) if name == "qwen3_5" else text(CONFIGS[name])
    batch = prompts(c["vocab_size"], WINDOW, 2 * WINDOW + 5, 8 * WINDOW)
    plain = open_llm(folders[name], None, **options)
    want = [plain.generate(p, q)[0] for p, q in zip(batch, PARAMS, strict=True)]
    shape = Shape(vocab=c["vocab_size"], hidden=c["hidden_size"], layers=c["num_hidden_layers"])
    drafter = write_drafter(tmp_path / "drafter", shape, Draft(taps=(0, 2), sharp=3.0))
    configs: list[dict[str, Any]] = [
        {"method": "ngram", "num_speculative_tokens": 5},
        {"method": "dflash", "model": str(drafter)},
        {"method": "dspark", "model": str(write_spark(tmp_path / "dspark", shape, Spark()))},
        {"method": "dflash2", "model": str(write_walk(tmp_path / "dflash2", shape, Walk()))},
    ]
    if not options:
        smaller = write_target(tmp_path / "smaller", Shape(vocab=c["vocab_size"], context=512), tokenizer=True)
        configs.append({"method": "draft_model", "model": str(smaller), "num_speculative_tokens": 3})
    if name == "muse_glimmer":
        configs.append({"method": "dflash", "model": str(write_assistant(tmp_path / "assistant", ASSISTANT))})
    for config in configs:
        llm = open_llm(folders[name], config, max_num_batched_tokens=40, max_num_seqs=3, **options)
        drafted = cached = 0
        for _ in range(2):  # the second time prompts are in the prefix cache
            for mine, his in zip(llm.generate(batch, PARAMS), want, strict=True):
                assert_same(mine, his, config["method"])
                assert_stats(mine)
                drafted += mine.metrics.spec_decode.num_draft_tokens
                cached += mine.num_cached_tokens
        lookup = config["method"] == "ngram"  # coarse weights may say nothing that was said before
        assert (drafted or (lookup and options)) and cached >= 5 * WINDOW
        assert_idle(llm)
