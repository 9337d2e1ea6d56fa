"""DFlash drafters with random weights in the step loop: text as without them, rings as good as whole tables."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models.reference import DrafterReference, Reference
from models.tiny import (
    Draft,
    Shape,
    config_of,
    drafter_config,
    drafter_tensors,
    tensors_of,
    write_drafter,
    write_target,
)
from safetensors.numpy import save_file

from paceline import LLM, SamplingParams
from paceline.speculation.dflash import DFlashProposer

from .distributions import assert_samples_follow
from .harness import assert_idle, assert_same, assert_stats, watched

TARGET = Shape("qwen3", vocab=40, hidden=32, inner=40, layers=3, heads=2, kv_heads=1, context=640)
WINDOW = 32
DRAFTS = {
    "full": Draft(taps=(0, 2)),
    "sliding": Draft(taps=(1,), window=WINDOW, sliding=(0, 1)),
    "sliding both ways": Draft(taps=(2, 0), window=WINDOW, sliding=(0, 1), causal=False, head_dim=10),
    "mixed": Draft(taps=(0, 1, 2), window=WINDOW, sliding=(0,), kv_heads=1, bias=True, nested=False),
    "causal": Draft(taps=(-1, 2), causal=True, fc_bias=True, block_size=5),
    "interleaved": Draft(extra={"rope_is_neox_style": False, "output_multiplier": 0.5}, block_size=4),
    "capped": Draft(layers=1, extra={"final_logit_softcapping": 3.0, "input_embedding_scale": 1.7}),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"), TARGET, tokenizer=True)


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = {name: write_drafter(tmp_path_factory.mktemp("drafter"), TARGET, d) for name, d in DRAFTS.items()}
    short = write_drafter(tmp_path_factory.mktemp("drafter"), TARGET, DRAFTS["full"])
    rows = np.array([0, 3, 4, 7, 11, 12, 13, 20, 22, 25, 30, 39], np.int32)
    save_file({"head_rows": rows}, str(short / "head_rows.safetensors"))
    return out | {"short head": short}


def open_llm(target: Path, drafter: Path | None, drafts: int | None = None, **options: Any) -> LLM:
    config = drafter and {"method": "dflash", "model": str(drafter), "num_speculative_tokens": drafts}
    return watched(LLM(target, **{"threads": 1, "dtype": "float32", "speculative_config": config or None, **options}))


def prompts(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(11)
    return [rng.integers(0, TARGET.vocab, n).tolist() for n in lengths]


PARAMS = [
    SamplingParams(temperature=0.0, seed=1, max_tokens=30, logprobs=1, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=2, max_tokens=40, logprobs=2, n=2),
    SamplingParams(
        temperature=1.4,
        seed=3,
        max_tokens=25,
        top_k=9,
        repetition_penalty=1.2,
        ignore_eos=True,
        allowed_token_ids=range(1, 30),
        bad_words=["ab", "g", "hh"],
    ),
    SamplingParams(
        temperature=0.7,
        seed=4,
        max_tokens=30,
        logit_bias={5: 3.0},
        stop_token_ids=[5, 6],
        min_tokens=3,
        prompt_logprobs=2,
    ),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [*DRAFTS, "short head"])
def test_text_is_that_of_plain_decoding(target, drafters, name, dtype):
    """Greedy and sampled, at every kind of draft length, in batches that chunk their prompts."""
    small = {"dtype": dtype, "max_num_batched_tokens": 40, "max_num_seqs": 4}
    plain = open_llm(target, None, dtype=dtype)
    batch = prompts(5, 70, 1, 33)
    want = [plain.generate(p, params)[0] for p, params in zip(batch, PARAMS, strict=True)]
    llm = open_llm(target, drafters[name], **small)
    accepted = drafted = 0
    for drafts in (1, 3, 5, 7, None):
        got = llm.generate(batch, PARAMS, num_speculative_tokens=drafts)
        for mine, his in zip(got, want, strict=True):
            assert_same(mine, his, (name, drafts))
            assert_stats(mine)
            accepted += mine.metrics.spec_decode.num_accepted_tokens
            drafted += mine.metrics.spec_decode.num_draft_tokens
        assert_idle(llm)
    assert 0 < accepted < drafted


def test_longer_drafts_than_trained_are_warned_about_and_right(target, drafters, caplog):
    plain = open_llm(target, None)
    with caplog.at_level(logging.WARNING):
        llm = open_llm(target, drafters["full"], 13)
    assert any("13" in r.message and "7" in r.message for r in caplog.records)
    for prompt, params in zip(prompts(5, 70, 1, 33), PARAMS, strict=True):
        got = llm.generate(prompt, params)[0]
        assert_same(got, plain.generate(prompt, params)[0], "13 drafts")
    assert max(i for i, n in enumerate(got.metrics.spec_decode.num_accepted_tokens_per_pos) if n >= 0) == 12
    caplog.clear()
    open_llm(target, drafters["full"], 7)
    assert not caplog.records


@pytest.mark.parametrize("name", [n for n in DRAFTS])
def test_drafts_follow_the_definition(target, drafters, name):
    """Draft logits of a running engine against the fp64 reference: context 1 to 8 windows, block by block."""
    d = DRAFTS[name]
    reference = Reference(config_of(TARGET), tensors_of(TARGET))
    drafter = DrafterReference(drafter_config(TARGET, d), drafter_tensors(TARGET, d), reference)
    for length in (1, WINDOW - 1, 2 * WINDOW + 5, 8 * WINDOW):
        llm = open_llm(target, drafters[name], max_num_batched_tokens=50)
        seen = record(llm)
        params = SamplingParams(temperature=1.0, seed=length, max_tokens=14, ignore_eos=True)
        output = llm.generate(prompts(length)[0], params)[0]
        ids = output.prompt_token_ids + output.outputs[0].token_ids
        taps = reference.forward(ids).taps
        features = np.concatenate([taps[i] for i in d.taps], 1)
        assert len(seen) >= 2
        for anchor, logits in seen:
            want = drafter.draft_logits(features[:anchor], ids[anchor], len(logits))
            np.testing.assert_allclose(logits, want, atol=2e-4 * max(1, np.abs(want).max()), err_msg=f"at {anchor}")


def record(llm: LLM) -> list[tuple[int, np.ndarray]]:
    """(position of the anchor, draft logits) of every block drafted from now on, one sequence at a time."""
    seen: list[tuple[int, np.ndarray]] = []
    proposer = llm.engine.proposer
    assert isinstance(proposer, DFlashProposer)
    inner = proposer.drafter.draft_logits

    def recording(*arguments: Any) -> np.ndarray:
        logits, (_, _, positions, starts, _, _) = inner(*arguments), arguments
        row = 0
        for first, end in itertools.pairwise(starts):
            drafts = int(end - first) - 1
            seen.append((int(positions[first]), logits[row : row + drafts].copy()))
            row += drafts
        return logits

    proposer.drafter.draft_logits = recording  # type: ignore[assignment,method-assign]
    return seen


RINGS = [n for n, d in DRAFTS.items() if len(d.sliding) == d.layers]


@pytest.mark.parametrize(
    ("chunk", "dtype"),
    [
        *((16, "float32"), (24, "bfloat16"), (100, "float32"), (512, "bfloat16")),
        *(
            pytest.param(chunk, dtype, marks=pytest.mark.slow)
            for chunk, dtype in ((16, "bfloat16"), (24, "float32"), (100, "bfloat16"), (512, "float32"))
        ),
    ],
)
@pytest.mark.parametrize("name", RINGS)
def test_a_ring_of_blocks_drafts_like_a_whole_table(target, drafters, name, chunk, dtype, monkeypatch):
    """Sliding-only drafters keep a window of blocks. Same bits as with all blocks, at contexts of 1x, 2x, 8x, 16x the
    window, with long chunks of prompt, in batches, and with many more drafts than trained."""
    batch = prompts(WINDOW - 1, WINDOW, 2 * WINDOW + 3, 8 * WINDOW + 7, 16 * WINDOW, 1)
    params = [SamplingParams(temperature=1.0, seed=i, max_tokens=70, ignore_eos=True) for i in range(len(batch))]

    def run(drafts: int, concurrency: int) -> tuple[list[Any], list[list[int]], int]:
        llm = open_llm(
            target, drafters[name], drafts, max_num_batched_tokens=chunk, max_num_seqs=concurrency, dtype=dtype
        )
        seen = record(llm)
        outputs = llm.generate(batch, params)
        proposer = llm.engine.proposer
        assert isinstance(proposer, DFlashProposer)
        assert proposer._free_rings == list(range(len(proposer._free_rings)))[::-1] or concurrency > 1
        return seen, [o.outputs[0].token_ids for o in outputs], proposer._cache.blocks

    for drafts, concurrency in ((7, 1), (20, 1), (7, 6)):
        seen, ids, blocks = run(drafts, concurrency)
        with monkeypatch.context() as patch:
            patch.setattr(DFlashProposer, "_ring_blocks", lambda *_: 0)
            all_seen, all_ids, all_blocks = run(drafts, concurrency)
        assert ids == all_ids
        assert len(seen) == len(all_seen) and len(seen) > 20
        for (at, mine), (same_at, his) in zip(seen, all_seen, strict=True):
            assert at == same_at and mine.shape == his.shape
            assert (mine.view(np.uint32) == his.view(np.uint32)).all(), (drafts, concurrency, at)
        assert blocks < all_blocks, "rings are shorter than the texts"


def test_the_drafter_has_its_share_of_the_cache_budget(target, drafters):
    space = 0.001  # GiB
    plain, llm = (open_llm(target, d, kv_cache_space=space) for d in (None, drafters["full"]))
    assert isinstance(llm.engine.proposer, DFlashProposer)
    mine = plain.model.new_cache(1).bytes_per_block
    both = mine + llm.engine.proposer.drafter.new_cache(1).bytes_per_block
    assert plain.engine.pool.size == int(space * 2**30) // mine
    assert llm.engine.pool.size == int(space * 2**30) // both < plain.engine.pool.size


def test_a_drafter_with_a_shorter_context_does_not_end_the_text(tmp_path, target):
    """Prompt and output go on beyond the drafter's max_position_embeddings as if it had none."""
    d = Draft(taps=(0, 2), extra={"max_position_embeddings": 64})
    llm, plain = open_llm(target, write_drafter(tmp_path, TARGET, d)), open_llm(target, None)
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=40, ignore_eos=True)
    for prompt in prompts(40, 100):
        output = llm.generate(prompt, params)[0]
        assert_same(output, plain.generate(prompt, params)[0], "short drafter")
        assert output.metrics.spec_decode.num_drafts > 0


