"""Where the time of a round goes: drafting, the verify pass, sampling, the drafter's context, and the rest.

A pass of its own with clocks around the engine's parts: what is timed for speed runs without them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import paceline.engine as engine_module
from paceline.bench.backend import Arm, Conversation
from paceline.bench.datasets import BenchPrompt
from paceline.bench.local import LocalBackend
from paceline.sampling_params import SamplingParams

PARTS = ("draft", "pass", "sampling", "context", "rest")


@dataclass(slots=True)
class RoundTimes:
    """Seconds per part, summed over steps in which no prompt was computed."""

    steps: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    def as_row(self) -> dict[str, Any]:
        """Milliseconds per step."""
        return {part: 1e3 * self.seconds[part] / self.steps if self.steps else None for part in PARTS}


def profile(
    arms: Sequence[Arm], prompts: Sequence[BenchPrompt], params: SamplingParams, concurrency: int = 1
) -> list[dict[str, Any]]:
    """Milliseconds per part of a step, for every arm of the engine in this process."""
    rows = []
    for arm in arms:
        if isinstance(arm.backend, LocalBackend):
            with clocks(arm.backend.llm.engine) as times:
                arm.backend.run([Conversation(p) for p in prompts], arm.length, params, concurrency)
            if times.steps:
                rows.append({"arm": arm.name, "k": arm.length, "steps": times.steps, **times.as_row()})
    return rows


@contextmanager
def clocks(engine: Any) -> Iterator[RoundTimes]:
    """Time the parts of `engine`'s steps while the block runs."""
    times = RoundTimes()
    now: dict[str, float] = {}

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **options: Any) -> Any:
            begin = perf_counter()
            try:
                return call(*args, **options)
            finally:
                now[name] = now.get(name, 0.0) + perf_counter() - begin

        return wrapper

    def step() -> Any:
        decoding = engine.running and not engine.waiting and not any(s.is_prefill for s in engine.running)
        now.clear()
        begin = perf_counter()
        results = own_step()
        whole = perf_counter() - begin
        if decoding:
            times.steps += 1
            for name, seconds in now.items():
                times.seconds[name] += seconds
            times.seconds["rest"] += whole - sum(now.values())
        return results

    own_step, verify = engine.step, engine_module.verify
    wrapped = [(engine, "_propose", "draft"), (engine, "_forward", "pass")]
    wrapped += [(engine.proposer, "observe", "context")] if engine.proposer is not None else []
    try:
        for owner, method, part in wrapped:
            setattr(owner, method, timed(part, getattr(owner, method)))
        engine.step = step
        engine_module.verify = timed("sampling", verify)
        yield times
    finally:
        engine_module.verify = verify
        for owner, method, _ in [*wrapped, (engine, "step", "")]:
            owner.__dict__.pop(method, None)
