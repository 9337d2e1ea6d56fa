"""What a request says about the form of its output: one grammar at most, by whichever name it was asked for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from paceline.parsing.tool_grammar import culprit
from paceline.server.errors import ApiError, bad, in_json
from paceline.server.fields import check_nested
from paceline.structured.params import KINDS, StructuredOutputsError, StructuredOutputsParams

# Between the tokens of a JSON answer: a space, or a line end with its indentation. Small models would otherwise fill
# their limit with line ends; what a model writes that means to answer fits in.
WHITESPACE = r" ?|\n[ \t]{0,40}"

GUIDED = {  # vLLM's old names
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_whitespace_pattern": "whitespace_pattern",
}
TOOLS, FUNCTIONS = "tools", "functions"
OR = " or "  # between the field of an answer's form and these, where both make one grammar
_OF_SCHEMAS = ("name", "description", "schema", "strict")
_OF_OUTPUTS = tuple(field.name for field in fields(StructuredOutputsParams))
HARMLESS = ("disable_fallback",)  # vLLM's: there is one backend
REFUSED = {"structural_tag": "is not supported; use tools or another kind"}
_OURS = re.compile(r"structured_outputs(\.[a-z_]+)?")


@dataclass(frozen=True, slots=True)
class Wanted:
    """params: the grammar. field: who asked for it, by the name that errors give it. yields: it is the form of an
    answer, and a request with tools may call them instead."""

    params: StructuredOutputsParams
    field: str
    yields: bool = False


def from_fields(request: Any) -> Wanted | None:
    """Of chat and plain completions: `response_format`, `structured_outputs` or `guided_*`. Raises ApiError."""
    first = from_structured(request.structured_outputs, besides=from_response_format(request.response_format))
    return _one_of(first, _guided(request))


def from_structured(value: Mapping[str, Any] | None, *, besides: Wanted | None) -> Wanted | None:
    """vLLM's object, or what was asked for otherwise. Raises ApiError for both."""
    if not value:
        return besides
    where = "structured_outputs"
    check_nested(where, value, (*_OF_OUTPUTS, *HARMLESS), REFUSED)
    given = {name: item for name, item in value.items() if name in _OF_OUTPUTS}
    return _one_of(besides, _made(where, given))


def _one_of(a: Wanted | None, b: Wanted | None) -> Wanted | None:
    if a is not None and b is not None:
        first, other = a.field.partition(".")[0], b.field.partition(".")[0]
        raise ApiError(400, f"{other}: contradicts {first}; give one of them", param=other)
    return a if a is not None else b


def from_response_format(value: Mapping[str, Any] | None) -> Wanted | None:
    """OpenAI's {"type": "text" | "json_object" | "json_schema", "json_schema": {"schema", "strict"}}, or the schema
    beside the type as llama.cpp has it."""
    where = "response_format"
    if not value:
        return None
    if value.get("type") != "json_schema" or ("json_schema" not in value and "schema" in value):
        return from_format(where, value)
    inner = value.get("json_schema")
    if not isinstance(inner, Mapping):
        raise bad(f"{where}.json_schema", inner, 'use {"name": ..., "schema": {...}, "strict": true}')
    check_nested(where, value, ("type", "json_schema"), dict.fromkeys(_OF_SCHEMAS, "belongs into json_schema"))
    check_nested(f"{where}.json_schema", inner, _OF_SCHEMAS)
    return _schema(f"{where}.json_schema", inner)


def from_format(where: str, value: Any) -> Wanted | None:
    """The same with the schema beside the type, as the Responses interface and Anthropic's have it; a `json_object`
    may have one too, which is llama.cpp's way."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise bad(where, value, 'use an object such as {"type": "json_schema", "schema": {...}}')
    kind = value.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise bad(f"{where}.type", kind, "use 'text', 'json_object' or 'json_schema'")
    if kind == "text":
        check_nested(where, value, ("type",), {"schema": "belongs to the type 'json_schema'"})
        return None
    wrapped = "belongs to the type 'json_schema'" if where == "response_format" else "its fields stand beside type here"
    check_nested(where, value, ("type", *_OF_SCHEMAS), {"json_schema": wrapped})
    if kind == "json_schema" or value.get("schema"):
        return _schema(where, value)
    return Wanted(StructuredOutputsParams(json_object=True, whitespace_pattern=WHITESPACE), where, yields=True)


def _schema(where: str, value: Mapping[str, Any]) -> Wanted:
    """Every schema is kept to; strict only says of objects that list properties that they have no others."""
    schema, strict = value.get("schema"), value.get("strict")
    if not isinstance(schema, Mapping):
        raise bad(f"{where}.schema", schema, "use a JSON schema")
    if not (strict is None or isinstance(strict, bool)):
        raise bad(f"{where}.strict", strict, "use true or false")
    asked = {"json": schema, "disable_additional_properties": bool(strict), "whitespace_pattern": WHITESPACE}
    return _made(f"{where}.schema", asked, yields=True)


def _guided(request: Any) -> Wanted | None:
    given = {name: value for name in GUIDED if (value := getattr(request, name)) is not None}
    if not given:
        return None
    kinds = [name for name in given if GUIDED[name] in KINDS]
    if len(kinds) != 1:
        name = kinds[1] if kinds else next(iter(given))
        raise ApiError(400, f"{name}: give exactly one of guided_json, _regex, _choice and _grammar", param=name)
    return _made(kinds[0], {GUIDED[name]: value for name, value in given.items()})


def _made(field: str, values: Mapping[str, Any], *, yields: bool = False) -> Wanted:
    try:
        params = StructuredOutputsParams.read(values)
    except StructuredOutputsError as error:
        raise renamed(error, field) from None
    assert params is not None
    return Wanted(params, field, yields)


def renamed(error: StructuredOutputsError, field: str, grammar: Any = None, schemas: Sequence[str] = ()) -> ApiError:
    """A grammar's error under the name that the client knows. grammar: the parameters that did not compile. schemas: of
    a grammar of calls, the names of the schemas of which it was made."""
    text = in_json(str(error))
    ours = _OURS.match(text)
    if field == "structured_outputs" and ours is not None:
        return ApiError(400, text, param=ours[0])
    if field.endswith((TOOLS, FUNCTIONS)):  # the grammar made of them means nothing to the client
        reason = text.rpartition("cannot be compiled: ")[2].rpartition(f"{ours and ours[0]}=")[2]
        found = culprit(getattr(grammar, "grammar", None) or "", reason)
        if found is not None and found[0] is not None and found[0] < len(schemas):
            where = schemas[found[0]]
            return ApiError(400, f"{where}: the schema cannot be compiled: {found[1]}", param=where)
        if found is not None:
            where, reason = field.partition(OR)[0], found[1]
            return ApiError(400, f"{where}: the schema cannot be compiled: {reason}", param=where)
        return ApiError(400, f"{field}: the schemas cannot be compiled: {reason}", param=field.partition(OR)[0])
    return ApiError(400, field + (text[ours.end() :] if ours is not None else f": {text}"), param=field)
