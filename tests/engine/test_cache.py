"""The block pool against a model of it, and keys that name texts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.cache import BLOCK_TOKENS, BlockPool, block_keys, blocks_for, stack_tables
from paceline.errors import CapacityError

B = BLOCK_TOKENS


@given(st.integers(0, 5), st.integers(0, 5), st.integers(0, 4), st.sampled_from([None, "", "a", "b"]))
def test_keys_are_equal_where_texts_are(common: int, blocks: int, other: int, salt: str | None) -> None:
    left = [1] * (common * B) + [2] * (blocks * B)
    right = [1] * (common * B) + [3] * (other * B)
    a = block_keys([], left, common + blocks, salt)
    b = block_keys([], right, common + other, salt)
    same = sum(x == y for x, y in zip(a, b, strict=False))
    assert same == common and a[:same] == b[:same]
    assert block_keys(a[: common // 2], left, common + blocks, salt) == a, "chains may be extended"
    assert len(set(a)) == len(a), "a repeated block is another block"
    assert not set(a) & set(block_keys([], left, common + blocks, "other salt"))


def test_tables_of_several_sequences() -> None:
    tables = stack_tables([np.array([4, 5], np.int32), np.array([1], np.int32)])
    assert tables.tolist() == [[4, 5], [1, -1]]
    assert [blocks_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_what_is_asked_for_beyond_the_pool_is_refused_whole() -> None:
    pool = BlockPool(3)
    pool.take(2)
    with pytest.raises(CapacityError, match="kv_cache_space"):
        pool.take(2)
    assert pool.free == 1


def test_the_longest_unused_content_goes_first_and_ends_before_beginnings() -> None:
    pool = BlockPool(4)
    old, new = pool.take(2), pool.take(2)
    for blocks, name in ((old, b"old"), (new, b"new")):
        for i, block in enumerate(blocks):
            pool.publish(block, name + bytes([i]), True)
    pool.give(old)
    pool.give(new)
    assert pool.find([b"old\0", b"old\1"]) == old
    taken = pool.take(1)
    assert taken == [old[1]] and pool.find([b"old\0", b"old\1"]) == old[:1]
    pool.share(pool.find([b"old\0"]))  # used again: no more the oldest
    pool.give([old[0]])
    assert pool.take(2) == [new[1], new[0]]
    assert pool.find([b"old\0"]) == [old[0]]
    pool.check([taken, new])


def test_blocks_with_a_drafters_rows_are_found_before_those_without() -> None:
    pool = BlockPool(3)
    plain, tapped, late = pool.take(3)
    pool.publish(plain, b"x", False)
    assert pool.find([b"x"]) == [plain] and pool.num_tapped([plain]) == 0
    pool.publish(tapped, b"x", True)
    assert pool.find([b"x"]) == [tapped] and pool.num_tapped([tapped]) == 1
    pool.publish(late, b"x", False)
    assert pool.find([b"x"]) == [tapped]
    pool.publish(tapped, b"x", False)
    assert pool.num_tapped([tapped]) == 1
    pool.check([[plain, tapped, late]])


class PoolMachine(RuleBasedStateMachine):
    """Holders with texts over a small alphabet of blocks; contents are what was published, never anything else."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(9)
        self.held: list[tuple[list[int], list[bytes], bool]] = []
        self.content: dict[int, tuple[bytes, bool]] = {}

    @rule(text=st.text("ab", max_size=5), tapped=st.booleans())
    def start(self, text: str, tapped: bool) -> None:
        keys = [text[: i + 1].encode() for i in range(len(text))]
        shared = self.pool.find(keys)
        if tapped:
            shared = shared[: self.pool.num_tapped(shared)]
        for block, key in zip(shared, keys, strict=False):
            found, was_tapped = self.content[block]
            assert found == key and (was_tapped or not tapped)
        need = len(keys) - len(shared)
        if need > self.pool.room_beside(shared):
            return
        self.pool.share(shared)
        taken = self.pool.take(need)
        for block in taken:
            self.content.pop(block, None)
        assert not {b for blocks, *_ in self.held for b in blocks} & set(taken), "someone holds it"
        blocks = shared + taken
        for block, key in zip(blocks[len(shared) :], keys[len(shared) :], strict=True):
            self.pool.publish(block, key, tapped)
            self.content[block] = key, tapped
        self.held.append((blocks, keys, tapped))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        blocks, *_ = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.give(blocks)

    @rule(count=st.integers(0, 3))
    def grow(self, count: int) -> None:
        if count <= self.pool.free:
            taken = self.pool.take(count)
            for block in taken:
                self.content.pop(block, None)
            self.held.append((taken, [], False))

    @rule()
    def forget(self) -> None:
        self.pool.forget_all()
        assert self.pool.published == 0

    @invariant()
    def whole(self) -> None:
        self.pool.check([blocks for blocks, *_ in self.held])
        if not self.held:
            self.pool.check_idle()


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("damage", ["lost", "twice", "index"])
def test_damage_is_found(damage: str) -> None:
    pool = BlockPool(3)
    held = pool.take(2)
    pool.publish(held[0], b"k", True)
    if damage == "lost":
        held = held[:1]
    elif damage == "twice":
        held = [held[0], held[0]]
    else:
        pool._published.clear()
    with pytest.raises(AssertionError):
        pool.check([held])
