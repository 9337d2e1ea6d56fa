"""What a request returns: vLLM's shapes, with this engine's speculation counters."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from paceline.speculation.stats import SpecDecodeStats

if TYPE_CHECKING:
    from paceline.so_far import SoFar

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

    def finished(self) -> bool:
        """Whether it has ended."""
        return self.finish_reason is not None


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


class _Made:
    """The request behind a piece: no field, so that a piece is compared, shown and taken apart as a plain value."""

    __slots__ = ("so_far",)
    so_far: SoFar | Kept | None

    def belongs_to(self, so_far: SoFar | Kept | None) -> None:
        self.so_far = so_far


@dataclass(slots=True)
class StreamDelta(_Made):
    """What one step added to one choice.

    accepted: for each new id, whether it came from an accepted draft. output: the whole request, on its last delta.
    logprobs: one entry per new id when asked for. stop_reason: with the finish reason, as CompletionOutput has it.
    passes: (draft tokens, how many of them the model agreed with) of each pass behind this delta; one, unless deltas
    were joined for a slow reader. Counted before a stop cuts a block.

    These are the piece's own. What vLLM's pieces have beside them, and mean: request_id, prompt, prompt_token_ids,
    finished, outputs. A copy, also one that was pickled, has them too, as they were when it was made.
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

    def __post_init__(self) -> None:
        self.belongs_to(None)

    def __reduce__(self) -> tuple[Any, ...]:
        made = None if self.so_far is None else self.so_far.kept(self)
        return _piece, (made, *(getattr(self, f.name) for f in fields(self)))

    @property
    def outputs(self) -> list[CompletionOutput]:
        """The choice of this piece, with all of its text, ids and log-probabilities so far; on the last piece of the
        request all choices, as `output` has them. SamplingParams(output_kind=RequestOutputKind.DELTA): the choice with
        what the piece adds, on the last piece too. Put together at each access."""
        return self._made.outputs(self)

    @property
    def finished(self) -> bool:
        """Whether this is the last piece of the request."""
        return self.output is not None

    @property
    def request_id(self) -> str:
        return self._made.request_id

    @property
    def prompt(self) -> str | None:
        """Its text, None if it was given as token ids or messages."""
        return self._made.prompt

    @property
    def prompt_token_ids(self) -> list[int]:
        return self._made.prompt_token_ids

    @property
    def _made(self) -> SoFar | Kept:
        if self.so_far is None:
            raise AttributeError("this piece was made by hand; pieces of an engine's streams know their request")
        return self.so_far


@dataclass(slots=True)
class Kept:
    """What a copy of a piece knows of its request, which is not copied."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    choices: list[CompletionOutput] | None  # None: those of the piece's output

    def outputs(self, delta: StreamDelta) -> list[CompletionOutput]:
        """`delta.outputs`: see there."""
        if self.choices is None and delta.output is not None:
            return delta.output.outputs
        return self.choices or []

    def kept(self, delta: StreamDelta) -> Kept:
        return self


def _piece(made: Kept | None, *values: Any) -> StreamDelta:
    """A copy of a piece."""
    delta = StreamDelta(*values)
    delta.belongs_to(made)
    return delta


def prompt_alone(delta: StreamDelta) -> None:
    """Take the token that was drawn behind a prompt out of the only piece of its choice: nobody asked for it."""
    delta.text, delta.token_ids, delta.accepted = "", [], []
    delta.logprobs = None if delta.logprobs is None else []
    if delta.finish_reason != "abort":
        delta.finish_reason, delta.stop_reason = "length", None
    if delta.output is None:
        return
    choices = [replace(choice) for choice in delta.output.outputs]
    for choice in choices:
        choice.text, choice.token_ids = "", []
        if choice.logprobs is not None:
            choice.logprobs, choice.cumulative_logprob = [], 0.0
        if choice.finish_reason != "abort":
            choice.finish_reason, choice.stop_reason = "length", None
    delta.output = replace(delta.output, outputs=choices)
