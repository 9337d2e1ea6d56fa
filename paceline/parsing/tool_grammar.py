"""Calls as a grammar, in the format that a model was taught: what it yields, the parser of that name reads."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.errors import ConfigError
from paceline.structured.params import StructuredOutputsParams
from paceline.structured.source import closed, json_options, quoted

# as Python's json.dumps writes it, which is what models see in their training data; nothing for white space to loop in
_JSON_STYLE = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
# the escapes that mean the same in Python's strings
_PYTHON_STYLE = {**_JSON_STYLE, "json_allowed_escapes": '"\\bfnrt'}


_AT = re.compile(r"\bat (\d+)\(\d+\): (?:failed to compile JSON schema: )?")
_RULE = re.compile(r"(answer|(?:call|args|value)_(\d+))\w*:")


def culprit(grammar: str, error: str) -> tuple[int | None, str] | None:
    """What the compiler complains of in a grammar of `calls_grammar`: (which of its tools, None for the answer; why).
    None where the error names no place."""
    place = _AT.search(error)
    lines = grammar.splitlines()
    rule = _RULE.match(lines[int(place[1]) - 1]) if place is not None and int(place[1]) <= len(lines) else None
    if place is None or rule is None:
        return None
    why = re.split(r"\s\d+ \| ", error[place.end() :])[0]  # what follows shows the grammar
    return (None if rule[2] is None else int(rule[2])), why.strip()


def calls_grammar(
    parser: str,
    tools: Sequence[tuple[str, Mapping[str, Any]]],
    *,
    several: bool,
    special: Mapping[str, int],
    template: str = "",
    answer: StructuredOutputsParams | None = None,
) -> str:
    """A Lark grammar for one call to one of `tools` (name, schema of the arguments), or for one or more if `several`.

    special: tags that are special tokens, with their ids. template: the chat template, where a format has variants.
    answer: of kind json or json_object, what the output may be instead of calls. Arguments have no members but those
    that their schema lists, unless it says otherwise. Raises ConfigError for a format that has no grammar, or a schema
    that the format cannot carry.
    """
    build = {"hermes": _hermes, "llama3_json": _llama3, "mistral": _mistral, "pythonic": _pythonic}.get(parser)
    if build is None:
        raise ConfigError(f"tool_call_parser: {parser!r} has no grammar, so tool_choice can only be 'auto' or 'none'")
    calls = build([(name, _arguments_schema(schema)) for name, schema in tools], several, special, template)
    if answer is None:
        return calls
    schema = json.loads(str(answer.json)) if answer.json is not None else {"type": "object"}
    if answer.disable_additional_properties:
        schema = closed(schema)
    return f"start: calls | answer\nanswer: {_json(schema, json_options(answer))}\ncalls{calls.removeprefix('start')}"


Tools = list[tuple[str, dict[str, Any]]]


def _arguments_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    plain = dict(schema)
    # with allOf, parts that list different properties would exclude each other's
    if '"allOf"' not in json.dumps(plain):
        plain = closed(plain)
    return plain


def _json(schema: Mapping[str, Any], style: Mapping[str, Any] = _JSON_STYLE) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": style})


def _tag(text: str, special: Mapping[str, int]) -> str:
    return f"<[{special[text]}]>" if text in special else quoted(text)


def _rules(start: str, alternatives: Sequence[str]) -> str:
    lines = [f"start: {start}", "call: " + " | ".join(f"call_{i}" for i in range(len(alternatives)))]
    lines += [f"call_{i}: {body}" for i, body in enumerate(alternatives)]
    return "\n".join(lines) + "\n"


def _object(name: str, member: str, schema: dict[str, Any]) -> str:
    before = '{"name": ' + json.dumps(name) + ', "' + member + '": '
    return f"{quoted(before)} {_json(schema)} {quoted('}')}"


def _hermes(tools: Tools, several: bool, special: Mapping[str, int], template: str) -> str:
    begin, end = _tag("<tool_call>", special), _tag("</tool_call>", special)
    line = quoted("\n")
    bodies = [f"{begin} {line} {_object(name, 'arguments', schema)} {line} {end}" for name, schema in tools]
    return _rules(f"call ({line} call)*" if several else "call", bodies)


def _llama3(tools: Tools, several: bool, special: Mapping[str, int], template: str) -> str:
    bodies = [_object(name, "parameters", schema) for name, schema in tools]
    return _rules('call ("; " call)*' if several else "call", bodies)


def _mistral(tools: Tools, several: bool, special: Mapping[str, int], template: str) -> str:
    tag = _tag("[TOOL_CALLS]", special)
    if "[ARGS]" in template:
        args = _tag("[ARGS]", special)
        bodies = [f"{tag} {quoted(name)} {args} {_json(schema)}" for name, schema in tools]
        return _rules("call+" if several else "call", bodies)
    bodies = [_object(name, "arguments", schema) for name, schema in tools]
    calls = 'call (", " call)*' if several else "call"
    return _rules(f'{tag} "[" {calls} "]"', bodies)


def _pythonic(tools: Tools, several: bool, special: Mapping[str, int], template: str) -> str:
    bodies = []
    extra: list[str] = []
    for index, (name, schema) in enumerate(tools):
        values = []
        for number, (key, value) in enumerate(schema.get("properties", {}).items()):
            if not key.isidentifier():
                raise ConfigError(
                    f"tools: parameter {key!r} of {name!r} is no Python name, so the 'pythonic' format cannot carry it"
                )
            rule = f"value_{index}_{number}"
            extra.append(f"{rule}: {_python_value(value, schema)}")
            values.append((f"{quoted(key + '=')} {rule}", key in schema.get("required", ())))
        extra += _keywords(f"args_{index}", values)
        bodies.append(f'{quoted(name + "(")} args_{index} ")"')
    calls = 'call (", " call)*' if several else "call"
    return _rules(f'"[" {calls} "]"', bodies) + "\n".join(extra) + "\n"


def _keywords(rule: str, values: Sequence[tuple[str, bool]]) -> list[str]:
    """Rules for keyword arguments in order, the optional ones there or not, with ", " between those that are."""
    rules = []
    for i in range(len(values) + 1):
        first, later = f"{rule}" if i == 0 else f"{rule}_first_{i}", f"{rule}_later_{i}"
        if i == len(values):
            rules += [f'{first}: ""', f'{later}: ""']
            continue
        text, required = values[i]
        skip = "" if required else f" | {rule}_first_{i + 1}"
        rules.append(f"{first}: {text} {rule}_later_{i + 1}{skip}")
        if i:
            skip = "" if required else f" | {rule}_later_{i + 1}"
            rules.append(f'{later}: ", " {text} {rule}_later_{i + 1}{skip}')
    return rules


def _python_value(schema: Any, root: Mapping[str, Any]) -> str:
    """A value as Python writes it. Inside lists and objects JSON's true, false and null stand for Python's."""
    if isinstance(schema, Mapping):
        if schema.get("type") == "boolean" and "enum" not in schema and "const" not in schema:
            return '"True" | "False"'
        if schema.get("type") == "null":
            return '"None"'
        definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
        return _json({**definitions, **schema}, _PYTHON_STYLE)
    return _json({}, _PYTHON_STYLE)
