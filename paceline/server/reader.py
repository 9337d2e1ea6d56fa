"""A choice's text as parts of a message: reasoning, content, calls, in the order in which they come."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from paceline.outputs import StreamDelta
from paceline.parsing.chat import ChatParser
from paceline.parsing.deltas import ChatDelta, ChatMessage, ToolCallDelta
from paceline.parsing.tools import Form


class Reader:
    """Parts are deltas with one kind of thing each. Which parts there are, and their order, does not depend on how the
    text was cut into deltas; only their cut does."""

    def __init__(
        self,
        parser: ChatParser | None,
        *,
        calls: bool = False,
        parallel_calls: bool = True,
        show_reasoning: bool = True,
        form: Form = "any",
        opening: str = "",
    ) -> None:
        """parser: None where all is content. calls: it looks for them. parallel_calls: False = only the first counts.
        show_reasoning: False = it is left out. form: of the output, as ToolPlan has it. opening: the tag before a
        call."""
        self._parser = parser
        self._calls = calls
        self._parallel = parallel_calls
        self._show = show_reasoning
        self._form = form
        self._opening = opening
        self._answers = False  # content has come
        self.num_calls = 0

    @property
    def is_plain(self) -> bool:
        """All text is content, as it is."""
        return self._parser is None

    def read(self, delta: StreamDelta) -> list[ChatDelta]:
        """What a step added; with the last delta of a choice, the rest too."""
        return self._parts(delta.text, delta.finish_reason is not None)

    def whole(self, text: str) -> list[ChatDelta]:
        """All parts of a whole output."""
        return self._parts(text, True)

    def _parts(self, text: str, end: bool) -> list[ChatDelta]:
        if self._parser is None:
            return [ChatDelta(content=text)] if text else []
        parts = _Parts()
        # a delta does not say whether its content came before its calls or behind them: one character at a time does
        for piece in text if self._calls else (text,):
            self._add(parts, self._parser.feed(piece))
        if end:
            self._add(parts, self._parser.finish())
        return parts.joined()

    def _add(self, parts: _Parts, delta: ChatDelta) -> None:
        if delta.reasoning and self._show:
            parts.text("reasoning", delta.reasoning)
        if delta.content and not self._is_cut_call(delta.content):
            self._answers = True
            parts.text("content", delta.content)
        for call in delta.tool_calls:
            if self._parallel or call.index == 0:
                self.num_calls = max(self.num_calls, call.index + 1)
                parts.call(call)

    def _is_cut_call(self, text: str) -> bool:
        """Whether text that is no call is the beginning of one, of which a limit left too little: nothing else is
        there to be said. Of an answer in JSON, a single "[" may be the beginning too."""
        if self._form == "any":
            return False
        if self._form == "calls" or self.num_calls:
            return True
        begun = text.lstrip()[: len(self._opening)]
        return not self._answers and begun not in ("", "[") and self._opening.startswith(begun)


class _Parts:
    """Pieces of text are joined at the end: += on an attribute would copy it every time."""

    def __init__(self) -> None:
        self._runs: list[tuple[str, list[Any]]] = []

    def text(self, kind: str, text: str) -> None:
        self._run(kind).append(text)

    def call(self, piece: ToolCallDelta) -> None:
        calls = self._run("calls")
        if piece.name is not None or not calls or calls[-1][0].index != piece.index:
            calls.append((piece, []))
        calls[-1][1].append(piece.arguments)

    def _run(self, kind: str) -> list[Any]:
        if not self._runs or self._runs[-1][0] != kind:
            self._runs.append((kind, []))
        return self._runs[-1][1]

    def joined(self) -> list[ChatDelta]:
        out = []
        for kind, items in self._runs:
            if kind == "calls":
                for piece, arguments in items:
                    piece.arguments = "".join(arguments)
                out.append(ChatDelta(tool_calls=[piece for piece, _ in items]))
            elif kind == "reasoning":
                out.append(ChatDelta(reasoning="".join(items)))
            else:
                out.append(ChatDelta(content="".join(items)))
        return out


def message_of(parts: Iterable[ChatDelta]) -> ChatMessage:
    """Parts as one message."""
    message = ChatMessage()
    for part in parts:
        message.add(part)
    return message
