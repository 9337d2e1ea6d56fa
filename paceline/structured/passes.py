"""Grammars in the step loop: what becomes of a pass's drafts, and the bitmask of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.sampling import DraftProbs
from paceline.speculation.drafting import Proposal
from paceline.structured.constraint import GrammarConstraint
from paceline.structured.vocabulary import WORD


def trim_drafts(grammars: Sequence[GrammarConstraint | None], proposal: Proposal, limits: Sequence[int]) -> Proposal:
    """Drafts that the grammars can follow, with forced tokens behind them up to limits[i] drafts in all.

    With the distributions that drafts were drawn from (mode "rejection") nothing is added, and each distribution is
    conditioned on the tokens that its row allows: given that a draft was not trimmed, it was drawn from that one. So
    the output's distribution stays the target's.
    """
    if all(grammar is None for grammar in grammars):
        return proposal
    drafts: list[list[int]] = []
    rows: list[int] = []
    allowed: list[tuple[int, np.ndarray]] = []  # (row of the new probs, mask)
    first = 0
    for grammar, block, limit in zip(grammars, proposal.drafts, limits, strict=True):
        kept = block
        if grammar is not None:
            kept = grammar.prepare(block, 0 if proposal.probs is not None else limit)
            if proposal.probs is not None:
                allowed += [(len(rows) + j, grammar.draft_mask(j)) for j in range(len(kept))]
        rows += range(first, first + min(len(kept), len(block)))
        first += len(block)
        drafts.append(kept)
    probs = None if proposal.probs is None else _condition(proposal.probs, rows, allowed)
    return Proposal(drafts, probs)


def _condition(probs: DraftProbs, rows: list[int], allowed: list[tuple[int, np.ndarray]]) -> DraftProbs:
    values = probs.probs[rows]
    ids = probs.ids if probs.ids is None or len(probs.ids) == 1 else probs.ids[rows]
    for row, mask in allowed:
        columns = np.arange(values.shape[1]) if ids is None else ids[row if len(ids) > 1 else 0]
        permitted = mask.view(np.uint32)[columns // WORD] >> (columns % WORD).astype(np.uint32) & 1
        weights = values[row] * permitted.astype(np.float32)
        total = float(weights.sum(dtype=np.float64))
        values[row] = weights / np.float32(total) if total > 0 else weights
    return DraftProbs(values, ids)


def bitmask(blocks: Sequence[tuple[Any, Sequence[int]]]) -> np.ndarray | None:
    """int32 [rows, words] for the rows of (grammar or None, drafts) blocks in order; None if nobody has a grammar."""
    words = next((grammar.vocabulary.words for grammar, _ in blocks if grammar is not None), None)
    if words is None:
        return None
    out = np.empty((sum(len(drafts) + 1 for _, drafts in blocks), words), np.int32)
    row = 0
    for grammar, drafts in blocks:
        end = row + len(drafts) + 1
        out[row:end] = -1 if grammar is None else grammar.masks(drafts)
        row = end
    return out
