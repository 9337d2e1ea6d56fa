"""Native arithmetic of draft lengths against the same in Python: choices are the same, to the last draft."""

from __future__ import annotations

import random
from itertools import accumulate
from operator import mul
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline._native import DraftMemory
from paceline.speculation import allotment
from paceline.speculation.acceptance import FORGET, PRIOR_FORGET, TRUST_FORGET, TRUST_PRIOR, Acceptance, Trust
from paceline.speculation.calibration import Calibration
from paceline.speculation.cost_table import KNOTS, CostCurve, CostTable, Pace, rising

from . import arithmetic as python

CHANCES = st.floats(0.0, 1.0)
SURVIVALS = st.lists(st.lists(CHANCES, max_size=7).map(lambda row: sorted(row, reverse=True)), min_size=1, max_size=5)


def table(seed: int, rows: int) -> CostTable:
    draw, costs, seconds = random.Random(seed), CostTable(), 1.0
    for n in range(1, rows + 1):
        costs.preset({n: seconds})
        seconds += draw.choice((0.0, 0.1, draw.random()))
    return costs


@settings(deadline=None)
@given(SURVIVALS, st.integers(0, 2**32), st.integers(0, 3), st.floats(0.0, 2.0), st.data())
def test_lengths_are_those_of_python(
    survivals: list[list[float]], seed: int, others: int, paid: float, data: st.DataObject
) -> None:
    """Equal chances and equal rates, too, which a sort or a comparison could break in another way."""
    if data.draw(st.booleans()):
        survivals = [[round(s, 1) for s in row] for row in survivals]
    drafts, costs = sum(map(len, survivals)), table(seed, 50)
    assert allotment.admitted(survivals, costs, paid, others) == python.admitted(survivals, costs, paid, others)
    count = data.draw(st.integers(0, drafts + 1))
    lengths, expected = allotment.likeliest(survivals, count)
    assert (lengths, pytest.approx(expected)) == python.likeliest(survivals, count)
    found = data.draw(st.one_of(st.just([]), st.lists(st.booleans(), min_size=len(survivals), max_size=len(survivals))))
    margin, draw = data.draw(st.sampled_from((-1.0, 0.0, 0.3))), random.Random(seed)
    prices = list(accumulate(draw.random() / 4 for _ in range(drafts + 1)))
    arguments: tuple[Any, ...] = (others, found, margin)
    wanted = python.best_lengths(survivals, costs, prices.__getitem__, *arguments)
    assert allotment.best_lengths(survivals, costs, prices.__getitem__, *arguments) == wanted
    wanted = python.best_lengths(survivals, costs, lambda _: paid, *arguments)
    assert allotment.best_lengths(survivals, costs, paid, *arguments) == wanted


@given(st.lists(st.lists(CHANCES, max_size=7), max_size=4), st.floats(0.1, 2.0))
def test_survivals_are_those_of_python(chances: list[list[float]], trust: float) -> None:
    assert allotment.survivals_of(chances, trust) == python.survivals_of(chances, trust)


@settings(deadline=None)
@given(SURVIVALS, st.lists(st.floats(0.0, 2.0), max_size=8), st.floats(0.0, 2.0), st.integers(0, 2**32))
def test_worths_of_slots_are_those_of_python(
    survivals: list[list[float]], worths: list[float], token: float, seed: int
) -> None:
    slots, costs, rows = max(map(len, survivals)), table(seed, 50), 2
    seconds = costs.several(rows, len(survivals) * slots)
    prices = python.row_prices(seconds, len(survivals), slots)
    wanted = list(worths)
    for survival in survivals:
        shown = [max(0.0, s * token - price) for s, price in zip(survival, prices, strict=False)]
        for j, worth in enumerate(shown[: len(wanted)]):
            wanted[j] += (worth - wanted[j]) / 32.0
        wanted += shown[len(wanted) :]
    assert allotment.slot_worths(worths, survivals, costs, token, 32.0, rows) == pytest.approx(wanted, abs=1e-12)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.floats(-900, 900, width=32), st.floats(-40, 40, width=32)), max_size=9),
    st.lists(st.floats(0.01, 100), max_size=4),
    st.one_of(st.none(), st.tuples(*[st.floats(-100, 100)] * 3)),
)
def test_chances_are_those_of_python(
    values: list[tuple[float, float]], temperatures: list[float], mix: tuple[float, float, float] | None
) -> None:
    """Logits for which an exponential has no end in doubles among them."""
    logits, own = [a for a, _ in values], [b for _, b in values]
    wanted = python.chances(temperatures, mix, logits, own)
    assert Calibration(tuple(temperatures), mix).chances(logits, own) == pytest.approx(wanted, rel=1e-12, abs=1e-300)


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("observe"), st.integers(0, 7), st.integers(0, 7), st.sampled_from((1.0, FORGET))),
        st.tuples(st.just("expect"), st.integers(0, 4), st.lists(CHANCES, max_size=4), st.sampled_from((1.0, FORGET))),
        st.tuples(st.just("fade"), st.floats(0.0, 1.0)),
    ),
    max_size=20,
)


