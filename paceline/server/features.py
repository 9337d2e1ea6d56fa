"""What the served model's outputs hold besides text, and what is refused because nothing here reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.chat_template import ChatTemplateError, variables_of
from paceline.errors import ConfigError
from paceline.parsing.reasoning import ReasoningStyle, reasoning_style
from paceline.parsing.registry import choose_reasoning_parser, choose_tool_parser, tool_parser_class
from paceline.server import tool_prompt
from paceline.server.errors import ApiError, shown
from paceline.server.fields import is_neutral
from paceline.tokenizer import Tokenizer

AUTO, NONE = "auto", "none"  # names of parsers: the model's own, and no parser

# Of chats alone: an endpoint without them has no such field.
CHAT_ONLY: Mapping[str, str] = {
    "tools": "belongs to a chat; use /v1/chat/completions",
    "tool_choice": "belongs to a chat; use /v1/chat/completions",
    "functions": "belongs to a chat; use /v1/chat/completions",
    "function_call": "belongs to a chat; use /v1/chat/completions",
    "reasoning": "is not a field of this endpoint; use reasoning_effort of /v1/chat/completions",
    "reasoning_effort": "belongs to a chat; use /v1/chat/completions",
    "thinking": "belongs to a chat; use /v1/chat/completions",
    "prompt_logprobs": "is not a field of this endpoint; use /v1/chat/completions or /v1/completions",
    "response_format": "is not a field of this endpoint; /v1/responses has text.format, /v1/messages output_config",
}

REFUSED: Mapping[str, str] = {
    "thinking_token_budget": "is not supported; use max_tokens",
    "structural_tag": "is not supported; use tools or structured_outputs",
}

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto", {"type": "none"}, {"type": "auto"}),
    "function_call": ("none", "auto"),
    "thinking": ({"type": "disabled"},),
    "reasoning_effort": ("none",),
}


def take_features(extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """The fields that are none of these. Raises ApiError for one of them, unless it asks for nothing."""
    rest = {}
    for name, value in (extra or {}).items():
        why = REFUSED.get(name) or CHAT_ONLY.get(name)
        if why is None:
            rest[name] = value
        elif not is_neutral(name, value, NEUTRAL):
            raise ApiError(400, f"{name}={shown(value)}: {why}", param=name, code="unsupported_field")
    return rest


def check_parsers(tool_parser: str, reasoning_parser: str) -> None:
    """Raises ConfigError for a name that no parser has."""
    if tool_parser not in (AUTO, NONE):
        tool_parser_class(tool_parser)
    if reasoning_parser not in (AUTO, NONE):
        reasoning_style(reasoning_parser)


class ModelFeatures:
    """tool_parser: how the model writes calls, None: it has tools that nothing here reads, or they are switched off.
    knows_tools: its chat template does; else they are described in words. reasoning: its tags. variables: what its
    template can be told."""

    def __init__(
        self, tokenizer: Tokenizer, model_type: str, tool_parser: str = AUTO, reasoning_parser: str = AUTO
    ) -> None:
        """tool_parser, reasoning_parser: names, "auto" or "none". Raises ConfigError for a name that does not fit."""
        check_parsers(tool_parser, reasoning_parser)
        template = tokenizer.chat_template or ""
        self.templates = tuple(tokenizer.templates.values())
        try:
            self.variables = variables_of(template)
        except ChatTemplateError:
            self.variables = frozenset()  # whoever chats with it gets the error
        self.knows_tools = "tool_use" in tokenizer.templates or "tools" in self.variables
        self.tool_parser: str | None = None
        if tool_parser == AUTO:
            source = tokenizer.templates.get("tool_use", template)
            self.tool_parser = choose_tool_parser(source, model_type) if self.knows_tools else tool_prompt.FORMAT
        elif tool_parser != NONE:
            self.tool_parser = tool_parser
            if not self.knows_tools and tool_parser != tool_prompt.FORMAT:
                raise ConfigError(
                    f"tool_call_parser: {tool_parser!r} needs a chat template with tools, and this model's has none; "
                    f"give one (--chat-template), or use {tool_prompt.FORMAT!r}"
                )
        name = choose_reasoning_parser(template) if reasoning_parser == AUTO else reasoning_parser
        self.reasoning: ReasoningStyle | None = None if name in (None, NONE) else reasoning_style(str(name))
        # tags that are special tokens have to be in the text
        special = (
            {tokenizer.backend.token_to_id(t) for t in (self.reasoning.start, self.reasoning.end)}
            if (self.reasoning)
            else set()
        )
        self.special_tags = bool(special & tokenizer.special_ids)
