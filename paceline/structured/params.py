"""What a request asks of the grammar: vLLM's field names, checked when the object is made."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from paceline.errors import ConfigError
from paceline.values import shown

MAX_SOURCE = 512 * 1024  # characters of a schema or of all choices together
MAX_GRAMMAR = 64 * 1024  # characters of a regex or a Lark grammar: every rule may cost a stack frame and milliseconds
MAX_MARKER = 64
KINDS = ("json", "json_object", "regex", "choice", "grammar")


class StructuredOutputsError(ConfigError, ValueError):
    """A grammar parameter is missing, of the wrong type, malformed, or too large."""


def fail(field: str, value: object, remedy: str) -> StructuredOutputsError:
    return StructuredOutputsError(f"structured_outputs.{field}={shown(value)}: {remedy}")


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """The output has to match exactly one of:

    json: a JSON schema, as a mapping or its JSON text. json_object: True = any JSON object. regex: a regular expression
    (Rust's syntax, no look-around or back-references) that the whole output matches. choice: a list of strings.
    grammar: a context-free grammar in llguidance's Lark dialect, with a rule `start`, or in llama.cpp's GBNF.

    disable_any_whitespace: no whitespace between JSON tokens. whitespace_pattern: a regular expression for what may
    stand between them. disable_additional_properties: objects whose schema does not say otherwise have no other
    members. These three concern json and json_object alone.
    reasoning_end: the grammar begins behind this marker ("</think>"), what comes before is free; a prompt that ends
    with it has the reasoning behind it, and the grammar begins at once. reasoning_start: the output itself says whether
    it reasons: it begins with this tag, or else with the grammar. That takes a tag that is one token; with another one
    the output is taken to reason.

    After construction `json` is JSON text and `choice` a tuple, so that equal parameters are equal and have one hash.
    Raises StructuredOutputsError, which names the field, the value and the remedy. Whether the grammar itself compiles
    shows when a model's compiler sees it.
    """

    json: Mapping[str, Any] | str | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    reasoning_end: str | None = None
    reasoning_start: str | None = None

    def __post_init__(self) -> None:
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool):
                raise fail(name, getattr(self, name), "use True or False")
        if self.json_object not in (None, True, False):
            raise fail("json_object", self.json_object, "use True or leave it out")
        if self.json_object is False:
            object.__setattr__(self, "json_object", None)
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise StructuredOutputsError(
                f"structured_outputs: give exactly one of {', '.join(KINDS)}; {', '.join(given) or 'none'} given"
            )
        if self.json is not None:
            object.__setattr__(self, "json", _schema(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        for name, most in (("regex", MAX_GRAMMAR), ("grammar", MAX_GRAMMAR), ("whitespace_pattern", 1024)):
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, str) or (name != "regex" and not value.strip()):
                raise fail(name, value, "use a string")
            _encodable(name, value, most)
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            raise fail(
                "whitespace_pattern", self.whitespace_pattern, "contradicts disable_any_whitespace; leave one out"
            )
        for name, example in (("reasoning_end", "</think>"), ("reasoning_start", "<think>")):
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, str) or not value.strip():
                raise fail(name, value, f'use a marker such as "{example}"')
            _encodable(name, value, MAX_MARKER)
        if self.reasoning_start is not None and self.reasoning_end is None:
            raise fail("reasoning_start", self.reasoning_start, "needs reasoning_end, where the grammar begins")

    @property
    def kind(self) -> str:
        """The one of KINDS that is given."""
        return next(name for name in KINDS if getattr(self, name) is not None)

    @classmethod
    def read(cls, value: Any) -> StructuredOutputsParams | None:
        """An object, a mapping of its fields, or None."""
        if value is None or isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise StructuredOutputsError(
                f"structured_outputs={shown(value)}: use StructuredOutputsParams(...) or a mapping of its fields"
            )
        known = [f.name for f in fields(cls)]
        unknown = sorted(str(name) for name in value if name not in known)
        if unknown:
            raise StructuredOutputsError(
                f"structured_outputs.{unknown[0]}: not a field that is known here; use some of {', '.join(known)}"
            )
        return cls(**value)


def _encodable(field: str, text: str, most: int) -> None:
    if len(text) > most:
        raise fail(field, text, f"at most {most} characters are compiled; simplify it")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise fail(field, text, "lone surrogates cannot be written as UTF-8; remove them") from None


def _schema(value: Any) -> str:
    """JSON text of a schema. The order of members is kept: it is the order in which the output has them."""
    if isinstance(value, str):
        _encodable("json", value, MAX_SOURCE)
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise fail("json", value, f"not valid JSON ({error})") from None
    if not isinstance(value, Mapping):
        raise fail("json", value, "a JSON schema is an object")
    try:
        text = json.dumps(dict(value), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise fail("json", value, f"only JSON values can stand in a schema ({error})") from None
    if len(text) > MAX_SOURCE:
        raise fail("json", text, f"at most {MAX_SOURCE} characters are compiled; simplify it")
    return text


def _choices(value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise fail("choice", value, "use a list of at least one string")
    for text in value:
        if not isinstance(text, str) or not text:
            raise fail("choice", text, "choices are non-empty strings")
        _encodable("choice", text, MAX_SOURCE)
    if sum(map(len, value)) > MAX_SOURCE:
        raise fail("choice", value, f"at most {MAX_SOURCE} characters are compiled; simplify it")
    return tuple(dict.fromkeys(value))
