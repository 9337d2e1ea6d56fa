"""Calls written as JSON: Hermes and Qwen, Llama 3, Mistral."""

from __future__ import annotations

from paceline.parsing.deltas import mistral_call_id
from paceline.parsing.scan import CallScanner, JsonScanner, TagFinder
from paceline.parsing.tool_parser import ToolParser


class JsonCallParser(ToolParser):
    """Calls that are objects {"name": ..., "arguments": {...}}, read by `_scan`."""

    needs_arguments = False  # an object without them is no call

    def _begin_object(self) -> None:
        self._scanner = CallScanner()
        self._reported = False
        self._raw: list[str] = []  # of an object that is not reported yet

    def _scan(self, char: str) -> str:
        """ "more", "done", or "bad": the character does not belong to the object, or it is no call."""
        scanner = self._scanner
        if not scanner.push(char):
            return "bad"
        if not self._reported:
            self._raw.append(char)
            known = scanner.name is not None and (scanner.has_arguments or scanner.done)
            if known and scanner.name is not None and self._is_call(scanner.name):
                self._call(scanner.name)
                self._reported, self._raw = True, []
                if not scanner.has_arguments:
                    self._arguments("{}")
            elif known or scanner.done:
                return "bad"
        if self._reported:
            self._arguments(scanner.take())
        return "done" if scanner.done else "more"

    def _is_call(self, name: str) -> bool:
        return self._scanner.has_arguments or not self.needs_arguments

    def _give_up(self, before: str, char: str) -> None:
        """The object is no call, or stopped being one at this character (if that is not part of `_raw` yet)."""
        if self._reported:
            self._content(char)
        else:
            raw = "".join(self._raw)
            self._content(before + raw + ("" if not self._scanner.failed else char))


