"""One output's text -> reasoning, content and tool calls, while it comes."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from paceline.parsing.deltas import ChatDelta, ChatMessage
from paceline.parsing.reasoning import ReasoningParser, begins_in_reasoning, reasoning_style
from paceline.parsing.registry import make_tool_parser
from paceline.parsing.tool_parser import ToolParser


class ChatParser:
    """A reasoning parser, and behind it a tool parser for the answer; either may be None."""

    def __init__(self, reasoning: ReasoningParser | None = None, tools: ToolParser | None = None) -> None:
        self._reasoning = reasoning
        self._tools = tools

    @property
    def num_tool_calls(self) -> int:
        return 0 if self._tools is None else self._tools.num_calls

    def feed(self, text: str) -> ChatDelta:
        """What a piece of text adds to the message. Concatenated, the same for any cut of the text into pieces."""
        return self._answer(self._reasoning.feed(text) if self._reasoning is not None else ChatDelta(content=text))

    def finish(self) -> ChatDelta:
        """The rest, once the output has ended. Call it exactly once."""
        delta = self._answer(self._reasoning.finish() if self._reasoning is not None else ChatDelta())
        if self._tools is not None:
            rest = self._tools.finish()
            delta.content += rest.content
            delta.tool_calls += rest.tool_calls
        return delta

    def _answer(self, delta: ChatDelta) -> ChatDelta:
        if self._tools is None or not delta.content:
            return delta
        answer = self._tools.feed(delta.content)
        answer.reasoning = delta.reasoning
        return answer


def make_chat_parser(
    prompt: str, *, reasoning: str | None = None, tools: str | None = None, tool_names: Collection[str] = ()
) -> ChatParser:
    """A parser for one output. prompt: the text of its prompt, or the end of it, which says whether the reasoning has
    begun. reasoning, tools: names of parsers. Raises ConfigError for an unknown name."""
    splitter = None
    if reasoning is not None:
        style = reasoning_style(reasoning)
        splitter = ReasoningParser(style, begins_in_reasoning(style, prompt))
    return ChatParser(splitter, None if tools is None else make_tool_parser(tools, tool_names))


def parse_chat(parser: ChatParser, pieces: Iterable[str]) -> ChatMessage:
    """The whole message of a fresh parser."""
    message = ChatMessage()
    for piece in pieces:
        message.add(parser.feed(piece))
    message.add(parser.finish())
    return message
