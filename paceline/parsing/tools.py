"""Tools on offer and `tool_choice`: checked, and turned into what the engine and the parsers need."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.errors import ConfigError
from paceline.parsing.registry import tool_parser_class
from paceline.parsing.tool_grammar import calls_grammar
from paceline.structured.params import StructuredOutputsParams
from paceline.tokenizer import Tokenizer
from paceline.values import shown_as_json as shown

MAX_TOOLS = 128
Form = Literal["any", "calls", "calls or answer"]
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


class ToolsError(ConfigError, ValueError):
    """A tool definition or tool_choice is malformed, or they contradict each other."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function on offer. parameters: JSON schema of its arguments, an object's. definition: as the client wrote it,
    for the chat template."""

    name: str
    description: str
    parameters: dict[str, Any] = field(hash=False)
    definition: dict[str, Any] = field(hash=False, repr=False)


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """What a request's tools come to.

    template_tools: for the chat template (None: none). parser: name of the parser for the output (None: the output
    holds no calls). tool_names: for the parser. structured_outputs: the grammar that makes the output a call, or None.
    skip_special_tokens: for the sampling parameters; the parser has to see tags that are special tokens.
    form: what the grammar leaves the output to be: anything, calls alone, or either calls or an answer. constrained:
    indices of the tools of which the grammar was made, in its order.
    """

    template_tools: list[dict[str, Any]] | None = None
    parser: str | None = None
    tool_names: tuple[str, ...] = ()
    structured_outputs: StructuredOutputsParams | None = None
    skip_special_tokens: bool = True
    form: Form = "any"
    constrained: tuple[int, ...] = ()


def read_tools(value: Any) -> list[Tool]:
    """OpenAI's `tools`: [{"type": "function", "function": {"name", "description", "parameters"}}, ...]; None is empty.
    Raises ToolsError, which names the field."""
    if value is None:
        return []
    if isinstance(value, str | Mapping) or not isinstance(value, Sequence):
        raise ToolsError(f"tools={shown(value)}: use a list of function definitions")
    if len(value) > MAX_TOOLS:
        raise ToolsError(f"tools: {len(value)} given; at most {MAX_TOOLS} are taken")
    tools = [_tool(f"tools[{i}]", item) for i, item in enumerate(value)]
    seen: set[str] = set()
    for i, tool in enumerate(tools):
        if tool.name in seen:
            raise ToolsError(f"tools[{i}].function.name={tool.name!r}: is there twice; names have to differ")
        seen.add(tool.name)
    return tools


def _tool(where: str, value: Any) -> Tool:
    if not isinstance(value, Mapping):
        raise ToolsError(f'{where}={shown(value)}: use {{"type": "function", "function": {{...}}}}')
    if value.get("type", "function") != "function":
        raise ToolsError(f"{where}.type={shown(value.get('type'))}: only 'function' is supported")
    function = value.get("function")
    if not isinstance(function, Mapping):
        raise ToolsError(f"{where}.function={shown(function)}: use an object with a name and parameters")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ToolsError(f"{where}.function.name={shown(name)}: use 1 to 64 letters, digits, '_', '-' and '.'")
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise ToolsError(f"{where}.function.description={shown(description)}: use a string")
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, Mapping):
        raise ToolsError(f"{where}.function.parameters={shown(parameters)}: use a JSON schema of type 'object'")
    if parameters.get("type", "object") != "object":
        raise ToolsError(
            f"{where}.function.parameters.type={shown(parameters.get('type'))}: arguments are an object; use 'object'"
        )
    properties = parameters.get("properties", {})
    if not isinstance(properties, Mapping):
        raise ToolsError(f"{where}.function.parameters.properties={shown(properties)}: use an object of schemas")
    required = parameters.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise ToolsError(f"{where}.function.parameters.required={shown(required)}: use a list of names")
    try:
        plain, definition = json.loads(json.dumps([dict(parameters), dict(value)], allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ToolsError(f"{where}: only JSON values can stand in a tool definition ({error})") from None
    return Tool(name, description or "", {"type": "object", **plain}, definition)


def plan_tools(
    tools: Any,
    tool_choice: Any = None,
    *,
    tokenizer: Tokenizer,
    parser: str | None = None,
    parallel_tool_calls: bool = True,
    reasoning_end: str | None = None,
    answer: StructuredOutputsParams | None = None,
) -> ToolPlan:
    """OpenAI's `tools` and `tool_choice` (None, "none", "auto", "required", or a named function) of one request.

    parser: name of the model's format, from `choose_tool_parser` or the operator; None: "hermes", the most common.
    "required" and a named function become a grammar in that format, so that the output always parses: at least one
    call, exactly one for a named function or with parallel_tool_calls=False. reasoning_end: the calls come behind it.
    answer: what an answer has to match (of kind json or json_object); with "auto" the output is that, or calls.
    Raises ToolsError, which names the field. Whether the tools' schemas compile shows when the engine compiles them.
    """
    offered = read_tools(tools)
    choice, chosen = _choice(tool_choice, offered)
    if not isinstance(parallel_tool_calls, bool):
        raise ToolsError(f"parallel_tool_calls={shown(parallel_tool_calls)}: use True or False")
    if choice == "none":
        return ToolPlan(structured_outputs=answer)
    name = parser or "hermes"
    markers = tool_parser_class(name).markers
    special = {marker: token for marker in markers if (token := _special(tokenizer, marker)) is not None}
    grammar = None
    wanted: list[int] = []
    if choice != "auto" or answer is not None:
        wanted = [i for i, tool in enumerate(offered) if chosen in (None, tool.name)]
        several = chosen is None and parallel_tool_calls
        text = calls_grammar(
            name,
            [(offered[i].name, offered[i].parameters) for i in wanted],
            several=several,
            special=special,
            template=tokenizer.chat_template or "",
            answer=answer if choice == "auto" else None,
        )
        grammar = StructuredOutputsParams(grammar=text, reasoning_end=reasoning_end)
    return ToolPlan(
        template_tools=[tool.definition for tool in offered],
        parser=name,
        tool_names=tuple(tool.name for tool in offered),
        structured_outputs=grammar,
        skip_special_tokens=not special,
        form="any" if grammar is None else "calls or answer" if choice == "auto" else "calls",
        constrained=tuple(wanted),
    )


def _choice(value: Any, tools: Sequence[Tool]) -> tuple[str, str | None]:
    """("none", "auto" or "required", None), or ("named", the tool's name)."""
    if value is None:
        return ("auto" if tools else "none"), None
    if isinstance(value, str):
        if value not in ("none", "auto", "required"):
            raise ToolsError(f"tool_choice={shown(value)}: use 'none', 'auto', 'required' or a named function")
        if not tools and value != "none":
            if value == "required":
                raise ToolsError("tool_choice='required': there are no tools; give some")
            return "none", None
        return value, None
    if isinstance(value, Mapping) and value.get("type") == "function":
        function = value.get("function", value)
        name = function.get("name") if isinstance(function, Mapping) else None
        if isinstance(name, str) and any(tool.name == name for tool in tools):
            return "named", name
        known = ", ".join(tool.name for tool in tools) or "none"
        raise ToolsError(f"tool_choice.function.name={shown(name)}: no such tool; there are: {known}")
    raise ToolsError(
        f'tool_choice={shown(value)}: use "none", "auto", "required" or '
        '{"type": "function", "function": {"name": ...}}'
    )


def _special(tokenizer: Tokenizer, marker: str) -> int | None:
    """The special token that a tag is: text does not show it, and a grammar names it by its id."""
    token = tokenizer.backend.token_to_id(marker)
    return token if token is not None and token in tokenizer.special_ids else None
