"""Whether what an engine samples follows its model: joint frequencies of a few tokens against exact enumeration."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from paceline import LLM, SamplingParams

PROMPT = [1, 4, 2, 4, 1, 1, 4]
LOT = 250  # requests of one call, many times as many as run at once


def chi_square_p(observed: np.ndarray, expected: np.ndarray) -> float:
    """Upper tail of the statistic, cells of small expectation pooled (Wilson and Hilferty's approximation)."""
    small = expected < 6
    if small.any():
        observed = np.append(observed[~small], observed[small].sum())
        expected = np.append(expected[~small], expected[small].sum())
    df = len(expected) - 1
    x = float(((observed - expected) ** 2 / expected).sum())
    z = ((x / df) ** (1 / 3) - (1 - 2 / (9 * df))) / math.sqrt(2 / (9 * df))
    return 0.5 * math.erfc(z / math.sqrt(2))


def warped(logits: np.ndarray, temperature: float, top_k: int) -> np.ndarray:
    x = logits.astype(np.float64) / temperature
    if top_k:
        x = np.where(x >= np.sort(x, axis=-1)[..., -top_k, None], x, -np.inf)
    p = np.exp(x - x.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def joint(llm: LLM, prompt: list[int], depth: int, temperatures: Sequence[float], top_k: int) -> list[np.ndarray]:
    """Probability of every sequence of `depth` tokens, [V] * depth, from the model's logits, at each temperature."""
    vocab = llm.model.vocab_size
    out = [np.empty((vocab,) * depth) for _ in temperatures]
    for rest in np.ndindex(*(vocab,) * (depth - 1)):
        logits, _ = llm.model.logits([*prompt, *rest])
        for table, temperature in zip(out, temperatures, strict=True):
            p = warped(logits[len(prompt) - 1 :], temperature, top_k)
            table[rest] = np.prod([p[i, t] for i, t in enumerate(rest)]) * p[-1]
    return out


def assert_samples_follow(llm: LLM, temperature: float, top_k: int, samples: int, *, most_kept: float | None) -> None:
    """The three tokens behind PROMPT. most_kept: drafts that are kept, at most, so that kept and replaced ones are both
    put to the test; None: there are no drafts."""
    observed = np.zeros((llm.model.vocab_size,) * 3)
    accepted = drafted = 0
    for first in range(0, samples, LOT):
        params = [
            SamplingParams(temperature=temperature, top_k=top_k, seed=i, max_tokens=4, ignore_eos=True)
            for i in range(first, first + LOT)
        ]
        for output in llm.generate([PROMPT] * LOT, params):
            observed[tuple(output.outputs[0].token_ids[:3])] += 1
            accepted += output.metrics.spec_decode.num_accepted_tokens
            drafted += output.metrics.spec_decode.num_draft_tokens
    if most_kept is not None:
        assert drafted > samples / 2 and 0.03 < accepted / drafted < most_kept
    want, off = joint(llm, PROMPT, 3, (temperature, temperature * 1.35), top_k)
    assert abs(want.sum() - 1) < 1e-9
    alive = want > 0
    assert observed[~alive].sum() == 0
    assert chi_square_p(observed[alive], want[alive] * samples) > 0.001
    # the test can tell a slightly wrong distribution from the right one
    assert chi_square_p(observed[alive], off[alive] * samples) < 0.001
