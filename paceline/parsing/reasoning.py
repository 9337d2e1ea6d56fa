"""Reasoning apart from answers: `<think>...</think>` and its relatives."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from paceline.errors import ConfigError
from paceline.parsing.deltas import ChatDelta
from paceline.parsing.scan import TagFinder


@dataclass(frozen=True, slots=True)
class ReasoningStyle:
    """start, end: the tags. implicit: the output begins inside the reasoning even when no start tag is anywhere."""

    name: str
    start: str
    end: str
    implicit: bool = False


REASONING_STYLES: dict[str, ReasoningStyle] = {
    style.name: style
    for style in (
        ReasoningStyle("qwen3", "<think>", "</think>"),
        ReasoningStyle("deepseek_r1", "<think>", "</think>", implicit=True),
        ReasoningStyle("mistral", "[THINK]", "[/THINK]"),
        ReasoningStyle("seed_oss", "<seed:think>", "</seed:think>"),
    )
}


def reasoning_style(name: str) -> ReasoningStyle:
    """Raises ConfigError for an unknown name."""
    if name not in REASONING_STYLES:
        raise ConfigError(f"reasoning_parser: {name!r} is unknown; use one of {', '.join(REASONING_STYLES)}")
    return REASONING_STYLES[name]


def begins_in_reasoning(style: ReasoningStyle, prompt: str) -> bool | None:
    """Where an output starts, from the text of its prompt: True inside the reasoning, False behind it, None: the
    output itself says so (with a start tag, or without)."""
    tail = prompt.rstrip()
    if tail.endswith(style.end):
        return False
    return True if style.implicit or tail.endswith(style.start) else None


def begins_behind(style: ReasoningStyle, text: str) -> bool | None:
    """`begins_in_reasoning` for an output that goes on from the beginning of one."""
    parser = ReasoningParser(style, True if style.implicit else None)
    parser.feed(text)
    return None if parser.is_open else parser.in_reasoning


class ReasoningParser:
    """Splits the text of one output. White space at both ends of the reasoning, and between it and the answer, belongs
    to neither."""

    def __init__(self, style: ReasoningStyle, begins: bool | None = None) -> None:
        """begins: of `begins_in_reasoning`."""
        self.style = style
        self._place = {None: "before", True: "reasoning", False: "content"}[begins]
        self._start = TagFinder([style.start])
        self._end = TagFinder([style.end])
        self._may_start = begins is not False
        self._space: list[str] = []  # white space that may turn out to be an end
        self._fresh = True  # nothing but white space since the place was entered
        self._text: list[str] = []  # of the next delta; += on an attribute would copy it every time
        self._thoughts: list[str] = []

    @property
    def in_reasoning(self) -> bool:
        return self._place == "reasoning"

    @property
    def is_open(self) -> bool:
        """Nothing has come yet that says where the output begins."""
        return self._place == "before"

    def feed(self, text: str) -> ChatDelta:
        """What becomes certain with this text, in pieces of any size."""
        for index, char in enumerate(text):
            if self._place == "content" and not self._fresh:
                self._text.append(text[index:])
                break
            self._push(char)
        return self._take()

    def finish(self) -> ChatDelta:
        """The rest, at the end of the output."""
        if self._place == "before":
            self._text += [*self._space, self._start.flush()]
        elif self._place == "reasoning":
            self._reasoning(self._start.flush() + self._end.flush())
        return self._take()

    def _take(self) -> ChatDelta:
        out = ChatDelta("".join(self._thoughts), "".join(self._text))
        self._text, self._thoughts = [], []
        return out

    def _push(self, char: str) -> None:
        if self._place != "content" and self._may_start:
            self._seek_start(char)
        elif self._place == "reasoning":
            self._seek_end(char)
        elif self._fresh and char.isspace():
            pass
        else:
            self._fresh = False
            self._text.append(char)

    def _seek_start(self, char: str) -> None:
        """The first thing but white space: a start tag, or none."""
        if char.isspace() and not self._start.held:
            self._space.append(char)
            return
        text, tag = self._start.push(char)
        if tag is not None:
            self._place, self._space, self._may_start = "reasoning", [], False
        elif text:
            self._may_start = False
            text += self._start.flush()
            if self._place == "before":
                self._place, self._fresh = "content", False
                self._text += [*self._space, text]
            else:
                self._space = []
                for one in text:
                    self._seek_end(one)

    def _seek_end(self, char: str) -> None:
        text, tag = self._end.push(char)
        self._reasoning(text)
        if tag is not None:
            self._place, self._space, self._fresh = "content", [], True

    def _reasoning(self, text: str) -> None:
        for char in text:
            if char.isspace():
                self._space.append(char)
                continue
            if not self._fresh:
                self._thoughts += self._space
            self._space, self._fresh = [], False
            self._thoughts.append(char)


class ReasoningCounter:
    """Counts the tokens of an output that are reasoning: those before and behind which the text is inside it, so tags
    are not counted. Of n tokens it never counts more than n."""

    def __init__(self, style: ReasoningStyle, begins: bool | None, token_bytes: Callable[[int], bytes]) -> None:
        """token_bytes: of the tokenizer, special tokens by their text."""
        self._parser = ReasoningParser(style, begins)
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.count = 0

    def feed(self, token_ids: Iterable[int]) -> int:
        """`count` after these tokens."""
        for token in token_ids:
            before = self._parser.in_reasoning
            self._parser.feed(self._decoder.decode(self._token_bytes(token)))
            self.count += before and self._parser.in_reasoning
        return self.count
