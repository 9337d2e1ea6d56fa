"""What `LLM.chat`, `LLM.stream` and `AsyncLLM` may be told about a conversation, and the prompt that it becomes."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypedDict

from paceline.call_arguments import refuse_unknown
from paceline.chat_template import ChatTemplateError, variables_of
from paceline.errors import ConfigError
from paceline.prompts import chat_messages
from paceline.tokenizer import Tokenizer
from paceline.values import shown

log = logging.getLogger(__name__)


class ChatArguments(TypedDict, total=False):
    """Keyword arguments about a conversation, with vLLM's names.

    tools: functions in OpenAI's form, for the template. chat_template: Jinja source instead of the model's.
    add_generation_prompt: end with the beginning of an answer; None = unless a message is continued.
    continue_final_message: the answer goes on in the last message. chat_template_kwargs: variables of the template,
    such as {"enable_thinking": False}.
    """

    tools: list[dict[str, Any]] | None
    chat_template: str | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template_kwargs: Mapping[str, Any] | None


CHAT_ARGUMENTS = tuple(ChatArguments.__annotations__)
# names that the template is given anyway; "tokenize" would be a variable nowhere
_RESERVED = frozenset({*CHAT_ARGUMENTS, "messages", "tokenize"})


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """`ChatArguments`, checked."""

    tools: list[dict[str, Any]] | None
    chat_template: str | None
    generate: bool  # end with the beginning of an answer
    go_on: bool  # in the last message
    variables: Mapping[str, Any]

    @classmethod
    def read(cls, call: Callable[..., Any], arguments: Mapping[str, Any]) -> ChatOptions:
        """From the arguments of `call` that are not in its signature. Raises ConfigError, ArgumentError for those that
        there are not."""
        if not arguments:
            return _DEFAULTS
        if unknown := {name: value for name, value in arguments.items() if name not in CHAT_ARGUMENTS}:
            known = [name for name, p in inspect.signature(call).parameters.items() if p.kind is not p.VAR_KEYWORD]
            refuse_unknown(unknown, known, CHAT_ARGUMENTS, takes=True)
        for name in ("add_generation_prompt", "continue_final_message"):
            if not isinstance(arguments.get(name), bool | None):
                raise ConfigError(f"{name}={shown(arguments[name])}: use True or False")
        go_on, generate = bool(arguments.get("continue_final_message")), arguments.get("add_generation_prompt")
        if go_on and generate:
            raise ConfigError("continue_final_message=True: contradicts add_generation_prompt=True; give one of them")
        source, tools = arguments.get("chat_template"), arguments.get("tools")
        if not isinstance(source, str | None):
            raise ConfigError(f"chat_template={shown(source)}: use the source of a Jinja template, a string")
        if not isinstance(tools, list | tuple | None) or not all(isinstance(tool, Mapping) for tool in tools or ()):
            raise ConfigError(f"tools={shown(tools)}: use a list of mappings, functions in OpenAI's form")
        return cls(
            [dict(tool) for tool in tools] if tools else None,
            source,
            not go_on if generate is None else generate,
            go_on,
            _variables(arguments.get("chat_template_kwargs")),
        )

    def refuse_without_messages(self, arguments: Mapping[str, Any]) -> None:
        """Raise ConfigError for an argument that asks for something, beside a prompt that is no conversation."""
        asked = {
            "tools": self.tools,
            "chat_template": self.chat_template,
            "add_generation_prompt": arguments.get("add_generation_prompt"),
            "continue_final_message": self.go_on,
            "chat_template_kwargs": self.variables,
        }
        for name, value in asked.items():
            if value:
                raise ConfigError(f"{name}: belongs to a chat template; give messages as the prompt")

    def encode(self, messages: Any, tokenizer: Tokenizer) -> list[int]:
        """Token ids of a conversation. Raises ConfigError for what is none, ChatTemplateError."""
        text = self.render(messages, tokenizer)
        if self.variables:
            source = tokenizer.template_for(self.chat_template, self.tools)
            for name in self.variables:
                _warn_if_unread(source, name)
        return tokenizer.encode(text, add_special_tokens=False)  # the template writes them

    def render(self, messages: Any, tokenizer: Tokenizer) -> str:
        """The text of a conversation. Raises ConfigError for what is none, ChatTemplateError."""
        return tokenizer.apply_chat_template(
            chat_messages(messages),
            add_generation_prompt=self.generate,
            continue_final_message=self.go_on,
            tools=self.tools,
            chat_template=self.chat_template,
            **self.variables,
        )


_DEFAULTS = ChatOptions(None, None, True, False, {})


def _variables(given: Any) -> Mapping[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"chat_template_kwargs={shown(given)}: use a mapping of names to values")
    for name in given:
        if not isinstance(name, str) or not name.isidentifier():
            raise ConfigError(f"chat_template_kwargs: {shown(name)} is not the name of a variable")
        if name in _RESERVED:
            remedy = "give it as an argument of its own" if name in CHAT_ARGUMENTS else "leave it out"
            raise ConfigError(f"chat_template_kwargs: {name!r} is no variable of a template; {remedy}")
    return dict(given)


@lru_cache(maxsize=256)
def _warn_if_unread(source: str, name: str) -> None:
    """Once for each. No error: programs send enable_thinking to every model."""
    try:
        unread = name not in variables_of(source)
    except ChatTemplateError:
        return  # rendering says so
    if unread:
        log.warning("chat_template_kwargs: the chat template does not read %r; it changes nothing", name)
