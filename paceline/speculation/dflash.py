"""The DFlash drafter in the step loop: one pass drafts a block for every sequence."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline._native import KEYS_PER_BLOCK
from paceline.cache import stack_tables
from paceline.models.dflash import DFlashDrafter
from paceline.sampling import DraftProbs, IdMap, SamplerMode, draft, draft_with_probs
from paceline.speculation.drafting import Proposal, SequenceView


@dataclass(slots=True)
class _Pending:
    """Taps of committed rows whose keys and values are not written yet: from position `first` on."""

    first: int
    taps: list[np.ndarray] = field(default_factory=list)
    rows: int = 0


class DFlashProposer:
    """Context keys and values are written once per committed row; a draft reads them and leaves no trace.

    The taps of rows that are committed without a draft wait (less than a block of them for a sequence), so that plain
    steps do not pay for a drafter that is not asked. Keys and values stand beside the target's, in blocks of the same
    numbers; only a drafter whose layers all slide may keep a ring per sequence instead, as long as its window.
    """

    name = "dflash"

    def __init__(self, drafter: DFlashDrafter, max_drafts: int, sampler: SamplerMode = "coupled") -> None:
        self.drafter = drafter
        self.max_drafts = max_drafts
        self.trained_drafts = drafter.config.max_drafts
        self.taps = drafter.config.target_layer_ids
        self.sampler = sampler
        self.window = 0
        self._ids = None if drafter.head_rows is None else IdMap(drafter.head_rows, drafter.target.vocab_size)
        self._pending: dict[Hashable, _Pending] = {}
        self._ring = 0
        self._rings: dict[Hashable, np.ndarray] = {}  # of each sequence, if the drafter keeps rings
        self._free_rings: list[int] = []

    def _ring_blocks(self, blocks: int, max_num_seqs: int) -> int:
        """Blocks of a sequence's ring; 0: whole tables take no more memory."""
        if not self.drafter.window:
            return 0
        # window - 1 context rows, a block of drafts, and a pass of committed rows behind them
        reach = self.drafter.window + self.drafter.config.block_size + self.drafter.max_rows
        ring = -(-reach // KEYS_PER_BLOCK) + 1
        return ring if ring * max_num_seqs < blocks else 0

    def cache_bytes(self, blocks: int, max_num_seqs: int) -> int:
        ring = self._ring_blocks(blocks, max_num_seqs)
        return self.drafter.new_cache(1).bytes_per_block * (ring * max_num_seqs if ring else blocks)

    def bind(self, blocks: int, max_num_seqs: int) -> None:
        self._ring = self._ring_blocks(blocks, max_num_seqs)
        self.window = self.drafter.window if self._ring else 0
        self._free_rings = list(range(max_num_seqs))[::-1] if self._ring else []
        self._cache = self.drafter.new_cache(self._ring * max_num_seqs if self._ring else blocks)

    def _table(self, sequence: SequenceView) -> np.ndarray:
        """The sequence's blocks; with rings, the blocks of its own in turn."""
        blocks = sequence.blocks
        assert blocks is not None
        if not self._ring:
            return blocks
        ring = self._rings.get(sequence.request_id)
        if ring is None:
            first = self._free_rings.pop() * self._ring
            ring = self._rings[sequence.request_id] = np.arange(first, first + self._ring, dtype=np.int32)
        return ring[np.arange(len(blocks)) % self._ring]

    def _tables(self, sequences: Sequence[SequenceView]) -> np.ndarray:
        return stack_tables([self._table(s) for s in sequences])

    def propose(self, sequences: Sequence[SequenceView], limits: Sequence[int]) -> Proposal:
        """A block [anchor, mask * k] per sequence with limits[i] = k > 0; shorter blocks are fewer masks."""
        chosen = [(s, limit) for s, limit in zip(sequences, limits, strict=True) if limit > 0]
        self._write_context([s for s, _ in chosen])
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
        """Keep the taps of committed rows; those that complete a block are written with it."""
        complete = []
        for sequence, first, taps in items:
            pending = self._pending.setdefault(sequence.request_id, _Pending(first))
            assert first == pending.first + pending.rows, "rows are observed in order"
            pending.taps.append(taps)
            pending.rows += len(taps)
            if (first + len(taps)) // KEYS_PER_BLOCK > pending.first // KEYS_PER_BLOCK:
                complete.append(sequence)
        self._write_context(complete)
        for sequence, _, taps in items:
            kept = self._pending[sequence.request_id].taps
            if kept:
                kept[-1] = taps.copy()  # the buffer belongs to the engine's next pass

    def _write_context(self, sequences: Sequence[SequenceView]) -> None:
        """Write the drafter's keys and values of rows that wait, in passes of at most max_rows."""
        batch: list[tuple[SequenceView, int, np.ndarray]] = []
        rows, most = 0, self.drafter.max_rows
        for sequence in sequences:
            pending = self._pending.get(sequence.request_id)
            if pending is None or not pending.rows:
                continue
            taps = pending.taps[0] if len(pending.taps) == 1 else np.concatenate(pending.taps)
            while len(taps):
                part = taps[: most - rows]
                batch.append((sequence, pending.first, part))
                taps = taps[len(part) :]
                pending.first += len(part)
                rows += len(part)
                if rows == most:
                    self._add_context(batch)
                    batch, rows = [], 0
            pending.rows = 0
            pending.taps.clear()
        if batch:
            self._add_context(batch)

    def _add_context(self, batch: Sequence[tuple[SequenceView, int, np.ndarray]]) -> None:
        positions: list[int] = []
        starts = [0]
        for _, first, part in batch:
            positions += range(first, first + len(part))
            starts.append(len(positions))
        taps = batch[0][2] if len(batch) == 1 else np.concatenate([part for _, _, part in batch])
        tables = self._tables([s for s, _, _ in batch])
        self.drafter.add_context(self._cache, taps, np.array(positions, np.int32), np.array(starts, np.int32), tables)

    def finish(self, sequence: SequenceView) -> None:
        """The blocks belong to the engine; a ring is free again."""
        self._pending.pop(sequence.request_id, None)
        ring = self._rings.pop(sequence.request_id, None)
        if ring is not None:
            self._free_rings.append(int(ring[0]) // self._ring)
