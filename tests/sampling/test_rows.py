"""Draws, distributions and log-probabilities of single rows against the slow reference, on every path."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline import _native

from . import reference
from .reference import Request

RELAXED = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)


def state(r: Request, vocab: int) -> _native.SamplingState:
    s = _native.SamplingState(vocab, r.prompt, **r.native_arguments())
    s.commit(r.output)
    return s


def position(r: Request) -> int:
    return len(r.prompt) + len(r.output)


def logits_row(rng: np.random.Generator, vocab: int, kind: str) -> np.ndarray:
    x = rng.normal(0, 3, vocab).astype(np.float32)
    if kind == "ties":
        x = np.round(x).astype(np.float32)
    elif kind == "flat":
        x[:] = 1.5
    elif kind == "peaked":
        x[rng.integers(0, vocab)] += 30
    elif kind == "huge":
        x *= np.float32(1e30)
    elif kind == "holes":
        x[rng.random(vocab) < 0.3] = -np.inf
        x[rng.random(vocab) < 0.1] = np.nan
    elif kind == "infinite":
        x[rng.integers(0, vocab, 3)] = np.inf
    return x


KINDS = ("normal", "ties", "flat", "peaked", "huge", "holes", "infinite")


@st.composite
def requests(draw, vocab: int) -> Request:
    ids = st.integers(0, vocab - 1)
    return Request(
        prompt=draw(st.lists(ids, max_size=12)),
        output=draw(st.lists(ids, max_size=12)),
        temperature=draw(st.sampled_from([0.0, 1e-6, 0.3, 0.8, 1.0, 1.7, 50.0])),
        top_k=draw(st.sampled_from([0, 1, 2, 5, 40, vocab, 10 * vocab])),
        top_p=draw(st.sampled_from([1.0, 1e-9, 0.1, 0.5, 0.9, 0.999])),
        min_p=draw(st.sampled_from([0.0, 1e-5, 0.05, 0.5, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 0.7, 1.3, 2.0])),
        presence_penalty=draw(st.sampled_from([0.0, -1.0, 0.5])),
        frequency_penalty=draw(st.sampled_from([0.0, -0.5, 0.25])),
        logit_bias=draw(st.dictionaries(ids, st.sampled_from([-100.0, -2.0, 3.5, 100.0]), max_size=4)),
        banned=draw(st.lists(ids, max_size=3)),
        min_tokens=draw(st.sampled_from([0, 5, 30])),
        allowed=draw(st.one_of(st.just([]), st.lists(ids, max_size=6), st.lists(ids, min_size=vocab // 2))),
        bad_words=draw(st.lists(st.lists(st.integers(0, min(4, vocab - 1)), min_size=1, max_size=3), max_size=5)),
        seed=draw(st.integers(0, 2**64 - 1)),
        choice=draw(st.integers(0, 5)),
    )


def close_call(x: np.ndarray, r: Request) -> bool:
    """True if rounding (fp32 terms here, float64 there) may decide which ids survive."""
    if r.temperature == 0 or not (x > -np.inf).any():
        return False
    unfiltered = replace(r, top_p=1.0)
    kept = reference.survivors(x, unfiltered)
    d = (x[kept] - x.max()) / r.temperature
    w = np.exp(d)
    before = (np.cumsum(w) - w) / w.sum()
    near_top_p = r.top_p < 1 and np.abs(before - r.top_p).min() < 3e-6
    alive = x[x > -np.inf]
    near_min_p = r.min_p > 0 and np.abs((alive - x.max()) / r.temperature - math.log(r.min_p)).min() < 1e-9
    return bool(near_top_p or (near_min_p and r.min_p < 1))


@RELAXED
@given(data=st.data(), kind=st.sampled_from(KINDS), vocab=st.sampled_from([3, 64, 65, 200, 1000]))
def test_draws_and_probabilities_equal_the_reference(isa, data, kind, vocab):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    row = logits_row(rng, vocab, kind)
    r = data.draw(requests(vocab))
    x = reference.processed(row, r)
    if close_call(x, r):
        return
    s = state(r, vocab)
    [got] = _native.sample_rows(row[None], [s])
    probs = _native.probs_rows(row[None], [s])[0]
    if not (x > -np.inf).any():
        assert probs.sum() == 1
        assert got == -1 if (row > -np.inf).any() else probs[got] == 1
        return
    assert got == reference.draw(x, r, position(r))
    np.testing.assert_allclose(probs, reference.probs(x, r), rtol=2e-5, atol=1e-7)
    assert abs(probs.sum(dtype=np.float64) - 1) < 1e-5


def test_many_seeds_on_a_large_vocabulary(isa):
    """Pruning may not change a draw: V = 5003 ids, flat and peaked, every id a possible winner."""
    rng = np.random.default_rng(0)
    vocab = 5003
    for kind in ("flat", "normal", "ties"):
        row = logits_row(rng, vocab, kind)
        for seed in range(6):
            r = Request(seed=seed, temperature=[0.7, 1.0, 3.0][seed % 3])
            [got] = _native.sample_rows(row[None], [state(r, vocab)])
            assert got == reference.draw(reference.processed(row, r), r, 0)


@RELAXED
@given(st.integers(0, 2**32), st.sampled_from(KINDS), st.sampled_from([1, 7, 64, 130, 2000]))
def test_argmax_takes_the_lowest_id_and_never_nan(isa, seed, kind, vocab):
    row = logits_row(np.random.default_rng(seed), vocab, kind)
    clean = np.where(np.isnan(row), -np.inf, row)
    [got] = _native.argmax_rows(row[None])
    if (clean > -np.inf).any():
        assert got == int(np.argmax(clean))


def test_rows_without_a_finite_logit_have_a_defined_answer(isa):
    rows = np.full((4, 70), -np.inf, np.float32)
    rows[1] = np.nan
    rows[2, :3] = np.nan  # the lowest id that is -inf rather than NaN
    rows[3, 69] = -1e38
    assert _native.argmax_rows(rows).tolist() == [0, 0, 3, 69]
    states = [_native.SamplingState(70, [], temperature=t) for t in (0.0, 1.0, 1.0, 1.0)]
    assert _native.sample_rows(rows, states) == [0, 0, 3, 69]


def test_positive_zero_and_negative_zero_are_a_tie(isa):
    row = np.full((1, 66), -1, np.float32)
    row[0, 9], row[0, 65] = -0.0, 0.0
    assert _native.argmax_rows(row).tolist() == [9]
    top1 = _native.SamplingState(66, [], top_k=1)
    assert _native.probs_rows(row, [top1])[0].argmax() == 9


def test_ties_at_the_top_k_boundary_keep_the_lowest_ids(isa):
    row = np.zeros((1, 300), np.float32)
    row[0, 250] = 1
    probs = _native.probs_rows(row, [_native.SamplingState(300, [], top_k=4)])[0]
    assert np.flatnonzero(probs).tolist() == [0, 1, 2, 250]


@pytest.mark.parametrize("top_k", [1, 2, 17, 100, 156, 157, 158, 700, 9999])
@pytest.mark.parametrize("kind", ["normal", "ties"])
def test_top_k_of_a_large_vocabulary(isa, top_k, kind):
    """157 blocks of 64: selection through block maxima below that k, over everything above."""
    row = logits_row(np.random.default_rng(top_k), 10_000, kind)
    order = np.lexsort((np.arange(10_000), -row))
    [probs] = _native.probs_rows(row[None], [_native.SamplingState(10_000, [], top_k=top_k)])
    assert np.flatnonzero(probs).tolist() == sorted(order[:top_k].tolist())
    _, _, ids, _ = _native.logprobs_rows(row[None], [0], [0], top_k)
    assert ids[0].tolist() == order[:top_k].tolist()


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.99, 0.9999])
@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0])
def test_top_p_of_a_large_vocabulary(isa, top_p, spread):
    row = np.random.default_rng(5).normal(0, spread, 10_000).astype(np.float32)
    [probs] = _native.probs_rows(row[None], [_native.SamplingState(10_000, [], top_p=top_p)])
    kept = np.flatnonzero(probs)
    w = np.exp(row.astype(np.float64))
    mass = w / w.sum()
    lightest = kept[np.argmin(row[kept])]
    assert set(kept) == set(np.flatnonzero(row >= row[lightest]))
    assert mass[kept].sum() > top_p - 1e-6
    assert mass[kept].sum() - mass[lightest] < top_p + 1e-6


def test_equal_infinities_share_the_mass(isa):
    row = np.zeros((1, 100), np.float32)
    row[0, [20, 80]] = np.inf
    probs = _native.probs_rows(row, [_native.SamplingState(100, [])])[0]
    assert np.flatnonzero(probs).tolist() == [20, 80] and probs[20] == probs[80] == 0.5


def test_tiny_temperature_is_greedy_unless_tied(isa):
    row = np.random.default_rng(3).normal(0, 1, (1, 500)).astype(np.float32)
    for seed in range(20):
        for temperature in (1e-6, 1e-300, 5e-324):
            s = _native.SamplingState(500, [], temperature=temperature, seed=seed)
            assert _native.sample_rows(row, [s]) == [int(row.argmax())]


def test_filters_never_leave_nothing(isa):
    row = np.random.default_rng(3).normal(0, 1, (1, 500)).astype(np.float32)
    for arguments in ({"top_p": 1e-30}, {"min_p": 1.0}, {"top_k": 1}, {"top_p": 5e-324, "min_p": 5e-324, "top_k": 1}):
        probs = _native.probs_rows(row, [_native.SamplingState(500, [], **arguments)])[0]
        assert probs[row[0].argmax()] == 1 or "min_p" in arguments


def test_min_p_comes_before_top_p(isa):
    """Order of vLLM's sampler: top_p sees the mass that min_p left."""
    p = np.array([0.4, 0.3, 0.2, 0.1])
    row = np.log(p).astype(np.float32)[None]
    kept = _native.probs_rows(row, [_native.SamplingState(4, [], min_p=0.6, top_p=0.55)])[0]
    # min_p leaves 0.4 and 0.3, renormalised 0.571: the first alone reaches 0.55 (unfiltered, 0.4 would not).
    assert np.flatnonzero(kept).tolist() == [0]


