"""Where an output ends. Stops apply token by token inside an accepted block, so that ids, text, log-probabilities and
finish reason are those of plain decoding, however the tokens arrive."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from paceline.sampling import NO_TOKEN
from paceline.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort"]
MASKS = ("allowed_token_ids", "bad_words", "structured_outputs", "min_tokens")  # parameters that rule tokens out


class Detokenizer(Protocol):
    """Incremental detokenisation (paceline.detokenizer.IncrementalDetokenizer)."""

    def push(self, token_id: int) -> str:
        """Text that became certain with this token."""

    def finish(self) -> str:
        """The rest, at the end of the output."""


class Grammar(Protocol):
    """What ends an output from the side of its grammar (paceline.structured.constraint.GrammarConstraint)."""

    @property
    def failed(self) -> str | None:
        """Why the grammar cannot go on."""

    def commit(self, token: int) -> Literal["eos", "complete"] | None:
        """Take a token of the output; not None: it is the last one."""


@dataclass(frozen=True, slots=True)
class StopResult:
    """What became of a block of tokens.

    num_tokens: how many of them belong to the output (all, unless finish_reason is set). text: what may be shown now.
    stop_reason: the stop string or stop token id that matched; None for the end-of-sequence token and for limits.
    """

    num_tokens: int
    text: str
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


class StopChecker:
    """Follows one choice of one request.

    The first stop counts, token by token: an end-of-sequence or stop id; else a stop string, at the token that
    completes it (of several, the one whose last character comes first, then the longest); else the limits
    (max_tokens, context). The ids include the token that stopped. The text ends before the stop string (behind it with
    include_stop_str_in_output), and a stop token adds no text (unless so). Nothing stops within the first min_tokens
    tokens but the limits; a stop string may begin there. Text that may turn out to begin a stop string is held back.
    A grammar whose document is complete stops as an end-of-sequence id does, within min_tokens and with ignore_eos too;
    one that cannot go on ends the output with "abort" and the cause as stop_reason, and so does a place where the masks
    of the parameters leave no token (NO_TOKEN in a block).
    """

    def __init__(
        self,
        params: SamplingParams,
        detokenizer: Detokenizer | None,
        *,
        eos_token_ids: Iterable[int],
        num_prompt_tokens: int,
        max_model_len: int,
        grammar: Grammar | None = None,
    ) -> None:
        """detokenizer: None if no text is wanted; then stop strings raise ValueError. max_model_len: tokens of prompt
        and output together."""
        if detokenizer is None and params.stop_strings:
            raise ValueError(f"stop={list(params.stop_strings)}: stop strings need a detokenizer")
        self._detokenizer = detokenizer
        self._grammar = grammar
        self._stops = params.stop_strings
        self._longest = max(map(len, self._stops), default=0)
        self._include = params.include_stop_str_in_output
        self._eos = frozenset(() if params.ignore_eos else eos_token_ids)
        self._stop_ids = frozenset(params.stop_token_ids or ())
        self._min_tokens = params.min_tokens
        self._masks = [name for name in MASKS if getattr(params, name)]
        room = max_model_len - num_prompt_tokens
        self._limit = room if params.max_tokens is None else min(params.max_tokens, room)
        self._text = ""
        self._shown = 0
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    @property
    def text(self) -> str:
        """The output's text so far, what is held back included; final once finish_reason is set."""
        return self._text

    @property
    def num_shown(self) -> int:
        """Characters of the text that `feed` and `flush` have given out."""
        return self._shown

    @property
    def remaining(self) -> int:
        """Tokens that the limits still allow: at least 1 before the end."""
        return max(0, self._limit - self.num_tokens)

    def feed(self, tokens: Sequence[int]) -> StopResult:
        """Consume a block of committed tokens up to the first stop."""
        if self.finish_reason is not None:
            raise ValueError(f"the output already finished ({self.finish_reason})")
        used = 0
        if self._grammar is not None and self._grammar.failed is not None:
            tokens = ()
            self._finish("abort", f"grammar: {self._grammar.failed}", 0)
        for token in tokens:
            if token == NO_TOKEN:
                self._finish("abort", f"{', '.join(self._masks)}: no token is left that may follow", 0)
                break
            used += 1
            if self._feed_one(token):
                break
        if self.finish_reason is None:
            return StopResult(used, self._show(len(self._text) - self._held_back()))
        return StopResult(used, self._show(len(self._text)), self.finish_reason, self.stop_reason)

    def flush(self) -> str:
        """The text still held back, for an output that ends for another reason (abort)."""
        if self.finish_reason is None and self._detokenizer is not None:
            self._text += self._detokenizer.finish()
        return self._show(len(self._text))

    def _feed_one(self, token: int) -> bool:
        self.num_tokens += 1
        may_stop = self.num_tokens > self._min_tokens
        ended = None if self._grammar is None else self._grammar.commit(token)
        is_eos = ended == "eos" or (may_stop and token in self._eos)
        is_stop = is_eos or (may_stop and token in self._stop_ids)
        searched = len(self._text)
        if self._detokenizer is not None and (not is_stop or self._include):
            self._text += self._detokenizer.push(token)
        if not is_stop and may_stop and self._cut_at_stop_string(searched):
            return True
        if is_stop:
            self._finish("stop", None if is_eos else token, searched)
        elif ended is not None:
            self._finish("stop", None, searched)
        elif self.num_tokens >= self._limit:
            self._finish("length", None, searched)
        return self.finish_reason is not None

    def _finish(self, reason: FinishReason, detail: int | str | None, searched: int) -> None:
        # The last bytes come out now; they may complete a stop string, which then came first.
        if self._detokenizer is not None:
            searched = len(self._text)
            self._text += self._detokenizer.finish()
            if self.num_tokens > self._min_tokens and self._cut_at_stop_string(searched):
                return
        self.finish_reason, self.stop_reason = reason, detail

    def _cut_at_stop_string(self, searched: int) -> bool:
        """Look for stop strings that end behind the first `searched` characters; cut at the first."""
        if not self._stops or len(self._text) == searched:
            return False
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = self._text.find(stop, max(0, searched - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        if best is None:
            return False
        end, start, stop = best
        self._text = self._text[: end if self._include else start]
        self.finish_reason, self.stop_reason = "stop", stop
        return True

    def _held_back(self) -> int:
        """Length of the longest suffix that may become a stop string."""
        if self._include:
            return 0  # it would be part of the output anyway
        for length in range(min(self._longest - 1, len(self._text) - self._shown), 0, -1):
            suffix = self._text[-length:]
            if any(len(stop) > length and stop.startswith(suffix) for stop in self._stops):
                return length
        return 0

    def _show(self, end: int) -> str:
        new = self._text[self._shown : end]
        self._shown = max(self._shown, end)
        return new