@given(OPERATIONS, OPERATIONS, st.integers(0, 9))
def test_acceptance_is_that_of_python(one: list[Any], two: list[Any], length: int) -> None:
    pairs = []
    for operations in (one, two):
        native, reference = Acceptance(), python.Acceptance()
        for name, *arguments in operations:
            for side in (native, reference):
                getattr(side, name)(*arguments)
        assert (native.tries, native.hits) == (reference.tries, reference.hits)
        pairs.append((native, reference))
    (own, own_reference), (prior, prior_reference) = pairs
    assert own.survival(length) == own_reference.survival(length)
    assert own.survival(length, prior) == own_reference.survival(length, prior_reference)


@given(st.lists(st.tuples(st.sampled_from((0.5, 1.0, 1.5, 2.0, 7.0)), st.integers(1, 9)), max_size=16))
def test_smoothing_is_that_of_python(points: list[tuple[float, int]]) -> None:
    values, weights = [value for value, _ in points], [float(weight) for _, weight in points]
    assert rising(values, weights) == python.rising(values, weights)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32), st.integers(50, 600), st.booleans())
def test_curves_are_those_of_python(seed: int, steps: int, preset: bool) -> None:
    follow(seed, steps, preset=preset)


def test_curves_fade_as_those_of_python() -> None:
    """One size looks dear and is not seen again for thousands of steps."""
    follow(1, 5200, preset=False, seen_once=8)


def follow(seed: int, steps: int, *, preset: bool, seen_once: int = 0) -> None:
    """Steps of two curves with one pace, on a machine that jumps and interrupts."""
    draw = random.Random(seed)
    pace, reference = Pace(), python.Pace()
    natives = [CostCurve(pace), CostCurve(pace)]
    references = [python.CostCurve(reference), python.CostCurve(reference)]
    if preset:
        medians = {k: 0.002 + 0.0004 * k * draw.uniform(0.8, 1.2) for k in draw.sample(KNOTS, draw.randint(1, 6))}
        for curve in (natives[0], references[0]):
            curve.preset(medians)
    sizes, speed = [draw.choice((1, 2, 3, 5, 6, 9, 30, 600)) for _ in range(4)], 1.0
    for step in range(steps):
        if draw.random() < 0.02:
            speed = draw.choice((0.7, 1.0, 1.8))
        which, rows = draw.randrange(2), draw.choice(sizes)
        seconds = (0.002 + 0.0004 * rows) * speed * draw.uniform(0.9, 1.2) * (4.0 if draw.random() < 0.03 else 1.0)
        if seen_once and step < 40:
            rows, seconds = seen_once, 0.05
        for curves in (natives, references):
            curves[which].observe(rows, seconds)
        if draw.random() < 0.3:
            asked = draw.choice(sizes)
            for mine, his in zip(natives, references, strict=True):
                assert mine.seconds(asked) == pytest.approx(his.seconds(asked), rel=1e-9)
    for mine, his in zip(natives, references, strict=True):
        assert mine.several(1, 40) == pytest.approx([his.seconds(1 + n) for n in range(41)], rel=1e-9)
        assert mine.medians == pytest.approx(his.medians, rel=1e-9)
        assert mine.row_seconds == pytest.approx(his.row_seconds, rel=1e-9)
        assert (mine.changes, mine.known) == (his.changes, his.known)
        for rows in (1, 3, 8, 20, 700):
            assert [mine.settled(rows, n) for n in (3.0, 12.0)] == [his.settled(rows, n) for n in (3.0, 12.0)]


