"""What the step loop asks of a source of drafts, for all sequences of a pass at once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from paceline.sampling import DraftProbs, SamplingState
from paceline.speculation.tree import DraftTree


class SequenceView(Protocol):
    """The part of a sequence that a drafter may read."""

    @property
    def request_id(self) -> Hashable:
        """Names the sequence until `finish`."""

    @property
    def token_ids(self) -> Sequence[int]:
        """Prompt and committed output; the last entry is the anchor, whose row the next pass computes."""

    @property
    def state(self) -> SamplingState:
        """The sampler's state: its noise is the noise that the target will use."""

    @property
    def blocks(self) -> np.ndarray | None:
        """Cache blocks of the sequence, int32, shared by the target's cache and a drafter's."""


@dataclass(slots=True)
class Proposal:
    """Drafts per sequence.

    probs: the distributions they were drawn from, rows in the same order, where the sampler asks for them (mode
    "rejection"); None: certain guesses. confidence[i][j]: chance that draft j of sequence i is kept if those before it
    are, where the drafter estimates it; the step loop may verify a prefix alone. trees[i]: several continuations of
    sequence i, drafts[i] among them; the step loop may verify one, or its likeliest part, instead of drafts[i].
    """

    drafts: list[list[int]]
    probs: DraftProbs | None = None
    confidence: list[list[float]] | None = None
    trees: list[DraftTree | None] | None = None


def trim_to_masks(states: Sequence[SamplingState], proposal: Proposal) -> None:
    """Cut drafts that the target cannot draw, and those behind them: allowed_token_ids, bad_words and min_tokens rule
    them out. Not where they were drawn from known distributions, which respect these and would have to be conditioned
    on what is left."""
    if proposal.probs is None:
        for i, state in enumerate(states):
            if state.masks and proposal.drafts[i]:
                proposal.drafts[i] = proposal.drafts[i][: state.permitted(proposal.drafts[i])]


class Drafter(Protocol):
    """Guesses the tokens that follow. Guesses change the speed, never the text."""

    name: str
    taps: tuple[int, ...]  # target layers whose outputs `observe` wants
    max_drafts: int
    window: int  # once bound: rows that a sequence must see although their blocks are in the prefix cache; 0: none

    def cache_bytes(self, blocks: int, max_num_seqs: int) -> int:
        """Memory of a drafter's own cache beside `blocks` blocks of the target's, for so many sequences at once."""

    def bind(self, blocks: int, max_num_seqs: int) -> None:
        """Called once: the number of cache blocks, and of sequences that may hold some at the same time."""

    def propose(self, sequences: Sequence[Any], limits: Sequence[int]) -> Proposal:
        """At most limits[i] guesses for sequence i; fewer or none are fine."""

    def observe(self, items: Sequence[tuple[Any, int, np.ndarray]]) -> None:
        """(sequence, position of the first row, taps fp32 [rows, len(taps) * H]) of rows that were committed.

        The taps are overwritten by the next pass. The first row may be one that the prefix cache left to compute: what
        belongs to the rows before it is in blocks that another sequence filled. When the last row of a block has been
        observed, all of the block must be in the drafter's cache: it may serve others from now on.
        """

    def finish(self, sequence: Any) -> None:
        """The sequence ended, or lost its blocks and will be observed from its beginning again: drop its state. Unknown
        sequences are ignored."""


@runtime_checkable
class Finder(Protocol):
    """A drafter some of whose drafts are at hand before a length is chosen, and cost nothing."""

    asks: bool  # whether it can make drafts where none are at hand

    def find(self, sequences: Sequence[Any], rooms: Sequence[int], able: Sequence[bool]) -> list[list[float]]:
        """Called in each step before `propose`, which then hands out what was found. Per sequence, for at most rooms[i]
        drafts that are at hand, the chance of each that it is kept together with those before it; [] for a sequence
        without any, or for which it is better to make some (able[i]: the drafter has seen it and may be asked)."""
