"""Tools for models whose chat template knows of none: described in the system message, in the `hermes` format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

FORMAT = "hermes"

_INTRODUCTION = """You can call the functions that are listed here. To call one, write its name and its arguments as \
JSON between <tool_call> and </tool_call>, one pair of tags for each call:
<tool_call>
{"name": "name-of-the-function", "arguments": {"name-of-an-argument": "value"}}
</tool_call>

The functions, with the JSON schemas of their arguments:
<tools>
%s
</tools>"""


def in_words(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """Messages without roles and fields that such a template does not know: tools in the system message, calls in the
    text of the assistant, results as messages of the user."""
    joined: list[dict[str, Any]] = []
    before = None
    for message in messages:
        spoken, role = _spoken(message), message.get("role")
        if role == before == "tool":
            joined[-1]["content"] += "\n" + spoken["content"]
        else:
            joined.append(spoken)
        before = role
    if not tools:
        return joined
    words = _INTRODUCTION % "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    if joined and joined[0].get("role") == "system":
        first = joined[0]
        return [{**first, "content": f"{first['content']}\n\n{words}".lstrip()}, *joined[1:]]
    return [{"role": "system", "content": words}, *joined]


def _spoken(message: Mapping[str, Any]) -> dict[str, Any]:
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message.get('content')}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return dict(message)
    texts = [message.get("content") or "", *map(_call, calls)]
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join(text for text in texts if text)}


def _call(call: Any) -> str:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return ""
    body = {"name": function.get("name"), "arguments": function.get("arguments", {})}
    return f"<tool_call>\n{json.dumps(body, ensure_ascii=False)}\n</tool_call>"
