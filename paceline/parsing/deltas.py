"""What parsers report: pieces of a message as they become certain, in the shape of OpenAI's deltas."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass, field

_ALPHABET = string.ascii_letters + string.digits


@dataclass(slots=True)
class ToolCallDelta:
    """A piece of one call. index: of the call in the message. id and name: on its first piece alone. arguments: what
    is added to the JSON text of its arguments."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class ChatDelta:
    """What a piece of text added to a message; falsy if nothing."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.tool_calls)


@dataclass(slots=True)
class ToolCall:
    """A whole call. arguments: JSON text, as the model wrote it; cut short if the output was."""

    id: str
    name: str
    arguments: str


@dataclass(slots=True)
class ChatMessage:
    """A whole message: the sum of its deltas (`add`)."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    def add(self, delta: ChatDelta) -> None:
        self.reasoning += delta.reasoning
        self.content += delta.content
        for piece in delta.tool_calls:
            if piece.name is not None:
                self.tool_calls.append(ToolCall(piece.id or "", piece.name, ""))
            self.tool_calls[piece.index].arguments += piece.arguments


NewId = Callable[[], str]


def call_id() -> str:
    """OpenAI's form of a call id."""
    return "call_" + secrets.token_hex(12)


def mistral_call_id() -> str:
    """Nine letters or digits: Mistral's chat templates refuse others."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(9))
