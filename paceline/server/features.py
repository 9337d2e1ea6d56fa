"""Where structured outputs, tools and reasoning join the server.

Until they do, a request that needs them is refused here, by the name of the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.server.errors import ApiError
from paceline.server.fields import is_neutral
from paceline.values import shown

FEATURES: Mapping[str, str] = {
    "response_format": "structured outputs are not supported yet; use {'type': 'text'}",
    "structured_outputs": "structured outputs are not supported yet",
    "guided_json": "structured outputs are not supported yet",
    "guided_regex": "structured outputs are not supported yet",
    "guided_choice": "structured outputs are not supported yet",
    "guided_grammar": "structured outputs are not supported yet",
    "guided_decoding_backend": "structured outputs are not supported yet",
    "tools": "tool calls are not supported yet",
    "tool_choice": "tool calls are not supported yet",
    "functions": "tool calls are not supported yet",
    "function_call": "tool calls are not supported yet",
    "reasoning": "reasoning is not parsed yet; use chat_template_kwargs to steer the template",
    "reasoning_effort": "reasoning is not parsed yet; use chat_template_kwargs to steer the template",
    "thinking": "reasoning is not parsed yet; use chat_template_kwargs to steer the template",
    "thinking_token_budget": "reasoning is not parsed yet",
}

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", {"type": "none"}),
    "function_call": ("none",),
    "thinking": ({"type": "disabled"},),
}


def take_features(extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """The fields that are none of these features. Raises ApiError for one that is asked for and not there."""
    rest = {}
    for name, value in (extra or {}).items():
        if name not in FEATURES:
            rest[name] = value
        elif not (is_neutral(name, value, NEUTRAL) or _without_tools(name, value, extra or {})):
            raise ApiError(400, f"{name}={shown(value)}: {FEATURES[name]}", param=name, code="unsupported_field")
    return rest


def _without_tools(name: str, value: Any, extra: Mapping[str, Any]) -> bool:
    """A choice among no tools is none."""
    return name in ("tool_choice", "function_call") and value in ("auto", {"type": "auto"}) and not extra.get("tools")
