"""What a step costs, by the rows of its pass: measured while running, on machines whose speed changes under way."""

from __future__ import annotations

import statistics
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping, Sequence

WINDOW = 15  # passes of one size whose median counts: a pass that was interrupted does not
REFIT_AFTER = 16  # observations
ESTABLISHED = 4  # passes of a size after which it tells how fast the machine is now
PACE_WINDOW = 9  # steps


class Pace:
    """How much longer a step takes now than the same step took when the tables began.

    Neighbours on a shared machine slow all sizes down for a while. Sizes that were measured in different moments are
    compared as if they had been measured in the same, else a size that was last tried in a bad one looks dear for good:
    what looks dear is not tried again.
    """

    def __init__(self) -> None:
        self.now = 1.0
        self._recent: deque[float] = deque(maxlen=PACE_WINDOW)

    def feel(self, ratio: float) -> None:
        """A step took so many times as long as one of its size did before."""
        self._recent.append(ratio)
        self.now = statistics.median_low(self._recent)


class CostTable:
    """Seconds of a step over the rows of its pass, at the pace of the first.

    Until measured, sizes are interpolated between measured ones and extended from the nearest along a floor: reading
    the weights takes as long as the arithmetic of `knee` rows, so up to there a row costs next to nothing, and beyond
    it each costs 1 / knee of a one-row pass. Measured sizes are smoothed so that more rows never take less time: a few
    passes that were disturbed do not mislead.

    pace: divides what is observed, where given; tables that are added up share it. leads: this one tells it how long
    steps take now.
    """

    def __init__(
        self, pace: Pace | None = None, *, leads: bool = False, knee: float = 16.0, slope: float = 1 / 64
    ) -> None:
        self.knee = knee
        self.slope = slope
        self._pace, self._leads = pace, leads
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
        if self._pace is not None:
            if self._leads and len(times) >= ESTABLISHED:
                self._pace.feel(seconds / self._median[rows])
            seconds /= self._pace.now
        times.append(seconds)
        self._set(rows, statistics.median_low(times))

    def preset(self, medians: Mapping[int, float]) -> None:
        """Start from what an earlier run measured; what is observed replaces it."""
        for rows, seconds in medians.items():
            self._seen.setdefault(rows, deque(maxlen=WINDOW)).extend([seconds] * ESTABLISHED)
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
        """Rows -> seconds, of what was measured."""
        return {rows: self._median[rows] for rows in self._sizes}

    @property
    def row_seconds(self) -> float:
        """What a row costs in a pass of many, which computes rather than waits for memory."""
        largest = self._sizes[-1] if self._sizes else 1
        return max(self.seconds(1) / self.knee, self.seconds(largest) / largest if largest > self.knee else 0.0)

    def _floor(self, rows: float) -> float:
        """In passes of one row."""
        return (1.0 + self.slope * (rows - 1)) * max(1.0, rows / self.knee)

    def seconds(self, rows: int) -> float:
        """Expected seconds of a step of `rows` rows; in passes of one row as long as nothing was measured."""
        if not self._sizes:
            return self._floor(rows)
        fitted, at = self._fit(), bisect_left(self._sizes, rows)
        if at < len(self._sizes) and self._sizes[at] == rows:
            return fitted[at]
        if 0 < at < len(self._sizes):
            low, high = self._sizes[at - 1], self._sizes[at]
            share = (rows - low) / (high - low)
            return fitted[at - 1] * (1 - share) + fitted[at] * share
        near = 0 if at == 0 else -1
        return fitted[near] * self._floor(rows) / self._floor(self._sizes[near])


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
