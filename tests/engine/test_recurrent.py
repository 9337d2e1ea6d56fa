"""Who holds which recurrent state, and which snapshots are kept."""

from __future__ import annotations

import pytest

from paceline.errors import CapacityError
from paceline.recurrent import RecurrentStates, plan_states


class FakeStates:
    """Slots that hold a number instead of a state."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.held = [0] * slots

    def copy(self, source: int, to: int) -> None:
        self.held[to] = self.held[source]

    def reset(self, slot: int) -> None:
        self.held[slot] = 0

    def rows(self, slot: int) -> int:
        return self.held[slot]


def keys(text: str) -> list[bytes]:
    return [text[: i + 1].encode() for i in range(len(text))]


def keep(states: RecurrentStates, text: str, replaced: str | None = None) -> None:
    slot = states.open(None if replaced is None else replaced.encode())
    assert slot is not None
    states.native.held[slot] = len(text)
    states.publish(text.encode(), slot)


def test_the_longest_known_state_is_loaded() -> None:
    states = RecurrentStates(FakeStates(5), 2)
    keep(states, "ab")
    keep(states, "abcd")
    slot = states.take()
    for text, blocks in (("abcdef", 4), ("abcd", 4), ("abc", 2), ("ab", 2), ("a", 0), ("xbcd", 0), ("", 0)):
        assert states.known(keys(text)) == states.load(slot, keys(text)) == states.rows(slot) == blocks
    states.check([slot])
    states.give(slot)
    states.check([])


def test_the_longest_unused_goes_first() -> None:
    states = RecurrentStates(FakeStates(4), 1)
    for text in ("a", "b", "c"):
        keep(states, text)
    states.load(0, keys("a"))
    keep(states, "d")
    assert [text for text in "abcd" if text.encode() in states] == ["a", "c", "d"]
    states.load(0, keys("c"))
    keep(states, "e")  # in the place of a
    keep(states, "f")
    assert [text for text in "abcdef" if text.encode() in states] == ["c", "e", "f"]
    slot = states.open()  # d's place is taken; now c's is, the longest unused
    assert slot is not None and b"c" not in states
    states.publish(b"f", slot)  # known already: the slot is blank again, and f the last used
    keep(states, "g")
    keep(states, "h")
    assert [text for text in "efgh" if text.encode() in states] == ["f", "g", "h"]
    states.check([])


def test_what_is_written_is_not_found_and_not_taken() -> None:
    states = RecurrentStates(FakeStates(3), 1)
    first, second = states.open(), states.open()
    assert {first, second} == {1, 2} and states.open() is None
    assert states.known(keys("a")) == 0
    states.publish(b"a", first)
    states.cancel(second)
    assert states.known(keys("a")) == 1
    states.check([])


def test_one_snapshot_takes_the_place_of_another() -> None:
    states = RecurrentStates(FakeStates(4), 1)
    keep(states, "a")
    keep(states, "ab", replaced="a")
    assert states.known(keys("a")) == 0 and states.known(keys("ab")) == 2 and len(states._snapshots) == 1
    keep(states, "abc", replaced="gone")
    assert states.known(keys("ab")) == 2
    states.forget(b"ab")
    states.forget(b"never there")
    assert states.known(keys("abc")) == 3 and states.known(keys("ab")) == 0
    states.check([])


def test_a_lost_state_is_noticed() -> None:
    states = RecurrentStates(FakeStates(3), 2)
    slot = states.take()
    with pytest.raises(AssertionError, match="lost"):
        states.check([])
    states.give(slot)
    with pytest.raises(AssertionError, match="twice"):
        states.give(slot)


def test_a_budget_is_split_and_never_passed() -> None:
    mib = 1 << 20
    for budget in (101, 150, 400, 1000, 4000):
        plan = plan_states(budget * mib, 50 * mib, mib // 8, sequences=32, rows=0, snapshots=True)
        assert plan.bytes == (plan.running + plan.snapshots) * 50 * mib <= 0.75 * budget * mib
        assert plan.running == min(32, budget // 100)
    assert plan_states(4000 * mib, 50 * mib, mib, sequences=32, rows=8, snapshots=False).snapshots == 0
    drafting = plan_states(4000 * mib, 50 * mib, mib, sequences=64, rows=16, snapshots=True)
    assert drafting.running == 2000 // 66 and drafting.bytes <= 3000 * mib
    with pytest.raises(CapacityError, match=r"kv_cache_space: 99\.0 MiB are too little"):
        plan_states(99 * mib, 50 * mib, mib, sequences=32, rows=0, snapshots=True)
