"""Roles and fields of a chat's messages, checked before a template, which takes anything, sees them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from paceline.server.errors import bad

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# Fields of OpenAI's messages and of its answers, which clients send back, and what other servers add to them.
FIELDS = (
    *("role", "content", "name", "tool_calls", "tool_call_id", "function_call", "refusal", "audio", "annotations"),
    *("reasoning", "reasoning_content", "cache_control"),
)
MOST_GUESSES = 64  # a request may have a million names, and a guess takes a while
_SAID = ("tool_calls", "function_call", "reasoning", "reasoning_content", "refusal", "audio")  # instead of content
_TEXTS = ("name", "tool_call_id", "reasoning", "reasoning_content", "refusal")
_WORD = re.compile(r"\w+")
_QUOTED = re.compile(r"'(\w+)'|\"(\w+)\"")


def check_messages(messages: Iterable[Mapping[str, Any]], templates: tuple[str, ...]) -> None:
    """Known roles, content or what stands for it, and no misspelt fields. templates: the model's; a role that one of
    them names is known, and so is a field. Other fields are the template's business. Raises ApiError, which names the
    field, the value and the remedy."""
    words, quoted = _named(templates)
    guesses: dict[str, str | None] = {}  # unknown field -> what was perhaps meant
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        role = message.get("role")
        if not isinstance(role, str) or (role not in ROLES and role not in quoted):
            raise bad(f"{where}.role", role, f"use one of {', '.join(map(repr, ROLES))}")
        for name in message:
            if name in FIELDS or name in words:
                continue
            if name not in guesses and len(guesses) < MOST_GUESSES:
                guesses[name] = next(iter(get_close_matches(name[:80], FIELDS, 1, 0.8)), None)
            near = guesses.get(name)
            if near is not None and message.get(near) is None:
                raise bad(f"{where}.{name[:80]}", message[name], f"unknown field; did you mean {near!r}?")
        _check_content(message, role, where)
        for name in _TEXTS:
            if not isinstance(message.get(name), str | None):
                raise bad(f"{where}.{name}", message[name], "use a string")
        calls = message.get("tool_calls")
        if calls is not None and not (isinstance(calls, list) and all(isinstance(c, Mapping) for c in calls)):
            raise bad(f"{where}.tool_calls", calls, "use a list of calls: objects with id, type and function")


def _check_content(message: Mapping[str, Any], role: str, where: str) -> None:
    if message.get("content") is not None or role == "function":
        return
    if role == "assistant":
        if not any(message.get(name) for name in _SAID):
            raise bad(f"{where}.content", None, "give text, or tool_calls; an empty text is ''")
    elif role in ROLES:
        raise bad(f"{where}.content", None, f"a message of the role {role!r} needs text, or '' for none")


@lru_cache(maxsize=4)
def _named(templates: tuple[str, ...]) -> tuple[frozenset[str], frozenset[str]]:
    """(words, words in quotes) of templates."""
    words = frozenset(word for source in templates for word in _WORD.findall(source))
    return words, frozenset(a or b for source in templates for a, b in _QUOTED.findall(source))
