"""What a step costs, by the rows of its pass: as one run measured it, or learned for good on a machine that slows down
and speeds up under way."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

WINDOW = 15  # passes of one size whose median counts: a pass that was interrupted does not
REFIT_AFTER = 16  # observations of a `CostTable`
REFIT_CURVE_AFTER = 4  # of a `CostCurve`
LOOK_EVERY = 8  # steps of a settled size, at most
KNOTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # rows
NOISE = 0.2**2  # of a step, as all variances here of the logarithm of seconds; what disturbs one disturbs the next, too
PACE_STEP = 0.03**2  # by which the pace wanders from one step to the next
BEND = 0.15**2  # of the curve at a knot, in logarithms of seconds over those of rows to the base of two
KINK = 0.03**2  # of a knot by itself
ANY_LEVEL = 1e4  # of a curve of which nothing is known
FORGET_COSTS = 1 / 8192  # of what is known of the shape of curves, with each step that counts
PRESET = 0.07**2  # of what an earlier run learned
ANY_PACE = 0.3**2  # of the present against that run
FAR_OUT = 2.0  # standard deviations; a step counts no further than that
DOUBT = 256.0  # part of its square that counts against what is known of the size
JUMP_AFTER = 3  # steps in a row that are as far out: it is not one size
UNSEEN = 1e-3  # weight of a size that was never seen, in steps
STALE_AFTER = 4096  # steps since a size was last seen: from then on it is believed less and less
FADING = 0.02  # of the way to what the floor says, at each fit
TRUST = 12.0  # steps after which a size is known; what an earlier run learned counts as twice as many


class Costs(Protocol):
    """Seconds of a step over the rows of its pass."""

    changes: int

    @property
    def known(self) -> bool:
        """Whether anything was observed."""

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
    def row_seconds(self) -> float:
        """What a row costs in a pass of many, which computes rather than waits for memory."""

    def settled(self, rows: int, steps: float = TRUST) -> bool:
        """Whether more is known of a pass of so many rows than what a few steps happened to take: that many showed."""


def neighbours(rows: int) -> tuple[int, int]:
    """The knots above and below a size."""
    above = next((knot for knot in KNOTS if knot > rows), rows)
    return above, next((knot for knot in reversed(KNOTS) if knot < rows), rows)


def floor_shape(rows: float, knee: float = 16.0, slope: float = 1 / 64) -> float:
    """Seconds of a pass in passes of one row: reading the weights takes as long as the arithmetic of `knee` rows, so up
    to there a row costs next to nothing, and beyond it each costs 1 / knee of a one-row pass."""
    return (1.0 + slope * (rows - 1)) * max(1.0, rows / knee)


def _shapes() -> np.ndarray:
    """Covariance of the knots of a curve that bends at each of them, without its level."""
    at = np.log2(np.array(KNOTS, float))
    bends = np.maximum(at[:, None] - at, 0.0)  # [knot, bend]: what a bend of 1 does to the knot
    return BEND * bends @ bends.T + KINK * np.eye(len(KNOTS))


_FLOOR = np.log([floor_shape(rows) for rows in KNOTS])
_SHAPES = _shapes()


class Pace:
    """What is known of the logarithms of seconds at the knots of some curves, which the machine's pace moves together.

    Neighbours on a shared machine slow passes of every size down for a while: how long a step takes now says little
    about a size, while what it takes against the steps around it says much. So all knots are one Kalman filter, whose
    state wanders in common from step to step. What a step shows beyond the expected moves its own size as far as that
    is uncertain against the pace, and other sizes as far as they are known in terms of it.
    """

    def __init__(self) -> None:
        self.mean = np.zeros(0)
        self._cov = np.zeros((0, 0))
        self._wander = np.zeros((0, 0))  # added to it with each step
        self._far_out = 0  # steps in a row that were, below 0 if they were short
        self.fits = 0  # times that what curves were fitted to has changed

    def join(self) -> int:
        """A curve of nothing known: the place of its first knot."""
        first, end = len(self.mean), len(self.mean) + len(KNOTS)
        self.mean = np.concatenate([self.mean, _FLOOR])
        self._cov = np.pad(self._cov, (0, len(KNOTS)))
        self._cov[first:end, first:end] = _SHAPES + ANY_LEVEL
        self._wander = np.pad(self._wander - PACE_STEP, (0, len(KNOTS)))
        self._wander[first:end, first:end] = FORGET_COSTS * _SHAPES
        self._wander += PACE_STEP
        return first

    def observe(self, near: Sequence[tuple[int, float]], seconds: float, *, known: bool, again: bool) -> None:
        """A step took so long; near: the knots around its size with their shares. known: the size is, so that it can be
        far out. again: the step before had the same size, so that what has changed since is the pace."""
        self._cov *= 1.0 - FORGET_COSTS
        self._cov += self._wander
        parts = [(knot, share * math.exp(self.mean[knot])) for knot, share in near]
        total = sum(part for _, part in parts)
        shares = [(knot, part / total) for knot, part in parts]
        surprise = math.log(seconds / total)
        column, variance = self._column(shares)
        most = FAR_OUT * math.sqrt(variance)
        if abs(surprise) <= most or not known:
            self._far_out = 0
        else:
            self._far_out = max(0, self._far_out) + 1 if surprise > 0.0 else min(0, self._far_out) - 1
            if again or abs(self._far_out) >= JUMP_AFTER:  # the pace has jumped
                self._cov += surprise**2
                column, variance = self._column(shares)
            else:  # it may have, or the step was interrupted, or this size is another than it was
                for knot, _ in near:
                    self._cov[knot, knot] += surprise**2 / DOUBT
                column, variance = self._column(shares)
                surprise = math.copysign(most, surprise)
        gain = column / variance
        self.mean += gain * surprise
        self._cov -= gain[:, None] * column

    def _column(self, shares: Sequence[tuple[int, float]]) -> tuple[np.ndarray, float]:
        """Covariance of all knots with what such a step takes, and the variance of that."""
        (first, share), *others = shares  # behind a pass each operation on an array takes microseconds
        column = share * self._cov[first]
        for knot, share in others:
            column += share * self._cov[knot]
        return column, NOISE + sum(share * column.item(knot) for knot, share in shares)

    def preset(self, first: int, values: Mapping[int, float]) -> None:
        """The curve at `first` is as an earlier run left it: knot -> logarithm of seconds, at a pace of its own."""
        own = slice(first, first + len(KNOTS))
        knots = list(values)
        level = float(np.mean([values[knot] - _FLOOR[knot] for knot in knots]))
        prior = _SHAPES + ANY_LEVEL
        gain = np.linalg.solve(prior[np.ix_(knots, knots)] + 1e-9 * np.eye(len(knots)), prior[knots]).T
        self.mean[own] = _FLOOR + level + gain @ (np.array([values[knot] - level for knot in knots]) - _FLOOR[knots])
        self.mean[[first + knot for knot in knots]] = list(values.values())
        self._cov[own] = self._cov[:, own] = 0.0
        self._cov[own, own] = prior - gain @ prior[knots] + PRESET * (1.0 + np.eye(len(KNOTS)))
        self._cov += ANY_PACE

    def shift(self, knot: int, value: float) -> None:
        """A knot is taken to be at this value from now on, as little as is known of it."""
        self.mean[knot] = value


class CostCurve:
    """Costs that are learned over many steps, for choices between sizes; see `Costs`.

    Sizes are compared as if all had been measured in the same moment, see `Pace`. Else a size that was last tried in a
    bad moment looks dear for good, since what looks dear is not tried again. A curve with few knots, which every step
    moves a little, lets sizes learn from their neighbours: it is taken to be one of gentle bends, as a logarithm over
    that of rows.

    pace: shared by curves whose seconds are added up.
    """

    def __init__(self, pace: Pace) -> None:
        self.changes = 0
        self.known = False
        self._pace, self._first = pace, pace.join()
        self._seen: dict[int, int] = {}  # rows -> steps
        self._before = 0  # rows of the step before
        self._weight = [0.0] * len(KNOTS)  # steps that showed a knot
        self._last = [0] * len(KNOTS)  # the step that last did
        self._fitted: list[float] = []  # seconds of all knots
        self._fit_of = 0  # which of the pace's fits they are
        self._stale = 0  # steps that counted since
        self._known: dict[int, float] = {}  # rows -> seconds by them

    def observe(self, rows: int, seconds: float) -> None:
        """The first step of a size does not count: it touches memory first. Of sizes that are known well enough, one in
        a few does, since looking takes time, too: the better they are known, the fewer."""
        seen = self._seen[rows] = self._seen.get(rows, 0) + 1
        if seen == 1:
            return
        self.changes += 1
        again, self._before = self._before == rows, rows
        near = self._near(rows)
        weight = min(self._weight[knot] for knot, _ in near)
        known = weight >= TRUST
        if known and seen % min(LOOK_EVERY, int(weight / LOOK_EVERY)):
            return
        self._pace.observe([(self._first + knot, share) for knot, share in near], seconds, known=known, again=again)
        self._stale += 1
        for knot, share in near:
            self._last[knot] = self.changes
            self._weight[knot] += share
        self.known = True
        if self._stale >= REFIT_CURVE_AFTER or not known:
            self._stale = 0
            self._pace.fits += 1

    def preset(self, medians: Mapping[int, float]) -> None:
        values = {KNOTS.index(rows): math.log(seconds) for rows, seconds in medians.items() if rows in KNOTS}
        if not values:
            return
        self._pace.preset(self._first, values)
        self.known = True
        self._weight = [2 * TRUST if knot in values else 0.0 for knot in range(len(KNOTS))]
        self._pace.fits += 1

    def _refit(self) -> None:
        self._fade()
        self._fitted, self._fit_of = self._fit(), self._pace.fits
        # what is learned starts from here again: values that smoothing hides would drift away unseen
        for knot, weight in enumerate(self._weight):
            if weight:
                self._pace.shift(self._first + knot, math.log(self._fitted[knot]))
        self._known.clear()

    def _fade(self) -> None:
        """What looks dear and was not seen for long is slowly taken to cost what the floor says, until it is tried."""
        now = max(range(len(KNOTS)), key=self._last.__getitem__)
        values = self._values
        for knot, weight in enumerate(self._weight):
            if weight and self._last[now] - self._last[knot] > STALE_AFTER:
                target = values[now] + _FLOOR[knot] - _FLOOR[now]
                self._pace.shift(self._first + knot, values[knot] + FADING * min(0.0, target - values[knot]))

    @property
    def _values(self) -> list[float]:
        """Logarithms of seconds at the knots."""
        values: list[float] = self._pace.mean[self._first : self._first + len(KNOTS)].tolist()
        return values

    @property
    def medians(self) -> dict[int, float]:
        """Of the knots that were learned."""
        if self._fit_of != self._pace.fits and self.known:
            self._refit()
        return {
            rows: math.exp(value)
            for rows, value, weight in zip(KNOTS, self._values, self._weight, strict=True)
            if weight >= TRUST
        }

    @property
    def row_seconds(self) -> float:
        largest = max((rows for rows, weight in zip(KNOTS, self._weight, strict=True) if weight), default=1)
        return max(self.seconds(1) / 16, self.seconds(largest) / largest if largest > 16 else 0.0)

    def seconds(self, rows: int) -> float:
        """At the pace of late; in passes of one row as long as nothing was observed."""
        if self._fit_of != self._pace.fits and self.known:
            self._refit()
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

    def settled(self, rows: int, steps: float = TRUST) -> bool:
        return all(self._weight[knot] >= steps for knot, _ in self._near(rows))

    @staticmethod
    def _near(rows: int) -> list[tuple[int, float]]:
        """The knots around, with their shares."""
        at = bisect_right(KNOTS, rows) - 1
        if at == len(KNOTS) - 1 or KNOTS[at] == rows:
            return [(at, 1.0)]
        share = (rows - KNOTS[at]) / (KNOTS[at + 1] - KNOTS[at])
        return [(at, 1.0 - share), (at + 1, share)]

    def _fit(self) -> list[float]:
        """Seconds of all knots such that more rows never take less, and beyond what was seen a row never more."""
        weights = [min(weight, 64.0) or UNSEEN for weight in self._weight]
        fitted = rising([math.exp(value) for value in self._values], weights)
        last = max(knot for knot, weight in enumerate(self._weight) if weight)
        for knot in range(last + 1, len(KNOTS)):
            fitted[knot] = min(fitted[knot], fitted[knot - 1] * KNOTS[knot] / KNOTS[knot - 1])
        return fitted


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

    def settled(self, rows: int, steps: float = TRUST) -> bool:
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
