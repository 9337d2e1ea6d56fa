"""The DFlash drafter in the step loop: one pass drafts a block for every sequence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline._native import KEYS_PER_BLOCK
from paceline.cache import stack_tables
from paceline.models.dflash import DFlashDrafter
from paceline.sampling import DraftProbs, IdMap, SamplerMode, draft, draft_with_probs
from paceline.speculation.drafting import Proposal, SequenceView


class DFlashProposer:
    """Context keys and values are written once, when the target commits rows; a draft reads them and leaves no trace.

    A drafter whose layers all slide keeps a ring of blocks as long as its window instead of the whole context.
    """

    name = "dflash"

    def __init__(self, drafter: DFlashDrafter, max_drafts: int, sampler: SamplerMode = "coupled") -> None:
        self.drafter = drafter
        self.max_drafts = max_drafts
        self.trained_drafts = drafter.config.max_drafts
        self.taps = drafter.config.target_layer_ids
        self.sampler = sampler
        self._ids = None if drafter.head_rows is None else IdMap(drafter.head_rows, drafter.target.vocab_size)

    def bind(self, blocks: int) -> None:
        self._cache = self.drafter.new_cache(blocks)

    def cache_bytes_per_block(self) -> int:
        return self.drafter.new_cache(1).bytes_per_block

    def _table(self, sequence: SequenceView) -> np.ndarray:
        """The sequence's blocks; with a window, the first few of them in turn."""
        blocks = sequence.blocks
        assert blocks is not None
        window = self.drafter.window
        if not window:
            return blocks
        # window - 1 context rows, a block of drafts, and a pass of committed rows behind them
        reach = window + self.drafter.config.block_size + self.drafter.max_rows
        ring = min(len(blocks), -(-reach // KEYS_PER_BLOCK) + 1)
        return blocks[np.arange(len(blocks)) % ring]

    def _tables(self, sequences: Sequence[SequenceView]) -> np.ndarray:
        return stack_tables([self._table(s) for s in sequences])

    def propose(self, sequences: Sequence[SequenceView], limits: Sequence[int]) -> Proposal:
        """A block [anchor, mask * k] per sequence with limits[i] = k > 0; shorter blocks are fewer masks."""
        chosen = [(s, limit) for s, limit in zip(sequences, limits, strict=True) if limit > 0]
        mask = self.drafter.config.mask_token_id
        tokens: list[int] = []
        positions: list[int] = []
        select: list[int] = []
        starts = [0]
        for sequence, limit in chosen:
            anchor = len(sequence.token_ids) - 1
            first = len(tokens)
            tokens += [sequence.token_ids[-1], *[mask] * limit]
            positions += range(anchor, anchor + limit + 1)
            select += range(first + 1, first + limit + 1)
            starts.append(len(tokens))
        logits = self.drafter.draft_logits(
            self._cache,
            np.array(tokens, np.int32),
            np.array(positions, np.int32),
            np.array(starts, np.int32),
            self._tables([s for s, _ in chosen]),
            np.array(select, np.int32),
        )
        states = [s.state for s, _ in chosen]
        counts = [limit for _, limit in chosen]
        probs = None
        if self.sampler == "rejection":
            drawn, values = draft_with_probs(logits, states, counts, self._ids)
            rows = self.drafter.head_rows
            probs = DraftProbs(values, None if rows is None else rows[None])
        else:
            drawn = draft(logits, states, counts, self._ids)
        blocks = iter(drawn)
        return Proposal([next(blocks) if limit > 0 else [] for limit in limits], probs)

    def observe(self, items: Sequence[tuple[SequenceView, int, np.ndarray]]) -> None:
        """Write the drafter's keys and values of committed rows."""
        rows = [len(taps) for _, _, taps in items]
        taps = items[0][2] if len(items) == 1 else np.concatenate([taps for _, _, taps in items])
        positions = np.concatenate([np.arange(first, first + len(t), dtype=np.int32) for _, first, t in items])
        starts = np.zeros(len(items) + 1, np.int32)
        np.cumsum(rows, out=starts[1:])
        self.drafter.add_context(self._cache, taps, positions, starts, self._tables([s for s, _, _ in items]))

    def finish(self, sequence: SequenceView) -> None:
        """Nothing is kept outside the blocks, which the engine frees."""
