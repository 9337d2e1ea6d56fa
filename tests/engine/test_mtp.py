"""The multi-token-prediction layer in the step loop: text as without drafts, drafts as by definition."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models.hybrid import HybridShape
from models.predictor import PredictorReference, teacher_tensors, write_predicting
from models.test_mtp import TransformersPredictor
from native.paths import NAMES, runs_here

from paceline import LLM, SamplingParams
from paceline.errors import CheckpointError, ConfigError
from paceline.speculation.mtp import MTPProposer

from .distributions import assert_samples_follow
from .harness import assert_idle, assert_same, assert_stats, run_with_failing_passes
from .hybrid import StateWatch
from .test_dflash import PARAMS
from .test_drafters import open_llm

SHAPE = HybridShape(vocab=60, full=(2,), seed=3)
MTP: dict[str, Any] = {"method": "mtp"}
GREEDY = SamplingParams(temperature=0.0, seed=0, max_tokens=30, ignore_eos=True, logprobs=1)


def prompts(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(11)
    return [rng.integers(0, SHAPE.vocab, n).tolist() for n in lengths]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_predicting(tmp_path_factory.mktemp("target"), SHAPE, nested=True)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_predicting(tmp_path_factory.mktemp("teacher"), SHAPE, tensors=teacher_tensors(SHAPE))


class Rounds:
    """Every (committed text, drafts) of an engine."""

    def __init__(self, llm: LLM) -> None:
        self.seen: list[tuple[list[int], list[int]]] = []
        proposer = llm.engine.proposer
        assert proposer is not None
        propose = proposer.propose

        def noting(sequences: Sequence[Any], limits: Sequence[int]) -> Any:
            proposal = propose(sequences, limits)
            for sequence, limit, drafts in zip(sequences, limits, proposal.drafts, strict=True):
                if limit:
                    self.seen.append((list(sequence.token_ids), list(drafts)))
            return proposal

        proposer.propose = noting  # type: ignore[method-assign]

    def check(self, *, least: int, every: int = 1) -> None:
        """Greedy drafts of every so many rounds are the reference's, wherever it is sure."""
        reference, compared = PredictorReference(SHAPE), 0
        for text, drafts in sorted(self.seen, key=lambda seen: -len(seen[0]))[::every]:
            if len(text) == 1:
                assert not drafts
                continue
            logits = reference.logits(text, drafts[:-1])
            best = np.sort(logits, axis=1)
            sure = best[:, -1] - best[:, -2] > 1e-3
            assert (logits.argmax(1) == drafts)[sure].all(), (text, drafts)
            compared += int(sure.sum())
        assert compared >= least


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lookup", [False, True])
def test_text_is_that_of_plain_decoding(target, dtype, lookup):
    """Greedy and coupled sampling, at every draft length, in batches with chunks, from the prefix cache."""
    plain = open_llm(target, None, dtype=dtype)
    batch = prompts(5, 70, 1, 33)
    want = [plain.generate(p, params)[0] for p, params in zip(batch, PARAMS, strict=True)]
    config = {**MTP, "prompt_lookup_min": 1, "prompt_lookup_max": 3} if lookup else MTP
    llm = open_llm(target, config, dtype=dtype, max_num_batched_tokens=40, max_num_seqs=4)
    watch = StateWatch(llm) if dtype == "float32" and not lookup else None
    accepted = drafted = cached = 0
    for drafts in (1, 3, 5, None):
        got = llm.generate(batch, PARAMS, num_speculative_tokens=drafts)
        for mine, his in zip(got, want, strict=True):
            assert_same(mine, his, drafts)
            assert_stats(mine)
            accepted += mine.metrics.spec_decode.num_accepted_tokens
            drafted += mine.metrics.spec_decode.num_draft_tokens
            cached += mine.num_cached_tokens
        assert_idle(llm)
    assert 0 < accepted < drafted and cached >= 3 * 64
    assert watch is None or watch.compared > 100


@pytest.mark.parametrize("options", [{}, {"quantization": "int8"}, {"quantization": "int4", "kv_cache_dtype": "int8"}])
def test_text_is_that_of_plain_decoding_in_other_formats(target, options):
    plain = open_llm(target, None, dtype="bfloat16", **options)
    llm = open_llm(target, {**MTP, "quantization": options.get("quantization")}, dtype="bfloat16", **options)
    batch = prompts(9, 40)
    for mine, his in zip(llm.generate(batch, PARAMS[:2]), plain.generate(batch, PARAMS[:2]), strict=True):
        assert_same(mine, his, options)
        assert mine.metrics.spec_decode.num_draft_tokens
    assert_idle(llm)


