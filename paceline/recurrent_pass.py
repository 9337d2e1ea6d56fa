"""The recurrent part of one pass: which states move on, which wait for the verdict on their drafts, what is kept."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.cache import BLOCK_TOKENS, block_keys
from paceline.models.target import state_arguments
from paceline.recurrent import RecurrentStates
from paceline.request import Sequence


@dataclass(slots=True)
class _Kept:
    """A snapshot that is being written."""

    sequence: Sequence
    key: bytes
    slot: int
    rolling: bool  # the next one of the sequence replaces it


class RecurrentPass:
    """States of sequences without drafts move on with the pass. Where there are drafts, the state stays and the pass
    leaves a journal, from which `commit` repeats what was accepted: the same rows in the same order, so that the state
    is, bit for bit, that of decoding them one by one.

    A context manager: snapshots are offered to others when it ends well, and dropped when it does not.
    """

    def __init__(self, states: RecurrentStates, prefix_caching: bool) -> None:
        self._states = states
        self._keep = prefix_caching and states.num_snapshots > 0
        self._journalled: list[tuple[Sequence, int, int]] = []  # with its first row in the journal, and rows before
        self._kept: list[_Kept] = []

    def __enter__(self) -> RecurrentPass:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for kept in self._kept:
            if kind is not None:
                self._states.cancel(kept.slot)
                continue
            self._states.publish(kept.key, kept.slot)
            if kept.rolling:
                kept.sequence.last_snapshot = kept.key

    def arguments(self, work: Seq[tuple[Sequence, int, bool]]) -> dict[str, Any]:
        """For `Plan.forward`, given each sequence's rows and whether there are drafts among them."""
        slots, journal, snapshots, used = [], [], [], 0
        for index, (sequence, rows, drafted) in enumerate(work):
            assert sequence.state_slot is not None
            slots.append(sequence.state_slot)
            first = sequence.num_computed
            if drafted:
                journal.append(used)
                self._journalled.append((sequence, used, first))
                used += rows
            else:
                journal.append(-1)
                kept = self._snapshots(sequence, first, first + rows, reading=sequence.is_prefill)
                snapshots += [(index, at - first, slot) for at, slot in kept]
        return state_arguments(self._states.native, slots, journal, snapshots)

    def commit(self, isa: str) -> None:
        """Repeat what was accepted: `num_computed` of the sequences counts it."""
        entries: list[tuple[int, int, int]] = []
        snapshots: list[tuple[int, int, int]] = []
        for sequence, journal, before in self._journalled:
            rows = sequence.num_computed - before
            if rows < 1:
                continue
            last = self._snapshots(sequence, before, sequence.num_computed, reading=False)
            snapshots += [(len(entries), at - before, slot) for at, slot in last]
            assert sequence.state_slot is not None
            entries.append((sequence.state_slot, journal, rows))
        if entries:
            kept = np.array(snapshots, np.int32) if snapshots else None
            self._states.native.commit(isa, np.array(entries, np.int32), kept)

    def _snapshots(self, sequence: Sequence, first: int, end: int, *, reading: bool) -> list[tuple[int, int]]:
        """(rows of the text, slot) of the states to keep that rows [first, end) lead to, ascending: those planned while
        known tokens are read, then the last boundary, in place of the one before it."""
        if not self._keep:
            return []
        wanted = sequence.snapshot_rows if reading else [end // BLOCK_TOKENS * BLOCK_TOKENS]
        opened = []
        for rows in wanted:
            if not first < rows <= end:
                continue
            blocks = rows // BLOCK_TOKENS
            key = block_keys(sequence.block_keys, sequence.token_ids, blocks, sequence.cache_salt)[blocks - 1]
            if key in self._states or any(kept.key == key for kept in self._kept):
                continue
            slot = self._states.open(None if reading else sequence.last_snapshot)
            if slot is not None:
                self._kept.append(_Kept(sequence, key, slot, not reading))
                opened.append((rows, slot))
        return opened