class HermesParser(JsonCallParser):
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of them, with text around: Hermes 2 Pro and
    3, Qwen 2.5, Qwen 3."""

    start = "<tool_call>"
    end = "</tool_call>"
    markers = (start, end)

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._find = TagFinder([self.start])
        self._close = TagFinder([self.end, self.start])
        self._state = "content"
        self._gap = ""

    def _push(self, char: str) -> None:
        if self._state == "content":
            text, tag = self._find.push(char)
            self._content(text)
            if tag is not None:
                self._enter()
        elif self._state == "call":
            if char.isspace() and not self._raw and not self._reported:
                self._gap += char
                return
            outcome = self._scan(char)
            if outcome == "done":
                self._state = "close"
            elif outcome == "bad":
                self._state = "content"
                self._give_up(self.start + self._gap, char)
        else:
            self._closing(char)

    def _closing(self, char: str) -> None:
        """Behind a whole object: the end tag; without one, the call stands and text goes on."""
        if char.isspace() and not self._close.held:
            self._space.append(char)
            return
        text, tag = self._close.push(char)
        if text:
            self._state = "content"
            for one in text + self._close.flush():
                self._push(one)
        elif tag == self.start:
            self._enter()
        elif tag == self.end:
            self._state = "content"
            self._space.clear()

    def _enter(self) -> None:
        self._state, self._gap = "call", ""
        self._begin_object()

    def _end(self) -> None:
        if self._state == "content":
            self._content(self._find.flush())
        elif self._state == "call" and not self._reported:
            self._content(self.start + self._gap + "".join(self._raw))
        elif self._state == "close":
            self._close.flush()  # an end tag that was cut short


class Llama3Parser(JsonCallParser):
    """The whole answer is {"name": ..., "parameters": {...}}, or some of them with ";" between, perhaps behind
    <|python_tag|>: Llama 3.1, 3.2 and 3.3. JSON that names no tool on offer is an answer in JSON."""

    tag = "<|python_tag|>"
    markers = (tag,)
    needs_arguments = True

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._find = TagFinder([self.tag])
        self._state = "start"
        self._before = ""  # what stands between the calls, as far as it is not content

    def _is_call(self, name: str) -> bool:
        return super()._is_call(name) and (not self.tool_names or name in self.tool_names)

    def _push(self, char: str) -> None:
        if self._state == "start":
            text, tag = self._find.push(char)
            for one in text:
                self._start(one)
            if tag is not None:
                self._before += tag
        elif self._state == "call":
            outcome = self._scan(char)
            if outcome == "done":
                self._state, self._before = "start", ""
            elif outcome == "bad":
                self._state = "content"
                self._give_up(self._before, char)
        else:
            self._content(char)

    def _start(self, char: str) -> None:
        if self._state != "start":
            self._push(char)
        elif char == "{":
            self._state = "call"
            self._begin_object()
            self._scan(char)
        elif char.isspace() or (char == ";" and self.num_calls and ";" not in self._before):
            self._before += char
        else:
            self._state = "content"
            self._content(self._before + char)

    def _end(self) -> None:
        if self._state == "start":
            self._content(self._before + self._find.flush())
        elif self._state == "call" and not self._reported:
            self._content(self._before + "".join(self._raw))


class MistralParser(JsonCallParser):
    """[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...] and, of newer models, [TOOL_CALLS]name[ARGS]{...}."""

    tag = "[TOOL_CALLS]"
    args_tag = "[ARGS]"
    id_tag = "[CALL_ID]"
    markers = (tag, args_tag, id_tag)

    def __init__(self, tool_names: object = (), new_id: object = mistral_call_id) -> None:
        super().__init__(tool_names, new_id)  # type: ignore[arg-type]
        self._find = TagFinder([self.tag])
        self._args = TagFinder([self.args_tag, self.id_tag])
        self._state = "content"
        self._name = ""
        self._gap = ""

    def _push(self, char: str) -> None:
        if self._state == "content":
            text, tag = self._find.push(char)
            self._content(text)
            if tag is not None:
                self._state, self._name, self._gap = "tag", "", tag
        elif self._state == "tag":  # behind the tag: a list, an object, or a name
            self._behind_tag(char)
        elif self._state in ("item", "object"):
            self._in_object(char)
        elif self._state == "next":  # behind an object of the list
            self._between(char)
        elif self._state == "name":
            self._in_name(char)
        else:
            self._in_arguments(char)

    def _behind_tag(self, char: str) -> None:
        if char.isspace() or (char == "[" and "[" not in self._gap.removeprefix(self.tag)):
            self._gap += char
        elif char == "]" and self._gap.endswith("["):
            self._state = "content"  # an empty list
        elif char == "{":
            self._state = "item" if "[" in self._gap.removeprefix(self.tag) else "object"
            self._begin_object()
            self._scan(char)
        elif self._is_name(char) and "[" not in self._gap.removeprefix(self.tag):
            self._state, self._name = "name", char
        else:
            self._state = "content"
            self._content(self._gap)
            self._push(char)

    def _in_object(self, char: str) -> None:
        outcome = self._scan(char)
        if outcome == "done":
            self._state, self._gap = ("next" if self._state == "item" else "content"), ""
        elif outcome == "bad":
            self._state = "content"
            self._give_up(self._gap, char)

    def _between(self, char: str) -> None:
        if char == "]":
            self._state = "content"
        elif char == "{":
            self._state = "item"
            self._begin_object()
            self._scan(char)
        elif char == "," and "," not in self._gap:
            self._gap = char
        elif not char.isspace():
            self._state = "content"
            self._push(char)

    @staticmethod
    def _is_name(char: str) -> bool:
        return char.isalnum() or char in "_-."

    def _in_name(self, char: str) -> None:
        """name, [CALL_ID]id and [ARGS] are there for their tags' sake; the arguments begin with "{"."""
        text, tag = self._args.push(char)
        for one in text:
            if self._state != "name":
                self._push(one)
            elif one == "{":
                self._state, self._json = "arguments", JsonScanner()
                self._call(self._name)
                self._push(one)
            elif self._is_name(one) and self._gap != self.args_tag:
                if self._gap != self.id_tag:
                    self._name += one
            elif not (one.isspace() and self._gap == self.args_tag):
                self._state = "content"
                self._content(self.tag + self._name + one)
        if tag is not None:
            self._gap = tag

    def _in_arguments(self, char: str) -> None:
        if not self._json.push(char):
            self._state = "content"
            self._push(char)
            return
        self._arguments(char)
        if self._json.done:
            self._state = "content"

    def _end(self) -> None:
        if self._state == "content":
            self._content(self._find.flush())
        elif self._state == "tag":
            self._content(self._gap)
        elif self._state == "name":
            self._content(self.tag + self._name + self._args.flush())
        elif self._state in ("item", "object") and not self._reported:
            self._content(self._gap + "".join(self._raw))
