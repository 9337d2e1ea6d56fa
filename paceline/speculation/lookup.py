"""Prompt lookup as a drafter of the step loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.speculation.drafting import Proposal, SequenceView
from paceline.speculation.ngram import NgramProposer


class LookupDrafter:
    """The continuation of an earlier occurrence of the last few tokens (see `ngram`)."""

    name = "ngram"
    taps: tuple[int, ...] = ()
    window = 0

    def __init__(self, prompt_lookup_min: int, prompt_lookup_max: int, max_drafts: int) -> None:
        self.max_drafts = max_drafts
        self._proposer = NgramProposer(prompt_lookup_min, prompt_lookup_max)

    def cache_bytes(self, blocks: int, max_num_seqs: int) -> int:
        return 0

    def bind(self, blocks: int, max_num_seqs: int) -> None:
        """Nothing to prepare."""

    def propose(self, sequences: Sequence[SequenceView], limits: Sequence[int]) -> Proposal:
        return Proposal([self._proposer.propose(s, limit) for s, limit in zip(sequences, limits, strict=True)])

    def observe(self, items: Sequence[tuple[Any, int, np.ndarray]]) -> None:
        """The index follows token_ids by itself."""

    def finish(self, sequence: SequenceView) -> None:
        self._proposer.finish(sequence)
