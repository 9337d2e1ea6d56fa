"""Block drafters of the DFlash family in the step loop: one pass drafts a block for every sequence."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from paceline._native import KEYS_PER_BLOCK
from paceline.cache import stack_tables
from paceline.models.dflash import DFlashDrafter
from paceline.sampling import (
    DraftProbs,
    IdMap,
    SamplerMode,
    SamplingState,
    draft,
    draft_candidates,
    draft_with_probs,
)
from paceline.speculation.config import AUTO_TREE_BUDGET
from paceline.speculation.drafting import Proposal, SequenceView
from paceline.speculation.tree import DraftTree, best_first


@dataclass(slots=True)
class _Pending:
    """Taps of committed rows whose keys and values are not written yet: from position `first` on."""

    first: int
    taps: list[np.ndarray] = field(default_factory=list)
    rows: int = 0


@dataclass(slots=True)
class Blocks:
    """What a pass yields for the sequences that draft: logits [slots, columns] of counts[i] slots of sequence i, in
    the order of `_arrange`; features: fp32 [slots, width] where the drafter has any."""

    states: list[SamplingState]
    anchors: list[int]
    counts: list[int]
    logits: np.ndarray
    features: np.ndarray


@dataclass(slots=True)
class Drawn:
    """Drafts of each sequence of `Blocks`, and what else a family knows of them."""

    drafts: list[list[int]]
    probs: DraftProbs | None = None
    confidence: list[list[float]] | None = None
    trees: list[DraftTree] | None = None


class DFlashProposer:
    """Context keys and values are written once per committed row; a draft reads them and leaves no trace.

    The taps of rows that are committed without a draft wait (less than a block of them for a sequence), so that plain
    steps do not pay for a drafter that is not asked. Keys and values stand beside the target's, in blocks of the same
    numbers; only a drafter whose layers all slide may keep a ring per sequence instead, as long as its window.

    tree_budget: drafts come as trees of at most so many nodes, too; "auto" leaves their size to the step loop.
    """

    tree_budget: int | Literal["auto"] | None = None

    def __init__(self, drafter: DFlashDrafter, max_drafts: int, sampler: SamplerMode = "coupled") -> None:
        self.name: str = drafter.config.family
        self.drafter = drafter
        self.max_drafts = max_drafts
        self.trained_drafts = drafter.config.max_drafts
        self.context_rows = 0  # written by the last `propose`
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
        """A block [anchor, mask, ...] per sequence with limits[i] = k > 0; shorter blocks are fewer masks."""
        chosen = [(s, limit) for s, limit in zip(sequences, limits, strict=True) if limit > 0]
        self.context_rows = self._write_context([s for s, _ in chosen])
        drawn = self._draw(self._run([s for s, _ in chosen], [limit for _, limit in chosen]))
        drafts = iter(drawn.drafts)
        confidence = None
        if drawn.confidence is not None:
            values = iter(drawn.confidence)
            confidence = [next(values) if limit > 0 else [] for limit in limits]
        trees = None
        if drawn.trees is not None:
            grown = iter(drawn.trees)
            trees = [next(grown) if limit > 0 else None for limit in limits]
        return Proposal([next(drafts) if limit > 0 else [] for limit in limits], drawn.probs, confidence, trees)

    def _run(self, sequences: Sequence[SequenceView], counts: list[int]) -> Blocks:
        """One pass of the drafter. Slot 0 is the anchor's; it counts among the drafts of an anchor-first drafter."""
        c = self.drafter.config
        skip = 0 if c.anchor_first else 1
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[range] = []
        starts = [0]
        for sequence, count in zip(sequences, counts, strict=True):
            anchor, width = len(sequence.token_ids) - 1, count + skip
            tokens += [sequence.token_ids[-1], *[c.mask_token_id] * (width - 1)]
            positions += range(anchor, anchor + width)
            slots.append(range(starts[-1] + skip, starts[-1] + width))
            starts.append(starts[-1] + width)
        select = self._arrange(slots)
        arguments = (self._cache, tokens, positions, starts, self._tables(sequences), select)
        anchors = [s.token_ids[-1] for s in sequences]
        states = [s.state for s in sequences]
        if not self.drafter.features_width:
            return Blocks(states, anchors, counts, self.drafter.draft_logits(*arguments), np.empty((0, 0), np.float32))
        features = np.empty((len(tokens), self.drafter.features_width), np.float32)
        logits = self.drafter.draft_logits(*arguments, features=features)
        return Blocks(states, anchors, counts, logits, features[select])

    def _arrange(self, slots: list[range]) -> list[int]:
        """Rows of the pass whose logits are wanted, given those of each sequence: one sequence after the other."""
        return [row for rows in slots for row in rows]

    def _draw(self, blocks: Blocks) -> Drawn:
        """Tokens of all slots, each drawn from its own row."""
        if self.sampler == "rejection":
            drafts, values = draft_with_probs(blocks.logits, blocks.states, blocks.counts, self._ids)
            rows = self.drafter.head_rows
            return Drawn(drafts, DraftProbs(values, None if rows is None else rows[None]))
        if self.tree_budget is not None:
            return self._draw_trees(blocks, AUTO_TREE_BUDGET if self.tree_budget == "auto" else self.tree_budget)
        return Drawn(draft(blocks.logits, blocks.states, blocks.counts, self._ids, pool=self.drafter.target.pool))

    def _draw_trees(self, blocks: Blocks, budget: int) -> Drawn:
        """The best tokens of every slot, and trees of them."""
        top = min(budget, blocks.logits.shape[1])
        ids, chances = draft_candidates(blocks.logits, blocks.states, blocks.counts, top, self._ids)
        ends = np.cumsum(blocks.counts).tolist()
        parts = [slice(end - count, end) for end, count in zip(ends, blocks.counts, strict=True)]
        return Drawn(
            [_before_none(ids[part, 0].tolist()) for part in parts],
            trees=[best_first(ids[part], chances[part], budget) for part in parts],
        )

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

    def _write_context(self, sequences: Sequence[SequenceView]) -> int:
        """Write the drafter's keys and values of rows that wait, in passes of at most max_rows. Returns how many."""
        batch: list[tuple[SequenceView, int, np.ndarray]] = []
        rows, most, total = 0, self.drafter.max_rows, 0
        for sequence in sequences:
            pending = self._pending.get(sequence.request_id)
            if pending is None or not pending.rows:
                continue
            total += pending.rows
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
        return total

    def _add_context(self, batch: Sequence[tuple[SequenceView, int, np.ndarray]]) -> None:
        positions: list[int] = []
        starts = [0]
        for _, first, part in batch:
            positions += range(first, first + len(part))
            starts.append(len(positions))
        taps = batch[0][2] if len(batch) == 1 else np.concatenate([part for _, _, part in batch])
        tables = self._tables([s for s, _, _ in batch])
        self.drafter.add_context(self._cache, taps, positions, starts, tables)

    def finish(self, sequence: SequenceView) -> None:
        """The blocks belong to the engine; a ring is free again."""
        self._pending.pop(sequence.request_id, None)
        ring = self._rings.pop(sequence.request_id, None)
        if ring is not None:
            self._free_rings.append(int(ring[0]) // self._ring)


def _before_none(ids: list[int]) -> list[int]:
    """Best candidates of consecutive slots, up to the first slot that has none (-1): a head over listed rows may have
    nothing that the masks of a request permit."""
    return ids[: ids.index(-1)] if -1 in ids else ids
