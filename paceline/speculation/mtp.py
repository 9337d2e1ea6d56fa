"""The multi-token-prediction layer of a model as its drafter: it drafts token by token, from the model's last rows."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline._native import KEYS_PER_BLOCK, draft_step
from paceline.cache import stack_tables
from paceline.models.mtp import FIRST_KEY, Predictor
from paceline.sampling import DraftProbs, SamplerMode
from paceline.speculation.drafting import Proposal, SequenceView


@dataclass(slots=True)
class _Rows:
    """What is known of a sequence: keys and values of positions below `written` are in the cache; `hidden` are the
    target's rows from position written - 1 to known - 1. anchor: the position that the last draft wrote on its way."""

    written: int
    known: int
    hidden: list[np.ndarray] = field(default_factory=list)
    anchor: int = -1

    def take(self, count: int) -> np.ndarray:
        """The first `count` rows, which the next `count` positions are written from."""
        rows = self.hidden[0] if len(self.hidden) == 1 else np.concatenate(self.hidden)
        self.hidden = [rows[count:]] if count < len(rows) else []
        self.written += count
        return rows[:count]


class MTPProposer:
    """Keys and values are written once for each committed token, in blocks of the target's numbers; those of drafts
    stand behind the committed end, where the next ones overwrite them.

    A position needs the target's row before it. At the beginning of a block that row may be in a block which another
    sequence computed, so the last row of each block is kept.
    """

    name = "mtp"
    window = 0

    def __init__(self, predictor: Predictor, max_drafts: int, sampler: SamplerMode = "coupled") -> None:
        self.predictor = predictor
        self.max_drafts = max_drafts
        self.sampler = sampler
        self.taps = (predictor.target.config.num_layers - 1,)
        self.context_rows = 0  # written by the last `propose`
        self._rows: dict[Hashable, _Rows] = {}

    def cache_bytes(self, blocks: int, max_num_seqs: int) -> int:
        return (self.predictor.new_cache(1).bytes_per_block + 4 * self.predictor.config.hidden_size) * blocks

    def bind(self, blocks: int, max_num_seqs: int) -> None:
        self._cache = self.predictor.new_cache(blocks)
        self._last_rows = np.zeros((blocks, self.predictor.config.hidden_size), np.float32)  # of each block

    def propose(self, sequences: Sequence[SequenceView], limits: Sequence[int]) -> Proposal:
        """Up to limits[i] drafts, one pass each; the first one reads the anchor. A text of a single token gets none:
        there is no row before it."""
        chosen = [i for i, limit in enumerate(limits) if limit > 0 and len(sequences[i].token_ids) > FIRST_KEY]
        rows = [self._known(sequences[i], len(sequences[i].token_ids) - 1) for i in chosen]
        self.context_rows = self._write([(sequences[i], r, r.known) for i, r in zip(chosen, rows, strict=True)])
        drafts: list[list[int]] = [[] for _ in sequences]
        probs: dict[int, list[np.ndarray]] = {i: [] for i in chosen}
        tokens = [sequences[i].token_ids[-1] for i in chosen]
        before = np.concatenate([r.hidden[-1][-1:] for r in rows]) if rows else np.empty((0, 0), np.float32)
        for r in rows:
            r.anchor = r.known
        step, active = 0, chosen
        while active:
            logits, after = self.predictor.draft_logits(
                self._cache,
                np.array(tokens, np.int32),
                before,
                np.array([len(sequences[i].token_ids) - 1 + step for i in active], np.int32),
                stack_tables([_blocks(sequences[i]) for i in active]),
                first=step == 0,
            )
            filled = np.empty_like(logits) if self.sampler == "rejection" else None
            states = [sequences[i].state for i in active]
            drawn = draft_step(logits, states, [drafts[i] for i in active], None, filled)
            for row, (i, token) in enumerate(zip(active, drawn, strict=True)):
                drafts[i].append(token)
                if filled is not None:
                    probs[i].append(filled[row])
            step += 1
            kept = [row for row, i in enumerate(active) if step < limits[i]]
            active = [active[row] for row in kept]
            tokens, before = [drawn[row] for row in kept], after[kept]
        filled_rows = [row for i in chosen for row in probs[i]]
        return Proposal(drafts, DraftProbs(np.array(filled_rows), None) if filled_rows else None)

    def observe(self, items: Sequence[tuple[SequenceView, int, np.ndarray]]) -> None:
        """Keep the rows; positions are written once they complete a block, or when a draft is asked for."""
        complete = []
        for sequence, first, taps in items:
            rows, blocks = self._known(sequence, first), _blocks(sequence)
            if rows.anchor == rows.written == first:
                rows.take(1)
            ends = np.flatnonzero((first + 1 + np.arange(len(taps))) % KEYS_PER_BLOCK == 0)
            self._last_rows[blocks[(first + ends) // KEYS_PER_BLOCK]] = taps[ends]
            rows.hidden.append(taps.copy())  # the buffer belongs to the engine's next pass
            rows.known += len(taps)
            if rows.known // KEYS_PER_BLOCK > rows.written // KEYS_PER_BLOCK:
                complete.append((sequence, rows, rows.known))
        self._write(complete)

    def _known(self, sequence: SequenceView, position: int) -> _Rows:
        """The sequence's rows, all before `position`. Those never observed are in blocks that others filled."""
        rows = self._rows.get(sequence.request_id)
        if rows is None:
            rows = self._rows[sequence.request_id] = _Rows(max(position, FIRST_KEY), position)
            if position:
                assert position % KEYS_PER_BLOCK == 0, "whole blocks are shared"
                block = _blocks(sequence)[position // KEYS_PER_BLOCK - 1]
                rows.hidden.append(self._last_rows[block : block + 1].copy())
        assert rows.known == position, "rows are observed in order"
        return rows

    def _write(self, wanted: Sequence[tuple[SequenceView, _Rows, int]]) -> int:
        """Keys and values of positions below an end, in passes of at most max_rows. Returns how many positions."""
        batch: list[tuple[SequenceView, int, np.ndarray]] = []
        count = total = 0
        for sequence, rows, end in wanted:
            while rows.written < end:
                first = rows.written
                taken = rows.take(min(end - first, self.predictor.max_rows - count))
                batch.append((sequence, first, taken))
                count += len(taken)
                total += len(taken)
                if count == self.predictor.max_rows:
                    self._pass(batch)
                    batch, count = [], 0
        if batch:
            self._pass(batch)
        return total

    def _pass(self, batch: Sequence[tuple[SequenceView, int, np.ndarray]]) -> None:
        tokens: list[int] = []
        positions: list[int] = []
        starts = [0]
        for sequence, first, before in batch:
            tokens += sequence.token_ids[first : first + len(before)]
            positions += range(first, first + len(before))
            starts.append(len(positions))
        self.predictor.add_context(
            self._cache,
            np.array(tokens, np.int32),
            np.concatenate([before for _, _, before in batch]),
            np.array(positions, np.int32),
            np.array(starts, np.int32),
            stack_tables([_blocks(sequence) for sequence, _, _ in batch]),
        )

    def finish(self, sequence: SequenceView) -> None:
        """The blocks belong to the engine."""
        self._rows.pop(sequence.request_id, None)


def _blocks(sequence: SequenceView) -> np.ndarray:
    blocks = sequence.blocks
    assert blocks is not None
    return blocks
