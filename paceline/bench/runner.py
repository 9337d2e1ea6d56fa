"""Measuring arms: every arm decodes a prompt before the next prompt comes, so that drift hits all alike."""

from __future__ import annotations

from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

from paceline.errors import PacelineError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.bench.datasets import BenchPrompt
    from paceline.llm import LLM
    from paceline.sampling_params import SamplingParams
    from paceline.speculation.stats import SpecDecodeStats

WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Completion:
    """One prompt decoded by one arm. Times in seconds; `decode_s` runs from the first token to the last."""

    prompt: BenchPrompt
    num_speculative_tokens: int
    token_ids: list[int]
    logprobs: list[float] | None
    finish_reason: str | None
    ttft_s: float
    decode_s: float
    wall_s: float
    stats: SpecDecodeStats | None
    error: str | None = None

    def same_output(self, other: Completion) -> bool:
        """Token ids, and logprobs where kept, equal bit for bit; a failure equals nothing."""
        return (
            self.error is None
            and other.error is None
            and self.token_ids == other.token_ids
            and _bits(self.logprobs) == _bits(other.logprobs)
            and self.finish_reason == other.finish_reason
        )


def run_arms(
    llm: LLM,
    prompts: Sequence[BenchPrompt],
    arms: Sequence[int],
    params: SamplingParams,
    on_step: Callable[[str], None] = lambda _label: None,
) -> list[list[Completion]]:
    """Decode every prompt with every arm (a number of speculative tokens). Result: [prompt][arm].

    The order of the arms turns round from prompt to prompt. Each arm first decodes a few tokens unmeasured.
    A request that the engine refuses (too long a prompt, say) is a failed completion, not the end of the run.
    """
    encoded = [prompt.encode(llm.tokenizer) for prompt in prompts]
    few = replace(params, max_tokens=WARM_UP_TOKENS, min_tokens=0)
    for arm in arms:
        _decode(llm, prompts[0], encoded[0], arm, few)
    completions: list[list[Completion]] = []
    for turn, (prompt, ids) in enumerate(zip(prompts, encoded, strict=True)):
        done: dict[int, Completion] = {}
        for arm in arms if turn % 2 == 0 else reversed(arms):
            done[arm] = _decode(llm, prompt, ids, arm, params)
            on_step(f"prompt {prompt.index}, k = {arm}")
        completions.append([done[arm] for arm in arms])
    return completions


def _decode(llm: LLM, prompt: BenchPrompt, ids: list[int], arm: int, params: SamplingParams) -> Completion:
    started = perf_counter()
    try:
        output = llm.generate([ids], params, num_speculative_tokens=arm)[0]
    except PacelineError as error:
        return Completion(prompt, arm, [], None, None, 0.0, 0.0, 0.0, None, str(error))
    wall = perf_counter() - started
    choice, metrics = output.outputs[0], output.metrics
    return Completion(
        prompt=prompt,
        num_speculative_tokens=arm,
        token_ids=list(choice.token_ids),
        logprobs=_chosen_logprobs(choice),
        finish_reason=choice.finish_reason,
        ttft_s=metrics.time_to_first_token_s,
        decode_s=metrics.generation_time_s,
        wall_s=wall,
        stats=metrics.spec_decode,
    )


def _chosen_logprobs(choice: Any) -> list[float] | None:
    """The raw logprob of each delivered token, or None where the request did not ask for logprobs."""
    if choice.logprobs is None:
        return None
    return [entry.logprob for entry in choice.logprobs]


def _bits(logprobs: list[float] | None) -> list[str] | None:
    """Hex floats: equality of bits, where `==` would call two NaNs different and two zeros equal."""
    return None if logprobs is None else [value.hex() for value in logprobs]
