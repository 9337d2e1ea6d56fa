"""Parameters -> the grammar text that llguidance compiles."""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.parse import unquote

from paceline.structured.gbnf import as_lark, is_gbnf
from paceline.structured.params import StructuredOutputsParams


def grammar_source(params: StructuredOutputsParams) -> str:
    """A grammar for `llguidance.LLMatcher`. Pure; what is wrong with it shows when it is compiled."""
    from llguidance import LLMatcher, regex_to_lark

    if params.json is not None:
        assert isinstance(params.json, str)
        schema = json.loads(params.json)
        check_conjunctions(schema)
        return _json_grammar(schema, params)
    if params.json_object:
        return _json_grammar({"type": "object"}, params)
    if params.regex is not None:
        # "\\d" means 0 to 9, as users expect who count digits; Unicode has 70 others of each
        body = f"/{regex_to_lark(params.regex, 'd')}/" if params.regex else '""'
        return str(LLMatcher.grammar_from_lark(f"start: {body}"))
    if params.choice is not None:
        return str(LLMatcher.grammar_from_lark("start: " + " | ".join(map(quoted, params.choice))))
    assert params.grammar is not None
    lark = as_lark(params.grammar) if is_gbnf(params.grammar) else params.grammar
    if _LITERAL.sub("", lark).count("&") > MAX_CONJUNCTS:
        raise ValueError(f"more than {MAX_CONJUNCTS} intersections (&)")
    return str(LLMatcher.grammar_from_lark(lark))


# Whether several expressions have a text in common may take for ever and gigabytes to find out, and cannot be stopped.
MAX_CONJUNCTS = 8
_LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|//[^\n]*')


def check_conjunctions(schema: Any) -> None:
    """Raises ValueError for a schema that asks of one text to match too many patterns at once."""
    todo = [schema]
    while todo:
        item = todo.pop()
        if isinstance(item, dict):
            if "allOf" in item and len(_patterns(item, schema)) > MAX_CONJUNCTS:
                raise ValueError(f"allOf: more than {MAX_CONJUNCTS} patterns for one text")
            todo += item.values()
        elif isinstance(item, list):
            todo += item


def _patterns(item: Any, root: Any) -> set[str]:
    """All patterns that one place of a document may have to match."""
    found: set[str] = set()
    todo, seen = [item], set()
    while todo:
        here = todo.pop()
        if not isinstance(here, dict) or id(here) in seen:
            continue
        seen.add(id(here))
        if isinstance(here.get("pattern"), str):
            found.add(here["pattern"])
        for name in ("allOf", "anyOf", "oneOf"):
            if isinstance(here.get(name), list):
                todo += here[name]
        if isinstance(here.get("$ref"), str):
            todo.append(_pointed(here["$ref"], root))
    return found


def _pointed(reference: str, root: Any) -> Any:
    """What a reference within the document points at; None for others, which are not followed here."""
    if not reference.startswith("#"):
        return None
    here = root
    for part in reference[1:].split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(here, list):
            here = here[int(name[:9])] if name.isascii() and name.isdigit() and int(name[:9]) < len(here) else None
        else:
            here = here.get(name) if isinstance(here, dict) else None
    return here


def quoted(text: str) -> str:
    """A string literal of a Lark grammar: JSON's escapes."""
    return json.dumps(text, ensure_ascii=True) if text.isascii() else json.dumps(text, ensure_ascii=False)


def json_options(params: StructuredOutputsParams) -> dict[str, Any]:
    """llguidance's options for JSON, from the fields about whitespace."""
    options: dict[str, Any] = {}
    if params.disable_any_whitespace:
        options["whitespace_flexible"] = False
    if params.whitespace_pattern is not None:
        options["whitespace_pattern"] = params.whitespace_pattern
    return options


def _json_grammar(schema: Any, params: StructuredOutputsParams) -> str:
    from llguidance import LLMatcher

    if params.disable_additional_properties:
        schema = closed(schema)
    options: Any = json_options(params)
    return str(LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options))


_DATA = frozenset({"enum", "const", "default", "examples"})  # members that hold values
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})  # name -> schema


def closed(schema: Any) -> Any:
    """The schema with `additionalProperties: false` wherever an object lists properties and says nothing of others."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    out: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            out[key] = {name: closed(item) for name, item in value.items()}
        else:
            out[key] = value if key in _DATA else closed(value)
    if ("properties" in schema or "patternProperties" in schema) and "additionalProperties" not in schema:
        out["additionalProperties"] = False
    return out
