"""Whole passes: several requests, drafts, reduced heads, masks. No row may notice its neighbours."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import _native

from . import reference
from .test_rows import RELAXED, close_call, position, requests, state

VOCAB = 150


def bitmask(allowed: list[set[int]], vocab: int) -> np.ndarray:
    words = np.zeros((len(allowed), (vocab + 31) // 32), np.uint32)
    for row, ids in zip(words, allowed, strict=True):
        for i in ids:
            row[i // 32] |= np.uint32(1 << (i % 32))
    return words.view(np.int32)


@RELAXED
@given(st.data())
def test_a_row_of_a_block_sees_the_drafts_before_it(isa, data):
    """Row j draws what plain decoding would draw had it produced drafts 1..j."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    r = data.draw(requests(VOCAB))
    drafts = data.draw(st.lists(st.integers(0, VOCAB - 1), max_size=6))
    x = rng.normal(0, 2, (len(drafts) + 1, VOCAB)).astype(np.float32)
    s = state(r, VOCAB)
    together = _native.sample_rows(x, [s], [drafts])
    assert _native.sample_rows(x, [s], [drafts]) == together  # nothing is left behind
    assert (s.num_tokens, s.num_output) == (position(r), len(r.output))
    for j in range(len(drafts) + 1):
        assert _native.sample_rows(x[j : j + 1], [s]) == together[j : j + 1]
        row = reference.processed(x[j], r, drafts[:j])
        if not close_call(row, r):
            assert together[j] == reference.draw(row, r, position(r) + j)
        s.commit(drafts[j : j + 1])