class Memory:
    """What the policy remembers of requests, in Python."""

    def __init__(self) -> None:
        self.overall, self.trust = python.Acceptance(), Trust()
        self.own: dict[int, python.Acceptance] = {}
        self.cut_off: dict[int, list[float]] = {}
        self.said: dict[int, float] = {}

    def survivals(self, requests: list[int], limits: list[int]) -> list[list[float]]:
        return [
            self.own[r].survival(n, self.overall) if r in self.own else self.overall.survival(n)
            for r, n in zip(requests, limits, strict=True)
        ]

    def cut(self, requests: list[int], drafts: list[list[int]], chances: list[list[float]], lengths: list[int]) -> None:
        for request, row, said, length in zip(requests, drafts, chances, lengths, strict=True):
            if row and min(said) < 1.0:
                self.said[request] = sum(accumulate(said[:length], mul))
            if length < len(row):
                self.cut_off[request] = list(said[length:])
                del row[length:]

    def observe(self, request: int, drafted: int, accepted: int) -> None:
        cut, said = self.cut_off.pop(request, []), self.said.pop(request, None)
        if said is not None and drafted:
            self.trust.observe(said, accepted)
        own = self.own.setdefault(request, python.Acceptance()) if drafted or cut else python.Acceptance()
        if drafted:
            self.overall.observe(drafted, accepted, PRIOR_FORGET)
            own.observe(drafted, accepted, FORGET)
        if cut and accepted == drafted:
            self.overall.expect(drafted, cut, 1.0 if drafted else PRIOR_FORGET)
            own.expect(drafted, cut, 1.0 if drafted else FORGET)


@settings(deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_what_is_cut_and_remembered_is_what_python_does(seed: int, native_curves: bool) -> None:
    draw, pace = random.Random(seed), Pace()
    verify, draft = CostCurve(pace), CostCurve(pace)
    verify.preset({k: 0.002 + 0.0004 * k for k in KNOTS[:8]})
    draft.preset({k: 0.0005 + 0.00005 * k for k in KNOTS[:8]})
    native, reference = DraftMemory(FORGET, PRIOR_FORGET, TRUST_PRIOR, TRUST_FORGET), Memory()
    for _ in range(draw.randint(1, 25)):
        requests = draw.sample(range(4), draw.randint(1, 3))
        limits = [draw.randint(0, 7) for _ in requests]
        assert native.survivals(requests, limits) == reference.survivals(requests, limits)
        one = [list(range(draw.choice((0, 1, n)))) for n in limits]
        two = [row.copy() for row in one]
        chances = [[draw.choice((1.0, draw.random())) for _ in row] for row in one]
        survivals = python.survivals_of(chances, reference.trust.share)
        made = [len(row) for row in one if row]
        paid = draft.seconds(len(made) + sum(made)) if made else 0.0
        wanted = python.admitted(survivals, verify, paid)
        if native_curves:
            assert native.trim(requests, one, chances, len(requests), verify, draft, 3.0)
        else:
            native.cut(requests, one, chances, allotment.admitted(survivals, verify, paid))
        if made:
            reference.cut(requests, two, chances, wanted)
        assert one == two
        for request, row in zip(requests, one, strict=True):
            accepted = draw.randint(0, len(row))
            native.observe(request, len(row), accepted)
            reference.observe(request, len(row), accepted)
        assert native.trust == pytest.approx(reference.trust.share, rel=1e-12)
        for request in range(4):
            mine, his = native.of(request), reference.own.get(request)
            assert (mine is None) == (his is None)
            assert mine is None or his is None or (mine.tries, mine.hits) == (his.tries, his.hits)
    assert (native.overall.tries, native.overall.hits) == (reference.overall.tries, reference.overall.hits)
    for request in range(4):
        native.finish(request)
    assert not len(native)


def test_kept_lengths_are_for_what_they_were_chosen_for() -> None:
    memory = DraftMemory(FORGET, PRIOR_FORGET, TRUST_PRIOR, TRUST_FORGET)
    first = ([1, 2], [7, 3], 4, 0.08)
    for other in (([1, 3], [7, 3], 4, 0.08), ([1, 2], [7, 2], 4, 0.08), ([1, 2], [7, 3], 5, 0.08), ([1], [7], 4, 0.08)):
        memory.keep(*first, 0.1, 5)
        assert memory.holds(*first)
        assert not memory.holds(*other)
        assert not memory.holds(*first), "they are dropped"
    memory.keep(*first, 0.1, 2)
    assert [memory.holds(*first) for _ in range(3)] == [True, True, False]
    for _ in range(60):
        memory.observe(1, 7, 3)
    memory.keep(*first, 0.1, 100)
    memory.observe(1, 7, 3)
    assert memory.holds(*first), "it has hardly changed"
    for _ in range(40):
        memory.observe(1, 7, 0)
    assert not memory.holds(*first)
    memory.keep(*first, 0.1, 5)
    memory.drop()
    assert not memory.holds(*first)
