"""The arithmetic of draft lengths as it is written down in Python: what the native one has to agree with."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np

from paceline.speculation.cost_table import _FLOOR, _SHAPES, ANY_LEVEL, KNOTS, PRESET, TRUST, floor_shape

PRIOR_WEIGHT = 6.0
REFIT_CURVE_AFTER, LOOK_EVERY = 4, 8
NOISE, PACE_STEP, FORGET_COSTS, ANY_PACE = 0.2**2, 0.03**2, 1 / 8192, 0.3**2
FAR_OUT, DOUBT, JUMP_AFTER = 2.0, 256.0, 3
UNSEEN, STALE_AFTER, FADING = 1e-3, 4096, 0.02


def sigmoid(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return 1.0 / (1.0 + np.exp(-x))


def chances(temperatures: Sequence[float], mix: Sequence[float] | None, logits: Any, own: Any) -> np.ndarray:
    values = np.asarray(logits, np.float64)
    if mix is not None:
        values = mix[0] * values + mix[1] * np.asarray(own, np.float64) + mix[2]
    if temperatures and len(values):
        known = list(temperatures[: len(values)])
        values = values / np.array([*known, *[temperatures[-1]] * (len(values) - len(known))])
    return sigmoid(values)


@dataclass(slots=True)
class Acceptance:
    """Conditional acceptance per position, with exponential forgetting: tries and hits of the drafts so far."""

    tries: list[float] = field(default_factory=list)
    hits: list[float] = field(default_factory=list)

    def observe(self, drafted: int, accepted: int, forget: float = 1.0) -> None:
        """A draft of `drafted` tokens of which the first `accepted` were kept."""
        if forget != 1.0:
            self.fade(forget)
        reached = min(drafted, accepted + 1)  # positions that were put to the test
        while len(self.tries) < reached:
            self.tries.append(0.0)
            self.hits.append(0.0)
        for j in range(reached):
            self.tries[j] += 1.0
            self.hits[j] += j < accepted

    def fade(self, share: float) -> None:
        """Keep this share of the weight of what was seen."""
        self.tries = [x * share for x in self.tries]
        self.hits = [x * share for x in self.hits]

    def expect(self, first: int, chances: Sequence[float], forget: float = 1.0) -> None:
        """Drafts behind the first `first`, all of which were kept, that were not put to the test: counted by their
        calibrated chances, so that what was left out because it was doubtful does not look good."""
        if forget != 1.0:
            self.fade(forget)
        missing = first + len(chances) - len(self.tries)
        self.tries += [0.0] * missing
        self.hits += [0.0] * missing
        reached = 1.0
        for j, chance in enumerate(chances, first):
            self.tries[j] += reached
            reached *= chance
            self.hits[j] += reached

    def survival(self, length: int, prior: Acceptance | None = None) -> list[float]:
        """Chance that each of `length` positions is kept; positions never tried follow the one before."""
        out, alive, last = [], 1.0, 0.7
        for j in range(length):
            tries = self.tries[j] if j < len(self.tries) else 0.0
            hits = self.hits[j] if j < len(self.hits) else 0.0
            base = last
            if prior is not None and j < len(prior.tries) and prior.tries[j] > 0:
                base = (prior.hits[j] + last) / (prior.tries[j] + 1.0)
            last = (hits + PRIOR_WEIGHT * base) / (tries + PRIOR_WEIGHT)
            alive *= last
            out.append(alive)
        return out


def _by_survival(survivals: Sequence[Sequence[float]]) -> list[tuple[float, int, int]]:
    """All drafts as (-survival, request, position), those that are most likely to be kept first."""
    return sorted((-s, i, j) for i, row in enumerate(survivals) for j, s in enumerate(row))


def _allot(drafts: Sequence[tuple[float, int, int]], requests: int) -> list[int]:
    """How many of these drafts each request has."""
    lengths = [0] * requests
    for _, i, _ in drafts:
        lengths[i] += 1
    return lengths


def best_lengths(
    survivals: Sequence[Sequence[float]],
    verify: Any,
    draft: Callable[[int], float],
    other_rows: int = 0,
    found: Sequence[bool] = (),
    margin: float = 0.0,
) -> tuple[list[int], float]:
    """Draft lengths, one per request, that maximise expected committed tokens per second of the whole step, and how
    many times those of a plain step that is.

    survivals[i][j]: chance that draft j + 1 of request i is kept (never rising in j); its length is the most that may
    be drafted. draft: tokens drafted by all -> seconds, apart from the pass that verifies them. other_rows: rows of the
    pass that belong to others, prompts for the most part; each counts as a committed token, since it has to be computed
    once whatever the drafts do. found: requests whose drafts are at hand and take no time. Draft tokens are admitted in
    order of their survival, as many as make the ratio largest. margin: what it takes beyond the ratio of a plain step
    for drafts to be made at all, as a share of it.
    """
    rows = len(survivals) + other_rows
    order = _by_survival(survivals)
    plain = rows / verify.seconds(rows)
    best, best_rate = 0, (1.0 + margin) * plain
    expected, drawn = float(rows), 0
    for n, (negative, i, _) in enumerate(order, 1):
        expected -= negative
        drawn += not (found and found[i])
        rate = expected / ((draft(drawn) if drawn else 0.0) + verify.seconds(rows + n))
        if rate > best_rate:
            best, best_rate = n, rate
    return _allot(order[:best], len(survivals)), best_rate / plain if best else 1.0


def likeliest(survivals: Sequence[Sequence[float]], drafts: int) -> tuple[list[int], float]:
    """Draft lengths of so many drafts in all, those most likely to be kept, and how many will be on average."""
    order = _by_survival(survivals)[:drafts]
    return _allot(order, len(survivals)), -sum(negative for negative, _, _ in order)


def survivals_of(chances: Sequence[Sequence[float]], trust: float = 1.0) -> list[list[float]]:
    """Chance of each draft that it is kept together with those before it. trust: how many of the drafts that such
    chances promised came."""
    return [[min(1.0, trust * s) for s in accumulate(row, mul)] for row in chances]


def row_prices(seconds: Sequence[float], blocks: int, slots: int) -> list[float]:
    """What a row costs more for each slot, along the largest convex curve below the costs of as many slots of all
    blocks: at each place the lowest of all lines from a size before it to one behind it."""
    costs = [seconds[j * blocks] for j in range(slots + 1)]
    below = [
        min(
            costs[i] if i == k else costs[i] + (costs[k] - costs[i]) * (j - i) / (k - i)
            for i in range(j + 1)
            for k in range(j, slots + 1)
        )
        for j in range(slots + 1)
    ]
    return [(below[j + 1] - below[j]) / blocks for j in range(slots)]


def admitted(survivals: Sequence[Sequence[float]], verify: Any, draft_seconds: float, other_rows: int = 0) -> list[int]:
    """How many of the drafts of each request to verify, now that they are made and their chances known.

    survivals[i][j]: chance that draft j + 1 of request i is kept together with those before it, or that node of its
    tree, in the order in which nodes would be added. Maximises expected committed tokens over (draft_seconds + seconds
    of the pass): Algorithm 1 of DSpark (arXiv 2607.05147) without its early stop, which only sampling with the
    drafter's own noise needs. other_rows: as for `best_lengths`.
    """
    rows = len(survivals) + other_rows
    order = _by_survival(survivals)
    expected, best, best_rate = float(rows), 0, rows / (draft_seconds + verify.seconds(rows))
    for n, (negative, _, _) in enumerate(order, 1):
        expected -= negative
        rate = expected / (draft_seconds + verify.seconds(rows + n))
        if rate > best_rate:
            best, best_rate = n, rate
    return _allot(order[:best], len(survivals))


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
        self._looked: dict[int, int] = {}  # rows -> the step that was last looked at
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
        if rows not in self._looked:
            self._looked[rows] = self.changes
            return
        self.changes += 1
        again, self._before = self._before == rows, rows
        near = self._near(rows)
        weight = min(self._weight[knot] for knot, _ in near)
        known = weight >= TRUST
        if known and self.changes - self._looked[rows] < min(LOOK_EVERY, int(weight / LOOK_EVERY)):
            return
        self._looked[rows] = self.changes
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
