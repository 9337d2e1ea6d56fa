"""How many tokens to draft: the number that makes the most committed tokens per second, down to none.

A step that drafts k tokens commits 1 + sum of survival(j <= k) on average and takes T_draft + T_verify(rows). Both are
measured while running: costs in a table over rows, survival per position for each request, which starts from what
other requests of the same drafter showed.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

WINDOW = 15  # passes of one size whose median counts: a pass that was interrupted does not
PROBE_EVERY = 24  # steps without a draft after which one is tried all the same; sooner at first, from 3 on, doubling
PRIOR_WEIGHT = 6.0  # drafts of other requests count as much as this many of a request's own
FORGET = 0.97  # weight of a request's past at each of its drafts


class CostTable:
    """Seconds of a pass over its rows.

    Unknown sizes are interpolated between measured ones and extended from the nearest by `slope`, the share of a
    one-row pass that each further row is taken to cost until measured (1/64: arithmetic against reading the weights).
    """

    def __init__(self, slope: float = 1 / 64) -> None:
        self.slope = slope
        self._seen: dict[int, deque[float]] = {}
        self._median: dict[int, float] = {}

    def observe(self, rows: int, seconds: float) -> None:
        """A pass of this size took so long. The first of a size does not count: it touches memory first."""
        times = self._seen.get(rows)
        if times is None:
            self._seen[rows] = deque(maxlen=WINDOW)
            return
        times.append(seconds)
        self._median[rows] = statistics.median_low(times)

    @property
    def known(self) -> bool:
        return bool(self._median)

    def seconds(self, rows: int) -> float:
        """Expected seconds of a pass of `rows` rows; relative to a one-row pass as long as nothing was measured."""
        if not self._median:
            return 1.0 + self.slope * (rows - 1)
        if rows in self._median:
            return self._median[rows]
        below = max((r for r in self._median if r < rows), default=None)
        above = min((r for r in self._median if r > rows), default=None)
        if below is not None and above is not None:
            share = (rows - below) / (above - below)
            return self._median[below] * (1 - share) + self._median[above] * share
        near = below if below is not None else above
        assert near is not None
        one = self._median[near] / (1.0 + self.slope * (near - 1))
        return one * (1.0 + self.slope * (rows - 1))


@dataclass(slots=True)
class Acceptance:
    """Conditional acceptance per position, with exponential forgetting: tries and hits of the drafts so far."""

    tries: list[float] = field(default_factory=list)
    hits: list[float] = field(default_factory=list)

    def observe(self, drafted: int, accepted: int, forget: float = 1.0) -> None:
        """A draft of `drafted` tokens of which the first `accepted` were kept."""
        if forget != 1.0:
            self.tries = [x * forget for x in self.tries]
            self.hits = [x * forget for x in self.hits]
        reached = min(drafted, accepted + 1)  # positions that were put to the test
        while len(self.tries) < reached:
            self.tries.append(0.0)
            self.hits.append(0.0)
        for j in range(reached):
            self.tries[j] += 1.0
            self.hits[j] += j < accepted

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


def best_lengths(
    survivals: Sequence[Sequence[float]], verify: CostTable, draft_seconds: float, other_rows: int = 0
) -> list[int]:
    """Draft lengths, one per request, that maximise expected committed tokens per second of the whole step.

    survivals[i][j]: chance that draft j + 1 of request i is kept (never rising in j); its length is the most that may
    be drafted. draft_seconds: cost of drafting at all. other_rows: rows of the pass that belong to others. Draft tokens
    are admitted in order of their survival, as many as make the ratio largest.
    """
    rows = len(survivals) + other_rows
    order = sorted(((-s, i, j) for i, row in enumerate(survivals) for j, s in enumerate(row)))
    best, best_rate = 0, len(survivals) / verify.seconds(rows)
    expected = float(len(survivals))
    for n, (negative, _, _) in enumerate(order, 1):
        expected -= negative
        rate = expected / (draft_seconds + verify.seconds(rows + n))
        if rate > best_rate:
            best, best_rate = n, rate
    lengths = [0] * len(survivals)
    for _, i, _ in order[:best]:
        lengths[i] += 1
    return lengths


class DraftLengthPolicy:
    """Chooses draft lengths for the requests of a step and learns from what became of them."""

    def __init__(self) -> None:
        self.verify = CostTable()
        self.draft = CostTable()
        self.overall = Acceptance()
        self.chosen: dict[int, int] = {}  # draft length -> how often
        self._own: dict[int, Acceptance] = {}
        self._idle: dict[int, int] = {}  # steps since the last draft
        self._patience: dict[int, int] = {}  # idle steps until the next probe

    def choose(self, requests: Sequence[int], limits: Sequence[int]) -> list[int]:
        """Lengths of at most limits[i] for requests named by number; 0 = decode plainly this time."""
        survivals = [
            self._own[r].survival(limit, self.overall) if r in self._own else self.overall.survival(limit)
            for r, limit in zip(requests, limits, strict=True)
        ]
        draft_seconds = self.draft.seconds(len(requests)) if self.draft.known else 0.12 * self.verify.seconds(1)
        lengths = best_lengths(survivals, self.verify, draft_seconds)
        for i, request in enumerate(requests):
            if lengths[i] == 0 and limits[i] > 0:
                # a request that drafts badly now may draft well later: try two tokens from time to time
                idle, patience = self._idle.get(request, 0) + 1, self._patience.get(request, 3)
                if idle >= patience:
                    lengths[i], idle = min(2, limits[i]), 0
                    self._patience[request] = min(2 * patience, PROBE_EVERY)
                self._idle[request] = idle
            self.chosen[lengths[i]] = self.chosen.get(lengths[i], 0) + 1
        return lengths

    def observe(self, request: int, drafted: int, accepted: int) -> None:
        """What became of a draft."""
        if drafted:
            self.overall.observe(drafted, accepted, 0.999)
            self._own.setdefault(request, Acceptance()).observe(drafted, accepted, FORGET)

    def finish(self, request: int) -> None:
        self._own.pop(request, None)
        self._idle.pop(request, None)
        self._patience.pop(request, None)