@pytest.mark.parametrize("isa", NAMES)
def test_on_every_path(target, isa):
    if not runs_here(isa):
        pytest.skip(f"this processor has no {isa}")
    for dtype in ("float32", "bfloat16"):
        options = {"isa": isa, "dtype": dtype, "threads": 2}
        got = open_llm(target, MTP, **options).generate(prompts(20), GREEDY)[0]
        assert_same(got, open_llm(target, None, **options).generate(prompts(20), GREEDY)[0], isa)
        assert got.metrics.spec_decode.num_draft_tokens


def test_drafts_follow_the_definition(target):
    """Whatever the chunks are, beside other texts, and up to the last token of the context."""
    llm = open_llm(target, MTP, max_num_batched_tokens=24, max_num_seqs=4, max_model_len=120)
    rounds = Rounds(llm)
    llm.generate(prompts(5, 70, 1, 33), GREEDY)
    llm.generate(prompts(110), SamplingParams(temperature=0.0, ignore_eos=True))
    rounds.check(least=150)
    assert max(len(text) + len(drafts) for text, drafts in rounds.seen) == 119  # and the model's own


def test_drafts_over_shared_blocks_follow_the_definition(target):
    """Texts that part at the end of a block, and in the middle of one; a prompt that is all in the cache."""
    llm = open_llm(target, MTP, max_num_batched_tokens=64)
    start = prompts(48)[0]
    llm.generate(start, GREEDY)
    rounds, cached = Rounds(llm), 0
    for text in ([*start, 7], [*start, 9], [*start[:40], 3, 4, 5], [*start[:32], 8], [*start, 7, 1], [*start, 9]):
        cached += llm.generate(text, GREEDY)[0].num_cached_tokens
    assert cached >= 4 * 32
    rounds.check(least=100)


def test_drafts_after_preemption_follow_the_definition(target):
    plain = open_llm(target, None)
    llm = open_llm(target, MTP, max_num_seqs=3, max_num_batched_tokens=40, kv_cache_space=0.01)
    pool = llm.engine.pool
    taken = pool.take(pool.size - 16)  # room for less than three texts of 8 blocks
    check, idle = pool.check, pool.check_idle
    pool.check = lambda held, index=True: None  # type: ignore[method-assign]
    pool.check_idle = lambda: None  # type: ignore[method-assign]
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=60, ignore_eos=True, logprobs=1)
    rounds, batch = Rounds(llm), prompts(60, 61, 62)
    for mine, his in zip(llm.generate(batch, params), plain.generate(batch, params), strict=True):
        assert_same(mine, his, "preempted")
    assert llm.engine.scheduler.num_preemptions > 0
    rounds.check(least=100, every=5)
    pool.give(taken)
    pool.check, pool.check_idle = check, idle  # type: ignore[method-assign]
    assert_idle(llm)


def test_a_drafter_that_rested_goes_on_where_it_was(target):
    """Steps without drafts leave rows waiting; a block that they complete is written for others too."""
    llm = open_llm(target, MTP)
    rounds, engine = Rounds(llm), llm.engine
    turn = iter(range(1 << 30))
    engine.lengths.choose = lambda requests, limits, *_: [n * (next(turn) % 9 == 0) for n in limits]
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=60, ignore_eos=True)
    first = llm.generate(prompts(21)[0], params)[0]
    again = llm.generate(first.prompt_token_ids + first.outputs[0].token_ids, GREEDY)[0]
    assert again.num_cached_tokens == 80
    rounds.check(least=30)


def test_a_drafter_that_was_not_asked_catches_up(target):
    """Where drafts do not pay it sees nothing at all; later it starts from the last state known before."""
    plain = open_llm(target, None)
    llm = open_llm(target, MTP, max_num_batched_tokens=40)
    lengths, rounds, batch = llm.engine.lengths, Rounds(llm), prompts(50, 3, 41)
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=60, ignore_eos=True, logprobs=1)
    want = plain.generate(batch, params)
    lengths.reconsider = lambda rows: None  # type: ignore[method-assign]
    lengths.saved = lambda rows, limit: 1e9  # type: ignore[method-assign]
    for worth in (0, 5, 17, 40):
        with llm._lock:
            lengths.worthwhile = False
            added = [llm._add(p, params, llm._draft_length(True, None)) for p in batch]
            for step in range(1000):
                lengths.worthwhile = worth <= step < worth + 12
                if not llm.engine.busy:
                    break
                llm._step()
        for request, his in zip(added, want, strict=True):
            assert_same(request.output(), his, worth)
    rounds.check(least=200)
    assert_idle(llm)


