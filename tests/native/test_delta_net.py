"""States of delta nets: passes, journals, commits and snapshots lead to the same bits; misuse is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models.hybrid import HybridShape, write_hybrid

from paceline import _native
from paceline.models import TargetModel, load_model
from paceline.models.target import state_arguments
from paceline.runtime import thread_pool

from .paths import NAMES, runs_here, same_bits

SHAPE = HybridShape(layers=4, full=(1,))
ROWS, BLOCKS = 9, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hybrid(tmp_path_factory.mktemp("hybrid"), SHAPE)


@pytest.fixture(scope="module")
def model(folder: Path) -> TargetModel:
    return load_model(folder, dtype="float32", threads=2, max_rows=32)


class Text:
    """Random tokens in blocks and a slot of their own."""

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.tokens = np.random.default_rng(slot).integers(0, SHAPE.vocab, 60).astype(np.int32)
        self.table = np.arange(slot * BLOCKS, (slot + 1) * BLOCKS, dtype=np.int32)


class World:
    """A model with caches for four texts, slots 4 to 7 for snapshots."""

    def __init__(self, model: TargetModel) -> None:
        self.model = model
        self.cache = model.new_cache(4 * BLOCKS)
        self.states = model.new_states(8)
        self.texts = [Text(i) for i in range(4)]

    def run(self, parts: Sequence[tuple[int, int, int]], journal: Any = None, snapshots: Any = ()) -> np.ndarray:
        """Rows [start, end) of texts; parts: (text, start, end). Returns the logits of all rows."""
        rows = sum(end - start for _, start, end in parts)
        logits = np.empty((rows, SHAPE.vocab), np.float32)
        self.model.plan().forward(
            self.cache,
            np.concatenate([np.arange(start, end, dtype=np.int32) for _, start, end in parts]),
            np.cumsum([0, *(end - start for _, start, end in parts)]).astype(np.int32),
            tokens=np.concatenate([self.texts[i].tokens[start:end] for i, start, end in parts]),
            block_tables=np.stack([self.texts[i].table for i, _, _ in parts]),
            select=np.arange(rows, dtype=np.int32),
            logits=logits,
            **state_arguments(self.states, [self.texts[i].slot for i, _, _ in parts], journal, snapshots),
        )
        return logits

    def commit(self, *entries: tuple[int, int, int], snapshots: Sequence[tuple[int, int, int]] = ()) -> None:
        kept = np.array(snapshots, np.int32) if snapshots else None
        self.states.commit(self.model.isa, np.array(entries, np.int32).reshape(-1, 3), kept)

    def state(self, slot: int) -> np.ndarray:
        out = np.empty(self.states.slot_bytes, np.uint8)
        self.states.read(slot, out)
        return out


def one_by_one(model: TargetModel, text: int, rows: int) -> tuple[list[np.ndarray], np.ndarray]:
    """States behind 0 to `rows` rows and the logits of each."""
    world = World(model)
    states, logits = [world.state(text)], []
    for at in range(rows):
        logits.append(world.run([(text, at, at + 1)])[0])
        states.append(world.state(text))
    return states, np.array(logits)


@pytest.mark.parametrize("f32", [True, False], ids=["fp32", "bf16"])
@pytest.mark.parametrize("isa", NAMES)
def test_every_way_to_read_a_text_leads_to_the_same_bits(folder: Path, isa: str, f32: bool) -> None:
    if not runs_here(isa):
        pytest.skip(f"this processor has no {isa}")
    dtype = "float32" if f32 else "bfloat16"
    models = [load_model(folder, dtype=dtype, isa=isa, threads=threads, max_rows=32) for threads in (1, 3)]
    states, logits = one_by_one(models[0], 0, 24)
    others = [one_by_one(models[0], i, 24) for i in range(4)]
    for model in models:
        world = World(model)
        got = world.run([(0, 0, 7)], snapshots=[(0, 1, 4), (0, 3, 5), (0, 7, 6)])
        assert same_bits(got, logits[:7]) and (world.state(0) == states[7]).all()
        for rows, slot in ((1, 4), (3, 5), (7, 6)):
            assert (world.state(slot) == states[rows]).all() and world.states.rows(slot) == rows
        at = 7
        for accepted in (3, 1, 5, 2):  # of five rows: with a short convolution of four
            got = world.run([(0, at, at + 5)], journal=[0])
            assert same_bits(got, logits[at : at + 5]), "rows that wait give the logits of rows that do not"
            assert (world.state(0) == states[at]).all(), "the state has not moved"
            kept = [(0, min(2, accepted), 7)]
            world.commit((0, 0, accepted), snapshots=kept)
            assert (world.state(7) == states[at + kept[0][1]]).all()
            at += accepted
            assert (world.state(0) == states[at]).all() and world.states.rows(0) == at
        assert same_bits(world.run([(0, at, at + 3)], journal=[2]), logits[at : at + 3])
        assert same_bits(world.run([(0, at, at + 2)]), logits[at : at + 2]), "what is not committed never happened"
        assert (world.state(0) == states[at + 2]).all()
        # several texts at once, some of them waiting
        world.run([(1, 0, 6), (2, 0, 1), (3, 0, 9)], journal=[-1, -1, 3], snapshots=[(0, 6, 4), (2, 4, 5)])
        assert all((world.state(i) == others[i][0][n]).all() for i, n in ((1, 6), (2, 1), (3, 0)))
        assert (world.state(4) == others[1][0][6]).all() and (world.state(5) == others[3][0][4]).all()
        got = world.run([(3, 0, 3), (1, 6, 10), (2, 1, 4)], journal=[8, 0, 4])
        want = np.concatenate([others[3][1][:3], others[1][1][6:10], others[2][1][1:4]])
        assert same_bits(got, want)
        world.commit((2, 4, 3), (3, 8, 1))
        assert all((world.state(i) == others[i][0][n]).all() for i, n in ((1, 6), (2, 4), (3, 1)))


def test_a_copied_state_goes_on_like_its_source(model: TargetModel) -> None:
    states, logits = one_by_one(model, 0, 12)
    world = World(model)
    world.run([(0, 0, 8)])
    world.states.copy(0, 5)
    world.states.reset(0)
    assert world.states.rows(0) == 0 and not world.state(0).any()
    assert (world.state(5) == states[8]).all() and world.states.rows(5) == 8
    world.states.copy(5, 0)
    assert same_bits(world.run([(0, 8, 12)]), logits[8:]) and (world.state(0) == states[12]).all()


def passes(**wrong: Any) -> Callable[[World], Any]:
    """Text 0 from row 2 on and text 1 from 0, two rows each, with wrong arguments."""
    return lambda world: world.run([(0, 2, 4), (1, 0, 2)], **wrong)


WRONG: dict[str, tuple[Callable[[World], Any], str]] = {
    "a row too early": (lambda w: w.run([(0, 1, 3)]), "has seen 2 rows, the pass starts at 1"),
    "a row too late": (lambda w: w.run([(0, 3, 4)]), "has seen 2 rows, the pass starts at 3"),
    "one state for two": (lambda w: w.run([(0, 2, 3), (0, 2, 3)]), "a state of its own"),
    "journal too short": (passes(journal=[31, -1]), "too few rows"),
    "journal used twice": (passes(journal=[0, 1]), "used twice"),
    "journals of another count": (passes(journal=[0]), "one per sequence"),
    "snapshot into a state in use": (passes(snapshots=[(0, 1, 1)]), "in use"),
    "snapshot into no slot": (passes(snapshots=[(0, 1, 8)]), "does not exist"),
    "snapshot into a negative slot": (passes(snapshots=[(0, 1, -1)]), "does not exist"),
    "two snapshots in one slot": (passes(snapshots=[(0, 1, 4), (1, 1, 4)]), "in use"),
    "snapshot behind no row": (passes(snapshots=[(0, 0, 4)]), "no such row"),
    "snapshot behind the end": (passes(snapshots=[(0, 3, 4)]), "no such row"),
    "snapshot of no sequence": (passes(snapshots=[(2, 1, 4)]), "no such row"),
    "snapshots out of order": (passes(snapshots=[(1, 1, 4), (0, 1, 5)]), "ascend"),
    "commit without a pass": (lambda w: w.commit((0, 0, 1)), "no such journal"),
    "commit of too much": (lambda w: (w.run([(0, 2, 4)], journal=[0]), w.commit((0, 0, 3))), "no such journal"),
    "commit of nothing": (lambda w: (w.run([(0, 2, 4)], journal=[0]), w.commit((0, 0, 0))), "no such journal"),
    "commit of another row": (lambda w: (w.run([(0, 2, 4)], journal=[0]), w.commit((0, 1, 1))), "no such journal"),
    "commit twice in one": (
        lambda w: (w.run([(0, 2, 4)], journal=[0]), w.commit((0, 0, 1), (0, 0, 1))),
        "named twice",
    ),
    "commit again": (
        lambda w: (w.run([(0, 2, 4)], journal=[0]), w.commit((0, 0, 1)), w.commit((0, 0, 1))),
        "no such journal",
    ),
    "commit after another pass": (
        lambda w: (w.run([(0, 2, 4)], journal=[0]), w.run([(1, 0, 1)]), w.commit((0, 0, 1))),
        "no such journal",
    ),
    "commit with a snapshot into itself": (
        lambda w: (w.run([(0, 2, 4)], journal=[0]), w.commit((0, 0, 2), snapshots=[(0, 1, 0)])),
        "in use",
    ),
    "commit of no slot": (lambda w: w.commit((8, 0, 1)), "does not exist"),
    "read of no slot": (lambda w: w.state(8), "does not exist"),
    "copy to no slot": (lambda w: w.states.copy(0, -1), "does not exist"),
}


@pytest.mark.parametrize(("misuse", "message"), WRONG.values(), ids=WRONG.keys())
def test_misuse_is_refused_and_changes_nothing(model: TargetModel, misuse: Any, message: str) -> None:
    states, logits = one_by_one(model, 0, 6)
    world = World(model)
    world.run([(0, 0, 2)])
    with pytest.raises(ValueError, match=message):
        misuse(world)
    done = world.states.rows(0)
    assert (world.state(0) == states[done]).all()
    assert same_bits(world.run([(0, done, 6)]), logits[done:])


def test_a_pass_without_states_is_refused(model: TargetModel) -> None:
    with pytest.raises(ValueError, match="needs a state cache"):
        model.plan().forward(
            model.new_cache(1),
            np.zeros(1, np.int32),
            np.array([0, 1], np.int32),
            block_tables=np.zeros((1, 1), np.int32),
        )


def test_states_of_another_shape_are_refused(model: TargetModel) -> None:
    world = World(model)
    for wrong in ((2, 2, 4, 18, 20, 4), (3, 2, 4, 18, 20, 3), (3, 2, 4, 16, 20, 4), (3, 1, 4, 18, 20, 4)):
        world.states = _native.StateCache(thread_pool(2), *wrong, 8, 32)
        with pytest.raises(ValueError, match="does not fit the plan"):
            world.run([(0, 0, 1)])
    for wrong in ((0, 2, 4, 18, 20, 4), (1, 3, 4, 18, 20, 4), (1, 2, 4, 257, 20, 4), (1, 2, 4, 18, 20, 1)):
        with pytest.raises(ValueError, match="delta net"):
            _native.StateCache(thread_pool(1), *wrong, 1, 1)
    for slots, rows in ((0, 1), (1, 0), (-1, 1)):
        with pytest.raises(ValueError, match="slots and journal rows"):
            _native.StateCache(thread_pool(1), 1, 1, 1, 8, 8, 4, slots, rows)
