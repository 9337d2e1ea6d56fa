"""Anthropic's messages and tools, in the form of chat completions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.server.errors import bad

# OpenAI's names in errors about tools -> Anthropic's
TOOL_NAMES = ((".function.parameters", ".input_schema"), ("tool_choice.function", "tool_choice"), (".function", ""))
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def messages_of(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Chat messages: results of tools become messages of their own, before the text that came with them. Raises
    ApiError."""
    out: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        role, content, where = message.get("role"), message.get("content"), f"messages[{i}]"
        if role not in ("user", "assistant", "system"):
            raise bad(f"{where}.role", role, "use 'user' or 'assistant'")
        if not isinstance(content, list):
            out.append({"role": role, "content": content})
        elif role == "assistant":
            out.append(_said(content, where))
        else:
            out += _asked(role, content, where)
    return out


def _said(content: list[Any], where: str) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for j, block in enumerate(content):
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "tool_use":
            calls.append(_call(block, f"{where}.content[{j}]"))
        elif kind == "thinking" and isinstance(block.get("thinking"), str):
            thoughts.append(block["thinking"])
        elif kind != "redacted_thinking":
            texts.append(block)
    said: dict[str, Any] = {"role": "assistant", "content": texts}
    if thoughts:
        said["reasoning_content"] = "\n".join(thoughts)
    if calls:
        said["tool_calls"] = calls
    return said


def _call(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    for name in ("id", "name"):
        if not isinstance(block.get(name), str):
            raise bad(f"{where}.{name}", block.get(name), "use a string")
    if not isinstance(block.get("input"), Mapping):
        raise bad(f"{where}.input", block.get("input"), "use an object")
    function = {"name": block["name"], "arguments": dict(block["input"])}
    return {"id": block["id"], "type": "function", "function": function}


def _asked(role: str, content: list[Any], where: str) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    rest = []
    for j, block in enumerate(content):
        if not (isinstance(block, Mapping) and block.get("type") == "tool_result"):
            rest.append(block)
            continue
        if not isinstance(block.get("tool_use_id"), str):
            raise bad(f"{where}.content[{j}].tool_use_id", block.get("tool_use_id"), "use the id of a tool_use block")
        result = block.get("content")
        out.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": "" if result is None else result})
    return [*out, {"role": role, "content": rest}] if rest or not out else out


def tools_of(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Function tools as chat completions have them. Raises ApiError for tools that Anthropic's servers run."""
    if tools is None:
        return None
    out = []
    for i, tool in enumerate(tools):
        if tool.get("type") not in (None, "custom"):
            remedy = "only tools of your own ('custom') are supported"
            raise bad(f"tools[{i}].type", tool.get("type"), remedy, code="unsupported_field")
        function = {
            "name": tool.get("name"),
            "description": tool.get("description"),
            "parameters": tool.get("input_schema"),
        }
        out.append({"type": "function", "function": {k: v for k, v in function.items() if v is not None}})
    return out


def choice_of(value: str | Mapping[str, Any] | None) -> tuple[Any, bool]:
    """(`tool_choice` as chat completions have it, whether calls may come in parallel). Raises ApiError."""
    if value is None:
        return None, True
    kind = value.get("type") if isinstance(value, Mapping) else value
    if not isinstance(value, Mapping) or kind not in (*_CHOICES, "tool"):
        raise bad("tool_choice.type", kind, "use an object with the type 'auto', 'any', 'tool' or 'none'")
    parallel = not value.get("disable_parallel_tool_use")
    if kind == "tool":
        return {"type": "function", "function": {"name": value.get("name")}}, parallel
    return _CHOICES[str(kind)], parallel


def arguments_of(text: str) -> Any:
    """`input` of a whole call; one that a limit cut short has none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {}
