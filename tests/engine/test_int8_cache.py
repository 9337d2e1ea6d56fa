"""`kv_cache_dtype="int8"` in the engine: speculation, sharing and preemption change no bit; memory is counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models.tiny import Draft, Shape, write_drafter, write_target
from native.paths import NAMES, runs_here

from paceline import LLM, SamplingParams
from paceline.errors import ConfigError

from .harness import assert_idle, assert_same, assert_stats, watched

TARGET = Shape("qwen3", vocab=90, hidden=48, inner=70, layers=3, heads=3, kv_heads=1, head_dim=18, context=640, sharp=2)
PATHS = [pytest.param(i, marks=[] if runs_here(i) else [pytest.mark.skip(reason=f"no {i}")]) for i in NAMES]
PARAMS = [
    SamplingParams(temperature=0.0, seed=1, max_tokens=40, logprobs=1, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=2, max_tokens=25, logprobs=2, n=2),
    SamplingParams(temperature=0.7, seed=4, max_tokens=30, stop_token_ids=[5, 6], min_tokens=3),
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"), TARGET, tokenizer=True)


@pytest.fixture(scope="module")
def configs(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    drafter = write_drafter(tmp_path_factory.mktemp("drafter"), TARGET, Draft(taps=(0, 2)))
    return {
        "ngram": {"method": "ngram"},
        "dflash": {"method": "dflash", "model": str(drafter)},
        "itself": {"method": "draft_model", "model": str(target)},
    }


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    shared = rng.integers(0, TARGET.vocab, 70).tolist()
    return [shared[:5], [*shared, 7, 8], [*shared, 9]]


def open_llm(target: Path, config: Any, **options: Any) -> LLM:
    return watched(LLM(target, **{"threads": 1, "kv_cache_dtype": "int8", "speculative_config": config, **options}))


@pytest.mark.parametrize("method", ["ngram", "dflash", "itself"])
@pytest.mark.parametrize("isa", PATHS)
def test_text_is_that_of_plain_decoding(target, configs, isa, method):
    """In small chunks, with shared prefixes, and with too few blocks for all three at once."""
    quantization = "int4" if method == "dflash" else "auto"
    plain = open_llm(target, None, isa=isa, quantization=quantization, enable_prefix_caching=False)
    want = [plain.generate(p, params)[0] for p, params in zip(prompts(), PARAMS, strict=True)]
    assert plain.info()["kv_cache_dtype"] == "int8"
    llm = open_llm(target, configs[method], isa=isa, quantization=quantization, max_num_batched_tokens=24)
    for drafts in (3, None, 3):
        got = llm.generate(prompts(), PARAMS, num_speculative_tokens=drafts)
        for mine, his in zip(got, want, strict=True):
            assert_same(mine, his, (isa, method, drafts))
            assert_stats(mine)
    assert got[1].num_cached_tokens >= 64
    assert_idle(llm)


def test_preemption_keeps_every_bit(target):
    plain = open_llm(target, None)
    rng = np.random.default_rng(5)
    texts = [rng.integers(0, TARGET.vocab, 40).tolist() for _ in range(4)]
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=70, logprobs=1, ignore_eos=True) for i in range(4)]
    want = [plain.generate(p, one)[0] for p, one in zip(texts, params, strict=True)]
    space = 16 * plain.model.new_cache(1).bytes_per_block / 2**30  # each grows from 3 to 7 blocks
    llm = open_llm(target, {"method": "ngram"}, kv_cache_space=space, max_num_batched_tokens=24)
    for mine, his in zip(llm.generate(texts, params), want, strict=True):
        assert_same(mine, his, "preempted")
    assert llm.engine.scheduler.num_preemptions > 0
    assert_idle(llm)


def test_the_memory_plan_counts_the_smaller_blocks(target):
    space = 0.001
    half, full = (open_llm(target, None, kv_cache_space=space, kv_cache_dtype=kind) for kind in ("int8", "auto"))
    assert half.info()["kv_bytes_per_token"] < full.info()["kv_bytes_per_token"]
    assert half.info()["kv_cache_tokens"] > full.info()["kv_cache_tokens"]
    assert half.info()["kv_cache_bytes"] <= space * 2**30
    assert half.pass_cost(1, 100)[0] < full.pass_cost(1, 100)[0]


def test_logits_stay_near_those_of_the_exact_cache(target):
    exact, rounded = (
        open_llm(target, None, kv_cache_dtype=kind).model.logits(prompts()[1])[0] for kind in ("auto", "int8")
    )
    assert 0 < np.linalg.norm(rounded - exact) < 0.03 * np.linalg.norm(exact)


def test_the_drafters_context_stays_as_it_is(target, configs):
    caches = [
        open_llm(target, configs["dflash"], kv_cache_dtype=kind)._drafter.drafter.new_cache(1).bytes_per_block
        for kind in ("int8", "auto")
    ]
    assert caches[0] == caches[1]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype: 'fp8' is not supported; use auto, bfloat16, int8"),
        ({"kv_cache_dtype": None}, "kv_cache_dtype: None"),
        ({"kv_cache_dtype": "bfloat16", "dtype": "float32"}, "bfloat16 does not go with dtype float32"),
    ],
)
def test_what_cannot_be_is_refused(target, options, told):
    with pytest.raises(ConfigError, match=told):
        open_llm(target, None, **options)


def test_narrow_heads_are_refused(tmp_path):
    narrow = write_target(tmp_path, Shape(hidden=24, heads=4, kv_heads=2, head_dim=6), tokenizer=True)
    with pytest.raises(ConfigError, match="kv_cache_dtype: int8 needs heads of 8 values or more, this model's have 6"):
        open_llm(narrow, None)


@pytest.mark.slow
def test_smollm2_speculation_changes_no_bit():
    plain = LLM("smollm2-135m", speculative_config=None, kv_cache_dtype="int8")
    llm = LLM("smollm2-135m", kv_cache_dtype="int8")
    chats = [
        [{"role": "user", "content": q}] for q in ("Write a Python function that reverses a list.", "Name a tree.")
    ]
    for temperature in (0.0, 0.8):
        params = [SamplingParams(temperature=temperature, seed=i, max_tokens=48, logprobs=2) for i in range(2)]
        for chat, p, got in zip(chats, params, llm.chat(chats, params), strict=True):
            assert_same(got, plain.chat(chat, p)[0], temperature)
