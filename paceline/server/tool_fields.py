"""Fields of tools and of tool_choice, as each interface has them: all others are refused by their whole path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.server.fields import check_nested

# Behind the first ones: what the interfaces define, and what changes nothing here. "return" is what transformers' own
# tool schemas have besides; the template sees it.
_FUNCTION = ("name", "description", "parameters", "strict", "cache_control", "return")
_TOOL = ("type", "function", "strict", "cache_control", "defer_loading")
_FLAT = ("type", "name", "description", "parameters", "strict", "cache_control", "defer_loading")
_ANTHROPIC = (
    *("type", "name", "description", "input_schema"),
    *("cache_control", "strict", "defer_loading", "eager_input_streaming"),
)
_CALLERS = {"allowed_callers": "is not supported: only the model itself calls tools"}
_EXAMPLES = {"input_examples": "is not supported; put examples into the description"}
_INSIDE = "stands inside of function in this interface"
_BESIDE = "its fields stand beside type in this interface"
_SCHEMA = {"input_schema": "is Anthropic's; use parameters", "inputSchema": "use parameters"}


def check_chat(tools: Sequence[Mapping[str, Any]] | None, choice: Any) -> None:
    """Of chats, and of /tokenize. Values are `plan_tools`' business. Raises ApiError."""
    for i, tool in enumerate(tools or ()):
        function = tool.get("function")
        if tool.get("type", "function") == "function" and isinstance(function, Mapping):
            check_nested(f"tools[{i}]", tool, _TOOL, dict.fromkeys(_FUNCTION, _INSIDE))
            check_nested(f"tools[{i}].function", function, _FUNCTION, _SCHEMA)
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        check_nested("tool_choice", choice, ("type", "function", "name"))
        if isinstance(choice.get("function"), Mapping):
            check_nested("tool_choice.function", choice["function"], ("name",))


def check_functions(functions: Sequence[Mapping[str, Any]] | None, choice: Any) -> None:
    """OpenAI's old form. Raises ApiError."""
    for i, function in enumerate(functions or ()):
        check_nested(f"functions[{i}]", function, _FUNCTION, _SCHEMA)
    if isinstance(choice, Mapping) and "name" in choice:
        check_nested("function_call", choice, ("name",))


def check_responses(tools: Sequence[Mapping[str, Any]] | None, choice: Any) -> None:
    """Of the Responses interface. Raises ApiError."""
    for i, tool in enumerate(tools or ()):
        if tool.get("type") == "function":
            check_nested(f"tools[{i}]", tool, _FLAT, {"function": _BESIDE, **_SCHEMA})
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        check_nested("tool_choice", choice, ("type", "name"), {"function": _BESIDE})


def check_anthropic(tools: Sequence[Mapping[str, Any]] | None, choice: Any) -> None:
    """Of the Messages interface. Raises ApiError."""
    for i, tool in enumerate(tools or ()):
        if tool.get("type") in (None, "custom"):
            direct = tool.get("allowed_callers") == ["direct"]
            known = (*_ANTHROPIC, "allowed_callers") if direct else _ANTHROPIC
            remedies = {"function": _BESIDE, "parameters": "is OpenAI's; use input_schema", **_CALLERS, **_EXAMPLES}
            check_nested(f"tools[{i}]", tool, known, remedies)
    if isinstance(choice, Mapping):
        check_nested("tool_choice", choice, ("type", "name", "disable_parallel_tool_use"))