@RELAXED
@given(st.data())
def test_requests_do_not_notice_each_other(isa, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    rs = [data.draw(requests(VOCAB)) for _ in range(4)]
    drafts = [rng.integers(0, VOCAB, rng.integers(0, 4)).tolist() for _ in rs]
    blocks = [rng.normal(0, 2, (len(d) + 1, VOCAB)).astype(np.float32) for d in drafts]
    alone = [_native.sample_rows(b, [state(r, VOCAB)], [d]) for b, r, d in zip(blocks, rs, drafts, strict=True)]
    for order in (range(4), rng.permutation(4)):
        got = _native.sample_rows(
            np.concatenate([blocks[i] for i in order]),
            [state(rs[i], VOCAB) for i in order],
            [drafts[i] for i in order],
        )
        assert got == [token for i in order for token in alone[i]]


@RELAXED
@given(st.data())
def test_the_drafter_draws_with_the_targets_noise(isa, data):
    """From equal logits the drafter proposes exactly what the target then draws: every draft is accepted."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    r = data.draw(requests(VOCAB))
    x = rng.normal(0, 2, (5, VOCAB)).astype(np.float32)
    s = state(r, VOCAB)
    drafts = _native.draft_rows(x[:4], [s], [4])
    drawn = _native.sample_rows(x, [s], [drafts])
    end = drawn.index(-1) if -1 in drawn else 4  # where masks leave nothing, the drafter's guess is an arbitrary one
    assert drawn[:end][:4] == drafts[:end]


@RELAXED
@given(st.data())
def test_a_reduced_head_speaks_of_target_ids(isa, data):
    """Columns of a listed head = the full row with every other id at -inf (filters see listed ids alone)."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    r = data.draw(requests(VOCAB))
    ids = np.sort(rng.choice(VOCAB, int(rng.integers(1, VOCAB)), replace=False)).astype(np.int32)
    full = np.full((3, VOCAB), -np.inf, np.float32)
    reduced = rng.normal(0, 2, (3, len(ids))).astype(np.float32)
    full[:, ids] = reduced
    sets = [set(rng.choice(VOCAB, 100, replace=False).tolist()) for _ in range(3)]
    usable = set(ids.tolist()) - set(r.banned) - {token for word in r.bad_words for token in word}
    usable &= set(r.allowed) or usable
    if not usable:
        return  # nothing to draw: any answer is an arbitrary one
    for allowed in (None, bitmask(sets, VOCAB)):
        if allowed is not None and not all(usable & s for s in sets):
            continue
        s = state(r, VOCAB)
        listed = _native.draft_rows(reduced, [s], [3], _native.IdMap(ids, VOCAB), allowed)
        assert listed == _native.draft_rows(full, [s], [3], None, allowed)


@RELAXED
@given(st.data())
def test_masked_ids_are_never_drawn(isa, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    r = data.draw(requests(VOCAB))
    sets = [set(rng.choice(VOCAB, size, replace=False).tolist()) for size in (1, 20, VOCAB)]
    x = rng.normal(0, 2, (3, VOCAB)).astype(np.float32)
    drafts = rng.integers(0, VOCAB, 2).tolist()
    got = _native.sample_rows(x, [state(r, VOCAB)], [drafts], bitmask(sets, VOCAB))
    for j, allowed in enumerate(sets):
        row = reference.processed(x[j], r, drafts[:j], allowed)
        if (row > -np.inf).any() and not close_call(row, r):
            assert got[j] in allowed
            assert got[j] == reference.draw(row, r, position(r) + j)


@RELAXED
@given(st.data())
def test_every_way_to_verify_keeps_to_the_masks(isa, data):
    """Of rows, trees and rejection alike: allowed ids alone, no bad word, drafts of the block counted; -1 where nothing
    is left. `permitted` tells beforehand which drafts these rule out."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    r = replace(data.draw(requests(6)), banned=[], min_tokens=0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0)
    drafts = data.draw(st.lists(st.integers(0, 5), max_size=5))
    x = rng.normal(0, 1, (len(drafts) + 1, 6)).astype(np.float32)
    s = state(r, 6)
    allowed = set(r.allowed) or set(range(6))
    left = [allowed - set(reference.forbidden(r.bad_words, [*r.output, *drafts[:j]])) for j in range(len(drafts) + 1)]
    fitting = next((j for j, token in enumerate(drafts) if token not in left[j]), len(drafts))
    assert s.permitted(drafts) == fitting
    for j, token in enumerate(_native.sample_rows(x, [s], [drafts])):
        assert token in left[j] if left[j] else token == -1
    [(path, tokens)] = _native.walk_rows(x, [s], [drafts], [list(range(len(drafts)))])
    [(kept, following)] = _native.reject_rows(x, [s], [drafts])
    assert len(path) - 1 <= fitting and kept <= fitting
    for place, token in ((len(path) - 1, tokens[-1]), (kept, following)):
        assert token in left[place] if left[place] else token == -1
    assert s.num_output == len(r.output)


def test_min_tokens_masks_until_enough_tokens_are_there(isa):
    x = np.zeros((4, 10), np.float32)
    x[:, 7] = 50  # the stop id wins wherever it may
    s = _native.SamplingState(10, [1, 2], temperature=0.0, banned=[7], min_tokens=3)
    assert _native.sample_rows(x, [s], [[0, 0, 0]]) == [0, 0, 0, 7]
    s.commit([0, 0])
    assert _native.sample_rows(x[:2], [s], [[0]]) == [0, 7]


def test_repetition_penalty_sees_drafts_of_the_block(isa):
    x = np.zeros((3, 10), np.float32)
    x[:, 4], x[:, 5] = 2.0, 1.9
    s = _native.SamplingState(10, [], temperature=0.0, repetition_penalty=1.3)
    assert _native.sample_rows(x, [s], [[4, 5]]) == [4, 5, 4]


def test_frequency_counts_the_output_alone(isa):
    x = np.zeros((1, 10), np.float32)
    x[:, 4], x[:, 5] = 2.0, 1.9
    prompt = _native.SamplingState(10, [4, 4, 4], temperature=0.0, frequency_penalty=1.0)
    assert _native.sample_rows(x, [prompt]) == [4]
    prompt.commit([4])
    assert _native.sample_rows(x, [prompt]) == [5]


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**32))
def test_choices_and_seeds_are_independent_streams(seed):
    x = np.random.default_rng(seed).normal(0, 1, (1, 2000)).astype(np.float32)
    draws = {
        (s, c): _native.sample_rows(x, [_native.SamplingState(2000, [], seed=s, choice=c)])[0]
        for s in range(4)
        for c in range(4)
    }
    assert len(set(draws.values())) > 8
    again = _native.sample_rows(x, [_native.SamplingState(2000, [], seed=2, choice=3)])[0]
    assert again == draws[2, 3]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("penalty", [0.0, 0.5])
def test_threads_draw_what_one_draws(isa, temperature, penalty):
    """Enough logits for rows to be shared out; penalties tie the rows of a block to one another."""
    vocab, pool, rng = 9000, _native.ThreadPool(3), np.random.default_rng(5)
    columns = np.sort(rng.choice(vocab, 8200, replace=False)).astype(np.int32)
    id_map = _native.IdMap(columns, vocab)
    drafts = [rng.integers(0, vocab, n).tolist() for n in (4, 0, 7)]
    states = [
        _native.SamplingState(
            vocab, rng.integers(0, vocab, n).tolist(), temperature=temperature, frequency_penalty=penalty, seed=n
        )
        for n in (3, 9, 4)
    ]
    rows = sum(len(d) + 1 for d in drafts)
    x = rng.normal(0, 2, (rows, vocab)).astype(np.float32)
    masks = bitmask([set(rng.choice(vocab, 50).tolist()) if r % 2 else set(range(vocab)) for r in range(rows)], vocab)
    for allowed in (None, masks):
        alone = _native.sample_rows(x, states, drafts, allowed)
        assert len(set(alone)) > rows // 2
        assert _native.sample_rows(x, states, drafts, allowed, pool) == alone
    assert _native.sample_rows(x[:3], states, [], None, pool) == _native.sample_rows(x[:3], states)
    x = np.ascontiguousarray(x[:, : len(columns)])
    for counts in ([5, 0, 8], [0, rows, 0]):
        alone = _native.draft_rows(x[: sum(counts)], states, counts, id_map)
        assert _native.draft_rows(x[: sum(counts)], states, counts, id_map, None, pool) == alone
    assert [s.num_output for s in states] == [0, 0, 0]
