"""How much of a finished draft is verified, and what is learnt from the rest."""

from __future__ import annotations

import itertools
import random
from functools import reduce

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.speculation.acceptance import TRUST_PRIOR, Acceptance
from paceline.speculation.allotment import admitted, slot_worths, survivals_of
from paceline.speculation.cost_table import CostTable
from paceline.speculation.length import DraftLengthPolicy


def table(times: dict[int, float]) -> CostTable:
    costs = CostTable()
    costs.preset(times)
    return costs


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(0, 3), st.floats(0, 3))
def test_the_prefixes_are_the_best_of_all(seed: int, requests: int, other_rows: int, paid: float) -> None:
    """(1 + expected accepted) / (T_draft + T_verify), of all requests together, by trying every combination."""
    rng = random.Random(seed)
    chances = [[rng.random() for _ in range(rng.randint(0, 4))] for _ in range(requests)]
    costs = table({rows: 1.0 + rng.random() * rows for rows in range(1, 24)})

    def rate(lengths: tuple[int, ...]) -> float:
        expected = float(requests + other_rows)
        for row, length in zip(chances, lengths, strict=True):
            expected += sum(reduce(lambda a, b: a * b, row[: j + 1]) for j in range(length))
        return expected / (paid + costs.seconds(requests + other_rows + sum(lengths)))

    chosen = tuple(admitted(survivals_of(chances), costs, paid, other_rows))
    every = itertools.product(*(range(len(row) + 1) for row in chances))
    assert rate(chosen) == pytest.approx(max(map(rate, every)))


def test_doubtful_drafts_are_left_out_and_sure_ones_kept() -> None:
    costs = table({rows: 1.0 + 0.1 * rows for rows in range(1, 20)})
    assert admitted(survivals_of([[0.99, 0.99, 0.02, 0.99]]), costs, 0.2) == [2]
    assert admitted(survivals_of([[0.99] * 4]), costs, 0.2) == [4]
    assert admitted(survivals_of([[0.01] * 4]), costs, 0.2) == [0]
    assert admitted(survivals_of([[0.9, 0.9], [0.01, 0.9], []]), costs, 0.2) == [2, 0, 0]
    dear = table({rows: float(rows) for rows in range(1, 20)})
    assert admitted(survivals_of([[0.9] * 4]), dear, 0.0) == [0]
    assert admitted(survivals_of([[0.9] * 4]), dear, 3.0)[0] > 0, "a draft that is paid is used"


def policy() -> DraftLengthPolicy:
    out = DraftLengthPolicy()
    out.verify = table({rows: 1.0 + 0.1 * rows for rows in range(1, 60)})
    out.draft = table({rows: 0.2 for rows in range(1, 60)})
    return out


def test_trimming_cuts_in_place_and_counts_what_was_left_out() -> None:
    lengths = policy()
    drafts = [[1, 2, 3, 4], [5, 6, 7, 8]]
    lengths.trim([1, 2], drafts, [[0.99, 0.99, 0.01, 0.5], [0.01, 0.5, 0.5, 0.5]])
    assert drafts == [[1, 2], []]
    lengths.observe(1, 2, 2)
    own = lengths._memory.of(1)
    assert own is not None
    assert own.tries == pytest.approx([1, 1, 1, 0.01]) and own.hits == pytest.approx([1, 1, 0.01, 0.005])
    lengths.observe(2, 0, 0)
    other = lengths._memory.of(2)
    assert other is not None and other.tries == pytest.approx([1, 0.01, 0.005, 0.0025])
    lengths.trim([1], [[1, 2, 3]], [[0.99, 0.99, 0.01]])
    lengths.observe(1, 2, 1)  # refused before the cut: nothing is known of what lies behind it
    assert own.tries[2] == pytest.approx(0.97)
    for request in (1, 2):
        lengths.finish(request)
    assert not len(lengths._memory)


def test_a_request_whose_drafts_are_always_doubtful_is_no_longer_drafted_for() -> None:
    lengths = policy()
    lengths.whole = lengths.confident = True
    asked = []
    for _ in range(400):
        (count,) = lengths.choose([1], [7])
        asked.append(count)
        if count:
            drafts = [list(range(7))]
            lengths.trim([1], drafts, [[0.05] * 7])
            lengths.observe(1, len(drafts[0]), 0)
    assert asked[0] == 7 and sum(asked[200:]) < 7 * 20


@settings(deadline=None)
@given(st.lists(st.floats(0, 1), max_size=6), st.integers(0, 3))
def test_expected_drafts_keep_chances_chances(chances: list[float], first: int) -> None:
    own = Acceptance()
    own.observe(first, first)
    own.expect(first, chances)
    assert all(0 <= h <= t + 1e-12 for h, t in zip(own.hits, own.tries, strict=True))
    survival = own.survival(8)
    assert all(a >= b >= 0 for a, b in itertools.pairwise(survival))


