"""Both samplers are exact in distribution: chi-square tests on small vocabularies, fixed seeds, p > 0.001."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from paceline import _native, sampling
from paceline.sampling_params import SamplingParams

from . import golden_vectors, reference
from .reference import Request

GOLDEN = Path(os.environ.get("PACELINE_GOLDEN_DIR") or Path(__file__).parents[3] / "shared" / "golden") / "S"


def chi_square_p(observed: np.ndarray, expected: np.ndarray) -> float:
    """Probability of a statistic at least as large: Q(df / 2, x / 2) by recursion over df."""
    assert expected.min() > 5 and len(expected) > 1
    x = float(((observed - expected) ** 2 / expected).sum()) / 2
    df = len(expected) - 1
    a, q = (0.5, math.erfc(math.sqrt(x))) if df % 2 else (1.0, math.exp(-x))
    while a < df / 2:
        q += x**a * math.exp(-x) / math.gamma(a + 1)
        a += 1
    return q


def test_chi_square_p():
    for statistic, df, p in [(13.816, 2, 0.001), (16.266, 3, 0.001), (51.179, 24, 0.001), (3.841, 1, 0.05)]:
        expected = np.full(df + 1, 1e6)
        observed = expected + np.where(np.arange(df + 1) == 0, math.sqrt(statistic * 1e6), 0)
        assert abs(chi_square_p(observed, expected) - p) < 2e-4 * p**0.5


def distributions(seed: int, rows: int, vocab: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 1.2, (rows, vocab)).astype(np.float32)


WARPS = [{}, {"temperature": 0.7, "top_k": 5}, {"temperature": 1.3, "top_p": 0.9}, {"min_p": 0.1}]


@pytest.mark.parametrize("warp", WARPS)
def test_coupled_draws_follow_the_warped_distribution(warp):
    vocab, n = 9, 40_000
    row = distributions(4, 1, vocab)
    s = _native.SamplingState(vocab, [], seed=11, **warp)
    tokens = _native.sample_rows(np.repeat(row, n, axis=0), [s], [[0] * (n - 1)])
    p = reference.probs(reference.processed(row[0], Request()), Request(**warp))
    observed = np.bincount(tokens, minlength=vocab)
    assert observed[p == 0].sum() == 0
    alive = np.flatnonzero(p)
    assert len(alive) > 1
    assert chi_square_p(observed[alive], p[alive] * n) > 0.001


def run_blocks(target, drafter, trials, mode, warp, bad_words=()):
    """Tokens at the first two positions, generated in rounds of two drafts, one fixed distribution per position."""
    vocab = target.shape[1]
    params = SamplingParams(**warp)
    out, accepted, proposed = [], 0, 0
    for trial in range(trials):
        s = sampling.make_state(params, [], vocab_size=vocab, seed=trial + 1000, bad_words=bad_words)
        tokens: list[int] = []
        while len(tokens) < 2:
            at = len(tokens)
            probs = None
            if mode == "rejection":
                [drafts], q = sampling.draft_with_probs(drafter[at : at + 2], [s], [2])
                probs = sampling.DraftProbs(q)
            else:
                [drafts] = sampling.draft(drafter[at : at + 2], [s], [2])
            rows = target[at : at + 3]
            [committed] = sampling.verify(rows, [s], [drafts], mode=mode, draft_probs=probs)
            accepted += len(committed) > 1
            proposed += 1
            s.commit(committed)
            tokens += committed
        out.append(tokens[:2])
    return np.array(out), accepted / proposed


@pytest.mark.parametrize("mode", ["coupled", "rejection"])
@pytest.mark.parametrize(
    ("warp", "masks"),
    [
        ({}, {}),
        ({"temperature": 0.8, "top_k": 3}, {}),
        ({"top_p": 0.8}, {}),
        ({}, {"allowed": [0, 1, 2, 4], "bad_words": [[0, 1], [2, 2], [4, 0], [4, 1]]}),
    ],
)
def test_speculative_pairs_follow_the_target(mode, warp, masks):
    """The joint distribution of two tokens is the target's, although a rejected block's noise is used again."""
    vocab, trials = 5, 6000
    target, drafter = distributions(1, 5, vocab), distributions(2, 5, vocab)
    allowed = {"allowed_token_ids": masks["allowed"]} if masks else {}
    pairs, _ = run_blocks(target, drafter, trials, mode, warp | allowed, masks.get("bad_words", ()))

    def probs(row, *before):
        return reference.probs(reference.processed(row, Request(**masks), before), Request(**warp))

    first = probs(target[0])
    joint = np.concatenate([first[token] * probs(target[1], token) for token in range(vocab)])
    observed = np.bincount(pairs[:, 0] * vocab + pairs[:, 1], minlength=vocab * vocab)
    assert observed[joint == 0].sum() == 0
    rare = joint * trials < 8
    cells = np.append(joint[~rare], joint[rare].sum())
    counts = np.append(observed[~rare], observed[rare].sum())
    if cells[-1] * trials < 8:
        cells, counts = cells[:-1] / cells[:-1].sum(), counts[:-1]
    assert chi_square_p(counts, cells * counts.sum()) > 0.001


def test_acceptance_reaches_its_theoretical_rates():
    """Rejection accepts 1 - TV; coupling at least (1 - TV) / (1 + TV)."""
    vocab, n = 7, 20_000
    target, drafter = distributions(5, 1, vocab), distributions(6, 1, vocab)
    p, q = (np.exp(x[0]) / np.exp(x[0]).sum() for x in (target, drafter))
    tv = 0.5 * np.abs(p - q).sum()
    noise = 4 * math.sqrt(0.25 / n)
    states = [_native.SamplingState(vocab, [], seed=i) for i in range(n)]
    drafts = [[t] for t in _native.draft_rows(np.repeat(drafter, n, axis=0), states, [1] * n)]
    rows = np.repeat(target, 2 * n, axis=0)
    drawn = _native.sample_rows(rows, states, drafts)
    coupled = np.mean([d[0] == t for d, t in zip(drafts, drawn[::2], strict=True)])
    assert coupled > (1 - tv) / (1 + tv) - noise
    tokens, probs = _native.draft_rows_with_probs(np.repeat(drafter, n, axis=0), states, [1] * n)
    decided = _native.reject_rows(rows, states, [[t] for t in tokens], probs)
    rejection = np.mean([kept for kept, _ in decided])
    assert abs(rejection - (1 - tv)) < noise


def test_prompt_lookup_drafts_count_as_certain():
    """q = 1 at the draft: accepted with p(draft), else drawn from p without it; so the token follows p."""
    vocab, n = 7, 20_000
    target = distributions(8, 1, vocab)
    p = np.exp(target[0].astype(np.float64))
    p /= p.sum()
    states = [_native.SamplingState(vocab, [], seed=i) for i in range(n)]
    decided = _native.reject_rows(np.repeat(target, 2 * n, axis=0), states, [[3]] * n)
    first = np.array([3 if kept else token for kept, token in decided])
    assert not any(token == 3 for kept, token in decided if not kept)
    assert chi_square_p(np.bincount(first, minlength=vocab), p * n) > 0.001
    bonus = np.array([token for kept, token in decided if kept])
    assert chi_square_p(np.bincount(bonus, minlength=vocab), p * len(bonus)) > 0.001


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_rejection_follows_its_definition(data):
    """accept while u q(d) < p(d); then norm(max(p - q, 0)), or p if nothing is left, or the last row's p."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    vocab, k = data.draw(st.sampled_from([1, 3, 50])), data.draw(st.integers(0, 4))
    p = rng.dirichlet(np.full(vocab, 0.4), k + 1).astype(np.float32)
    width = data.draw(st.integers(1, vocab))
    ids = np.sort(rng.choice(vocab, width, replace=False)).astype(np.int32)
    q = rng.dirichlet(np.full(width, 0.4), k).astype(np.float32) if k else np.zeros((0, width), np.float32)
    same = data.draw(st.booleans())
    if same and width == vocab:
        q = p[:k].copy()
    drafts = [int(ids[rng.choice(width, p=row / row.sum(dtype=np.float64))]) for row in q.astype(np.float64)]
    uniforms = rng.random(k)
    dense = np.zeros((k, vocab), np.float64)
    dense[:, ids] = q
    kept = 0
    while kept < k and uniforms[kept] * dense[kept, drafts[kept]] < p[kept, drafts[kept]]:
        kept += 1
    want = p[kept].astype(np.float64)
    if kept < k:
        rest = np.maximum(p[kept] - dense[kept].astype(np.float32), 0)
        want = rest / rest.sum() if rest.sum() > 0 else want
    got, probs = _native.reject_block(p, drafts, uniforms.tolist(), q, ids[None])
    assert got == kept
    np.testing.assert_allclose(probs, want, rtol=1e-5, atol=1e-7)
    if width == vocab:
        again, same_probs = _native.reject_block(p, drafts, uniforms.tolist(), q)
        assert again == kept and same_probs.tobytes() == probs.tobytes()


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32), st.integers(0, 2**64 - 1))
def test_rejection_uses_its_own_streams(content, seed):
    rng = np.random.default_rng(content)
    vocab = 200
    x = rng.normal(0, 1, (3, vocab)).astype(np.float32)
    s = _native.SamplingState(vocab, [1, 2, 3], seed=seed, choice=2)
    q = rng.dirichlet(np.full(vocab, 1.0), 2).astype(np.float32)
    drafts = rng.integers(0, vocab, 2).tolist()
    [(kept, token)] = _native.reject_rows(x, [s], [drafts], q)
    p = _native.probs_rows(x, [s], [drafts])
    accept = [reference.uniform(seed, 2, 3 + j, reference.ACCEPT) for j in range(2)]
    want, rest = _native.reject_block(p, drafts, accept, q)
    assert kept == want
    u = reference.uniform(seed, 2, 3 + kept, reference.NEXT)
    cdf = np.cumsum(rest.astype(np.float64))
    assert token == int(np.searchsorted(cdf, u * cdf[-1], side="right"))


def test_greedy_rejection_is_greedy():
    x = distributions(9, 3, 11)
    best = x.argmax(axis=1).tolist()
    s = _native.SamplingState(11, [], temperature=0.0)
    assert _native.reject_rows(x, [s], [best[:2]]) == [(2, best[2])]
    assert _native.reject_rows(x, [s], [[best[0], best[1] + 1 if best[1] < 10 else 0]]) == [(1, best[1])]


@pytest.mark.skipif(not GOLDEN.is_dir(), reason="no golden vectors beside the checkout (PACELINE_GOLDEN_DIR)")
def test_golden_vectors():
    expected = json.loads((GOLDEN / "expected.json").read_text())
    golden_vectors.check(expected, load_file(GOLDEN / "expected.safetensors"))
