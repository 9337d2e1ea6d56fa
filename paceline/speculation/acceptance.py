"""What is known of how far drafts are kept, per position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline._native import Acceptance

__all__ = ["FORGET", "FORGIVE", "PRIOR_FORGET", "TRUST_FORGET", "TRUST_PRIOR", "Acceptance", "Trust"]

FORGET = 0.97  # weight of a request's past at each of its drafts
PRIOR_FORGET = 0.999  # of what all requests showed
TRUST_PRIOR = 20.0  # accepted drafts for which chances are trusted as they are
TRUST_FORGET = 0.995
FORGIVE = 1 / 2048  # of what is known of it, with each step


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
