"""Which arms run at which concurrency: what was asked for, or the default grid in two parts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from paceline.bench.backend import Arm
from paceline.bench.datasets import BenchPrompt
from paceline.bench.figures import Answers, reference_answers, result_rows
from paceline.bench.runner import Measurement, measure, steps
from paceline.sampling_params import SamplingParams

GRID_LENGTHS: tuple[int | Literal["auto"], ...] = (0, 3, 5, 7)
GRID_CONCURRENCY = (1, 2, 4, 8)
FULL_LENGTHS: tuple[int | Literal["auto"], ...] = (0, 1, 2, 3, 4, 5, 6, 7, "auto")
FULL_CONCURRENCY = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, slots=True)
class Stage:
    """Arms at a concurrency. best: of the drafting arms, only the one that was fastest before."""

    concurrency: int
    arms: tuple[Arm, ...]
    best: bool = False


def cross(arms: Sequence[Arm], concurrency: Sequence[int]) -> list[Stage]:
    """Every arm at every concurrency."""
    return [Stage(c, tuple(arms)) for c in concurrency]


def default_grid(arms: Sequence[Arm], concurrency: Sequence[int] = GRID_CONCURRENCY) -> list[Stage]:
    """Every arm at concurrency 1, then plain decoding and the fastest arm at the rest."""
    return [Stage(c, tuple(arms), best=i > 0) for i, c in enumerate(concurrency)]


def best_arm(rows: Sequence[Mapping[str, Any]], arms: Sequence[Arm]) -> Arm | None:
    """The drafting arm with the largest mean speed-up over the sets at the lowest concurrency measured."""
    first = min((row["concurrency"] for row in rows), default=1)
    scores: dict[str, list[float]] = {}
    for row in rows:
        if row["concurrency"] == first and row["speedup"] is not None:
            scores.setdefault(row["arm"], []).append(row["speedup"])
    drafting = [arm for arm in arms if arm.length != 0 and arm.name in scores]
    return max(drafting, key=lambda arm: statistics.fmean(scores[arm.name]), default=None)


def chosen_arms(stage: Stage, rows: Sequence[Mapping[str, Any]]) -> tuple[Arm, ...]:
    """The arms of a stage, once the rows of the stages before it are known."""
    best = best_arm(rows, stage.arms) if stage.best else None
    if best is None:
        return stage.arms
    return tuple(arm for arm in stage.arms if arm.length == 0 or arm is best)


def total_steps(stages: Sequence[Stage], sets: Mapping[str, Sequence[BenchPrompt]], repeats: int) -> int:
    """Requests of the whole grid, warm-up apart."""
    arms = [min(2, len(s.arms)) if s.best else len(s.arms) for s in stages]
    return sum(steps(p, n, s.concurrency, repeats) for s, n in zip(stages, arms, strict=True) for p in sets.values())


def run_grid(
    stages: Sequence[Stage],
    sets: Mapping[str, Sequence[BenchPrompt]],
    params: SamplingParams,
    repeats: int,
    on_step: Callable[[str], None] = lambda _label: None,
) -> Iterator[tuple[Measurement, list[dict[str, Any]]]]:
    """Measure set by set within each stage; yields each measurement with its RESULT rows.

    Answers are compared with the reference arm's at the first concurrency at which a set ran: they must not depend on
    the batch either.
    """
    answers: dict[str, Answers] = {}
    rows: list[dict[str, Any]] = []
    for stage in stages:
        arms = chosen_arms(stage, rows)
        for name, prompts in sets.items():
            found = measure(
                name, prompts, arms, params, concurrency=stage.concurrency, repeats=repeats, on_step=on_step
            )
            new = result_rows(found, answers.get(name))
            answers.setdefault(name, reference_answers(found))
            rows += new
            yield found, new
