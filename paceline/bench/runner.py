"""Measuring arms in turns, so that a machine whose speed drifts slows all of them alike.

At concurrency 1 every arm decodes a prompt before the next prompt comes. Above, an arm runs the whole set with that
many clients, and the arms alternate over the repeats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from paceline.bench.backend import Arm, Completion, Conversation, Run
from paceline.bench.datasets import BenchPrompt
from paceline.sampling_params import SamplingParams

WARM_UP_TOKENS = 8
ADAPTIVE_WARM_UP_TOKENS = 32  # an arm that chooses its draft length also learns what passes cost
ROUNDS = 2  # requests per client at least: else the clients would hardly ever all be busy


@dataclass(frozen=True, slots=True)
class Measurement:
    """A set at a concurrency: runs[repeat][arm]."""

    dataset: str
    concurrency: int
    arms: Sequence[Arm]
    runs: list[list[Run]]


def requests(prompts: Sequence[BenchPrompt], concurrency: int) -> list[Conversation]:
    """The set once, or as often as keeps `concurrency` clients busy for at least two requests each."""
    wanted = len(prompts) if concurrency == 1 else max(len(prompts), ROUNDS * concurrency)
    return [Conversation(prompts[i % len(prompts)], i // len(prompts)) for i in range(wanted)]


def steps(prompts: Sequence[BenchPrompt], arms: int, concurrency: int, repeats: int) -> int:
    """How often `measure` reports progress: once per request."""
    return repeats * arms * sum(1 + len(c.prompt.later_turns) for c in requests(prompts, concurrency))


def measure(
    dataset: str,
    prompts: Sequence[BenchPrompt],
    arms: Sequence[Arm],
    params: SamplingParams,
    *,
    concurrency: int = 1,
    repeats: int = 1,
    on_step: Callable[[str], None] = lambda _label: None,
) -> Measurement:
    """Run every arm on a set `repeats` times. Each arm first decodes a few tokens unmeasured."""
    for arm in arms:
        few = min(
            params.max_tokens or WARM_UP_TOKENS, ADAPTIVE_WARM_UP_TOKENS if arm.length == "auto" else WARM_UP_TOKENS
        )
        short = replace(params, max_tokens=few, min_tokens=0)
        arm.backend.run(_first_turns(prompts, concurrency), arm.length, short, concurrency, lambda _: None)
    unit = _by_prompt if concurrency == 1 else _by_set
    runs = [
        unit(prompts, arms, params, concurrency, repeat, _told(on_step, dataset, concurrency, repeat))
        for repeat in range(repeats)
    ]
    return Measurement(dataset, concurrency, arms, runs)


def _first_turns(prompts: Sequence[BenchPrompt], concurrency: int) -> list[Conversation]:
    return [
        Conversation(replace(c.prompt, later_turns=()), c.copy) for c in requests(prompts, concurrency)[:concurrency]
    ]


def _by_prompt(
    prompts: Sequence[BenchPrompt],
    arms: Sequence[Arm],
    params: SamplingParams,
    concurrency: int,
    repeat: int,
    told: Callable[[Arm], Callable[[Completion], None]],
) -> list[Run]:
    """The arms take turns at going first, from prompt to prompt and from repeat to repeat."""
    runs = [Run() for _ in arms]
    for turn, prompt in enumerate(prompts):
        for i in _order(len(arms), turn + repeat):
            arm = arms[i]
            runs[i].add(arm.backend.run([Conversation(prompt)], arm.length, params, concurrency, told(arm)))
    return runs


def _by_set(
    prompts: Sequence[BenchPrompt],
    arms: Sequence[Arm],
    params: SamplingParams,
    concurrency: int,
    repeat: int,
    told: Callable[[Arm], Callable[[Completion], None]],
) -> list[Run]:
    runs = [Run() for _ in arms]
    for i in _order(len(arms), repeat):
        arm = arms[i]
        runs[i] = arm.backend.run(requests(prompts, concurrency), arm.length, params, concurrency, told(arm))
    return runs


def _order(count: int, turn: int) -> list[int]:
    order = list(range(count))
    return order if turn % 2 == 0 else order[::-1]


def _told(
    on_step: Callable[[str], None], dataset: str, concurrency: int, repeat: int
) -> Callable[[Arm], Callable[[Completion], None]]:
    def of(arm: Arm) -> Callable[[Completion], None]:
        def done(completion: Completion) -> None:
            on_step(f"{dataset} c = {concurrency} {arm.name} #{repeat + 1} prompt {completion.prompt.index}")

        return done

    return of
