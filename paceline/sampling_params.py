"""What a request asks of the sampler: vLLM's field names, checked when the object is made."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.errors import ConfigError

MAX_SEED = 2**64 - 1


class SamplingParamsError(ConfigError, ValueError):
    """A sampling parameter is of the wrong type or out of range."""


def _fail(field: str, value: object, remedy: str) -> SamplingParamsError:
    return SamplingParamsError(f"{field}={value!r}: {remedy}")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of one request; every field means the same with and without speculation.

    Order of operations, the one of vLLM's sampler: grammar mask, min_tokens, logit_bias, repetition penalty,
    frequency and presence penalty on the raw logits; then temperature, min_p, top_k, top_p (on the renormalised
    rest). temperature 0 takes the largest logit, ties to the lowest id.

    n: choices per prompt, each with its own noise.
    temperature: 0 = greedy. top_k: 0 or -1 = off. top_p, min_p: 1 and 0 = off.
    repetition_penalty: logits of tokens in prompt or output are divided by it if positive, multiplied otherwise.
    presence_penalty, frequency_penalty: subtracted once, and per occurrence, for tokens of the output.
    logit_bias: token id -> value in [-100, 100] added to the logit.
    seed: 0 to 2**64 - 1; None draws one, which the output names.
    stop: strings that end the output; stop_token_ids: ids that do. The text excludes them unless
    include_stop_str_in_output; the token ids include the last token.
    min_tokens: no stop of any kind within the first min_tokens tokens. max_tokens: None = to the end of the context.
    ignore_eos: the model's end-of-sequence ids do not stop. logprobs: None = none, N = of the token drawn and of the N
    most likely, raw (before temperature and penalties). skip_special_tokens: leave them out of the text.

    Raises SamplingParamsError, which names the field, the value and the remedy.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    stop: Iterable[str] | str | None = ()
    stop_token_ids: Iterable[int] | None = ()
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    max_tokens: int | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name in ("n", "top_k", "min_tokens"):
            _check_int(name, getattr(self, name))
        for name in ("seed", "max_tokens", "logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name))
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise _fail(name, getattr(self, name), "use True or False")
        self._set_floats()
        self._set_collections()
        self._check_ranges()

    def _set_floats(self) -> None:
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise _fail(name, value, "use a finite number")
            object.__setattr__(self, name, float(value))

    def _set_collections(self) -> None:
        stop = self.stop
        stop = (stop,) if isinstance(stop, str) else tuple(stop or ())
        for text in stop:
            if not isinstance(text, str) or not text:
                raise _fail("stop", text, "stop strings must be non-empty strings")
        object.__setattr__(self, "stop", stop)
        ids = tuple(self.stop_token_ids or ())
        for token in ids:
            _check_int("stop_token_ids", token)
            if token < 0:
                raise _fail("stop_token_ids", token, "token ids are 0 or more")
        object.__setattr__(self, "stop_token_ids", ids)
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, Mapping):
            raise _fail("logit_bias", self.logit_bias, "use a mapping from token id to bias")
        object.__setattr__(self, "logit_bias", dict(map(_bias_item, self.logit_bias.items())))

    def _check_ranges(self) -> None:
        if self.n < 1:
            raise _fail("n", self.n, "use 1 or more")
        if self.temperature < 0:
            raise _fail("temperature", self.temperature, "use 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            raise _fail("top_p", self.top_p, "use a value above 0 and at most 1 (1 = off)")
        if self.top_k < -1:
            raise _fail("top_k", self.top_k, "use 1 or more, or 0 or -1 to switch it off")
        if not 0 <= self.min_p <= 1:
            raise _fail("min_p", self.min_p, "use a value from 0 (off) to 1")
        if self.repetition_penalty <= 0:
            raise _fail("repetition_penalty", self.repetition_penalty, "use a value above 0 (1 = off)")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                raise _fail(name, getattr(self, name), "use a value from -2 to 2 (0 = off)")
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise _fail("seed", self.seed, "use 0 to 2**64 - 1, or None for a random one")
        if self.min_tokens < 0:
            raise _fail("min_tokens", self.min_tokens, "use 0 or more")
        if self.max_tokens is not None:
            if self.max_tokens < 1:
                raise _fail("max_tokens", self.max_tokens, "use 1 or more, or None for no limit")
            if self.min_tokens > self.max_tokens:
                raise _fail("min_tokens", self.min_tokens, f"must not exceed max_tokens={self.max_tokens}")
        if self.logprobs is not None and self.logprobs < 0:
            raise _fail("logprobs", self.logprobs, "use 0 or more alternatives, or None for no logprobs")

    @property
    def greedy(self) -> bool:
        """True if the largest logit is taken at every position."""
        return self.temperature == 0.0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` in its normal form."""
        assert isinstance(self.stop, tuple)
        return self.stop


def _check_int(field: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _fail(field, value, "use an integer")


def _bias_item(item: tuple[Any, Any]) -> tuple[int, float]:
    """Accepts JSON's string keys ("50256": -100)."""
    token, bias = item
    if isinstance(token, str) and token.isdecimal():
        token = int(token)
    if isinstance(token, bool) or not isinstance(token, int) or token < 0:
        raise _fail("logit_bias", item[0], "keys are token ids, 0 or more")
    if isinstance(bias, bool) or not isinstance(bias, (int, float)) or not -100 <= bias <= 100:
        raise _fail("logit_bias", {token: bias}, "values are numbers from -100 to 100")
    return token, float(bias)
