"""Prefix cache and preemption: the same bits, whatever was shared, lost and computed again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import SamplingParams
from paceline.errors import ConfigError

from .conftest import SHAPE
from .harness import (
    Oracle,
    Scripted,
    assert_idle,
    assert_same,
    assert_stats,
    half_right,
    kib,
    open_llm,
    scripted,
)

V = SHAPE.vocab
GREEDY = SamplingParams(temperature=0.0, seed=0, max_tokens=20, logprobs=1, ignore_eos=True)


def text(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, V, length).tolist()


# ---- prefix cache


def test_a_prompt_that_comes_again_is_not_computed_again(world):
    llm = open_llm(world.folder, None, dtype=world.dtype)
    rows: list[int] = []
    forward = llm.engine._forward
    llm.engine._forward = lambda work: rows.extend(len(w.tokens) for w in work) or forward(work)  # type: ignore[method-assign]
    prompt = text(1, 100)
    want = world.plain.generate(prompt, GREEDY)[0]
    assert llm.generate(prompt, GREEDY)[0].num_cached_tokens == 0 and rows[0] == 100
    rows.clear()
    again = llm.generate(prompt, GREEDY)[0]
    assert again.num_cached_tokens == 96 and rows[0] == 4
    assert_same(again, want, "the second time")
    # the next turn finds the answer too: prompt 100 + output 20, of which 119 rows were computed
    turn = prompt + again.outputs[0].token_ids + text(2, 9)
    rows.clear()
    follow = llm.generate(turn, GREEDY)[0]
    assert follow.num_cached_tokens == 112 and rows[0] == len(turn) - 112
    assert_same(follow, world.plain.generate(turn, GREEDY)[0], "the next turn")
    stats = llm.engine.scheduler.stats
    assert (stats.queries, stats.hits) == (100 + 100 + len(turn), 96 + 112)
    llm.reset_prefix_cache()
    assert llm.generate(prompt, GREEDY)[0].num_cached_tokens == 0
    assert_idle(llm)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33])
def test_the_last_token_of_a_prompt_is_always_computed(world, length):
    llm = open_llm(world.folder, None, dtype=world.dtype)
    prompt = text(3, length)
    want = world.plain.generate(prompt, GREEDY)[0]
    for cached in (0, (length - 1) // 16 * 16):
        got = llm.generate(prompt, GREEDY)[0]
        assert_same(got, want, length)
        assert got.num_cached_tokens == cached


def test_without_the_cache_nothing_is_found(tiny_target):
    llm = open_llm(tiny_target, None, enable_prefix_caching=False)
    for _ in range(2):
        assert llm.generate(text(1, 64), GREEDY)[0].num_cached_tokens == 0
    assert llm.engine.pool.published == 0 and llm.engine.scheduler.stats.queries == 0
    with pytest.raises(ConfigError, match="enable_prefix_caching"):
        open_llm(tiny_target, None, enable_prefix_caching="yes")


def test_salts_keep_prompts_apart(tiny_target):
    llm = open_llm(tiny_target, None)
    ids = text(5, 50)

    def cached(prompt: Any) -> int:
        return llm.generate(prompt, GREEDY)[0].num_cached_tokens

    assert cached({"prompt_token_ids": ids, "cache_salt": "a"}) == 0
    assert cached({"prompt_token_ids": ids, "cache_salt": "b"}) == 0
    assert cached(ids) == 0
    assert cached({"prompt_token_ids": ids, "cache_salt": "a"}) == 48
    for bad in ("", 3):
        with pytest.raises(ConfigError, match="cache_salt"):
            llm.generate({"prompt_token_ids": ids, "cache_salt": bad}, GREEDY)


def test_choices_compute_their_prompt_once(world):
    llm = open_llm(world.folder, None, dtype=world.dtype, max_num_batched_tokens=40)
    params = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=12, logprobs=1, ignore_eos=True)
    want = world.plain.generate(text(4, 90), params)[0]
    got = llm.generate(text(4, 90), params)[0]
    assert_same(got, want, "n = 3")
    stats = llm.engine.scheduler.stats
    assert (stats.queries, stats.hits) == (270, 160)
    assert_idle(llm)


def test_a_drafter_gets_what_it_needs_from_shared_blocks(world):
    """Blocks of a request without speculation have no drafter's rows: they serve plain requests only."""
    llm = open_llm(world.folder, Scripted(taps=(0, 1)), dtype=world.dtype)
    prompt = text(6, 70)
    oracle = Oracle()
    want = world.plain.generate(prompt, GREEDY)[0]
    oracle.learn(want)
    cached = []
    for drafts in (0, 4, 0, 4, 4):
        with scripted(llm, half_right(oracle, V, 1)) as drafter:
            got = llm.generate(prompt, GREEDY, num_speculative_tokens=drafts)[0]
            seen = list(drafter.rows.values())
        assert_same(got, want, drafts)
        cached.append(got.num_cached_tokens)
        if drafts:
            assert sum(row is None for row in seen[0]) == got.num_cached_tokens
    assert cached == [0, 0, 64, 64, 64]
    assert_idle(llm)


