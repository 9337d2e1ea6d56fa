"""Draft trees from one pass of a block drafter (DDTree, arXiv 2604.12989): several continuations, verified together.

A block drafter says for each of its slots which tokens may stand there. Combined, these are a tree: a node is a token
behind the tokens of its ancestors, and its chance is the product of theirs. The most likely nodes under a budget are
found best first, the target computes all of them in one pass, and its own draws lead from the anchor down the branch
that they agree with. What is committed is what plain decoding commits.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Nodes in the order in which they were found: likely ones first, each behind its parent.

    parents[i]: the node that node i follows, -1 for the anchor. chances[i]: of the text going through node i; none is
    larger than its parent's. Siblings have different tokens.
    """

    tokens: list[int]
    parents: list[int]
    chances: list[float]

    def __len__(self) -> int:
        return len(self.tokens)

    def first(self, count: int) -> DraftTree:
        """The tree of its `count` most likely nodes."""
        if count >= len(self.tokens):
            return self
        return DraftTree(self.tokens[:count], self.parents[:count], self.chances[:count])


def best_first(ids: np.ndarray, log_chances: np.ndarray, budget: int) -> DraftTree:
    """The `budget` most likely nodes over the candidates of consecutive slots.

    ids: int [slots, candidates], of each slot different tokens, best first; id -1 is none. log_chances: float [slots,
    candidates], falling along each row. A node's chance is the product over its path, as if slots were independent.
    """
    tokens, logs = ids.tolist(), log_chances.tolist()
    slots = len(tokens)
    tree = DraftTree([], [], [])
    # (-log chance, age, slot, rank, parent, log chance of the parent): of equal chances the older one first
    heap: list[tuple[float, int, int, int, int, float]] = []

    def push(slot: int, rank: int, parent: int, above: float) -> None:
        if slot < slots and rank < len(tokens[slot]) and tokens[slot][rank] >= 0 and logs[slot][rank] > -np.inf:
            heapq.heappush(heap, (-(above + logs[slot][rank]), age, slot, rank, parent, above))

    age = 0
    push(0, 0, -1, 0.0)
    while heap and len(tree) < budget:
        negative, _, slot, rank, parent, above = heapq.heappop(heap)
        node = len(tree)
        tree.tokens.append(tokens[slot][rank])
        tree.parents.append(parent)
        tree.chances.append(float(np.exp(-negative)))
        age += 1
        push(slot, rank + 1, parent, above)
        age += 1
        push(slot + 1, 0, node, -negative)
    return tree


@dataclass(frozen=True, slots=True)
class Branch:
    """Rows [start, end) of a sequence's part of a pass: consecutive positions, the first at `depth` behind the anchor.

    ancestors: the rows of other branches that lead to it, the anchor's first; `depth` of them.
    """

    start: int
    end: int
    ancestors: tuple[int, ...]

    @property
    def depth(self) -> int:
        return len(self.ancestors)

    @property
    def last_depth(self) -> int:
        return self.depth + self.end - self.start - 1


@dataclass(frozen=True)
class TreeRows:
    """A tree as rows of a pass: row 0 is the anchor, and each branch's rows lie side by side.

    The first branch is the anchor and the likeliest child of each of its nodes; where a node has other children, each
    begins a branch. tokens[i], parents[i]: of row i + 1, the parent being an earlier row.
    """

    tokens: list[int]
    parents: list[int]
    branches: list[Branch]

    @cached_property
    def depths(self) -> list[int]:
        """Of every row: how far behind the anchor it stands."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return depths

    @property
    def depth(self) -> int:
        """Most drafts that can be accepted."""
        return max(self.depths)

    def branch_of(self, row: int) -> int:
        return next(i for i, branch in enumerate(self.branches) if row < branch.end)


def as_rows(tree: DraftTree) -> TreeRows:
    """Arrange the nodes of a tree as branches; see `TreeRows`."""
    children: list[list[int]] = [[] for _ in range(len(tree) + 1)]  # of node i at i + 1
    for node, parent in enumerate(tree.parents):
        children[parent + 1].append(node)
    rows = TreeRows([], [], [])
    waiting: list[tuple[int, tuple[int, ...]]] = [(-1, ())]  # first node of a branch, rows that lead to it
    count = 0
    for node, ancestors in waiting:
        path, start = list(ancestors), count
        while True:
            if node >= 0:
                rows.tokens.append(tree.tokens[node])
                rows.parents.append(path[-1])
            path.append(count)
            count += 1
            following = children[node + 1]
            waiting += [(other, tuple(path)) for other in following[1:]]
            if not following:
                break
            node = following[0]
        rows.branches.append(Branch(start, count, ancestors))
    return rows


def chain_rows(drafts: Sequence[int]) -> TreeRows:
    """Drafts in a row as a tree with one branch."""
    return TreeRows(list(drafts), list(range(len(drafts))), [Branch(0, len(drafts) + 1, ())])


def accept_path(rows: TreeRows, target_tokens: Sequence[int]) -> list[int]:
    """The rows whose tokens the target chose, from the anchor's on: `accept` for a tree.

    target_tokens: what the target chose in every row, given the row's path. With p = accept_path(...), a step commits
    the target's tokens of the rows p: those of all but the last are drafts.

    >>> accept_path(as_rows(DraftTree([5, 6, 7], [-1, -1, 1], [0.5, 0.3, 0.2])), [6, 0, 7, 9])
    [0, 2, 3]
    """
    if len(target_tokens) != len(rows.tokens) + 1:
        raise ValueError(
            f"target_tokens: {len(target_tokens)} tokens for {len(rows.tokens)} nodes, expected {len(rows.tokens) + 1}"
        )
    path = [0]
    for row, (token, parent) in enumerate(zip(rows.tokens, rows.parents, strict=True), 1):
        # rows come behind their parents, and siblings differ: at most one child of the path's end fits
        if parent == path[-1] and token == target_tokens[parent]:
            path.append(row)
    return path
