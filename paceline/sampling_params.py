"""What a request asks of the sampler: vLLM's field names, checked when the object is made."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import FrozenInstanceError, dataclass, replace
from enum import IntEnum
from typing import Any, NoReturn, TypeVar

from paceline.errors import ConfigError
from paceline.other_names import is_neutral_sampling, unknown_field
from paceline.structured.params import StructuredOutputsParams
from paceline.values import MAX_INT32, as_integer, as_number, shown

MAX_SEED = 2**64 - 1
MAX_CHOICES = 1024

Class = TypeVar("Class", bound=type)


class SamplingParamsError(ConfigError, ValueError):
    """A sampling parameter is of the wrong type or out of range."""


def _fail(field: str, value: object, remedy: str) -> SamplingParamsError:
    return SamplingParamsError(f"{field}={shown(value)}: {remedy}")


class LogitBias(dict[int, float]):
    """Token id -> bias: a dictionary that cannot change and has a hash, as the parameters that hold it."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("logit_bias cannot change; make new SamplingParams")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[type[LogitBias], tuple[dict[int, float]]]:
        return LogitBias, (dict(self),)


class RequestOutputKind(IntEnum):
    """What `outputs` of a stream's pieces hold: all of a choice so far, or what the piece adds to it. FINAL_ONLY: the
    stream has one piece, the last. Values are vLLM's."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


def known_fields(cls: Class) -> Class:
    """Make a frozen dataclass name the field, the value and the remedy where it is given a field that it does not have,
    and where one is set. Fields of other engines at values that ask for nothing are dropped."""
    fields_of: Any = cls  # a dataclass
    init, known = fields_of.__init__, tuple(fields_of.__dataclass_fields__)

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **fields: Any) -> None:
        for name, value in fields.items():
            if name not in known and not is_neutral_sampling(name, value):
                raise _fail(name, value, unknown_field(name, known))
        init(self, *args, **{name: value for name, value in fields.items() if name in known})

    def refuse(self: Any, name: str, value: Any) -> NoReturn:
        what = type(self).__name__
        remedy = f"make a copy: params.clone({name}=...)" if hasattr(self, "clone") else f"make new {what}"
        raise FrozenInstanceError(f"{name}={shown(value)}: {what} cannot change; {remedy}")

    fields_of.__init__ = checked
    fields_of.__setattr__ = refuse
    return cls


@known_fields
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of one request; every field means the same with and without speculation.

    Order of operations, the one of vLLM's sampler: grammar mask, allowed_token_ids, bad_words, min_tokens, logit_bias,
    repetition penalty, frequency and presence penalty on the raw logits; then temperature, min_p, top_k, top_p (on the
    renormalised rest). temperature 0 takes the largest logit, ties to the lowest id.

    n: choices per prompt, at most 1024, each with its own noise.
    temperature: 0 = greedy. top_k: 0 or -1 = off. top_p, min_p: 1 and 0 = off.
    repetition_penalty: logits of tokens in prompt or output are divided by it if positive, multiplied otherwise.
    presence_penalty, frequency_penalty: subtracted once, and per occurrence, for tokens of the output.
    logit_bias: token id -> value in [-100, 100] added to the logit.
    seed: 0 to 2**64 - 1; None draws one, which the output names.
    stop: strings that end the output; stop_token_ids: ids that do. The text excludes them unless
    include_stop_str_in_output; the token ids include the last token. Integers and numbers may be numpy's.
    min_tokens: no stop of any kind within the first min_tokens tokens. max_tokens: None = to the end of the context.
    ignore_eos: the model's end-of-sequence ids do not stop. logprobs: None = none, N = of the token drawn and of the N
    most likely, -1 = of the whole vocabulary, raw (before temperature and penalties). skip_special_tokens: leave them
    out of the text.
    structured_outputs: what the output has to match (StructuredOutputsParams, or a mapping of its fields).
    prompt_logprobs: None = none, N = of the prompt's tokens and of the N most likely in their places, -1 = of the whole
    vocabulary, raw; the whole prompt is computed for it, whatever the prefix cache has.
    allowed_token_ids: no other id is ever drawn, ends of sequence included. bad_words: strings that are not generated,
    with or without a space before them: the last token of each is ruled out behind the others. Another split of the
    same text into tokens is not. Where a grammar and these leave no token, the output ends with "abort".
    output_kind: what `outputs` of a stream's pieces hold; see there and StreamDelta.

    Fields of vLLM's that there are not here are taken at values that ask for nothing (best_of=1, detokenize=True).

    Parameters cannot change; `clone` makes changed copies. Raises SamplingParamsError, which names the field, the value
    and the remedy.
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
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    allowed_token_ids: Iterable[int] | None = None
    bad_words: Iterable[str] | None = ()
    prompt_logprobs: int | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    @classmethod
    def from_optional(cls, **fields: Any) -> SamplingParams:
        """Parameters from fields of which None means the default. Raises SamplingParamsError."""
        return cls(**{name: value for name, value in fields.items() if value is not None})

    def clone(self, **changes: Any) -> SamplingParams:
        """A copy in which these fields are others. Raises SamplingParamsError."""
        return replace(self, **changes)

    def __post_init__(self) -> None:
        for name in ("n", "top_k", "min_tokens", "seed", "max_tokens", "logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None or name in ("n", "top_k", "min_tokens"):
                object.__setattr__(self, name, _integer(name, getattr(self, name)))
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise _fail(name, getattr(self, name), "use True or False")
        if not isinstance(self.output_kind, RequestOutputKind):  # a number where they come from JSON
            kind = as_integer(self.output_kind)
            if kind not in tuple(RequestOutputKind):
                kinds = "RequestOutputKind.CUMULATIVE, DELTA or FINAL_ONLY"
                raise _fail("output_kind", self.output_kind, f"use {kinds}")
            object.__setattr__(self, "output_kind", RequestOutputKind(kind))
        self._set_floats()
        self._set_collections()
        object.__setattr__(self, "structured_outputs", StructuredOutputsParams.read(self.structured_outputs))
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
            value = as_number(getattr(self, name))
            if value is None:
                raise _fail(name, getattr(self, name), "use a finite number")
            object.__setattr__(self, name, value)

    def _set_collections(self) -> None:
        stop = self.stop
        stop = (stop,) if isinstance(stop, str) else _items("stop", stop, "use a string or a list of strings")
        for text in stop:
            if not isinstance(text, str) or not text:
                raise _fail("stop", text, "stop strings must be non-empty strings")
        object.__setattr__(self, "stop", stop)
        words = _items("bad_words", self.bad_words, "use a list of strings")
        for text in words:
            if not isinstance(text, str) or not text:
                raise _fail("bad_words", text, "bad words must be non-empty strings")
        object.__setattr__(self, "bad_words", words)
        object.__setattr__(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise _fail("allowed_token_ids", [], "give at least one token id, or None to allow all")
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, Mapping):
            raise _fail("logit_bias", self.logit_bias, "use a mapping from token id to bias")
        bias = LogitBias(map(_bias_item, self.logit_bias.items()))
        if len(bias) != len(self.logit_bias):  # JSON's "7" beside 7
            raise _fail("logit_bias", self.logit_bias, "a token id stands there twice; leave one of them out")
        object.__setattr__(self, "logit_bias", bias)

    def _check_ranges(self) -> None:
        if not 1 <= self.n <= MAX_CHOICES:
            raise _fail("n", self.n, f"use 1 to {MAX_CHOICES}")
        if self.temperature < 0:
            raise _fail("temperature", self.temperature, "use 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            raise _fail("top_p", self.top_p, "use a value above 0 and at most 1 (1 = off)")
        if not -1 <= self.top_k <= MAX_INT32:
            raise _fail("top_k", self.top_k, "use 1 to 2**31 - 1, or 0 or -1 to switch it off")
        if not 0 <= self.min_p <= 1:
            raise _fail("min_p", self.min_p, "use a value from 0 (off) to 1")
        if self.repetition_penalty <= 0:
            raise _fail("repetition_penalty", self.repetition_penalty, "use a value above 0 (1 = off)")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                raise _fail(name, getattr(self, name), "use a value from -2 to 2 (0 = off)")
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise _fail("seed", self.seed, "use 0 to 2**64 - 1, or None for a random one")
        if not 0 <= self.min_tokens <= MAX_INT32:
            raise _fail("min_tokens", self.min_tokens, "use 0 to 2**31 - 1")
        if self.max_tokens is not None:
            if not 1 <= self.max_tokens <= MAX_INT32:
                raise _fail("max_tokens", self.max_tokens, "use 1 to 2**31 - 1, or None for no limit")
            if self.min_tokens > self.max_tokens:
                raise _fail("min_tokens", self.min_tokens, f"must not exceed max_tokens={self.max_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and not -1 <= count <= MAX_INT32:
                remedy = f"use 0 to 2**31 - 1 alternatives, -1 for the whole vocabulary, or None for no {name}"
                raise _fail(name, count, remedy)

    @property
    def greedy(self) -> bool:
        """True if the largest logit is taken at every position."""
        return self.temperature == 0.0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` in its normal form."""
        assert isinstance(self.stop, tuple)
        return self.stop