def test_every_path_gives_the_same_bits(every_isa):
    rng = np.random.default_rng(1)
    vocab = 3001
    rows = np.stack([logits_row(rng, vocab, kind) for kind in KINDS])
    requests = [
        Request(seed=i, temperature=0.9, top_p=[1.0, 0.9][i % 2], min_p=[0, 0.01][i % 3 == 0]) for i in range(7)
    ]
    results = []
    for name in every_isa:
        _native.select_sampling_isa(name)
        states = [state(r, vocab) for r in requests]
        results.append(
            [
                np.array(_native.sample_rows(rows, states)),
                _native.probs_rows(rows, states),
                *_native.logprobs_rows(rows, list(range(7)), [5] * 7, 10),
                _native.argmax_rows(rows),
            ]
        )
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert a.tobytes() == b.tobytes()


@RELAXED
@given(st.integers(0, 2**32), st.sampled_from(KINDS), st.sampled_from([5, 64, 333]), st.integers(0, 40))
def test_logprobs_equal_log_softmax(isa, seed, kind, vocab, num_top):
    rng = np.random.default_rng(seed)
    row = logits_row(rng, vocab, kind)
    token = int(rng.integers(0, vocab))
    num_top = min(num_top, vocab)
    chosen, ranks, ids, values = _native.logprobs_rows(row[None], [0], [token], num_top)
    x = np.minimum(np.where(np.isnan(row), -np.inf, row).astype(np.float64), np.finfo(np.float32).max)
    expected = x - x.max() - np.log(np.exp(x - x.max()).sum())
    order = np.lexsort((np.arange(vocab), -x))
    real = order[x[order] > -np.inf][:num_top]
    assert ids[0, : len(real)].tolist() == real.tolist()
    assert (ids[0, len(real) :] == -1).all()
    np.testing.assert_allclose(values[0, : len(real)], expected[real], rtol=1e-6, atol=2e-6)
    if not math.isnan(row[token]):
        np.testing.assert_allclose(chosen[0], expected[token], rtol=1e-6, atol=2e-6)
        if x[token] > -np.inf:
            assert ranks[0] == order.tolist().index(token) + 1


