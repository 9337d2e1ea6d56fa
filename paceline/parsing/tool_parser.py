"""What the parsers of tool calls have in common."""

from __future__ import annotations

from collections.abc import Collection

from paceline.parsing.deltas import ChatDelta, NewId, ToolCallDelta, call_id


class ToolParser:
    """Finds the calls in the answer of one output, fed in pieces of any size. Base class: an automaton over characters.

    White space around calls is not content. A call that turns out malformed is content if it was not reported yet; one
    that was reported keeps the arguments reported so far, and what follows is content.
    """

    markers: tuple[str, ...] = ()  # tags that may be special tokens, which the text then has to show

    def __init__(self, tool_names: Collection[str] = (), new_id: NewId = call_id) -> None:
        """tool_names: the tools on offer; formats without a tag of their own take nothing else for a call."""
        self.tool_names = frozenset(tool_names)
        self.num_calls = 0
        self._new_id = new_id
        # what the next delta reports, in pieces that are joined there: += on an attribute copies the text every time
        self._text: list[str] = []
        self._pieces: list[tuple[ToolCallDelta, list[str]]] = []
        self._space: list[str] = []  # white space that is content if content follows

    def feed(self, text: str) -> ChatDelta:
        """What becomes certain with this text."""
        for char in text:
            self._push(char)
        return self._take()

    def finish(self) -> ChatDelta:
        """The rest, at the end of the output."""
        self._end()
        if not self.num_calls:
            self._text += self._space
        return self._take()

    def _push(self, char: str) -> None:
        raise NotImplementedError

    def _end(self) -> None:
        raise NotImplementedError

    # ---- reporting

    def _take(self) -> ChatDelta:
        for piece, arguments in self._pieces:
            piece.arguments = "".join(arguments)
        out = ChatDelta(content="".join(self._text), tool_calls=[piece for piece, _ in self._pieces])
        self._text, self._pieces = [], []
        return out

    def _content(self, text: str) -> None:
        for char in text:
            self._space.append(char)
            if not char.isspace():
                self._text += self._space
                self._space.clear()

    def _call(self, name: str) -> None:
        self._space.clear()
        self._pieces.append((ToolCallDelta(self.num_calls, self._new_id(), name), []))
        self.num_calls += 1

    def _arguments(self, text: str) -> None:
        if not text:
            return
        if not self._pieces or self._pieces[-1][0].index != self.num_calls - 1:
            self._pieces.append((ToolCallDelta(self.num_calls - 1), []))
        self._pieces[-1][1].append(text)