def test_a_chunk_longer_than_the_window_on_several_threads(target, drafters, monkeypatch):
    """Rows of one pass never share a place in the ring: which of them stayed would be up to the threads."""
    prompt = prompts(15 * WINDOW)[0]
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=6, ignore_eos=True)

    def logits() -> list[np.ndarray]:
        llm = open_llm(target, drafters["sliding"], 7, threads=3)
        seen = record(llm)
        llm.generate(prompt, params)
        return [x for _, x in seen]

    ring = logits()
    monkeypatch.setattr(DFlashProposer, "_ring_blocks", lambda *_: 0)
    whole = logits()
    assert len(ring) == len(whole) > 2
    assert all((a.view(np.uint32) == b.view(np.uint32)).all() for a, b in zip(ring, whole, strict=True))


@pytest.mark.parametrize("name", ["full", "sliding", "short head"])
@pytest.mark.parametrize("sampler", ["coupled", "rejection"])
def test_acceptance_does_not_depend_on_the_batch(target, drafters, name, sampler):
    """Each request is drafted with its own noise, filters and context, whoever shares the passes."""
    llm = open_llm(target, drafters[name], sampler=sampler)
    batch = prompts(5, 70, 1, 33)
    alone = [llm.generate(p, q, num_speculative_tokens=5)[0] for p, q in zip(batch, PARAMS, strict=True)]
    together = llm.generate(batch, PARAMS, num_speculative_tokens=5)
    for a, b in zip(alone, together, strict=True):
        assert_same(b, a, sampler)
        assert a.metrics.spec_decode == b.metrics.spec_decode
    assert sum(a.metrics.spec_decode.num_accepted_tokens for a in alone) > 0
    assert_idle(llm)


