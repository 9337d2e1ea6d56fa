"""Every kind of drafter in the step loop: the text is that of plain decoding, whatever drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models.relatives import Spark, Walk, write_spark, write_walk
from models.tiny import Draft, Shape, write_drafter, write_target

from paceline import LLM, SamplingParams
from paceline.speculation.dspark import DSparkProposer

from .distributions import assert_samples_follow
from .harness import assert_idle, assert_same, assert_stats, watched
from .test_dflash import PARAMS

TARGET = Shape("qwen3", vocab=40, hidden=32, inner=40, layers=3, heads=2, kv_heads=1, context=640)
WINDOW = 32
SLIDING = Draft(taps=(1,), window=WINDOW, sliding=(0, 1))
BOTH_WAYS = Draft(taps=(0, 2), window=WINDOW, sliding=(0, 1), causal=False, block_size=6)
KINDS: dict[str, Spark | Walk | Draft] = {
    "vanilla": Spark(Draft(taps=(0, 2)), strength=1.0),
    "gated": Spark(SLIDING, kind="gated", strength=1.0),
    "rnn": Spark(Draft(taps=(0, 1, 2), block_size=5), kind="rnn", strength=1.0),
    "headless": Spark(Draft(taps=(0, 2), block_size=4), rank=0, confidence=False),
    "confidence alone": Spark(Draft(taps=(2,)), rank=0, with_markov=False),
    "reduced": Spark(Draft(taps=(0, 2)), packaging="speculators", reduced=(0, 3, 4, 7, 11, 12, 13, 20, 22, 25, 30, 39)),
    "dflash2": Walk(BOTH_WAYS, strength=1.0),
    "dflash2, full attention": Walk(Draft(taps=(0, 2), causal=False), kernel=3, group=4, top_k=3),
    "dflash2, listed rows": Walk(BOTH_WAYS, strength=1.0, rows=(0, 3, 4, 7, 11, 12, 13, 20, 22, 25, 30, 39)),
    "dflash from the anchor": Draft(taps=(0, 2), extra={"sample_from_anchor": True}),
}


def write_any(folder: Path, shape: Shape, d: Spark | Walk | Draft | Shape) -> dict[str, Any]:
    """A drafter on disk, and the configuration that asks for it."""
    if isinstance(d, Shape):
        model = write_target(folder, d, tokenizer=True)
        return {"method": "draft_model", "model": str(model), "num_speculative_tokens": 3}
    if isinstance(d, Spark):
        return {"method": "dspark", "model": str(write_spark(folder, shape, d))}
    if isinstance(d, Walk):
        return {"method": "dflash2", "model": str(write_walk(folder, shape, d))}
    return {"method": "dflash", "model": str(write_drafter(folder, shape, d))}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"), TARGET, tokenizer=True)


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory, target: Path) -> dict[str, dict[str, Any]]:
    out: dict[str, dict[str, Any]] = {
        name: write_any(tmp_path_factory.mktemp("drafter"), TARGET, d) for name, d in KINDS.items()
    }
    smaller = Shape("llama", vocab=40, hidden=24, inner=32, layers=1, heads=2, kv_heads=2, head_dim=12, context=64)
    small = write_target(tmp_path_factory.mktemp("model"), smaller, tokenizer=True)
    out["draft model"] = {"method": "draft_model", "model": str(small), "num_speculative_tokens": 4}
    out["itself"] = {"method": "draft_model", "model": str(target), "num_speculative_tokens": 4}
    for name in ("dflash from the anchor", "reduced", "dflash2", "draft model"):
        out[f"lookup or {name}"] = {**out[name], "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    return out


def open_llm(target: Path, config: dict[str, Any] | None, *, adaptive: bool = False, **options: Any) -> LLM:
    llm = LLM(target, **{"threads": 1, "dtype": "float32", "speculative_config": config, **options})
    return watched(llm, adaptive=adaptive)


def prompts(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(11)
    return [rng.integers(0, TARGET.vocab, n).tolist() for n in lengths]


NAMES = [*KINDS, "draft model", "itself"]
NAMES += [f"lookup or {name}" for name in ("dflash from the anchor", "reduced", "dflash2", "draft model")]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_text_is_that_of_plain_decoding(target, configs, name, dtype):
    """Greedy and coupled sampling, log-probabilities bit for bit, at every draft length, in batches with chunks."""
    plain = open_llm(target, None, dtype=dtype)
    batch = prompts(5, 70, 1, 33)
    want = [plain.generate(p, params)[0] for p, params in zip(batch, PARAMS, strict=True)]
    llm = open_llm(target, configs[name], dtype=dtype, max_num_batched_tokens=40, max_num_seqs=4)
    accepted = drafted = found = 0
    for drafts in (1, 3, 4, None):
        got = llm.generate(batch, PARAMS, num_speculative_tokens=drafts)
        for mine, his in zip(got, want, strict=True):
            assert_same(mine, his, (name, drafts))
            assert_stats(mine)
            accepted += mine.metrics.spec_decode.num_accepted_tokens
            drafted += mine.metrics.spec_decode.num_draft_tokens
            found += mine.metrics.spec_decode.num_found_drafts
        assert_idle(llm)
    assert (found > 0) == name.startswith("lookup")
    assert 0 < accepted <= drafted
    assert (accepted == drafted) == (name == "itself" and dtype == "float32") or name == "itself"


@pytest.mark.parametrize("name", NAMES)
def test_contexts_of_many_windows_up_to_the_last_token(target, configs, name):
    """1x, 2x, 8x the window, and on until max_model_len cuts a block short."""
    plain = open_llm(target, None, max_model_len=300)
    llm = open_llm(target, configs[name], max_model_len=300, max_num_batched_tokens=64)
    for length in (WINDOW, 2 * WINDOW, 8 * WINDOW + 7, 297, 298, 299):
        params = SamplingParams(temperature=1.0, seed=length, ignore_eos=True, max_tokens=None if length > 100 else 20)
        (prompt,) = prompts(length)
        output = llm.generate(prompt, params)[0]
        assert_same(output, plain.generate(prompt, params)[0], (name, length))
        if length > 100:
            assert len(output.outputs[0].token_ids) == 300 - length and output.outputs[0].finish_reason == "length"
    assert_idle(llm)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sampler", ["coupled", "rejection"])
def test_acceptance_does_not_depend_on_the_batch(target, configs, name, sampler):
    """Nor does the text that rejection sampling draws. (Coupled, a hybrid learns from other requests whom to ask.)"""
    if sampler == "coupled" and name.startswith("lookup"):
        pytest.skip("drafts by design depend on other requests; the text is compared above")
    llm = open_llm(target, configs[name], sampler=sampler)
    batch = prompts(5, 70, 1, 33)
    alone = [llm.generate(p, q, num_speculative_tokens=4)[0] for p, q in zip(batch, PARAMS, strict=True)]
    together = llm.generate(batch, PARAMS, num_speculative_tokens=4)
    for a, b in zip(alone, together, strict=True):
        assert_same(b, a, sampler)
        assert a.metrics.spec_decode == b.metrics.spec_decode
    assert sum(a.metrics.spec_decode.num_accepted_tokens for a in alone) > 0
    assert_idle(llm)


CHI = Shape("qwen3", vocab=7, hidden=16, inner=24, layers=2, heads=2, kv_heads=1, sharp=0.8, seed=4, context=64)
SMALL = Draft(heads=2, kv_heads=1, inner=16, block_size=4)
LOOKUP = {"prompt_lookup_min": 1, "prompt_lookup_max": 2}
CHI_KINDS: dict[str, tuple[Spark | Walk | Shape | Draft, dict[str, Any]]] = {
    "draft model": (Shape(vocab=7, hidden=16, inner=24, layers=1, heads=2, kv_heads=1, seed=9, context=64), {}),
    "lookup or dflash": (SMALL, LOOKUP),
    "lookup or reduced": (Spark(SMALL, strength=1.5, packaging="speculators", reduced=(0, 2, 3, 6)), LOOKUP),
    "lookup or dflash2": (Walk(SMALL, top_k=3, strength=1.5), LOOKUP),
    "vanilla": (Spark(SMALL, strength=1.5), {}),
    "rnn, reduced": (Spark(SMALL, kind="rnn", strength=1.5, packaging="speculators", reduced=(0, 2, 3, 6)), {}),
    "gated, with a threshold": (Spark(SMALL, kind="gated", strength=1.5), {"confidence_threshold": 0.5}),
    "dflash2": (Walk(SMALL, top_k=3, strength=1.5), {}),
    "dflash2, all candidates": (Walk(SMALL, top_k=7, strength=2.0), {}),
    "dflash2, listed rows": (Walk(SMALL, top_k=3, strength=1.5, rows=(0, 2, 3, 6)), {}),
}


@pytest.mark.parametrize("name", CHI_KINDS)
@pytest.mark.parametrize(
    ("sampler", "temperature", "top_k", "samples"),
    [
        ("rejection", 1.0, 0, 4000),
        ("coupled", 0.8, 4, 2000),
        pytest.param("rejection", 0.7, 4, 15_000, marks=pytest.mark.slow),
    ],
)
def test_samples_follow_the_model(tmp_path, name, sampler, temperature, top_k, samples):
    """Joint distribution of the three tokens behind a prompt, through the whole engine, against exact enumeration."""
    target = write_target(tmp_path / "target", CHI, tokenizer=True)
    d, extra = CHI_KINDS[name]
    config = {**write_any(tmp_path / "drafter", CHI, d), **extra}
    options: dict[str, Any] = {"max_num_seqs": 64, "kv_cache_space": 0.05, "sampler": sampler}
    llm = open_llm(target, config, **options)
    assert_samples_follow(llm, temperature, top_k, samples, most_kept=0.97)
    assert_idle(llm)


# ---- confidence


def test_text_is_the_same_when_confidence_decides_what_is_verified(target, configs):
    """Variable lengths, chosen from costs and confidence: as plain decoding, greedy and sampled."""
    plain = open_llm(target, None)
    batch = prompts(5, 70, 1, 33)
    want = [plain.generate(p, params)[0] for p, params in zip(batch, PARAMS, strict=True)]
    for name in ("vanilla", "gated", "confidence alone"):
        llm = open_llm(target, configs[name], adaptive=True, max_num_seqs=4)
        lengths = llm.engine.lengths
        assert lengths.whole
        # costs that make it worth while, whatever this machine is busy with
        lengths.verify.observe = lambda *_: None  # type: ignore[method-assign]
        lengths.draft.observe = lambda *_: None  # type: ignore[method-assign]
        lengths.verify.preset({rows: 1.0 + 0.02 * rows for rows in range(1, 80)})
        lengths.draft.preset({rows: 0.05 for rows in range(1, 80)})
        verified: set[int] = set()
        inner = lengths.trim

        def noting(requests: Any, drafts: Any, chances: Any, others: int = 0, inner: Any = inner) -> None:
            inner(requests, drafts, chances, others)
            verified.update(map(len, drafts))  # noqa: B023 (called in this turn of the loop alone)

        lengths.trim = noting  # type: ignore[method-assign]
        for mine, his in zip(llm.generate(batch, PARAMS), want, strict=True):
            assert_same(mine, his, name)
            assert_stats(mine)
        assert len(verified) > 2, "lengths vary"
        assert_idle(llm)


def test_calibration_changes_what_is_verified_and_not_the_text(tmp_path, target):
    folder = write_spark(tmp_path, TARGET, KINDS["vanilla"])  # type: ignore[arg-type]
    config = {"method": "dspark", "model": str(folder)}
    params = SamplingParams(temperature=0.0, max_tokens=40, seed=0, ignore_eos=True)
    before = open_llm(target, config).generate(prompts(20)[0], params)[0]
    (folder / "confidence_calibration.json").write_text('{"temperatures": [3.0, 0.5]}')
    llm = open_llm(target, config)
    proposer = llm.engine.proposer
    assert isinstance(proposer, DSparkProposer) and proposer.calibration.temperatures == (3.0, 0.5)
    assert_same(llm.generate(prompts(20)[0], params)[0], before, "calibrated")


def test_confidence_is_fitted_to_what_was_kept(tmp_path, target):
    """`train calibrate` on a running engine: every draft is verified whole, and its outcome counted."""
    from paceline.train.calibrate import record

    config = {"method": "dspark", "model": str(write_spark(tmp_path, TARGET, KINDS["vanilla"]))}  # type: ignore[arg-type]
    llm = LLM(target, threads=1, dtype="float32", speculative_config=config)
    policy = llm.engine.lengths
    blocks = record(llm, prompts(5, 40, 9, 17), max_tokens=40, temperature=1.0)
    assert llm.engine.lengths is policy
    assert len(blocks) > 20 and any(a for *_, a in blocks)
    assert all(0 <= accepted <= len(logits) == len(own) <= 8 for logits, own, accepted in blocks)
    assert max(len(logits) for logits, *_ in blocks) == 8


def test_drafters_without_confidence_cannot_be_calibrated(target, configs):
    from paceline.train.calibrate import record
    from paceline.train.errors import TrainError

    llm = open_llm(target, configs["dflash2"])
    with pytest.raises(TrainError, match="no confidence head"):
        record(llm, prompts(5), max_tokens=10, temperature=0.0)