@pytest.mark.parametrize("taps", [(), (0, 1)])
def test_a_drafter_that_rests_catches_up_when_it_is_worth_it(world, taps):
    """While drafts do not pay, rows are not tapped; later they are computed again, with the same bits, or the request
    stays plain: the harness sees to it that a drafter is asked only where it knows all rows."""
    llm = open_llm(world.folder, Scripted(taps=taps), dtype=world.dtype, max_num_batched_tokens=40)
    lengths, prompts = llm.engine.lengths, [text(7, 50), text(8, 3), text(7, 41)]
    params = [SamplingParams(temperature=0.9, seed=i, max_tokens=60, logprobs=1, ignore_eos=True) for i in range(3)]
    want, oracle = [world.plain.generate(p, q)[0] for p, q in zip(prompts, params, strict=True)], Oracle()
    for output in want:
        oracle.learn(output)
    lengths.reconsider = lambda rows: None  # type: ignore[method-assign]
    seen = set()
    for round_, (worth, saves) in enumerate([(0, 1), (5, 1), (17, 1), (17, 0), (40, 1)]):
        lengths.saved = lambda rows, limit, saves=saves: 1e9 * saves  # type: ignore[method-assign]
        if round_ == 3:
            llm.reset_prefix_cache()
        with scripted(llm, half_right(oracle, V, 4)) as drafter, llm._lock:
            lengths.worthwhile = False
            added = [llm._add(p, q, llm._draft_length(True, None)) for p, q in zip(prompts, params, strict=True)]
            for step in range(1000):
                lengths.worthwhile = worth <= step < worth + 12
                if not llm.engine.busy:
                    break
                llm._step()
            drafted = sum(r.output().metrics.spec_decode.num_drafts for r in added)
            seen.add((saves, bool(drafter.rows), bool(drafted)))
        for request, his in zip(added, want, strict=True):
            assert_same(request.output(), his, (worth, saves))
    assert (1, bool(taps), True) in seen
    if taps:
        assert (0, False, False) in seen, "not worth it: plain to the end"
    assert_idle(llm)


# ---- preemption


@pytest.fixture(scope="module")
def crowded(tiny_target, worlds):
    """Room for two or three of the requests that want to run at once."""
    llm = open_llm(
        tiny_target,
        Scripted(taps=(0, 1)),
        dtype="float32",
        max_num_batched_tokens=24,
        max_num_seqs=8,
        kv_cache_space=kib(11, worlds["float32"].plain),
    )
    assert llm.engine.pool.size == 11
    return llm


