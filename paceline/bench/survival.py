"""Acceptance that is made up: survival per position, and what a list of it must be."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from paceline.errors import ConfigError


def article() -> tuple[float, ...]:
    """The published HumanEval run of Qwen3.5-9B: 85.83 % of drafts survive position 0, 51.44 % position 4 and 11.81 %
    position 14; geometric between these points. Acceptance length 6.88 (6.93 was published)."""
    points = ((0, 0.8583), (4, 0.5144), (14, 0.1181))
    survival = [points[0][1]]
    for (left, a), (right, b) in pairwise(points):
        survival += [a * (b / a) ** ((i - left) / (right - left)) for i in range(left + 1, right + 1)]
    return tuple(survival)


def check_survival(survival: Sequence[float]) -> None:
    """Survival per position: shares that never rise. Raises ConfigError."""
    if not survival or any(not 0 <= s <= 1 for s in survival):
        raise ConfigError(f"{list(survival)}: give shares from 0 to 1, position 0 first")
    for i, (before, after) in enumerate(pairwise(survival)):
        if after > before:
            raise ConfigError(
                f"{after} at position {i + 1} is more than {before} before it; these are shares "
                "of all drafts, accepted up to a position, which never rise"
            )
