"""A tree of drafts in a pass of the target: every branch is a sequence of its own that shares the committed blocks.

The kernels then need no mask for trees, and a row's attention is, to the bit, that of plain decoding: a branch's table
holds the committed keys and those of its ancestors at their own positions, in blocks of its own from the anchor's block
on. What stands there of other branches' rows and of committed ones is copied in the pass. Afterwards the accepted path
is copied into the sequence's blocks, and the others are free again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.cache import BLOCK_TOKENS, BlockPool
from paceline.speculation.tree import DraftTree, TreeRows, as_rows

Copy = tuple[int, int, int, int]  # from block, to block, first slot, slots


@dataclass(slots=True)
class Branches:
    """tables[i]: blocks of branch i, int32, up to its last row; those of branch 0 are the sequence's.

    anchor: position of the anchor. chances: of the nodes, as the drafter estimated them. scratch: blocks that the other
    branches have for this pass.
    """

    rows: TreeRows
    anchor: int
    chances: list[float]
    tables: list[np.ndarray]
    scratch: list[int]

    @property
    def positions(self) -> list[int]:
        return [self.anchor + depth for depth in self.rows.depths]

    @property
    def copies(self) -> Iterator[Copy]:
        """Committed rows of the anchor's block, for each branch but the first."""
        block, count = divmod(self.anchor, BLOCK_TOKENS)
        if count:
            for table in self.tables[1:]:
                yield int(self.tables[0][block]), int(table[block]), 0, count

    def mirrors(self, first_row: int, first_sequence: int) -> Iterator[tuple[int, int]]:
        """(row, sequence) of ancestors that belong to another branch, in numbers of the pass."""
        for i, branch in enumerate(self.rows.branches):
            for row in branch.ancestors:
                yield first_row + row, first_sequence + i

    def moves(self, path: Sequence[int]) -> Iterator[Copy]:
        """What brings the accepted path (rows, the anchor's first) into the sequence's own blocks."""
        home = next((depth for depth, row in enumerate(path) if row >= self.rows.branches[0].end), len(path))
        table = self.tables[self.rows.branch_of(path[-1])]
        at, end = self.anchor + home, self.anchor + len(path)
        while at < end:
            block, slot = divmod(at, BLOCK_TOKENS)
            count = min(BLOCK_TOKENS - slot, end - at)
            yield int(table[block]), int(self.tables[0][block]), slot, count
            at += count


def scratch_blocks(rows: TreeRows, anchor: int) -> list[int]:
    """Blocks that each branch but the first needs of its own."""
    first = anchor // BLOCK_TOKENS
    return [(anchor + branch.last_depth) // BLOCK_TOKENS - first + 1 for branch in rows.branches[1:]]


def fitting_rows(tree: DraftTree, nodes: int, anchor: int, free: int) -> TreeRows:
    """The likeliest nodes of a tree, at most `nodes`, whose branches need no more than `free` blocks."""
    while True:
        rows = as_rows(tree.first(nodes))
        if sum(scratch_blocks(rows, anchor)) <= free:
            return rows
        nodes -= 1


def lay_out(tree: DraftTree, rows: TreeRows, anchor: int, blocks: np.ndarray, scratch: list[int]) -> Branches:
    """blocks: the sequence's own table. scratch: as many blocks as `scratch_blocks` says."""
    first, taken, tables = anchor // BLOCK_TOKENS, 0, [blocks]
    for count in scratch_blocks(rows, anchor):
        own = np.array(scratch[taken : taken + count], np.int32)
        tables.append(np.concatenate((blocks[:first], own)))
        taken += count
    return Branches(rows, anchor, tree.chances[: len(rows.tokens)], tables, scratch)


def grow(
    wanted: Sequence[tuple[DraftTree, int, np.ndarray | None]], sizes: Sequence[int], room: int, pool: BlockPool
) -> list[tuple[list[int], Branches | None]]:
    """Of each (tree, anchor's position, the sequence's blocks): the `sizes[i]` likeliest nodes, or as many as the rows
    of a pass (`room`, shared evenly) and free blocks allow. Returns their tokens, in order of rows, and their branches:
    None where there is one alone, which needs nothing more than drafts in a row do. The blocks of the others are taken
    from the pool.
    """
    out: list[tuple[list[int], Branches | None]] = []
    for left, (tree, anchor, blocks), size in zip(range(len(wanted), 0, -1), wanted, sizes, strict=True):
        assert blocks is not None
        rows = fitting_rows(tree, max(0, min(size, room // left)), anchor, pool.free)
        room -= len(rows.tokens)
        branches = None
        if len(rows.branches) > 1:
            branches = lay_out(tree, rows, anchor, blocks, pool.take(sum(scratch_blocks(rows, anchor))))
        out.append((rows.tokens, branches))
    return out
