"""What a request returns: vLLM's shapes, with this engine's speculation counters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from paceline.speculation.stats import SpecDecodeStats

FinishReason = Literal["stop", "length", "abort"]


@dataclass(slots=True)
class Logprob:
    """Raw log-probability of a token in its place. rank: 1 = the argmax; equal ones rank by id. decoded_token: its
    text, alone."""

    logprob: float
    rank: int
    decoded_token: str


# Of a token and of the likeliest in its place, by id, its own first.
TokenAlternatives = dict[int, Logprob]


def own_logprob(found: TokenAlternatives) -> tuple[int, Logprob]:
    """The token itself."""
    return next(iter(found.items()))


@dataclass(slots=True)
class CompletionOutput:
    """One choice. `token_ids` include the token that stopped it; `text` ends before a stop string.

    logprobs: when asked for, one entry per token id. stop_reason: the stop string or stop id that matched, None for
    end-of-sequence and limits. seed: draws the same text again.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[TokenAlternatives] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    seed: int


PromptLogprobs = list[TokenAlternatives | None]  # None for the first token


@dataclass(slots=True)
class RequestMetrics:
    """Seconds on the engine's clock. generation_time_s: from the first token to the last, the slowest choice's."""

    queue_time_s: float = 0.0
    time_to_first_token_s: float = 0.0
    generation_time_s: float = 0.0
    spec_decode: SpecDecodeStats = field(default_factory=SpecDecodeStats)


@dataclass(slots=True)
class RequestOutput:
    """A finished request. prompt: its text, None if it was given as token ids. num_cached_tokens: tokens of the prompt
    that the prefix cache had, so that they were not computed. prompt_logprobs: when asked for, one entry per token of
    the prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int = 0
    prompt_logprobs: PromptLogprobs | None = None


@dataclass(slots=True)
class StreamDelta:
    """What one step added to one choice.

    accepted: for each new id, whether it came from an accepted draft. output: the whole request, on its last delta.
    logprobs: one entry per new id when asked for. stop_reason: with the finish reason, as CompletionOutput has it.
    passes: (draft tokens, how many of them the model agreed with) of each pass behind this delta; one, unless deltas
    were joined for a slow reader. Counted before a stop cuts a block.
    """

    index: int
    text: str
    token_ids: list[int]
    accepted: list[bool]
    finish_reason: FinishReason | None
    output: RequestOutput | None = None
    logprobs: list[TokenAlternatives] | None = None
    stop_reason: int | str | None = None
    passes: list[tuple[int, int]] = field(default_factory=list)
