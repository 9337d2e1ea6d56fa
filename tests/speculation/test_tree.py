"""Trees: grown best first, arranged as rows, walked as a reference walks them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.branches import fitting_rows, lay_out, scratch_blocks
from paceline.sampling import IdMap, SamplingState, draft, draft_candidates, sample, walk_rows
from paceline.speculation.accept import accept
from paceline.speculation.tree import DraftTree, accept_path, as_rows, best_first, chain_rows


@st.composite
def trees(draw: st.DrawFn, most: int = 24) -> DraftTree:
    """Any tree whose siblings differ; chances fall from parent to child."""
    count = draw(st.integers(0, most))
    parents = [draw(st.integers(-1, i - 1)) for i in range(count)]
    tokens, taken = [], {}
    for parent in parents:
        siblings = taken.setdefault(parent, set())
        token = draw(st.integers(0, 30).filter(lambda t, seen=siblings: t not in seen))
        siblings.add(token)
        tokens.append(token)
    return DraftTree(tokens, parents, [2.0 ** -(i + 1) for i in range(count)])


def path_tokens(tree: DraftTree, node: int) -> tuple[int, ...]:
    return () if node < 0 else (*path_tokens(tree, tree.parents[node]), tree.tokens[node])


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 5).flatmap(
        lambda slots: st.lists(st.lists(st.floats(-6, 0), min_size=3, max_size=3), min_size=slots, max_size=slots)
    ),
    st.integers(1, 40),
)
def test_best_first_finds_the_likeliest_paths(logs: list[list[float]], budget: int) -> None:
    values = -np.sort(-np.array(logs), axis=1)
    ids = np.arange(values.size).reshape(values.shape)
    tree = best_first(ids, values, budget)
    every = [  # the log-chance of every path through the candidates
        sum(values[slot, rank] for slot, rank in enumerate(ranks))
        for length in range(1, len(values) + 1)
        for ranks in itertools.product(range(3), repeat=length)
    ]
    best = sorted(every, reverse=True)[:budget]
    np.testing.assert_allclose(np.log(tree.chances), best, atol=1e-9)
    assert len({path_tokens(tree, i) for i in range(len(tree))}) == len(tree)
    assert all(-1 <= parent < i for i, parent in enumerate(tree.parents))
    for count in (0, 1, len(tree) // 2, len(tree)):
        assert tree.first(count).tokens == tree.tokens[:count]


def test_missing_candidates_end_a_row() -> None:
    ids = np.array([[3, -1], [4, 5]])
    tree = best_first(ids, np.log(np.array([[0.9, 0.1], [0.6, 0.4]])), 10)
    assert [path_tokens(tree, i) for i in range(len(tree))] == [(3,), (3, 4), (3, 5)]
    assert best_first(ids, np.array([[-np.inf, -np.inf], [0.0, 0.0]]), 10).tokens == []


@settings(max_examples=150, deadline=None)
@given(trees())
def test_rows_are_the_nodes_branch_by_branch(tree: DraftTree) -> None:
    rows = as_rows(tree)
    assert sorted(rows.tokens) == sorted(tree.tokens)

    def text(row: int) -> tuple[int, ...]:
        return () if row == 0 else (*text(rows.parents[row - 1]), rows.tokens[row - 1])

    assert sorted(map(text, range(1, len(rows.tokens) + 1))) == sorted(path_tokens(tree, i) for i in range(len(tree)))
    end = 0
    for i, branch in enumerate(rows.branches):
        assert branch.start == end < branch.end
        end = branch.end
        for row in range(branch.start, branch.end):
            assert rows.branch_of(row) == i
            assert rows.depths[row] == branch.depth + row - branch.start
            if row > branch.start:
                assert rows.parents[row - 1] == row - 1
        assert rows.depths[branch.end - 1] == branch.last_depth
        assert [rows.depths[row] for row in branch.ancestors] == list(range(branch.depth))
        if branch.ancestors:
            assert rows.parents[branch.start - 1] == branch.ancestors[-1]
            assert text(branch.ancestors[-1]) == text(branch.start)[:-1]
    assert end == len(rows.tokens) + 1
    assert rows.depth == max((len(path_tokens(tree, i)) for i in range(len(tree))), default=0)


@settings(max_examples=150, deadline=None)
@given(trees(), st.integers(0, 1 << 30))
def test_acceptance_follows_the_target_as_far_as_the_tree_goes(tree: DraftTree, seed: int) -> None:
    rows = as_rows(tree)
    drawn = np.random.default_rng(seed).integers(0, 6, len(rows.tokens) + 1).tolist()
    for row in range(1, len(drawn)):  # make deep acceptance common
        if seed >> (row % 30) & 1:
            drawn[rows.parents[row - 1]] = rows.tokens[row - 1]
    known = {(parent, token): row for row, (parent, token) in enumerate(zip(rows.parents, rows.tokens, strict=True), 1)}
    path = [0]
    while (path[-1], drawn[path[-1]]) in known:
        path.append(known[path[-1], drawn[path[-1]]])
    assert accept_path(rows, drawn) == path


@given(st.lists(st.integers(0, 3), max_size=6), st.lists(st.integers(0, 3), min_size=7, max_size=7))
def test_a_chain_is_a_tree(drafts: list[int], drawn: list[int]) -> None:
    target = drawn[: len(drafts) + 1]
    rows = chain_rows(drafts)
    assert rows.tokens == drafts and len(rows.branches) == 1
    assert accept_path(rows, target) == list(range(accept(drafts, target) + 1))


def test_a_wrong_number_of_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="2 tokens for 2 nodes, expected 3"):
        accept_path(chain_rows([1, 2]), [1, 2])


# ---- blocks


@settings(max_examples=100, deadline=None)
@given(trees(), st.integers(0, 40))
def test_every_branch_has_the_blocks_of_its_path(tree: DraftTree, anchor: int) -> None:
    rows = as_rows(tree)
    need = sum(scratch_blocks(rows, anchor))
    own = np.arange((anchor + rows.depth) // 16 + 1, dtype=np.int32)
    branches = lay_out(tree, rows, anchor, own, list(range(100, 100 + need)))
    cells: dict[tuple[int, int], object] = {}  # (block, slot) -> what is there

    def place(branch: int, position: int) -> tuple[int, int]:
        return int(branches.tables[branch][position // 16]), position % 16

    for position in range(anchor):
        cells[place(0, position)] = ("committed", position)
    for source, to, slot, count in branches.copies:
        for i in range(slot, slot + count):
            cells[to, i] = cells[source, i]
    for i, branch in enumerate(rows.branches):
        for row in range(branch.start, branch.end):
            cells[place(i, branches.positions[row])] = row
    for row, sequence in branches.mirrors(0, 0):
        cells[place(sequence, branches.positions[row])] = row
    # the keys that attention sees: committed ones, then the path, at their positions
    for i, branch in enumerate(rows.branches):
        path = [*branch.ancestors, *range(branch.start, branch.end)]
        seen = [cells[place(i, p)] for p in range(anchor + branch.last_depth + 1)]
        assert seen == [("committed", p) for p in range(anchor)] + path
    assert all(len(set(table.tolist())) == len(table) for table in branches.tables)
    # any accepted path ends up in the sequence's own blocks
    for row in range(len(rows.tokens) + 1):
        path, at = [row], row
        while at:
            at = rows.parents[at - 1]
            path.insert(0, at)
        moved = dict(cells)
        for source, to, slot, count in branches.moves(path):
            for i in range(slot, slot + count):
                moved[to, i] = cells[source, i]
        assert [moved[place(0, anchor + depth)] for depth in range(len(path))] == path


def test_a_tree_shrinks_to_the_blocks_there_are() -> None:
    tree = DraftTree([1, 2, 3, 4], [-1, -1, 0, 1], [0.5, 0.3, 0.2, 0.1])
    assert len(fitting_rows(tree, 4, 15, 2).tokens) == 4  # the second branch reaches into another block
    assert len(fitting_rows(tree, 4, 15, 1).branches) == 1
    assert len(fitting_rows(tree, 4, 3, 1).tokens) == 4
    assert fitting_rows(tree, 0, 3, 0).tokens == []


# ---- native


def state(vocab: int, **options: object) -> SamplingState:
    return SamplingState(vocab, [1, 2, 3], **{"temperature": 0.0, "seed": 5, **options})  # type: ignore[arg-type]


STATES = [
    {},
    {"temperature": 0.8},
    {"temperature": 1.3, "top_k": 3},
    {"temperature": 1.0, "top_p": 0.6, "repetition_penalty": 1.4},
    {"logit_bias": [(4, 3.0)], "frequency_penalty": 0.7},
]


@pytest.mark.parametrize("options", STATES)
@settings(max_examples=40, deadline=None)
@given(trees(), st.integers(0, 1 << 30))
def test_the_native_walk_draws_what_each_path_draws(options: dict[str, object], tree: DraftTree, seed: int) -> None:
    rows, vocab = as_rows(tree), 31
    logits = np.random.default_rng(seed).normal(0, 3, (len(rows.tokens) + 1, vocab)).astype(np.float32)
    for row in range(1, len(logits)):
        if seed >> (row % 30) & 1:  # the target likes some nodes
            logits[rows.parents[row - 1], rows.tokens[row - 1]] += 12
    s = state(vocab, **options)
    before = s.num_tokens
    ((path, tokens),) = walk_rows(logits, [s], [rows.tokens], [rows.parents])
    assert s.num_tokens == before
    drawn = sample(logits[path], [s], [[rows.tokens[row - 1] for row in path[1:]]])
    assert tokens == drawn
    choice = dict(zip(path, tokens, strict=True))
    assert accept_path(rows, [choice.get(row, -1) for row in range(len(logits))]) == path


def test_the_native_walk_refuses_what_is_no_tree() -> None:
    logits, s = np.zeros((3, 8), np.float32), state(8)
    for drafts, parents, message in (
        ([[1, 2]], [[0]], "parents"),
        ([[1, 2]], [[1, 0]], "behind its parent"),
        ([[1, 9]], [[0, 0]], "9"),
        ([[1]], [[0]], "rows"),
        ([[1, 2]], [], "one list per state"),
    ):
        with pytest.raises(ValueError, match=message):
            walk_rows(logits, [s], drafts, parents)


@pytest.mark.parametrize("options", STATES)
@pytest.mark.parametrize("reduced", [False, True])
def test_candidates_begin_with_the_drafts_and_know_their_chances(options: dict[str, object], reduced: bool) -> None:
    vocab, rows = 200, 5
    columns = np.arange(0, vocab, 2, dtype=np.int32) if reduced else np.arange(vocab, dtype=np.int32)
    ids = IdMap(columns, vocab) if reduced else None
    logits = np.random.default_rng(3).normal(0, 2, (rows, len(columns))).astype(np.float32)
    s = state(vocab, **options)
    found, logs = draft_candidates(logits, [s], [rows], 7, ids)
    assert found[:, 0].tolist() == draft(logits, [s], [rows], ids)[0]
    assert found.shape == logs.shape == (rows, 7)
    assert (np.diff(logs) <= 0).all() and (logs <= 0).all()
    for row in found.tolist():
        assert len(set(row)) == 7 and set(row) <= set(columns.tolist())
    if not options:  # greedy: the softmax of the logits, best first
        order = np.argsort(-logits, axis=1, kind="stable")[:, :7]
        np.testing.assert_array_equal(found, columns[order])
        exact = np.log(np.exp(logits - logits.max(1, keepdims=True)))
        exact -= np.log(np.exp(exact).sum(1, keepdims=True))
        np.testing.assert_allclose(logs, np.take_along_axis(exact, order, 1), atol=1e-5)


def test_candidates_of_a_row_with_few_tokens() -> None:
    logits = np.full((1, 9), -np.inf, np.float32)
    logits[0, [2, 6]] = [0.0, 1.0]
    found, logs = draft_candidates(logits, [state(9)], [1], 4)
    assert found.tolist() == [[6, 2, -1, -1]] and np.isneginf(logs[0, 2:]).all()
    with pytest.raises(ValueError, match="top"):
        draft_candidates(logits, [state(9)], [1], 10)
