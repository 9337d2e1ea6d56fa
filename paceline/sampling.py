"""Logits of a pass -> tokens: a thin layer over the native sampler.

Design: the token at absolute position p of choice c is `argmax_i(log p_i + gumbel(seed, c, p, i))` over the ids that
survive the request's filters. The noise is a pure function of its four arguments (Philox4x32-10), so a drafter draws
with the target's noise, and a draft is kept when it equals the target's draw. A text therefore depends on the seed
alone, not on drafts, neighbours in the batch, or the order of rows.

The second mode, `rejection` (Leviathan et al. 2023, Chen et al. 2023), accepts a draft with probability min(1, p/q) and
otherwise draws from the residual: exact in distribution, with a higher acceptance rate, but the text for a seed then
depends on the drafts. Its streams of random numbers are separate (drafts, accept tests, replacements).

Rows: a request with drafts d_1..d_k has k + 1 consecutive rows of logits; row j predicts the token that follows d_j,
and its penalties count the committed tokens and d_1..d_j.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from paceline._native import (
    IdMap,
    SamplingState,
    ThreadPool,
    argmax_rows,
    draft_candidates,
    draft_rows,
    draft_rows_with_probs,
    logprobs_rows,
    reject_rows,
    sample_rows,
    walk_rows,
)
from paceline.sampling_params import SamplingParams
from paceline.speculation.accept import accept

__all__ = [
    "NO_TOKEN",
    "DraftProbs",
    "IdMap",
    "SamplerMode",
    "SamplingState",
    "TokenLogprobs",
    "argmax_rows",
    "draft",
    "draft_candidates",
    "draft_with_probs",
    "draw_seed",
    "make_state",
    "sample",
    "stopping_ids",
    "token_logprobs",
    "verify",
    "walk_rows",
]

SamplerMode = Literal["coupled", "rejection"]
Floats = NDArray[np.float32]
Ints = NDArray[np.int32]

NO_TOKEN = -1  # drawn where masks (a grammar's, allowed ids, bad words, min_tokens) leave nothing


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Raw log-probability of a committed token and of the most likely alternatives.

    rank: 1 = the argmax; equal logits rank by id. top: (token id, logprob) of the best, in order of rank.
    """

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class DraftProbs:
    """The distributions that drafts were drawn from, one row per draft token of a pass.

    probs: float32 [drafts, m]. ids: None if column = token id; int32 [1, m] if all rows list the same ids; int32
    [drafts, m] if each row has its own (ids within a row differ).
    """

    probs: Floats
    ids: Ints | None = None


def draw_seed() -> int:
    """A random seed for an unseeded request: 53 bits, so that it survives JSON readers whose numbers are doubles."""
    return secrets.randbits(53)


