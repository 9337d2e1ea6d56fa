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
        self._out = ChatDelta()
        self._space = ""  # white space that is content if content follows

    def feed(self, text: str) -> ChatDelta:
        """What becomes certain with this text."""
        for char in text:
            self._push(char)
        return self._take()

    def finish(self) -> ChatDelta:
        """The rest, at the end of the output."""
        self._end()
        if not self.num_calls:
            self._out.content += self._space
        return self._take()

    def _push(self, char: str) -> None:
        raise NotImplementedError

    def _end(self) -> None:
        raise NotImplementedError

    # ---- reporting

    def _take(self) -> ChatDelta:
        out, self._out = self._out, ChatDelta()
        return out

    def _content(self, text: str) -> None:
        for char in text:
            if char.isspace():
                self._space += char
            else:
                self._out.content += self._space + char
                self._space = ""

    def _call(self, name: str) -> None:
        self._space = ""
        self._out.tool_calls.append(ToolCallDelta(self.num_calls, self._new_id(), name))
        self.num_calls += 1

    def _arguments(self, text: str) -> None:
        if not text:
            return
        calls = self._out.tool_calls
        if not calls or calls[-1].index != self.num_calls - 1:
            calls.append(ToolCallDelta(self.num_calls - 1))
        calls[-1].arguments += text
