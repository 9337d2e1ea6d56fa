"""`input` and `tools` of the Responses interface, in the form of chat completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.server.errors import bad

# OpenAI's names in errors about tools -> this interface's
TOOL_NAMES = ((".function", ""),)


def messages_of(items: str | Sequence[Mapping[str, Any]], instructions: str | None) -> list[dict[str, Any]]:
    """The conversation as chat messages: what the assistant thought, said and called in one turn is one of them.
    Raises ApiError for items that are none."""
    out: list[dict[str, Any]] = []
    if instructions:
        out.append({"role": "system", "content": instructions})
    if not items and not isinstance(items, str) and not out:
        raise bad("input", items, "give at least one item")
    if isinstance(items, str):
        return [*out, {"role": "user", "content": items}]
    turn: dict[str, Any] | None = None  # of the assistant, while its items come
    for i, item in enumerate(items):
        where, kind = f"input[{i}]", item.get("type") or "message"
        if kind == "function_call_output":
            out.append({"role": "tool", "tool_call_id": _text(item, where, "call_id"), "content": _output(item, where)})
            turn = None
            continue
        if kind == "message":
            _check_message(item, where)
        if kind == "message" and item.get("role") != "assistant":
            out.append({"role": item.get("role"), "content": item.get("content")})
            turn = None
            continue
        if turn is None or (kind in ("message", "reasoning") and "content" in turn):
            turn = {"role": "assistant"}
            out.append(turn)
        if kind == "message":
            turn["content"] = item.get("content")
        elif kind == "function_call":
            function = {"name": _text(item, where, "name"), "arguments": _text(item, where, "arguments")}
            call = {"id": _text(item, where, "call_id"), "type": "function", "function": function}
            turn.setdefault("tool_calls", []).append(call)
        elif kind == "reasoning":
            turn["reasoning_content"] = _thoughts(item)
        else:
            raise bad(f"{where}.type", kind, "use 'message', 'function_call', 'function_call_output' or 'reasoning'")
    return out


def _check_message(item: Mapping[str, Any], where: str) -> None:
    role = item.get("role")
    if role not in ("user", "assistant", "system", "developer"):
        raise bad(f"{where}.role", role, "use 'user', 'assistant', 'system' or 'developer'")
    if item.get("content") is None and role != "assistant":  # whose answer may have been empty
        raise bad(f"{where}.content", None, "a message needs text, or '' for none")
    if item.get("tool_calls"):
        raise bad(f"{where}.tool_calls", item["tool_calls"], "use an item of the type 'function_call' for each")


def _text(item: Mapping[str, Any], where: str, name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise bad(f"{where}.{name}", value, "use a string")
    return value


def _output(item: Mapping[str, Any], where: str) -> Any:
    output = item.get("output")
    if not isinstance(output, str | list):
        raise bad(f"{where}.output", output, "use a string or a list of text parts")
    return output


def _thoughts(item: Mapping[str, Any]) -> str:
    parts = item.get("content") or item.get("summary") or []
    texts = [part.get("text") for part in parts if isinstance(part, Mapping)] if isinstance(parts, list) else []
    return "\n".join(text for text in texts if isinstance(text, str))


def tools_of(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Function tools as chat completions have them. Raises ApiError for other kinds."""
    if tools is None:
        return None
    out = []
    for i, tool in enumerate(tools):
        if tool.get("type") != "function":
            raise bad(f"tools[{i}].type", tool.get("type"), "only 'function' is supported", code="unsupported_field")
        out.append({"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}})
    return out


def choice_of(value: str | Mapping[str, Any] | None) -> Any:
    """`tool_choice` as chat completions have it. Raises ApiError for other kinds than a function."""
    if not isinstance(value, Mapping):
        return value
    if value.get("type") != "function":
        raise bad("tool_choice.type", value.get("type"), "use 'function' with a name", code="unsupported_field")
    return {"type": "function", "function": {"name": value.get("name")}}