@pytest.mark.parametrize("name", ["full", "sliding", "short head"])
def test_context_rows_are_those_of_committed_tokens(target, drafters, name):
    """After every step the drafter's cache equals one that saw the committed tokens only, at once."""
    llm = open_llm(target, drafters[name], max_num_batched_tokens=30, max_num_seqs=3)
    proposer, engine, compared = llm.engine.proposer, llm.engine, 0
    assert isinstance(proposer, DFlashProposer)
    drafter = proposer.drafter
    d = drafter.config.decoder
    inner = engine.step

    def rows(cache: Any, table: np.ndarray, span: range) -> np.ndarray:
        out = np.empty((d.num_layers, len(span), 2, d.num_kv_heads, d.head_dim), np.float32)
        for layer in range(d.num_layers):
            for i, at in enumerate(span):
                cache.read(layer, int(table[at // 16]), at % 16, out[layer, i, 0], out[layer, i, 1])
        return out.view(np.uint32)

    def checked() -> Any:
        nonlocal compared
        results = inner()
        for s in engine.running:
            proposer._write_context([s])  # what waits for the next draft
            done = s.num_computed
            if not done:
                continue
            _, taps = llm.model.logits(s.token_ids[:done], taps=proposer.taps)
            cache, table = drafter.new_cache(40), np.arange(40, dtype=np.int32)
            for first in range(0, done, 30):
                part = taps[first : first + 30]
                at = np.arange(first, first + len(part), dtype=np.int32)
                drafter.add_context(cache, part, at, np.array([0, len(part)], np.int32), table[None])
            span = range(max(0, done - (WINDOW - 1)), done)
            assert (rows(proposer._cache, proposer._table(s), span) == rows(cache, table, span)).all()
            compared += len(span)
        return results

    engine.step = checked  # type: ignore[method-assign]
    llm.generate(prompts(80, 3, 50), SamplingParams(temperature=1.0, seed=1, max_tokens=30, ignore_eos=True))
    assert compared > 500
    assert_idle(llm)


# ---- rejection sampling


CHI = Shape("qwen3", vocab=7, hidden=16, inner=24, layers=2, heads=2, kv_heads=1, sharp=0.8, seed=4, context=64)


@pytest.mark.parametrize(
    ("sampler", "method", "temperature", "top_k", "samples"),
    [
        ("rejection", "dflash", 1.0, 0, 4000),
        ("rejection", "dflash", 0.7, 4, 4000),
        ("rejection", "ngram", 1.0, 0, 4000),
        ("coupled", "dflash", 1.0, 0, 3000),
        ("coupled", "none", 1.0, 0, 3000),
        ("rejection", "none", 1.0, 0, 3000),
        pytest.param("rejection", "dflash", 1.0, 0, 60_000, marks=pytest.mark.slow),
        pytest.param("rejection", "short head", 1.3, 0, 60_000, marks=pytest.mark.slow),
        pytest.param("rejection", "ngram", 0.8, 5, 60_000, marks=pytest.mark.slow),
    ],
)
def test_samples_follow_the_model(tmp_path, sampler, method, temperature, top_k, samples):
    """Joint distribution of the three tokens behind a prompt, through the whole engine, against exact enumeration."""
    target = write_target(tmp_path / "target", CHI, tokenizer=True)
    config: dict[str, Any] | None = None
    if method in ("dflash", "short head"):
        drafter = write_drafter(tmp_path / "drafter", CHI, Draft(heads=2, kv_heads=1, inner=16, block_size=4))
        if method == "short head":
            save_file({"head_rows": np.array([0, 2, 3, 6], np.int32)}, str(drafter / "head_rows.safetensors"))
        config = {"method": "dflash", "model": str(drafter)}
    elif method == "ngram":
        config = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 2, "num_speculative_tokens": 3}
    options: dict[str, Any] = {"threads": 1, "dtype": "float32", "max_num_seqs": 64, "kv_cache_space": 0.05}
    llm = watched(LLM(target, speculative_config=config, sampler=sampler, **options))
    assert_samples_follow(llm, temperature, top_k, samples, most_kept=None if method == "none" else 0.95)
    assert_idle(llm)


def test_rejection_without_temperature_is_greedy(target, drafters):
    plain = open_llm(target, None)
    llm = open_llm(target, drafters["full"], sampler="rejection", max_num_batched_tokens=40)
    params = SamplingParams(temperature=0.0, max_tokens=30, logprobs=1, seed=0, ignore_eos=True)
    batch = prompts(5, 70, 1, 33)
    for mine, prompt in zip(llm.generate(batch, params), batch, strict=True):
        assert_same(mine, plain.generate(prompt, params)[0], "rejection, greedy")


@pytest.mark.parametrize("name", ["full", "short head"])
def test_rejection_is_reproducible_and_honours_filters(target, drafters, name):
    """With the same drafts the same text; banned ids never come, from drafts or replacements."""
    llm = open_llm(target, drafters[name], sampler="rejection")
    params = SamplingParams(
        temperature=1.5, max_tokens=60, seed=9, top_k=12, logit_bias={0: -100.0, 3: -100.0}, ignore_eos=True
    )
    first = [llm.generate(p, params)[0].outputs[0].token_ids for p in prompts(3, 20, 50)]
    assert first == [llm.generate(p, params)[0].outputs[0].token_ids for p in prompts(3, 20, 50)]
    assert not {0, 3} & {t for ids in first for t in ids}


def test_collapse_of_acceptance_is_warned_about_once(tmp_path, caplog):
    """A drafter for another model of the same sizes: nothing can refuse it, but it says so after 200 drafts."""
    shape = Shape("qwen3", vocab=199, hidden=32, inner=40, layers=3, heads=2, kv_heads=1, context=640)
    target = write_target(tmp_path / "target", shape, tokenizer=True)
    llm = open_llm(target, write_drafter(tmp_path / "drafter", shape, DRAFTS["full"]))
    with caplog.at_level(logging.WARNING):
        for prompt in prompts(3, 4, 5, 6):
            llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True))
    assert sum("acceptance length" in r.message for r in caplog.records) == 1