def _integer(field: str, value: Any) -> int:
    number = as_integer(value)
    if number is None:
        raise _fail(field, value, "use an integer")
    return number


def _items(field: str, value: Any, remedy: str) -> tuple[Any, ...]:
    """A list, tuple, array, ... as a tuple; None is empty."""
    if isinstance(value, (str, bytes, Mapping)):
        raise _fail(field, value, remedy)
    try:
        return () if value is None else tuple(value)
    except TypeError:  # not iterable
        raise _fail(field, value, remedy) from None


def _token_ids(field: str, value: Any) -> tuple[int, ...]:
    ids = tuple(_integer(field, token) for token in _items(field, value, "use a list of token ids"))
    for token in ids:
        if not 0 <= token <= MAX_INT32:
            raise _fail(field, token, "token ids are 0 to 2**31 - 1")
    return ids


def _bias_item(item: tuple[Any, Any]) -> tuple[int, float]:
    """Accepts JSON's string keys ("50256": -100)."""
    key, bias = item
    # Ten digits reach past the largest id; int() refuses some thousands of them with an error of its own.
    token = int(key) if isinstance(key, str) and key.isdecimal() and len(key) <= 10 else as_integer(key)
    if token is None or not 0 <= token <= MAX_INT32:
        raise _fail("logit_bias", key, "keys are token ids, 0 to 2**31 - 1")
    value = as_number(bias)
    if value is None or not -100 <= value <= 100:
        raise _fail("logit_bias", {token: bias}, "values are numbers from -100 to 100")
    return token, value