def test_a_pass_that_fails_between_draft_and_commit_leaves_no_trace(target):
    llm = open_llm(target, MTP)
    batch = prompts(50, 20)
    want = open_llm(target, None).generate(batch, GREEDY)
    rounds = Rounds(llm)
    with llm._lock:
        requests = [llm._add(p, GREEDY, llm._draft_length(True, None)) for p in batch]
        run_with_failing_passes(llm)
    for request, his in zip(requests, want, strict=True):
        assert_same(request.output(), his, "failed passes")
    rounds.check(least=50)
    assert_idle(llm)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_layer_that_knows_its_model_is_always_right(teacher, temperature):
    llm, plain = open_llm(teacher, MTP), open_llm(teacher, None)
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=60, ignore_eos=True)
    for prompt in prompts(2, 17, 40):
        got = llm.generate(prompt, params, num_speculative_tokens=4)[0]
        assert_same(got, plain.generate(prompt, params)[0], temperature)
        stats = got.metrics.spec_decode
        assert stats.num_accepted_tokens == stats.num_draft_tokens > 40


@pytest.mark.parametrize("sampler", ["coupled", "rejection"])
def test_acceptance_does_not_depend_on_the_batch(target, sampler):
    """Nor does the text that rejection sampling draws."""
    llm = open_llm(target, MTP, sampler=sampler)
    batch = prompts(5, 70, 1, 33)
    alone = [llm.generate(p, q, num_speculative_tokens=4)[0] for p, q in zip(batch, PARAMS, strict=True)]
    together = llm.generate(batch, PARAMS, num_speculative_tokens=4)
    for a, b in zip(alone, together, strict=True):
        assert_same(b, a, sampler)
        assert a.metrics.spec_decode == b.metrics.spec_decode
    assert sum(a.metrics.spec_decode.num_accepted_tokens for a in alone) > 0
    assert_idle(llm)


CHI = HybridShape(vocab=7, hidden=16, inner=24, layers=2, heads=2, kv_heads=1, sharp=0.8, seed=4, context=64)


@pytest.mark.parametrize(("sampler", "temperature", "top_k"), [("rejection", 1.0, 0), ("coupled", 0.8, 4)])
def test_samples_follow_the_model(tmp_path, sampler, temperature, top_k, samples=2000):
    """Joint distribution of the three tokens behind a prompt, through the whole engine, against exact enumeration."""
    options: dict[str, Any] = {"max_num_seqs": 64, "kv_cache_space": 0.05, "sampler": sampler}
    llm = open_llm(write_predicting(tmp_path, CHI), MTP, **options)
    assert_samples_follow(llm, temperature, top_k, samples, most_kept=0.97)


@pytest.mark.slow
def test_drafts_and_tokens_are_those_of_transformers(tmp_path):
    """Draft, verify, keep: with transformers' model and multi-token-prediction model, whose assisted generation has no
    cache for recurrent layers."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    folder = write_predicting(tmp_path, SHAPE)
    reference, count, tokens = TransformersPredictor(folder), 3, 24
    llm = open_llm(folder, MTP)
    rounds = Rounds(llm)
    for prompt in prompts(7, 33):
        rounds.seen.clear()
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        got = llm.generate(prompt, params, num_speculative_tokens=count)[0].outputs[0].token_ids

        def greedy(text: list[int]) -> list[int]:
            with torch.no_grad():
                return reference.target(torch.tensor([text])).logits[0].argmax(-1).tolist()

        text = [*prompt, greedy(prompt)[-1]]
        theirs = []
        while len(text) < len(prompt) + tokens:
            drafts = reference.logits(text, count)[1]
            theirs.append((list(text), drafts))
            verified = greedy([*text, *drafts])[len(text) - 1 :]
            kept = next((j for j, (a, b) in enumerate(zip(drafts, verified, strict=False)) if a != b), count)
            text += verified[: kept + 1]
        assert got == text[len(prompt) :][:tokens]
        whole = [r for r in rounds.seen if len(r[1]) == count]
        assert len(whole) >= 4 and whole == theirs[: len(whole)]


def test_the_layer_is_asked_for_by_its_names(target, tmp_path):
    for config in ({"method": "qwen3_5_mtp"}, {"method": "qwen3_next_mtp"}, {**MTP, "model": str(target)}):
        llm = open_llm(target, config)
        assert isinstance(llm.engine.proposer, MTPProposer)
        assert llm.info()["speculation"] == "mtp" and llm.info()["num_speculative_tokens"] == 5
    assert open_llm(target, {**MTP, "num_speculative_tokens": 2}).info()["num_speculative_tokens"] == 2
    assert LLM(target, threads=1, dtype="float32").info()["speculation"] != "mtp", "only who asks gets it"


def test_a_target_without_the_layer_is_refused(tmp_path):
    from models.hybrid import write_hybrid
    from models.tiny import Shape, write_target

    with pytest.raises(CheckpointError, match=r"mtp\.fc\.weight is missing"):
        open_llm(write_hybrid(tmp_path / "bare", SHAPE, tokenizer=True), MTP)
    with pytest.raises(ConfigError, match="is a llama model"):
        open_llm(write_target(tmp_path / "llama", Shape("llama"), tokenizer=True), MTP)