def test_logprobs_of_a_row_without_finite_logits_are_nan(isa):
    chosen, _, ids, _ = _native.logprobs_rows(np.full((1, 10), np.nan, np.float32), [0], [3], 2)
    assert math.isnan(chosen[0]) and ids.tolist() == [[-1, -1]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, s: _native.sample_rows(x, [s], [[1, 2]]), "rows"),
        (lambda x, s: _native.sample_rows(x, [s, s], [[99], []]), "outside the vocabulary"),
        (lambda x, s: _native.sample_rows(x, [s, s], [[]]), "blocks"),
        (lambda x, s: _native.sample_rows(x[:, :5].copy(), [s, s]), "vocabulary"),
        (lambda x, s: _native.sample_rows(x, [s, s], [], np.zeros((2, 2), np.int32)), "allowed"),
        (lambda x, s: _native.sample_rows(x[:, :0].copy(), [s, s]), "columns"),
        (lambda x, s: _native.draft_rows(x, [s], [3]), "counts"),
        (lambda x, s: _native.draft_rows(x, [s, s], [3, -1]), "counts"),
        (lambda x, s: _native.logprobs_rows(x, [2], [0]), "rows"),
        (lambda x, s: _native.logprobs_rows(x, [0], [10]), "ids"),
        (lambda x, s: _native.logprobs_rows(x, [0], [0], 11), "top_n"),
        (lambda x, s: s.commit([10]), "tokens"),
        (lambda x, s: _native.IdMap(np.array([3, 2], np.int32), 10), "increase"),
        (lambda x, s: _native.IdMap(np.array([3, 10], np.int32), 10), "outside"),
        (lambda x, s: _native.SamplingState(10, [10]), "prompt"),
        (lambda x, s: _native.SamplingState(10, [], banned=[-1]), "banned"),
        (lambda x, s: _native.SamplingState(10, [], allowed=[3, 10]), "allowed"),
        (lambda x, s: _native.SamplingState(10, [], bad_words=[[1], [2, 10]]), "bad_words"),
        (lambda x, s: _native.SamplingState(10, [], bad_words=[[]]), "bad_words"),
        (lambda x, s: s.permitted([1, 10]), "tokens"),
        (lambda x, s: _native.SamplingState(10, [], logit_bias=[(10, 1.0)]), "logit_bias"),
        (lambda x, s: _native.reject_rows(x, [s], [[1]], np.zeros((2, 10), np.float32)), "draft_probs"),
        (
            lambda x, s: _native.reject_rows(
                x, [s], [[1]], np.zeros((1, 2), np.float32), np.array([[1, 10]], np.int32)
            ),
            "draft_ids",
        ),
    ],
)
def test_wrong_shapes_and_ids_are_refused(call, message):
    x = np.zeros((2, 10), np.float32)
    with pytest.raises(ValueError, match=message):
        call(x, _native.SamplingState(10, [1]))


def test_penalties_beyond_all_floats_rule_nothing_out(isa):
    """No mask is at work: what is penalised beyond measure is left, and all of it is alike."""
    row = np.array([[-50.0, -60.0, -70.0, 0.0]], np.float32)
    for penalty in (1e38, 1e300):
        for temperature in (0.0, 1.0):
            options = {"temperature": temperature, "repetition_penalty": penalty}
            s = _native.SamplingState(4, range(4), **options)
            assert _native.sample_rows(row, [s]) == [3]
            s = _native.SamplingState(4, [0, 1, 2], **options, allowed=[1])
            assert _native.sample_rows(row, [s]) == [1]
            s = _native.SamplingState(3, [0, 1, 2], **options, allowed=[1, 2])
            want = [0, 0.5, 0.5] if temperature else [0, 1, 0]
            assert _native.probs_rows(row[:, :3].copy(), [s])[0].tolist() == want
