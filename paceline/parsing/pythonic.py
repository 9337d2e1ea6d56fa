"""Calls written as a Python list: [get_weather(city="Lyon", days=2), now()]. Llama 3.2 and 4, ToolACE."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from paceline.parsing.scan import TagFinder
from paceline.parsing.tool_parser import ToolParser

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_JSON_NAMES = {"true": True, "false": False, "null": None}


class PythonicParser(ToolParser):
    """Reports each call when it is whole: its arguments are Python literals, which become JSON. A list that begins with
    something else than a call to a tool on offer is an answer."""

    start = "<|python_start|>"
    end = "<|python_end|>"
    markers = (start, end)

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._tags = TagFinder([self.start, self.end])
        self._state = "start"
        self._raw: list[str] = []  # since the list or the last whole call
        self._call_text: list[str] = []
        self._depth = 0
        self._quote = ""
        self._escaped = False

    def _push(self, char: str) -> None:
        text, tag = self._tags.push(char)
        for one in text:
            self._step(one)
        if tag is not None and self._state in ("content", "call"):
            for one in tag:
                self._step(one)

    def _step(self, char: str) -> None:
        if self._state == "content":
            self._content(char)
        elif self._state == "call":
            self._raw.append(char)
            self._in_call(char)
        elif self._state == "start":
            self._raw.append(char)
            if char == "[":
                self._enter()
            elif not char.isspace():
                self._give_up()
        else:  # behind a call
            self._raw.append(char)
            if char == ",":
                self._enter()
            elif char == "]":
                self._state, self._raw = "start", []
            elif not char.isspace():
                self._give_up()

    def _enter(self) -> None:
        self._state, self._call_text, self._depth = "call", [], 0
        self._quote, self._escaped = "", False

    def _give_up(self) -> None:
        self._state = "content"
        self._content("".join(self._raw))
        self._raw = []

    def _in_call(self, char: str) -> None:
        """Counts brackets outside strings until the call's own is closed."""
        self._call_text.append(char)
        if self._quote:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == self._quote:
                self._quote = ""
        elif char in "\"'" and self._depth:
            self._quote = char
        elif char in "([{":
            self._depth += 1
            if self._depth == 1 and not self._names_a_tool("".join(self._call_text[:-1]).strip(), char):
                self._give_up()
        elif char in ")]}":
            self._depth -= 1
            if self._depth > 0:
                return
            call = read_call("".join(self._call_text)) if self._depth == 0 and char == ")" else None
            if call is None:
                self._give_up()
                return
            self._call(call[0])
            self._arguments(call[1])
            self._state, self._raw = "behind", []
        elif not self._depth and not (char.isspace() or char.isalnum() or char in "_.-"):
            self._give_up()

    def _names_a_tool(self, name: str, bracket: str) -> bool:
        if bracket != "(" or not _NAME.fullmatch(name):
            return False
        return not self.tool_names or name in self.tool_names

    def _end(self) -> None:
        held = self._tags.flush()
        for one in held:
            self._step(one)
        if (
            not "".join(self._raw).isspace()
            and self._raw
            and not (self._state in ("behind", "start") and self.num_calls)
        ):
            self._give_up()
        else:
            self._space += self._raw


def read_call(text: str) -> tuple[str, str] | None:
    """(name, JSON text of the arguments) of `name(a=1, b="x")`; None for anything but literals by keyword."""
    name, _, rest = text.strip().partition("(")
    try:
        # the name may hold "-", which Python's names do not
        tree = ast.parse(f"_({rest}", mode="eval").body
        if not isinstance(tree, ast.Call) or tree.args or any(k.arg is None for k in tree.keywords):
            return None
        arguments = {str(k.arg): _literal(k.value) for k in tree.keywords}
        return name.strip(), json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _literal(node: ast.expr) -> Any:
    """A JSON value; JSON's own names are understood too. Raises ValueError for anything else."""
    if isinstance(node, ast.Constant):
        if node.value is None or isinstance(node.value, bool | int | float | str):
            return node.value
    elif isinstance(node, ast.Name) and node.id in _JSON_NAMES:
        return _JSON_NAMES[node.id]
    elif isinstance(node, ast.List | ast.Tuple):
        return [_literal(item) for item in node.elts]
    elif isinstance(node, ast.Dict):
        keys = [_literal(key) if key is not None else None for key in node.keys]
        if all(isinstance(key, str) for key in keys):
            return dict(zip(keys, map(_literal, node.values), strict=True))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _literal(node.operand)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return -value
    raise ValueError("not a literal")
