"""Quantised weights, of target and drafter: speculation changes no bit, on any path, in any format."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models.tiny import Draft, Shape, write_drafter, write_target
from native.paths import NAMES, runs_here
from safetensors.numpy import save_file

from paceline import LLM, SamplingParams
from paceline.errors import ConfigError
from paceline.weights.quantised_writer import quantise_model

from .harness import assert_idle, assert_same, assert_stats, watched

TARGET = Shape("qwen3", vocab=90, hidden=48, inner=70, layers=3, heads=3, kv_heads=1, context=640, tied=True, sharp=2)
PATHS = [pytest.param(i, marks=[] if runs_here(i) else [pytest.mark.skip(reason=f"no {i}")]) for i in NAMES]
PARAMS = [
    SamplingParams(temperature=0.0, seed=1, max_tokens=30, logprobs=1, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=2, max_tokens=25, logprobs=2, n=2),
    SamplingParams(temperature=0.7, seed=4, max_tokens=30, stop_token_ids=[5, 6], min_tokens=3),
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"), TARGET, tokenizer=True)


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_drafter(tmp_path_factory.mktemp("drafter"), TARGET, Draft(taps=(0, 2)))
    save_file({"head_rows": np.arange(0, 90, 2, dtype=np.int32)}, str(folder / "head_rows.safetensors"))
    return folder


@pytest.fixture(scope="module")
def quantised(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantised") / "int4"
    quantise_model(target, folder, "int4")
    return folder


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, TARGET.vocab, n).tolist() for n in (5, 50, 21)]


def open_llm(target: Path, config: Any, quantization: Any, **options: Any) -> LLM:
    return watched(LLM(target, threads=1, speculative_config=config, quantization=quantization, **options))


@pytest.mark.parametrize("quantization", ["int8", "int8_channel", "int4"])
@pytest.mark.parametrize("isa", PATHS)
def test_text_is_that_of_plain_decoding(target, drafter, isa, quantization):
    plain = open_llm(target, None, quantization, isa=isa)
    assert plain.info()["weight_type"] == quantization
    want = [plain.generate(p, params)[0] for p, params in zip(prompts(), PARAMS, strict=True)]
    llm = open_llm(
        target, {"method": "dflash", "model": str(drafter)}, quantization, isa=isa, max_num_batched_tokens=24
    )
    for drafts in (2, 7, None):
        got = llm.generate(prompts(), PARAMS, num_speculative_tokens=drafts)
        for mine, his in zip(got, want, strict=True):
            assert_same(mine, his, (isa, quantization, drafts))
            assert_stats(mine)
    assert_idle(llm)


@pytest.mark.parametrize("of_target", ["none", "int8", "int4"])
@pytest.mark.parametrize("of_drafter", [None, "none", "int8", "int8_channel", "int4"])
def test_any_drafter_beside_any_target(target, drafter, of_target, of_drafter):
    """The drafter's precision changes drafts, never text."""
    plain = open_llm(target, None, of_target)
    config = {"method": "dflash", "model": str(drafter), "quantization": of_drafter}
    llm = open_llm(target, config, of_target)
    assert llm._drafter.drafter.quantization == (of_drafter or "int8")
    drafted = 0
    for prompt, params in zip(prompts(), PARAMS, strict=True):
        got = llm.generate(prompt, params, num_speculative_tokens=5)[0]
        assert_same(got, plain.generate(prompt, params)[0], (of_target, of_drafter))
        drafted += got.metrics.spec_decode.num_draft_tokens
    assert drafted > 0


def test_a_quantised_drafter_drafts_much_as_the_exact_one(target, drafter):
    """int8 moves the drafter's logits by little: no scale, row or offset is out of place."""
    logits = {}
    for quantization in ("none", "int8"):
        config = {"method": "dflash", "model": str(drafter), "quantization": quantization}
        d = open_llm(target, config, "none")._drafter.drafter
        cache, table = d.new_cache(2), np.arange(2, dtype=np.int32)[None]
        taps = np.random.default_rng(1).normal(size=(9, 2 * TARGET.hidden)).astype(np.float32)
        starts = np.array([0, 9], np.int32)
        d.add_context(cache, taps, np.arange(9, dtype=np.int32), starts, table)
        block = np.arange(9, 14, dtype=np.int32)
        tokens = np.array([3, *[d.config.mask_token_id] * 4], np.int32)
        logits[quantization] = d.draft_logits(
            cache, tokens, block, np.array([0, 5], np.int32), table, np.arange(1, 5, dtype=np.int32)
        )
    scale = np.abs(logits["none"]).max()
    assert 0 < np.abs(logits["int8"] - logits["none"]).max() < 0.1 * scale


