"""Parsers by name, and the choice by chat template and kind of model."""

from __future__ import annotations

from collections.abc import Collection

from paceline.errors import ConfigError
from paceline.parsing.json_calls import HermesParser, Llama3Parser, MistralParser
from paceline.parsing.pythonic import PythonicParser
from paceline.parsing.reasoning import REASONING_STYLES
from paceline.parsing.tool_parser import ToolParser

TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3Parser,
    "mistral": MistralParser,
    "pythonic": PythonicParser,
}
_BY_MODEL_TYPE = {"qwen2": "hermes", "qwen3": "hermes", "mistral": "mistral"}


def tool_parser_class(name: str) -> type[ToolParser]:
    """Raises ConfigError for an unknown name."""
    if name not in TOOL_PARSERS:
        raise ConfigError(f"tool_call_parser: {name!r} is unknown; use one of {', '.join(TOOL_PARSERS)}")
    return TOOL_PARSERS[name]


def make_tool_parser(name: str, tool_names: Collection[str] = ()) -> ToolParser:
    """A parser for one output. Raises ConfigError for an unknown name."""
    return tool_parser_class(name)(tool_names)


def choose_tool_parser(chat_template: str | None, model_type: str = "") -> str | None:
    """The format in which a model was taught to call tools; None if its template knows of no tools."""
    template = chat_template or ""
    if "<function=" in template:  # Qwen3-Coder's XML, which no parser here reads
        return None
    if "<tool_call>" in template:
        return "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "tools" not in template:
        return None
    if "func_name1(" in template or "<|python_start|>" in template:
        return "pythonic"
    if "<|python_tag|>" in template or '"parameters"' in template:
        return "llama3_json"
    return _BY_MODEL_TYPE.get(model_type)


def choose_reasoning_parser(chat_template: str | None) -> str | None:
    """The tags that a chat template mentions; None if it mentions none."""
    template = chat_template or ""
    for name, style in REASONING_STYLES.items():
        if style.end in template:
            return name
    return None
