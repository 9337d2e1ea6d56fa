"""What a step costs, by the rows of its pass: as one run measured it, or learned for good on a machine that slows down
and speeds up under way."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

WINDOW = 15  # passes of one size whose median counts: a pass that was interrupted does not
REFIT_AFTER = 16  # observations
KNOTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # rows
PACE_WINDOW = 16  # steps
ENOUGH_OTHERS = 8  # of them: what runs most of the time is what other sizes are compared with
PACE_NOW = 9  # steps: as far back as the present goes
RATE = 1 / 16  # of what a step shows, in the long run
SURPRISE = 0.1  # most that one step can show, as the logarithm of a ratio, once a size is known: the rare long ones
# weigh hardly more than the others, and costs are near the median
STALE_AFTER = 4096  # steps since a size was last seen: from then on it is believed less and less
FADING = 0.02  # of the way to what the floor says, at each fit
TRUST = 12.0  # steps after which a size is known; what an earlier run learned counts as twice as many


class Costs(Protocol):
    """Seconds of a step over the rows of its pass."""

    changes: int

    def observe(self, rows: int, seconds: float) -> None:
        """A step of so many rows took so long."""

    def preset(self, medians: Mapping[int, float]) -> None:
        """Start from the `medians` of an earlier run; what is observed replaces them."""

    def seconds(self, rows: int) -> float:
        """What to expect of one."""

    @property
    def medians(self) -> dict[int, float]:
        """Rows -> seconds, of what was measured."""

    @property
    def known(self) -> bool:
        """Whether anything was observed."""

    @property
    def row_seconds(self) -> float:
        """What a row costs in a pass of many, which computes rather than waits for memory."""

    def settled(self, rows: int) -> bool:
        """Whether more is known of a pass of so many rows than what a few steps happened to take."""


def neighbours(rows: int) -> tuple[int, int]:
    """The knots above and below a size."""
    above = next((knot for knot in KNOTS if knot > rows), rows)
    return above, next((knot for knot in reversed(KNOTS) if knot < rows), rows)


def floor_shape(rows: float, knee: float = 16.0, slope: float = 1 / 64) -> float:
    """Seconds of a pass in passes of one row: reading the weights takes as long as the arithmetic of `knee` rows, so up
    to there a row costs next to nothing, and beyond it each costs 1 / knee of a one-row pass."""
    return (1.0 + slope * (rows - 1)) * max(1.0, rows / knee)


class Pace:
    """How much longer a step takes now than costs say, as a logarithm: neighbours on a shared machine slow passes of
    every size down for a while."""

    def __init__(self) -> None:
        self._recent: deque[tuple[int, float]] = deque(maxlen=PACE_WINDOW)

    def feel(self, rows: int, ratio: float) -> None:
        """A step took exp(ratio) times as long as expected."""
        self._recent.append((rows, ratio))

    @property
    def now(self) -> float:
        recent = [ratio for _, ratio in self._recent][-PACE_NOW:]
        return statistics.median_low(recent) if recent else 0.0

    def by_others(self, rows: int) -> float | None:
        """As steps of other sizes tell; None if too few of them ran of late. A size alone cannot tell whether it or the
        machine has changed."""
        others = [ratio for size, ratio in self._recent if size != rows]
        return statistics.median_low(others[-PACE_NOW:]) if len(others) >= ENOUGH_OTHERS else None


class CostCurve:
    """Costs that are learned over many steps, for choices between sizes; see `Costs`.

    Sizes are compared as if all had been measured in the same moment: what a step took is divided by the pace of the
    steps around it. Else a size that was last tried in a bad moment looks dear for good, since what looks dear is not
    tried again. A curve with few knots, which every step moves a little, lets sizes learn from their neighbours.

    pace: shared by curves whose seconds are added up. leads: this one tells it how long steps take now.
    """

    def __init__(self, pace: Pace, *, leads: bool = False) -> None:
        self.changes = 0
        self._pace, self._leads = pace, leads
        self._seen: set[int] = set()
        self._weight = [0.0] * len(KNOTS)  # steps that showed a knot
        self._last = [0] * len(KNOTS)  # the step that last did
        self._value = [0.0] * len(KNOTS)  # logarithm of seconds, where the weight is not 0
        self._fitted: list[float] = []  # seconds of all knots
        self._stale = 0  # steps since
        self._known: dict[int, float] = {}  # rows -> seconds by them

    def observe(self, rows: int, seconds: float) -> None:
        """The first step of a size does not count: it touches memory first."""
        if rows not in self._seen:
            self._seen.add(rows)
            return
        near, took = self._near(rows), math.log(seconds)
        trusted = self.settled(rows)
        expected = math.log(self.seconds(rows)) if self.known else took - self._pace.now
        pace: float | None
        if trusted and self._leads:
            pace = self._pace.by_others(rows)
            self._pace.feel(rows, took - expected)
        else:
            pace = self._pace.now
        self.changes += 1
        self._stale += 1
        for knot, share in near:
            self._last[knot] = self.changes
            if pace is not None:
                surprise = took - pace - expected
                self._learn(knot, share, expected, max(-SURPRISE, min(SURPRISE, surprise)) if trusted else surprise)
        if not trusted or self._stale >= REFIT_AFTER:
            self._refit()

    def _learn(self, knot: int, share: float, expected: float, surprise: float) -> None:
        if not self._weight[knot]:
            self._value[knot] = math.log(self._fitted[knot]) if self._fitted else expected
        self._weight[knot] += share
        self._value[knot] += share * max(RATE, min(1.0, 1.0 / self._weight[knot])) * surprise

    def preset(self, medians: Mapping[int, float]) -> None:
        for rows, seconds in medians.items():
            if rows in KNOTS:
                knot = KNOTS.index(rows)
                self._value[knot], self._weight[knot] = math.log(seconds), 2 * TRUST
        self._fitted = []  # these are at a scale of their own
        self._refit()

    def _refit(self) -> None:
        self._fade()
        before, self._fitted, self._stale = self._fitted, self._fit(), 0
        known = [knot for knot, weight in enumerate(self._weight) if weight >= TRUST]
        if self._leads and before and len(known) > 1:
            # sizes are told apart, not how fast the machine is, which is the pace's: together they stay where they were
            drift = sum(math.log(self._fitted[knot] / before[knot]) for knot in known) / len(known)
            self._fitted = [seconds * math.exp(-drift) for seconds in self._fitted]
        # what is learned starts from here again: values that smoothing hides would drift away unseen
        for knot, weight in enumerate(self._weight):
            if weight:
                self._value[knot] = math.log(self._fitted[knot])
        self._known.clear()

    def _fade(self) -> None:
        """What looks dear and was not seen for long is slowly taken to cost what the floor says, until it is tried."""
        now = max(range(len(KNOTS)), key=self._last.__getitem__)
        for knot, weight in enumerate(self._weight):
            if weight and self._last[now] - self._last[knot] > STALE_AFTER:
                target = self._value[now] + math.log(floor_shape(KNOTS[knot]) / floor_shape(KNOTS[now]))
                self._value[knot] += FADING * min(0.0, target - self._value[knot])

    @property
    def known(self) -> bool:
        return bool(self._fitted) or any(self._weight)

    @property
    def medians(self) -> dict[int, float]:
        """Of the knots that were learned."""
        return {
            rows: math.exp(value)
            for rows, value, weight in zip(KNOTS, self._value, self._weight, strict=True)
            if weight >= TRUST
        }

    @property
    def row_seconds(self) -> float:
        largest = max((rows for rows, weight in zip(KNOTS, self._weight, strict=True) if weight), default=1)
        return max(self.seconds(1) / 16, self.seconds(largest) / largest if largest > 16 else 0.0)

    def seconds(self, rows: int) -> float:
        """At the pace of the curve; in passes of one row as long as nothing was observed."""
        known = self._known.get(rows)
        if known is None:
            known = self._known[rows] = self._interpolate(rows)
        return known

    def _interpolate(self, rows: int) -> float:
        if not self._fitted:
            return floor_shape(rows)
        if rows >= KNOTS[-1]:
            return self._fitted[-1] * floor_shape(rows) / floor_shape(KNOTS[-1])
        return sum(share * self._fitted[knot] for knot, share in self._near(rows))

    def settled(self, rows: int) -> bool:
        return all(self._weight[knot] >= TRUST for knot, _ in self._near(rows))

    @staticmethod
    def _near(rows: int) -> list[tuple[int, float]]:
        """The knots around, with their shares."""
        at = bisect_right(KNOTS, rows) - 1
        if at == len(KNOTS) - 1 or KNOTS[at] == rows:
            return [(at, 1.0)]
        share = (rows - KNOTS[at]) / (KNOTS[at + 1] - KNOTS[at])
        return [(at, 1.0 - share), (at + 1, share)]

    def _fit(self) -> list[float]:
        """Seconds of all knots such that more rows never take less, unknown ones along the floor from the nearest."""
        seen = [knot for knot, weight in enumerate(self._weight) if weight]
        if not seen:
            return []
        fitted = rising([math.exp(self._value[knot]) for knot in seen], [min(self._weight[k], 64.0) for k in seen])
        table = dict(zip(seen, fitted, strict=True))
        out = []
        for knot, rows in enumerate(KNOTS):
            below = max((k for k in seen if k <= knot), default=seen[0])
            above = min((k for k in seen if k >= knot), default=seen[-1])
            if below < knot < above:
                share = (rows - KNOTS[below]) / (KNOTS[above] - KNOTS[below])
                out.append(table[below] * (1.0 - share) + table[above] * share)
            else:
                near = below if below <= knot else above
                out.append(table[near] * floor_shape(rows) / floor_shape(KNOTS[near]))
        return out


class CostTable:
    """Costs as one run measured them, medians by size; see `Costs`.

    Until measured, sizes are interpolated between measured ones and extended from the nearest along a floor. Measured
    sizes are smoothed so that more rows never take less time: a few passes that were disturbed do not mislead.
    """

    def __init__(self) -> None:
        self._seen: dict[int, deque[float]] = {}
        self._median: dict[int, float] = {}
        self._sizes: list[int] = []  # of _median, in order
        self._fitted: list[float] = []  # seconds of _sizes, made to rise with them
        self._stale = 0  # changes since
        self.changes = 0

    def observe(self, rows: int, seconds: float) -> None:
        """A step with this many rows took so long. The first of a size does not count: it touches memory first."""
        times = self._seen.get(rows)
        if times is None:
            self._seen[rows] = deque(maxlen=WINDOW)
            return
        times.append(seconds)
        self._set(rows, statistics.median_low(times))

    def preset(self, medians: Mapping[int, float]) -> None:
        for rows, seconds in medians.items():
            self._seen.setdefault(rows, deque(maxlen=WINDOW)).append(seconds)
            self._set(rows, seconds)

    def _set(self, rows: int, seconds: float) -> None:
        if rows not in self._median:
            insort(self._sizes, rows)
            self._fitted = []
        self._median[rows] = seconds
        self._stale += 1
        self.changes += 1

    def _fit(self) -> list[float]:
        """Seconds per size such that more rows never take less: sizes that were seen often count for more."""
        if not self._fitted or self._stale >= REFIT_AFTER:
            weights = [len(self._seen[rows]) for rows in self._sizes]
            self._fitted = rising([self._median[rows] for rows in self._sizes], weights)
            self._stale = 0
        return self._fitted

    @property
    def known(self) -> bool:
        return bool(self._median)

    @property
    def medians(self) -> dict[int, float]:
        return {rows: self._median[rows] for rows in self._sizes}

    @property
    def row_seconds(self) -> float:
        """What a row costs in a pass of many, which computes rather than waits for memory."""
        largest = self._sizes[-1] if self._sizes else 1
        return max(self.seconds(1) / 16, self.seconds(largest) / largest if largest > 16 else 0.0)

    def settled(self, rows: int) -> bool:
        return True

    def seconds(self, rows: int) -> float:
        """Expected seconds of a step of `rows` rows; in passes of one row as long as nothing was measured."""
        if not self._sizes:
            return floor_shape(rows)
        fitted, at = self._fit(), bisect_left(self._sizes, rows)
        if at < len(self._sizes) and self._sizes[at] == rows:
            return fitted[at]
        if 0 < at < len(self._sizes):
            low, high = self._sizes[at - 1], self._sizes[at]
            share = (rows - low) / (high - low)
            return fitted[at - 1] * (1 - share) + fitted[at] * share
        near = 0 if at == 0 else -1
        return fitted[near] * floor_shape(rows) / floor_shape(self._sizes[near])


def rising(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The non-decreasing sequence nearest to `values` in weighted absolute differences, so that a size whose every pass
    was disturbed does not raise its neighbours (pool adjacent violators, with medians)."""
    pools: list[tuple[float, list[tuple[float, float]]]] = []  # median, members with their weights
    for value, weight in zip(values, weights, strict=True):
        median, members = value, [(value, float(weight))]
        while pools and pools[-1][0] >= median:
            members = pools.pop()[1] + members
            median = weighted_median(members)
        pools.append((median, members))
    return [median for median, members in pools for _ in members]


def weighted_median(members: Sequence[tuple[float, float]]) -> float:
    """The least value at which half of the weight is reached."""
    half, reached = sum(weight for _, weight in members) / 2.0, 0.0
    for value, weight in sorted(members):
        reached += weight
        if reached >= half:
            return value
    raise ValueError("no members")
