"""Roles and fields of a chat's messages, checked before a template, which takes anything, sees them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from paceline.server.errors import bad
from paceline.server.fields import is_neutral

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# Fields of OpenAI's messages and of its answers, which clients send back, and what other servers add to them.
FIELDS = (
    *("role", "content", "name", "tool_calls", "tool_call_id", "function_call", "refusal", "audio", "annotations"),
    *("reasoning", "reasoning_content", "cache_control"),
)
# What a conversation would lose unseen under a wrong name. Nothing else is worth a refusal: clients and providers add
# names of their own (reasoning_text, cacheControl).
TELLING = ("content", "tool_calls", "function_call", "tool_call_id")
_TELLING_OF = {"assistant": TELLING[:3], "tool": ("content", "tool_call_id")}
MOST_GUESSES = 64  # a request may have a million names, and a guess takes a while
_SPEAKERS = ("system", "developer", "user")  # who has to say something; an empty answer or result is sent as null
_TEXTS = ("name", "tool_call_id", "reasoning", "reasoning_content")
_WORD = re.compile(r"\w+")
_QUOTED = re.compile(r"'(\w+)'|\"(\w+)\"")


def check_messages(messages: Iterable[Mapping[str, Any]], templates: tuple[str, ...]) -> None:
    """Known roles, content where somebody has to say something, calls that are some, and no misspelt fields. templates:
    the model's; a role that one of them names is known, and so is a field. Other fields are the template's business.
    Raises ApiError, which names the field, the value and the remedy."""
    words, quoted = _named(templates)
    guesses: dict[str, str | None] = {}  # unknown field -> what was perhaps meant
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        role = message.get("role")
        if not isinstance(role, str) or (role not in ROLES and role not in quoted):
            raise bad(f"{where}.role", role, f"use one of {', '.join(map(repr, ROLES))}")
        missing = _missing(message, role)
        for name in message if missing else ():
            if name in FIELDS or name in words or is_neutral(name, message[name]):
                continue
            if name not in guesses and len(guesses) < MOST_GUESSES:
                guesses[name] = next(iter(get_close_matches(name[:80], TELLING, 1, 0.8)), None)
            if guesses.get(name) in missing and _may_be(guesses[name], message[name]):
                raise bad(f"{where}.{name[:80]}", message[name], f"unknown field; did you mean {guesses[name]!r}?")
        if message.get("content") is None and role in _SPEAKERS:
            raise bad(f"{where}.content", None, f"a message of the role {role!r} needs text, or '' for none")
        for name in _TEXTS:
            if not isinstance(message.get(name), str | None):
                raise bad(f"{where}.{name}", message[name], "use a string")
        _check_calls(message.get("tool_calls"), f"{where}.tool_calls")


def _missing(message: Mapping[str, Any], role: str) -> list[str]:
    """What this message does not have and might have under a misspelt name."""
    calls = message.get("tool_calls") or message.get("function_call")
    names = _TELLING_OF.get(role, TELLING[:1])
    return [name for name in names if message.get(name) in (None, [], {}) and not (calls and name != "tool_call_id")]


def _may_be(name: str | None, value: Any) -> bool:
    """Whether a value is of the kind that this field has: `context` with an object is not meant to be content."""
    if name == "tool_calls":
        return isinstance(value, list | Mapping)
    if name == "function_call":
        return isinstance(value, Mapping)
    return isinstance(value, str) or (name == "content" and isinstance(value, list))


def _check_calls(calls: Any, where: str) -> None:
    """Templates print a call without a function, or one without a name, as nothing or as "None"."""
    if is_neutral("tool_calls", calls):
        return
    if not isinstance(calls, list):
        raise bad(where, calls, "use a list of calls: objects with id, type and function")
    for j, call in enumerate(calls):
        if not isinstance(call, Mapping):
            raise bad(f"{where}[{j}]", call, "use an object with id, type and function")
        function = call if "function" not in call and "arguments" in call else call.get("function")
        if not isinstance(function, Mapping):
            raise bad(f"{where}[{j}].function", function, 'use {"name": ..., "arguments": ...}')
        if not isinstance(function.get("name"), str):
            whose = f"{where}[{j}]" if function is call else f"{where}[{j}].function"
            raise bad(f"{whose}.name", function.get("name"), "name the function that was called")


@lru_cache(maxsize=4)
def _named(templates: tuple[str, ...]) -> tuple[frozenset[str], frozenset[str]]:
    """(words, words in quotes) of templates."""
    words = frozenset(word for source in templates for word in _WORD.findall(source))
    return words, frozenset(a or b for source in templates for a, b in _QUOTED.findall(source))
