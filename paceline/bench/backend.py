"""What is measured: an arm (a configuration), its requests in a closed loop of clients, and what came back.

The engine in this process (`local`) and a server behind a URL (`remote`) implement the same protocol, so that one
runner, one set of figures and one report serve both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from paceline.bench.counters import total
from paceline.bench.datasets import BenchPrompt
from paceline.sampling_params import SamplingParams
from paceline.speculation.stats import SpecDecodeStats

DraftLength = int | Literal["auto"] | None  # None: what a server does by itself


@dataclass(frozen=True, slots=True)
class Completion:
    """One request answered: a prompt, or a later turn of its conversation. Times in seconds, as a client sees them:
    `ttft_s` from request to first token, `decode_s` from the first token to the last, `wall_s` from request to end.

    num_tokens: None = as many as token_ids; a server may tell their number only. copy: which repetition of the prompt,
    where a set is shorter than the number of clients asks for. stats: None where nobody tells them per request.
    """

    prompt: BenchPrompt
    num_speculative_tokens: DraftLength
    token_ids: list[int]
    logprobs: list[float] | None
    finish_reason: str | None
    ttft_s: float
    decode_s: float
    wall_s: float
    stats: SpecDecodeStats | None
    error: str | None = None
    turn: int = 0
    copy: int = 0
    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    num_tokens: int | None = None

    @property
    def tokens(self) -> int:
        return len(self.token_ids) if self.num_tokens is None else self.num_tokens

    @property
    def key(self) -> tuple[int, int]:
        """Which request of a set this is: whatever the arm, repeat or copy, its answer must be the same."""
        return self.prompt.index, self.turn

    def same_output(self, other: Completion) -> bool:
        """Token ids, and logprobs where kept, equal bit for bit; a failure equals nothing. Answers whose ids no server
        told are compared as text."""
        if self.error is not None or other.error is not None or self.finish_reason != other.finish_reason:
            return False
        if self.num_tokens is not None or other.num_tokens is not None:
            return self.text == other.text
        return self.token_ids == other.token_ids and _bits(self.logprobs) == _bits(other.logprobs)


def _bits(logprobs: list[float] | None) -> list[str] | None:
    """Hex floats: equality of bits, where `==` would call two NaNs different and two zeros equal."""
    return None if logprobs is None else [value.hex() for value in logprobs]


@dataclass(slots=True)
class Conversation:
    """A prompt on its way: messages so far, and the user's later turns, which follow on the answers."""

    prompt: BenchPrompt
    copy: int = 0
    turn: int = 0
    messages: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.messages = list(self.prompt.messages)

    @property
    def salt(self) -> str | None:
        """Copies of a prompt share no cached prefix: different users would not have asked the very same."""
        return f"copy {self.copy}" if self.copy else None

    def advance(self, answer: str) -> bool:
        """Append an answer and the next turn; False when there is none."""
        if self.turn >= len(self.prompt.later_turns):
            return False
        self.messages += [
            {"role": "assistant", "content": answer},
            {"role": "user", "content": self.prompt.later_turns[self.turn]},
        ]
        self.turn += 1
        return True


@dataclass(slots=True)
class Run:
    """What one arm did in one repeat: its completions in order of prompts, copies and turns, and the wall time while
    it ran. chosen: draft length -> how often it was chosen, for an arm that chooses. stats: counters of the whole run
    where they are not known per request."""

    completions: list[Completion] = field(default_factory=list)
    wall_s: float = 0.0
    chosen: Counter[int] = field(default_factory=Counter)
    stats: SpecDecodeStats | None = None
    notes: list[str] = field(default_factory=list)

    def add(self, other: Run) -> None:
        """Append what the same arm did with the next prompts."""
        self.completions += other.completions
        self.wall_s += other.wall_s
        self.chosen += other.chosen
        if other.stats is not None:
            self.stats = total([s for s in (self.stats, other.stats) if s is not None])
        self.notes += [note for note in other.notes if note not in self.notes]

    @property
    def spec_decode(self) -> SpecDecodeStats:
        if self.stats is not None:
            return self.stats
        return total([c.stats for c in self.completions if c.stats is not None and c.error is None])


class Backend(Protocol):
    """Answers requests. `local` says whether it is this process's engine, whose arms must agree bit for bit."""

    local: bool

    def run(
        self,
        conversations: Sequence[Conversation],
        length: DraftLength,
        params: SamplingParams,
        concurrency: int,
        on_done: Callable[[Completion], None],
    ) -> Run:
        """All conversations by `concurrency` clients, each of which sends its next request when its last one is
        answered, from a prefix cache that is empty (where the backend can empty it)."""


@dataclass(frozen=True, slots=True)
class Arm:
    """A configuration to measure. baseline: speed-ups refer to it although it may draft."""

    backend: Backend
    length: DraftLength
    label: str = ""
    baseline: bool = False

    @property
    def name(self) -> str:
        if self.label:
            return self.label
        return "server" if self.length is None else str(self.length) if self.length == "auto" else f"k = {self.length}"


def in_order(completions: Iterable[Completion]) -> list[Completion]:
    """By copy, prompt and turn, whatever the order in which they ended."""
    return sorted(completions, key=lambda c: (c.copy, c.prompt.index, c.turn))
