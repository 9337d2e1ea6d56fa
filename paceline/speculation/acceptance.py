"""What is known of how far drafts are kept, per position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

PRIOR_WEIGHT = 6.0  # drafts of other requests count as much as this many of a request's own
FORGET = 0.97  # weight of a request's past at each of its drafts
PRIOR_FORGET = 0.999  # of what all requests showed
TRUST_PRIOR = 20.0  # accepted drafts for which chances are trusted as they are
TRUST_FORGET = 0.995
FORGIVE = 1 / 2048  # of what is known of it, with each step


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


@dataclass(slots=True)
class Trust:
    """How many of the drafts that were promised came: chances are a little wrong, and drafts that are made are those
    that look good, which are worse than they look."""

    promised: float = TRUST_PRIOR
    kept: float = TRUST_PRIOR

    def observe(self, promised: float, kept: float) -> None:
        """Drafts of which so many were expected, and so many kept."""
        self.promised = TRUST_FORGET * self.promised + promised
        self.kept = TRUST_FORGET * self.kept + kept

    def forgive(self) -> None:
        """A step's time has passed: what is not tried is trusted again in the end."""
        self.promised += (TRUST_PRIOR - self.promised) * FORGIVE
        self.kept += (TRUST_PRIOR - self.kept) * FORGIVE

    @property
    def share(self) -> float:
        """Of what is promised, what is expected to come; above 1 where promises were too small."""
        return self.kept / self.promised

    def of(self, survival: Sequence[float]) -> Sequence[float]:
        """The survival to count with, at most what is promised."""
        share = self.share
        return survival if share >= 1.0 else [share * s for s in survival]
