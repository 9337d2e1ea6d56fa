"""Blocks of the paged key/value cache: who holds which, and proof that none is lost."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline._native import KEYS_PER_BLOCK
from paceline.errors import CapacityError

BLOCK_TOKENS: int = KEYS_PER_BLOCK


def blocks_for(tokens: int) -> int:
    """Blocks that hold this many tokens."""
    return -(-tokens // BLOCK_TOKENS)


def stack_tables(tables: Sequence[np.ndarray]) -> np.ndarray:
    """Tables of several sequences as int32 [sequences, most blocks].

    Past a sequence's own blocks stands -1, which no pass accepts.
    """
    if len(tables) == 1:
        return tables[0][None]
    out = np.full((len(tables), max(map(len, tables))), -1, np.int32)
    for i, table in enumerate(tables):
        out[i, : len(table)] = table
    return out


class BlockPool:
    """A fixed number of cache blocks; a sequence takes all it may need when it is admitted, so a step never fails."""

    def __init__(self, blocks: int) -> None:
        self.size = blocks
        self._free = list(range(blocks - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> np.ndarray:
        """Block ids int32 [count]. Raises CapacityError when fewer are free."""
        if count > len(self._free):
            raise CapacityError(f"kv_cache_space: {count} blocks asked for, {len(self._free)} of {self.size} free")
        taken = [self._free.pop() for _ in range(count)]
        return np.array(taken, np.int32)

    def give(self, blocks: np.ndarray) -> None:
        self._free.extend(int(b) for b in reversed(blocks))

    def check(self, held: list[np.ndarray]) -> None:
        """Every block is free or held by exactly one sequence; raises AssertionError otherwise."""
        ids = sorted(self._free + [int(b) for blocks in held for b in blocks])
        assert ids == list(range(self.size)), "cache blocks lost or shared"