def make_state(
    params: SamplingParams,
    prompt_token_ids: Sequence[int],
    *,
    vocab_size: int,
    seed: int,
    choice: int = 0,
    eos_token_ids: Iterable[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
) -> SamplingState:
    """The sampler's memory of one choice of one request. bad_words: those of params as token ids.

    It counts tokens: call `state.commit(tokens)` with the tokens of every step, after they were cut by stops. Drafts
    need no roll-back; they are counted during native calls only. Properties: num_tokens (prompt + output; the absolute
    position of the next draw), num_output, seed, choice.

    Raises ValueError if a token id lies outside the vocabulary.
    """
    return SamplingState(
        vocab_size,
        prompt_token_ids if isinstance(prompt_token_ids, list) else [int(t) for t in prompt_token_ids],
        temperature=params.temperature,
        top_k=max(params.top_k, 0),
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=sorted((params.logit_bias or {}).items()),
        banned=sorted(stopping_ids(params, eos_token_ids)) if params.min_tokens > 0 else (),
        min_tokens=params.min_tokens,
        allowed=params.allowed_token_ids or (),  # type: ignore[arg-type]
        bad_words=bad_words,
        seed=seed,
        choice=choice,
    )


def stopping_ids(params: SamplingParams, eos_token_ids: Iterable[int]) -> set[int]:
    """Ids that end the output."""
    return {*(params.stop_token_ids or ()), *(() if params.ignore_eos else eos_token_ids)}


def sample(
    logits: Floats,
    states: Sequence[SamplingState],
    drafts: Sequence[Sequence[int]] = (),
    allowed: Ints | None = None,
    pool: ThreadPool | None = None,
) -> list[int]:
    """The target's draw for every row of a pass.

    logits: float32 [rows, vocabulary], raw. drafts: per state its drafts; () = none for anybody. allowed: int32 [rows,
    ceil(vocabulary / 32)], bit i of a row's bitmask permits id i. pool: threads that share the rows out. NO_TOKEN in
    rows of which the masks leave nothing.
    """
    return sample_rows(logits, states, drafts, allowed, pool)


def verify(
    logits: Floats,
    states: Sequence[SamplingState],
    drafts: Sequence[Sequence[int]] = (),
    allowed: Ints | None = None,
    *,
    mode: SamplerMode = "coupled",
    draft_probs: DraftProbs | None = None,
    pool: ThreadPool | None = None,
) -> list[list[int]]:
    """What a verify pass commits: per state the accepted drafts and one token more, or NO_TOKEN.

    Arguments as in `sample`. draft_probs matters in mode "rejection" alone; without it a draft counts as certain
    (q = 1), which is right for prompt lookup.
    """
    if mode == "rejection":
        probs, ids = (None, None) if draft_probs is None else (draft_probs.probs, draft_probs.ids)
        decisions = reject_rows(logits, states, drafts, probs, ids, allowed)
        if not drafts:
            return [[token] for _, token in decisions]
        return [[*block[:kept], token] for block, (kept, token) in zip(drafts, decisions, strict=True)]
    tokens = sample_rows(logits, states, drafts, allowed, pool)
    if not drafts:
        return [[token] for token in tokens]
    committed = []
    row = 0
    for block in drafts:
        drawn = tokens[row : row + len(block) + 1]
        committed.append(drawn[: accept(block, drawn) + 1])
        row += len(block) + 1
    return committed


def draft(
    logits: Floats,
    states: Sequence[SamplingState],
    counts: Sequence[int],
    id_map: IdMap | None = None,
    allowed: Ints | None = None,
    pool: ThreadPool | None = None,
) -> list[list[int]]:
    """A block drafter's tokens (target ids), drawn with the noise that the target will use.

    counts: rows per state; row j predicts position state.num_tokens + j, and its penalties count the drafts before it.
    id_map: the target id of each column, for a head over a part of the vocabulary. pool: as in `sample`.
    """
    return _split(draft_rows(logits, states, counts, id_map, allowed, pool), counts)


def draft_with_probs(
    logits: Floats,
    states: Sequence[SamplingState],
    counts: Sequence[int],
    id_map: IdMap | None = None,
    allowed: Ints | None = None,
) -> tuple[list[list[int]], Floats]:
    """As `draft` for mode "rejection": independent noise, and the distributions float32 [rows, columns] drawn from."""
    tokens, probs = draft_rows_with_probs(logits, states, counts, id_map, allowed)
    return _split(tokens, counts), probs


def _split(tokens: list[int], counts: Sequence[int]) -> list[list[int]]:
    if len(counts) == 1:
        return [tokens]
    out, row = [], 0
    for count in counts:
        out.append(tokens[row : row + count])
        row += count
    return out


def token_logprobs(logits: Floats, rows: Sequence[int], token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """Raw log-softmax of token_ids[i] in row rows[i], with the num_top best of that row.

    The value is computed in one fixed order from its own row: the same bits in any batch. num_top: -1 = all.
    """
    num_top = logits.shape[1] if num_top < 0 else min(num_top, logits.shape[1])
    chosen, ranks, top_ids, top_values = logprobs_rows(logits, rows, token_ids, num_top)
    return [
        TokenLogprobs(token, logprob, rank, list(zip(ids, values, strict=True)))
        for token, logprob, rank, ids, values in zip(
            token_ids, chosen.tolist(), ranks.tolist(), top_ids.tolist(), top_values.tolist(), strict=True
        )
    ]