def test_slots_that_cannot_pay_are_not_drafted() -> None:
    even = table({1: 1.0, 2: 1.3, 3: 1.6, 4: 1.9})
    assert slot_worths((), [[0.8, 0.5, 0.2]], even, 1.0, 4.0, 1) == pytest.approx([0.5, 0.2, 0.0])
    assert slot_worths([0.5], [[0.4, 0.5]], even, 1.0, 4.0, 1) == pytest.approx([0.4, 0.2])
    rising = table({1: 1.0, 2: 1.1, 3: 1.3, 4: 1.8})
    assert slot_worths((), [[0.8, 0.5, 0.3]], rising, 1.0, 4.0, 1) == pytest.approx([0.7, 0.3, 0.0]), "each by its row"
    lengths = policy()
    lengths.whole = lengths.confident = True
    lengths.draft = table({rows: 0.1 + 0.02 * rows for rows in range(1, 60)})
    asked = []
    for _ in range(900):  # sure of two drafts, and of none behind them
        (count,) = lengths.choose([1], [7])
        asked.append(count)
        if count:
            drafts = [list(range(count))]
            lengths.trim([1], drafts, [[0.9, 0.9, 0.3, 0.3, 0.3, 0.3, 0.3][:count]])
            lengths.observe(1, len(drafts[0]), 2)
    assert asked[0] == 7 and {2, 3} & set(asked[100:]), "shorter blocks"
    assert 2 <= asked[100:].count(7) <= 20, "and whole ones now and then"
    lengths.confident = False  # a tree
    assert lengths.choose([2], [7]) == [7]


def test_slots_are_weighed_in_seconds_from_the_start() -> None:
    """What the first blocks of a process seem to save, when costs are not known yet, is soon forgotten."""
    lengths = DraftLengthPolicy()
    lengths.whole = lengths.confident = True
    asked = []
    for step in range(400):
        (count,) = lengths.choose([1], [7])
        asked.append(count)
        drafts = [list(range(count))]
        if count:
            chances = [0.95] * 7 if step < 3 else [0.9, 0.8, 0.3, 0.2, 0.2, 0.2, 0.2]
            lengths.trim([1], drafts, [chances[:count]])
            lengths.observe_draft(1 + count, 1, 0.0004 + 0.0002 * count)
        lengths.observe_step(1 + len(drafts[0]), len(drafts[0]), 0.005 + 0.001 * len(drafts[0]))
        lengths.observe(1, len(drafts[0]), min(2, len(drafts[0])))
    assert asked[200:].count(7) < 40 and sum(asked[200:]) < 4 * 200


def test_chances_that_promise_too_much_are_discounted() -> None:
    honest, boasting = policy(), policy()
    for i in range(300):
        for lengths, accepted in ((honest, 3 if i % 4 else 0), (boasting, i % 2)):
            drafts = [[1, 2, 3, 4]]
            lengths.trim([1], drafts, [[0.8, 0.95, 0.98, 0.02]])
            lengths.observe(1, len(drafts[0]), min(accepted, len(drafts[0])))
    assert survivals_of([[0.5, 0.5]], 0.5) == [[0.25, 0.125]] and survivals_of([[0.9]], 2.0) == [[1.0]]
    assert boasting._memory.trust < 0.4
    assert honest._memory.trust == pytest.approx(1.0, abs=0.1)


def test_found_drafts_say_nothing_of_chances() -> None:
    lengths = policy()
    lengths.trim([1], [[1, 2, 3]], [[1.0, 1.0, 1.0]])
    lengths.observe(1, 3, 0)
    assert lengths._memory.promised == lengths._memory.kept == TRUST_PRIOR


def test_knowing_what_to_cut_is_worth_something() -> None:
    """Half of the blocks are sure, half are hopeless: cut in time, drafts pay more than on average."""
    lengths = policy()
    lengths.whole = lengths.confident = True
    lengths.verify = table({rows: 0.6 + 0.4 * rows for rows in range(1, 60)})
    lengths.draft = table({rows: 0.1 for rows in range(1, 60)})
    for i in range(200):
        lengths.overall.observe(6, 6 * (i % 2))
    asked = []
    for i in range(600):
        (count,) = lengths.choose([1], [6])
        asked.append(count)
        if count:
            drafts, sure = [list(range(count))], i % 2
            lengths.trim([1], drafts, [([0.99] if sure else [0.02]) * count])
            lengths.observe(1, len(drafts[0]), len(drafts[0]) * sure)
    assert lengths._option > 1.1
    assert sum(map(bool, asked[300:])) > 250, "there are a few plain steps, to know what they cost"
