"""What a step costs, by the rows of its pass: as one run measured it, or learned for good on a machine that slows down
and speeds up under way (the latter is native: `native/cost_curve.cpp`)."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from paceline import _native

WINDOW = 15  # passes of one size whose median counts: a pass that was interrupted does not
REFIT_AFTER = 16  # observations of a `CostTable`
KNOTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # rows
BEND = 0.15**2  # variance at a knot, in logarithms of seconds over those of rows to the base of two
KINK = 0.03**2  # of a knot by itself
ANY_LEVEL = 1e4  # of a curve of which nothing is known
PRESET = 0.07**2  # of what an earlier run learned
TRUST = 12.0  # steps after which a size is known; what an earlier run learned counts as twice as many (native, too)


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

    def several(self, rows: int, more: int) -> Sequence[float]:
        """The same of rows, rows + 1, ..., rows + more."""

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


class Pace(_native.Pace):
    """What is known of the logarithms of seconds at the knots of some curves, which the machine's pace moves together.

    Neighbours on a shared machine slow passes of every size down for a while: how long a step takes now says little
    about a size, while what it takes against the steps around it says much. So all knots are one Kalman filter, whose
    state wanders in common from step to step. What a step shows beyond the expected moves its own size as far as that
    is uncertain against the pace, and other sizes as far as they are known in terms of it.
    """

    def __init__(self) -> None:
        super().__init__(KNOTS, _FLOOR.tolist(), _SHAPES.tolist(), ANY_LEVEL)


class CostCurve(_native.CostCurve):
    """Costs that are learned over many steps, for choices between sizes; see `Costs`.

    Sizes are compared as if all had been measured in the same moment, see `Pace`. Else a size that was last tried in a
    bad moment looks dear for good, since what looks dear is not tried again. A curve with few knots, which every step
    moves a little, lets sizes learn from their neighbours: it is taken to be one of gentle bends, as a logarithm over
    that of rows. What looks dear and was not seen for long is slowly taken to cost what the floor says, until it is
    tried. More rows never take less, and beyond what was seen a row never takes more.

    Made from a `Pace`, which curves share whose seconds are added up.
    """

    def preset(self, medians: Mapping[int, float]) -> None:
        """The curve is as an earlier run left it, at a pace of its own."""
        values = {KNOTS.index(rows): math.log(seconds) for rows, seconds in medians.items() if rows in KNOTS}
        if not values:
            return
        knots = list(values)
        level = float(np.mean([values[knot] - _FLOOR[knot] for knot in knots]))
        prior = _SHAPES + ANY_LEVEL
        gain = np.linalg.solve(prior[np.ix_(knots, knots)] + 1e-9 * np.eye(len(knots)), prior[knots]).T
        mean = _FLOOR + level + gain @ (np.array([values[knot] - level for knot in knots]) - _FLOOR[knots])
        mean[knots] = list(values.values())
        cov = prior - gain @ prior[knots] + PRESET * (1.0 + np.eye(len(KNOTS)))
        self.start(mean.tolist(), cov.tolist(), knots)


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

    def several(self, rows: int, more: int) -> Sequence[float]:
        return [self.seconds(rows + n) for n in range(more + 1)]


def rising(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The non-decreasing sequence nearest to `values` in weighted absolute differences, so that a size whose every pass
    was disturbed does not raise its neighbours (pool adjacent violators, with medians)."""
    return _native.rising(values, weights)