def test_a_cache_too_small_for_all_makes_later_requests_wait_and_changes_nothing(crowded, worlds):
    plain = worlds["float32"].plain
    prompts = [text(i, n) for i, n in enumerate((60, 5, 30, 17, 1, 40))]
    params = [
        SamplingParams(temperature=0.9 * (i % 2), seed=i, max_tokens=60, logprobs=1, ignore_eos=True) for i in range(6)
    ]
    oracle, finished = Oracle(), []
    want = [plain.generate(p, q)[0] for p, q in zip(prompts, params, strict=True)]
    for output in want:
        oracle.learn(output)
    before = crowded.engine.scheduler.num_preemptions
    release = crowded.engine._release
    crowded.engine._release = lambda s: finished.append(s.order) or release(s)  # type: ignore[method-assign]
    with scripted(crowded, half_right(oracle, V, 2)):
        got = crowded.generate(prompts, params)
    crowded.engine._release = release  # type: ignore[method-assign]
    for mine, his in zip(got, want, strict=True):
        assert_same(mine, his, "preempted")
        assert_stats(mine)
    assert crowded.engine.scheduler.num_preemptions > before
    assert finished[0] == min(finished), "who came first finishes first"
    assert_idle(crowded)


def test_the_first_is_never_preempted(crowded):
    victims = []
    preempt = crowded.engine.scheduler._preempt

    def watched(sequence: Any) -> None:
        victims.append((sequence.order, min(s.order for s in crowded.engine.running)))
        preempt(sequence)

    crowded.engine.scheduler._preempt = watched
    with scripted(crowded, half_right_nothing):
        crowded.generate([text(i, 20) for i in range(6)], SamplingParams(max_tokens=80, seed=1, ignore_eos=True))
    crowded.engine.scheduler._preempt = preempt
    assert victims and all(order > first for order, first in victims)
    assert_idle(crowded)


def half_right_nothing(sequence: Any, limit: int) -> list[int]:
    return [0] * (sequence.num_output_tokens % (limit + 1))


REQUEST = st.tuples(st.integers(0, 3), st.integers(1, 60), st.integers(1, 40), st.booleans(), st.integers(0, 7))


@settings(max_examples=15, deadline=None)
@given(
    requests=st.lists(REQUEST, min_size=1, max_size=8),
    cancel=st.sets(st.tuples(st.integers(0, 40), st.integers(0, 7)), max_size=3),
    seed=st.integers(0, 99),
)
def test_shared_preempted_and_cancelled_in_any_mix(crowded, worlds, requests, cancel, seed):
    """Requests with common beginnings in a cache that is too small; some are cancelled at some step. The others' bits
    are those of plain decoding alone, and nothing is left behind."""
    plain, engine = worlds["float32"].plain, crowded.engine
    prompts = [text(root, length) for root, length, *_ in requests]
    params = [
        SamplingParams(temperature=0.8 if hot else 0.0, seed=i, max_tokens=most, logprobs=0, ignore_eos=True)
        for i, (_, _, most, hot, _) in enumerate(requests)
    ]
    want = [plain.generate(p, q)[0] for p, q in zip(prompts, params, strict=True)]
    oracle = Oracle()
    for output in want:
        oracle.learn(output)
    cancelled: set[int] = set()
    with scripted(crowded, half_right(oracle, V, seed)), crowded._lock:
        added = [
            crowded._add(p, q, (drafts, True)) for p, q, (*_, drafts) in zip(prompts, params, requests, strict=True)
        ]
        for step in range(2000):
            for at, who in cancel:
                if at == step and who < len(added) and not added[who].finished:
                    crowded._abort([added[who]])
                    cancelled.add(who)
            if not engine.busy:
                break
            crowded._step()
    assert not engine.busy
    for i, (request, his) in enumerate(zip(added, want, strict=True)):
        if i not in cancelled:
            assert_same(request.output(), his, requests)
        else:
            mine = request.output().outputs[0]
            assert mine.finish_reason == "abort"
            assert mine.token_ids == his.outputs[0].token_ids[: len(mine.token_ids)]
    assert_idle(crowded)
