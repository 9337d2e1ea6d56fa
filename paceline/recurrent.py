"""Recurrent states of sequences: who has which, and snapshots at block boundaries that let the prefix cache serve them.

Keys and values of a known beginning can be shared block by block; a recurrent state exists for one length of a text
only. So the states behind some boundaries are kept aside, by the key of the block that ends there (`cache.block_keys`):
the end of a prompt, the last boundary of what was generated, and where a prompt left a known text. The number of
snapshots is bounded; the longest unused goes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import CapacityError

RUNNING_SHARE = 0.5  # of the cache budget, at most, for the states of running sequences and the journal of a pass
SNAPSHOT_SHARE = 0.25  # of the cache budget, at most, for snapshots
SNAPSHOTS_PER_SEQUENCE = 8  # more are of little use


@dataclass(frozen=True, slots=True)
class StatePlan:
    """How many states fit: of running sequences and of snapshots; `bytes` counts both and the journal."""

    running: int = 0
    snapshots: int = 0
    bytes: int = 0


def plan_states(
    budget: int, slot_bytes: int, journal_row_bytes: int, *, sequences: int, rows: int, snapshots: bool
) -> StatePlan:
    """Split a budget: at most `sequences` running ones, each with `rows` rows of a pass in the journal.

    Raises CapacityError where not even one sequence fits beside its keys and values.
    """
    each = slot_bytes + rows * journal_row_bytes
    running = min(sequences, int(budget * RUNNING_SHARE) // each)
    if running < 1:
        raise CapacityError(
            f"kv_cache_space: {budget / 2**20:.1f} MiB are too little for this model: the recurrent state of a "
            f"sequence takes {each / 2**20:.1f} MiB, which may be half of it; give more"
        )
    kept = min(running * SNAPSHOTS_PER_SEQUENCE, int(budget * SNAPSHOT_SHARE) // slot_bytes) if snapshots else 0
    return StatePlan(running, kept, running * each + kept * slot_bytes)


class RecurrentStates:
    """Slots of a native state cache: the first `running` belong to sequences, the others hold snapshots."""

    def __init__(self, native: Any, running: int) -> None:
        assert 1 <= running <= native.slots
        self.native = native
        self.num_snapshots = native.slots - running
        self._running = list(range(running))[::-1]
        self._blank = list(range(running, native.slots))[::-1]
        self._snapshots: dict[bytes, int] = {}  # block key -> slot, longest unused first

    @property
    def free(self) -> int:
        """Sequences that can still start."""
        return len(self._running)

    # ---- states of sequences

    def take(self) -> int:
        """A slot for a sequence, to be filled by `load`."""
        return self._running.pop()

    def give(self, slot: int) -> None:
        assert slot not in self._running, f"state {slot} was given back twice"
        self._running.append(slot)

    def load(self, slot: int, keys: Sequence[bytes]) -> int:
        """Fill a sequence's slot with the longest state known of a text with these block keys; returns its blocks."""
        for blocks in range(len(keys), 0, -1):
            source = self._snapshots.get(keys[blocks - 1])
            if source is not None:
                self._touch(keys[blocks - 1])
                self.native.copy(source, slot)
                return blocks
        self.native.reset(slot)
        return 0

    def rows(self, slot: int) -> int:
        """Rows that a sequence's state has seen."""
        return int(self.native.rows(slot))

    # ---- snapshots

    def known(self, keys: Sequence[bytes]) -> int:
        """Blocks of the longest state known of a text with these block keys; 0: none."""
        return next((n for n in range(len(keys), 0, -1) if keys[n - 1] in self._snapshots), 0)

    def __contains__(self, key: bytes) -> bool:
        return key in self._snapshots

    def open(self, replaced: bytes | None = None) -> int | None:
        """A slot for a snapshot that nobody finds until it is published: that of `replaced`, if it is still there, a
        blank one, or that of the longest unused. None: all are open."""
        if replaced is not None and replaced in self._snapshots:
            return self._snapshots.pop(replaced)
        if self._blank:
            return self._blank.pop()
        if not self._snapshots:
            return None
        return self._snapshots.pop(next(iter(self._snapshots)))

    def publish(self, key: bytes, slot: int) -> None:
        """An open slot holds the state behind the block with this key."""
        if key in self._snapshots:
            self._touch(key)
            self._blank.append(slot)
        else:
            self._snapshots[key] = slot

    def cancel(self, slot: int) -> None:
        """An open slot holds nothing after all."""
        self._blank.append(slot)

    def forget(self, key: bytes) -> None:
        """The block with this key is gone, and what led to it is of no use."""
        slot = self._snapshots.pop(key, None)
        if slot is not None:
            self._blank.append(slot)

    def _touch(self, key: bytes) -> None:
        self._snapshots[key] = self._snapshots.pop(key)

    # ---- integrity

    def check(self, held: Sequence[int]) -> None:
        """Every slot is held by one sequence, or free, or a snapshot, or blank. Raises AssertionError."""
        slots = [*held, *self._running, *self._blank, *self._snapshots.values()]
        assert sorted(slots) == list(range(self.native.slots)), "states lost or held twice"
