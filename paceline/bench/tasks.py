"""Task accuracy: HumanEval pass@1 and GSM8K exact match of one answer per problem, for every arm.

Arms of one engine give the same tokens, so they have the same score by construction; both are shown.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.bench.answers import number_of, program_of, same_number, test_program
from paceline.bench.backend import Completion
from paceline.bench.datasets import DatasetError, packaged_rows
from paceline.bench.figures import result_rows
from paceline.bench.runner import Measurement
from paceline.bench.sandbox import Limits, run_program

TASKS = ("humaneval", "gsm8k")
SCORE_KEYS = (
    "task",
    "metric",
    "arm",
    "num_speculative_tokens",
    "score",
    "stderr",
    "correct",
    "total",
    "verdicts",
    "cut",
    "output_tokens",
    "identical",
    "same_score",
)


@dataclass(slots=True)
class Task:
    """A set whose answers can be judged. rows: as in its file. An answer that came before is not judged again."""

    name: str
    rows: Sequence[dict[str, Any]]
    limits: Limits = field(default_factory=Limits)
    _known: dict[tuple[int, str], str] = field(default_factory=dict)

    @property
    def metric(self) -> str:
        return "pass@1" if self.name == "humaneval" else "exact_match"

    def verdict(self, index: int, answer: str) -> str:
        """`passed` (or `correct`), or what went wrong."""
        key = (index, answer)
        if key not in self._known:
            self._known[key] = self._judge(self.rows[index], answer)
        return self._known[key]

    def _judge(self, row: dict[str, Any], answer: str) -> str:
        if self.name == "humaneval":
            return run_program(test_program(answer, row), self.limits)
        if number_of(answer) is None:
            return "no number"
        return "correct" if same_number(answer, row["expected"]) else "wrong"

    def extracted(self, index: int, answer: str) -> str | None:
        """What was judged: the program, or the number."""
        if self.name == "humaneval":
            return program_of(answer, self.rows[index])
        number = number_of(answer)
        return None if number is None else str(number)


RIGHT = ("passed", "correct")


def load_task(name: str) -> Task:
    """Raises DatasetError for a set without a judge."""
    if name not in TASKS:
        raise DatasetError(f"task {name!r} has no answers to compare with; use {' or '.join(TASKS)}")
    return Task(name, packaged_rows(name))


def stderr(score: float, total: int) -> float | None:
    """Standard error of a mean of zeros and ones, as evaluation harnesses give it; None for a single problem."""
    return math.sqrt(score * (1 - score) / (total - 1)) if total > 1 else None


def score_rows(
    task: Task, measurement: Measurement, on_step: Callable[[str], None] = lambda _label: None
) -> list[dict[str, Any]]:
    """One row per arm; a request that failed is a problem not solved."""
    plain = result_rows(measurement)
    first: float | None = None
    rows = []
    for arm, speed, run in zip(measurement.arms, plain, measurement.runs[0], strict=True):
        verdicts: Counter[str] = Counter()
        own = _once(run.completions)
        for completion in own:
            verdicts[_verdict(task, completion)] += 1
            on_step(f"{task.name} {arm.name} problem {completion.prompt.index}")
        correct = sum(verdicts[name] for name in RIGHT)
        score = correct / len(own)
        first = score if first is None else first
        values: dict[str, Any] = {
            "task": task.name,
            "metric": task.metric,
            "arm": arm.name,
            "num_speculative_tokens": arm.length,
            "score": score,
            "stderr": stderr(score, len(own)),
            "correct": correct,
            "total": len(own),
            "verdicts": dict(sorted(verdicts.items())),
            "cut": sum(c.finish_reason == "length" for c in own),
            "output_tokens": sum(c.tokens for c in own),
            "identical": speed["identical"],
            "same_score": None if len(measurement.arms) == 1 else score == first,
        }
        rows.append({key: values[key] for key in SCORE_KEYS})
    return rows


def _once(completions: Sequence[Completion]) -> list[Completion]:
    return [c for c in completions if c.copy == 0 and c.turn == 0]


def _verdict(task: Task, completion: Completion) -> str:
    return "request failed" if completion.error is not None else task.verdict(completion.prompt.index, completion.text)


def sample_rows(task: Task, measurement: Measurement) -> Iterator[dict[str, Any]]:
    """What every arm answered to every problem and how it was judged, for `--save-outputs`."""
    for arm, run in zip(measurement.arms, measurement.runs[0], strict=True):
        for c in _once(run.completions):
            yield {
                "task": task.name,
                "index": c.prompt.index,
                "arm": arm.name,
                "verdict": _verdict(task, c),
                "extracted": task.extracted(c.prompt.index, c.text) if c.error is None else None,
                "answer": c.text,
                "finish_reason": c.finish_reason,
                "error": c.error,
            }
