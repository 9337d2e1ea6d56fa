"""OpenAI's old form of tools: `functions` and `function_call`, messages that have them, and answers in that form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.parsing.deltas import ToolCall, ToolCallDelta
from paceline.server.errors import bad
from paceline.server.wanted import FUNCTIONS, TOOLS

# what errors about tools say -> the old names
NAMES = ((".function", ""), (TOOLS, FUNCTIONS), ("tool_choice", "function_call"))


def as_tools(
    functions: Sequence[dict[str, Any]], choice: str | dict[str, Any] | None
) -> tuple[list[dict[str, Any]], str | dict[str, Any] | None]:
    """`functions` and `function_call` as `tools` and `tool_choice`. Raises ApiError."""
    tools = [{"type": "function", "function": function} for function in functions]
    if not choice or choice in ("none", "auto"):
        return tools, choice or None
    if not isinstance(choice, Mapping) or not isinstance(choice.get("name"), str):
        raise bad("function_call", choice, 'use "none", "auto" or {"name": ...}')
    if not tools:
        raise bad("function_call", choice, "there are no functions; give some")
    return tools, {"type": "function", "function": {"name": choice["name"]}}


def modern(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages whose calls and results are in the form that chat templates read. Raises ApiError."""
    ids: dict[str, str] = {}  # of the last call of each function
    return [_modern(message, i, ids) for i, message in enumerate(messages)]


def _modern(message: dict[str, Any], i: int, ids: dict[str, str]) -> dict[str, Any]:
    own = f"call{i:05d}"  # nine letters and digits, which is what Mistral's template asks for
    call = message.get("function_call")
    if call is not None and call != {}:  # clients in Lua write what is empty so
        where = f"messages[{i}].function_call"
        if not isinstance(call, Mapping) or not all(isinstance(call.get(part), str) for part in ("name", "arguments")):
            raise bad(where, call, 'use {"name": ..., "arguments": ...}, both strings')
        if message.get("tool_calls"):
            raise bad(where, dict(call), "stands beside tool_calls; give one of them")
        ids[call["name"]] = own
        rest = {name: value for name, value in message.items() if name != "function_call"}
        return {**rest, "tool_calls": [{"id": own, "type": "function", "function": dict(call)}]}
    if message.get("role") != "function":
        return message
    name = message.get("name")
    if not isinstance(name, str):
        raise bad(f"messages[{i}].name", name, "name the function whose result this is")
    return {**message, "role": "tool", "tool_call_id": ids.get(name, own)}


def said(calls: Sequence[ToolCall]) -> dict[str, Any]:
    """The part of a message that has the call: there is one."""
    return {"function_call": {"name": calls[0].name, "arguments": calls[0].arguments}}


def delta(piece: ToolCallDelta) -> dict[str, Any]:
    """The same of a piece of a stream."""
    name = {} if piece.name is None else {"name": piece.name}
    return {"function_call": {**name, "arguments": piece.arguments}}
