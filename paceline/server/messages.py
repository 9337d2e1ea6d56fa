"""Chat messages as clients send them, and the prompt they become."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from paceline.async_llm import AsyncLLM
from paceline.server.errors import ApiError, bad
from paceline.server.functions import modern
from paceline.server.tool_prompt import in_words

_RESERVED = frozenset(
    {"messages", "tools", "add_generation_prompt", "chat_template", "continue_final_message", "tokenize"}
)


def normalised(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages for a chat template: text parts joined, past calls in OpenAI's newer form, their arguments as objects.
    Raises ApiError for parts that are not text."""
    if not messages:
        raise bad("messages", messages, "give at least one message")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(modern(messages))]


def _message(message: dict[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(message.get("role"), str):
        raise bad(f"{where}.role", message.get("role"), "use 'system', 'user', 'assistant' or 'tool'")
    out = {key: value for key, value in message.items() if key not in ("cache_control", "reasoning")}
    if isinstance(message.get("reasoning"), str):  # the newer name; templates know the other
        out.setdefault("reasoning_content", message["reasoning"])
    content = message.get("content")
    if isinstance(content, list):
        out["content"] = "\n".join(_text(part, where) for part in content)
    elif content is None:
        if message["role"] in ("user", "system", "developer"):
            raise bad(f"{where}.content", content, "a message needs text")
        out["content"] = ""
    elif not isinstance(content, str):
        raise bad(f"{where}.content", content, "use a string or a list of text parts")
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        out["tool_calls"] = [_call(call) for call in calls]
    return out


def _text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = (part.get("type") or "text") if isinstance(part, Mapping) else None
    if isinstance(part, Mapping) and kind in ("text", "input_text", "output_text", "refusal"):
        text = part.get("text", part.get("refusal"))
        if isinstance(text, str):
            return text
        raise bad(f"{where}.content", part, 'a text part needs its text: {"type": "text", "text": ...}')
    shown = part if kind is None else kind
    raise bad(f"{where}.content", shown, "this model reads text parts only", code="unsupported_content")


def _call(call: Any) -> Any:
    """Templates print arguments as JSON themselves; clients send them as a string."""
    if isinstance(call, Mapping) and "function" not in call and "arguments" in call:  # as datasets and models write it
        rest = {key: value for key, value in call.items() if key not in ("name", "arguments")}
        call = {"type": "function", **rest, "function": {"name": call.get("name"), "arguments": call["arguments"]}}
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def template_variables(kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """`chat_template_kwargs`, checked. Raises ApiError."""
    for name in kwargs or {}:
        if name in _RESERVED:
            raise bad("chat_template_kwargs", name, "is set by the server; use the request's own field")
        if not name.isidentifier():
            raise bad("chat_template_kwargs", name, "is not the name of a variable")
    return dict(kwargs or {})


async def chat_prompt(
    engine: AsyncLLM,
    messages: list[dict[str, Any]],
    kwargs: dict[str, Any] | None,
    *,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    add_special_tokens: bool | None,
    tools: list[dict[str, Any]] | None = None,
    knows_tools: bool = True,
) -> tuple[str, list[int]]:
    """(text, token ids) of a conversation. knows_tools: of the template. Raises ApiError, ChatTemplateError."""
    plain, variables = normalised(messages), template_variables(kwargs)
    if not knows_tools:
        plain, tools = in_words(plain, tools), None
    go_on = bool(continue_final_message)
    generate = not go_on if add_generation_prompt is None else add_generation_prompt
    if go_on and generate:
        raise bad("continue_final_message", True, "contradicts add_generation_prompt; give one of them")
    text = await engine.render_chat(
        plain, add_generation_prompt=generate, continue_final_message=go_on, tools=tools, chat_template_kwargs=variables
    )
    return text, await engine.encode(text, add_special_tokens=bool(add_special_tokens))


def refuse_unknown_model(model: str | None, names: tuple[str, ...]) -> None:
    """Raises ApiError 404 for a model that is not served here; no name means the one that is."""
    if model is not None and model not in names:
        raise ApiError(
            404,
            f"The model {model[:200]!r} does not exist here; this server has {', '.join(map(repr, names))}",
            param="model",
            code="model_not_found",
        )
