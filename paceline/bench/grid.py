"""Which arms run at which concurrency: what was asked for, or the default grid in two parts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from paceline.bench.backend import Arm
from paceline.bench.datasets import BenchPrompt
from paceline.bench.figures import Answers, reference_answers, result_rows
from paceline.bench.local import LocalBackend
from paceline.bench.runner import Measurement, measure, steps
from paceline.sampling_params import SamplingParams

GRID_LENGTHS: tuple[int | Literal["auto"], ...] = (0, 3, 5, 7)
GRID_CONCURRENCY = (1, 2, 4, 8)
GRID_REPEATS = 2  # above concurrency 1, unless a number is asked for: the whole must fit a quarter of an hour
CONTEXT = 160  # tokens before a typical pass
WORTH_SAYING = 120.0  # seconds from which a run's length is announced
FULL_LENGTHS: tuple[int | Literal["auto"], ...] = (0, 1, 2, 3, 4, 5, 6, 7, "auto")
FULL_CONCURRENCY = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, slots=True)
class Stage:
    """Arms at a concurrency. best: of the drafting arms, only the one that was fastest before. repeats: None = as many
    as the whole run."""

    concurrency: int
    arms: tuple[Arm, ...]
    best: bool = False
    repeats: int | None = None

    @property
    def columns(self) -> int:
        """How many arms it will have."""
        return min(2, len(self.arms)) if self.best else len(self.arms)


def cross(arms: Sequence[Arm], concurrency: Sequence[int]) -> list[Stage]:
    """Every arm at every concurrency."""
    return [Stage(c, tuple(arms)) for c in concurrency]


def default_grid(
    arms: Sequence[Arm], concurrency: Sequence[int] = GRID_CONCURRENCY, later_repeats: int | None = None
) -> list[Stage]:
    """Every arm at concurrency 1, then plain decoding and the fastest arm at the rest, `later_repeats` times."""
    first, *rest = concurrency
    return [Stage(first, tuple(arms)), *(Stage(c, tuple(arms), best=True, repeats=later_repeats) for c in rest)]


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
    return sum(steps(p, s.columns, s.concurrency, s.repeats or repeats) for s in stages for p in sets.values())


def longest_seconds(
    stages: Sequence[Stage],
    sets: Mapping[str, Sequence[BenchPrompt]],
    repeats: int,
    output_len: int,
    pass_seconds: Callable[[int], float],
) -> float:
    """About how long a grid takes if no draft is ever accepted and no answer ends early: passes of a row per request.
    pass_seconds: of a pass with so many rows."""
    total = 0.0
    for stage in stages:
        requests = sum(steps(p, stage.columns, stage.concurrency, stage.repeats or repeats) for p in sets.values())
        total += requests / stage.concurrency * output_len * pass_seconds(stage.concurrency)
    return total


def time_plan(
    stages: Sequence[Stage], sets: Mapping[str, Sequence[BenchPrompt]], repeats: int, output_len: int
) -> list[str]:
    """What a run of an engine in this process will do and how long that takes at most, where it takes minutes."""
    backend = stages[0].arms[0].backend
    if not isinstance(backend, LocalBackend):
        return []
    known: dict[int, float] = {}

    def pass_seconds(rows: int) -> float:
        if rows not in known:
            known[rows] = min(backend.llm.time_forward(rows, CONTEXT) for _ in range(3))
        return known[rows]

    seconds = longest_seconds(stages, sets, repeats, output_len, pass_seconds)
    if seconds < WORTH_SAYING:
        return []
    requests = total_steps(stages, sets, repeats)
    return [
        f"{requests:,} requests of at most {output_len} tokens: decoding takes at most about {seconds / 60:.0f} min"
    ]


def repeats_line(stages: Sequence[Stage], repeats: int) -> str:
    """`3 repeats (2 above concurrency 1)`."""
    later = {stage.repeats for stage in stages if stage.repeats not in (None, repeats)}
    line = f"{repeats} repeat{'s' * (repeats != 1)}"
    return f"{line} ({min(filter(None, later))} above concurrency {stages[0].concurrency})" if later else line


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
                name,
                prompts,
                arms,
                params,
                concurrency=stage.concurrency,
                repeats=stage.repeats or repeats,
                on_step=on_step,
            )
            new = result_rows(found, answers.get(name))
            answers.setdefault(name, reference_answers(found))
            rows += new
            yield found, new