def test_logits_stay_near_bf16(target):
    tokens = prompts()[1]
    exact = open_llm(target, None, "none").model.logits(tokens)[0]
    size = np.linalg.norm(exact)
    for quantization, limit in (("int8", 0.05), ("int8_channel", 0.06), ("int4", 0.5)):
        got = open_llm(target, None, quantization).model.logits(tokens)[0]
        assert 0 < np.linalg.norm(got - exact) < limit * size, quantization


def test_the_default_leaves_unquantised_files_alone(target):
    a, b = watched(LLM(target, threads=1, speculative_config=None)), open_llm(target, None, "none")
    assert a.info()["quantization"] == "auto"
    assert a.info()["weight_type"] == "bfloat16" and a.model.weight_bytes <= b.model.weight_bytes
    tokens = prompts()[0]
    assert (a.model.logits(tokens)[0] == b.model.logits(tokens)[0]).all()


@pytest.mark.parametrize(
    ("dtype", "quantization", "want"),
    [
        ("auto", None, "int4"),
        ("bfloat16", None, "int4"),
        ("float32", None, "float32"),
        ("auto", "none", "bfloat16"),
        ("float32", "auto", "float32"),
        ("float32", "int8", "int8"),
    ],
)
def test_what_a_quantised_file_runs_as(quantised, drafter, dtype, quantization, want):
    """By default as the file holds it; in fp32, which is for comparisons, its exact values."""
    options = {} if quantization is None else {"quantization": quantization}
    config = {"method": "dflash", "model": str(drafter)}
    llm = watched(LLM(quantised, threads=1, dtype=dtype, speculative_config=config, **options))
    assert llm.info()["weight_type"] == want
    assert llm._drafter.drafter.quantization == ("none" if dtype == "float32" else "int8")
    out = llm.generate(prompts()[0], PARAMS[0], num_speculative_tokens=4)[0]
    assert_same(out, llm.generate(prompts()[0], PARAMS[0], speculation=False)[0], (dtype, quantization))


def test_a_draft_model_runs_as_its_file_holds_it(target, quantised):
    for asked, want in ((None, "int4"), ("none", "bfloat16"), ("int8", "int8")):
        config = {"method": "draft_model", "model": str(quantised), "quantization": asked}
        llm = open_llm(target, config, "auto")
        assert llm._drafter.model.weight_type == want
        out = llm.generate(prompts()[0], PARAMS[0], num_speculative_tokens=4)[0]
        assert_same(out, llm.generate(prompts()[0], PARAMS[0], speculation=False)[0], asked)
        assert out.metrics.spec_decode.num_draft_tokens > 0


def test_what_converting_costs_is_said(target, caplog):
    with caplog.at_level(logging.WARNING):
        open_llm(target, None, "int4")
    assert any("converted to int4, relative error" in r.message for r in caplog.records)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        open_llm(target, None, "none")
    assert not caplog.records


@pytest.mark.parametrize("value", ["int3", None, 8, "INT8", ""])
def test_unknown_quantizations_are_refused(target, value):
    with pytest.raises(ConfigError, match="quantization"):
        LLM(target, quantization=value)


@pytest.mark.parametrize(
    "config", [{"method": "ngram", "quantization": "int8"}, {"model": "dflash", "quantization": 8}]
)
def test_speculative_configurations_are_checked(target, config):
    with pytest.raises(ConfigError, match="quantization"):
        LLM(target, speculative_config=config)


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["auto", "int8", "int8_channel", "int4"])
def test_smollm2_speculation_changes_no_bit(quantization):
    plain = LLM("smollm2-135m", speculative_config=None, quantization=quantization)
    llm = LLM("smollm2-135m", quantization=quantization)
    questions = ["Write a Python function that reverses a list.", "What is 12 times 11?", "Name three trees."]
    chats = [[{"role": "user", "content": q}] for q in questions]
    for temperature in (0.0, 0.8):
        params = [SamplingParams(temperature=temperature, seed=i, max_tokens=48, logprobs=2) for i in range(3)]
        together = llm.chat(chats, params)
        for chat, p, got in zip(chats, params, together, strict=True):
            assert_same(got, plain.chat(chat, p)[0], (quantization, temperature))
    assert llm.info()["weight_type"] in ("int8", "int8_channel", "int4")
