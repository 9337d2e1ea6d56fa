"""Branches of a tree as sequences of a pass: on every path, each row has the bits of its text decoded plainly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from models.tiny import Shape, write_target

from paceline.branches import lay_out, scratch_blocks
from paceline.models import TargetModel, load_model
from paceline.speculation.tree import DraftTree, as_rows

from .paths import every_path

SHAPE = Shape("qwen3", vocab=50, hidden=48, inner=40, layers=3, heads=6, kv_heads=2, window=20, sliding=(1,))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"), SHAPE)


def random_tree(rng: np.random.Generator, nodes: int) -> DraftTree:
    parents = [int(rng.integers(max(-1, i - 6), i)) for i in range(nodes)]
    return DraftTree(rng.permutation(SHAPE.vocab)[:nodes].tolist(), parents, [0.0] * nodes)


def run(
    model: TargetModel, cache: object, tokens: list[int], positions: list[int], starts: list[int], **options: object
) -> np.ndarray:
    logits = np.empty((len(tokens), model.vocab_size), np.float32)
    rows = np.arange(len(tokens), dtype=np.int32)
    arrays = [np.array(x, np.int32) for x in (positions, starts)]
    model.plan().forward(cache, *arrays, tokens=np.array(tokens, np.int32), select=rows, logits=logits, **options)  # type: ignore[arg-type]
    return logits


@every_path
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("anchor", "kv"), [(0, "auto"), (13, "auto"), (32, "auto"), (77, "auto"), (45, "int8")])
def test_a_row_of_a_tree_has_the_bits_of_its_text(folder, isa, f32, threads, anchor, kv):
    rng = np.random.default_rng(anchor)
    dtype = "float32" if f32 else "bfloat16"
    model = load_model(folder, dtype=dtype, threads=threads, isa=isa, max_rows=128, kv_cache_dtype=kv)
    text = rng.integers(0, SHAPE.vocab, anchor + 1).tolist()
    tree = random_tree(rng, 19)
    rows = as_rows(tree)
    assert len(rows.branches) > 4
    own = list(range((anchor + rows.depth) // 16 + 1))
    scratch = list(range(len(own), len(own) + sum(scratch_blocks(rows, anchor))))
    cache = model.new_cache(len(own) + len(scratch))
    table = np.array(own, np.int32)
    branches = lay_out(tree, rows, anchor, table, scratch)
    if anchor:
        run(model, cache, text[:anchor], list(range(anchor)), [0, anchor], block_tables=table[None])
    tables = np.full((len(branches.tables), max(map(len, branches.tables))), -1, np.int32)
    for i, blocks in enumerate(branches.tables):
        tables[i, : len(blocks)] = blocks
    copies = list(branches.copies)
    got = run(
        model, cache, [text[-1], *rows.tokens], branches.positions, [0, *(b.end for b in rows.branches)],
        block_tables=tables, mirrors=np.array(list(branches.mirrors(0, 0)), np.int32).reshape(-1, 2),
        copies=np.array(copies, np.int32) if copies else None,
    )  # fmt: skip
    longest: list[int] = []
    for row in range(len(got)):
        path, at = [row], row
        while at:
            at = rows.parents[at - 1]
            path.insert(0, at)
        whole = [*text, *(rows.tokens[r - 1] for r in path[1:])]
        want, _ = model.logits(whole)
        assert (got[row].view(np.uint32) == want[-1].view(np.uint32)).all(), (row, path)
        longest = max(longest, path, key=len)
    # an accepted path in the sequence's own blocks is what the next pass reads
    for source, to, slot, count in branches.moves(longest):
        cache.copy_rows(source, to, slot, count)
    whole = [*text, *(rows.tokens[r - 1] for r in longest[1:]), 7]
    last = len(whole) - 1
    table = np.array([*own, *scratch][: last // 16 + 1], np.int32)
    got = run(model, cache, [7], [last], [0, 1], block_tables=table[None])
    assert (got[0].view(np.uint32) == model.logits(whole)[0][-1].view(np.uint32)).all()


def test_branches_outside_the_pass_are_refused(folder):
    model = load_model(folder, dtype="float32", threads=1, max_rows=8)
    cache = model.new_cache(3)
    tables = np.array([[0], [1]], np.int32)
    good = {
        "block_tables": tables,
        "mirrors": np.array([[0, 1]], np.int32),
        "copies": np.array([[0, 1, 0, 2]], np.int32),
    }
    pass_ = ([1, 2, 3], [2, 3, 3], [0, 2, 3])
    run(model, cache, *pass_, **good)
    for name, value, message in (
        ("mirrors", [[3, 1]], "no such row"),
        ("mirrors", [[0, 2]], "no such row or sequence"),
        ("mirrors", [[-1, 1]], "no such row"),
        ("mirrors", [[1, 1]], "in front of"),
        ("mirrors", [[0, 1, 2]], "pairs"),
        ("copies", [[0, 3, 0, 1]], "outside the cache"),
        ("copies", [[0, 1, 15, 2]], "outside the cache"),
        ("copies", [[0, 1, 0, 0]], "outside the cache"),
        ("copies", [[1, 1, 0, 1]], "outside the cache"),
        ("copies", [[0, 1]], "expected"),
    ):
        with pytest.raises(ValueError, match=message):
            run(model, cache, *pass_, **{**good, name: np.array(value, np.int32)})
    with pytest.raises(ValueError, match="outside the cache"):
        cache.copy_rows(0, 7, 0, 1)
