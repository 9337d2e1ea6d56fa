"""Character by character through text: tags, and JSON that may end anywhere.

Every parser here is an automaton over characters, so what it reports cannot depend on how a text was cut into pieces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

_NUMBER_PREFIX = re.compile(r"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?(?:(?<=[0-9])[eE][+-]?[0-9]*)?)?")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_SPACE = " \t\n\r"
_LITERALS = {"t": "true", "f": "false", "n": "null"}


class TagFinder:
    """Finds the first of some tags in a stream; holds back what may become one."""

    def __init__(self, tags: Sequence[str]) -> None:
        self._tags = tuple(tags)
        self.held = ""

    def push(self, char: str) -> tuple[str, str | None]:
        """(text that is certain not to be a tag, the tag that this character completes)."""
        self.held += char
        released = ""
        while self.held:
            if self.held in self._tags:
                tag, self.held = self.held, ""
                return released, tag
            if any(tag.startswith(self.held) for tag in self._tags):
                break
            released, self.held = released + self.held[0], self.held[1:]
        return released, None

    def flush(self) -> str:
        """What is held back, at the end of the text."""
        held, self.held = self.held, ""
        return held


class JsonScanner:
    """One JSON value (RFC 8259), strictly. After each `push`, the fields say where its values begin and end.

    depth: containers around the next character. value: "begins" (this character is the first of a value), "ends" (it is
    the last), "ended" (the one before was the last: numbers show their end only then), or None. value_depth: containers
    around that value. key: the last complete member name in the innermost object.
    """

    def __init__(self) -> None:
        self.failed = self.done = False
        self.value: str | None = None
        self.value_depth = 0
        self.key: str | None = None
        self._stack: list[str] = []
        self._state = "value"
        self._text = ""  # of the key, number or literal that is being read
        self._is_key = False
        self._escaped = False
        self._hex = 0  # digits still to come of a \\u escape

    @property
    def depth(self) -> int:
        return len(self._stack)

    def push(self, char: str) -> bool:
        """False if no JSON value goes on like this."""
        self.value = None
        if self.failed or self.done or not self._push(char):
            self.failed = True
        return not self.failed

    def _push(self, char: str) -> bool:
        if self._state == "string":
            return self._string(char)
        if self._state == "number":
            if _NUMBER_PREFIX.fullmatch(self._text + char):
                self._text += char
                return True
            if not _NUMBER.fullmatch(self._text):
                return False
            self._after_value()
            self.value, self.value_depth = "ended", len(self._stack)
            if self.done:
                return char in _SPACE
            return self._between(char) if char not in _SPACE else True
        if self._state == "literal":
            self._text += char
            wanted = _LITERALS[self._text[0]]
            if self._text == wanted:
                self._end_value()
            return wanted.startswith(self._text)
        if char in _SPACE:
            return True
        return self._between(char)

    def _between(self, char: str) -> bool:
        """A structural character, or the first of a value or key."""
        state = self._state
        if state == "colon":
            self._state = "value"
            return char == ":"
        if state == "comma" and char == ",":
            self._state = "key" if self._stack[-1] == "{" else "value"
            return True
        if char in "]}":
            fits = self._stack and self._stack[-1] == ("[" if char == "]" else "{")
            if not fits or state not in ("comma", "first value" if char == "]" else "first key"):
                return False
            self._stack.pop()
            self._end_value()  # counts, also where a number ended with the character before
            return True
        if state in ("key", "first key"):
            self._state, self._is_key, self._text = "string", True, ""
            return char == '"'
        if state not in ("value", "first value"):
            return False
        self.value, self.value_depth = "begins", len(self._stack)
        if char in "[{":
            self._stack.append(char)
            self._state = "first value" if char == "[" else "first key"
        elif char == '"':
            self._state, self._is_key, self._text = "string", False, ""
        elif char in "-0123456789":
            self._state, self._text = "number", char
        elif char in _LITERALS:
            self._state, self._text = "literal", char
        else:
            return False
        return True

    def _string(self, char: str) -> bool:
        if char == '"' and not self._escaped and not self._hex:
            if self._is_key:
                self.key, self._state = json.loads(f'"{self._text}"'), "colon"
            else:
                self._end_value()
            return True
        if self._is_key:
            self._text += char
        if self._hex:
            self._hex -= 1
            return char in "0123456789abcdefABCDEF"
        if self._escaped:
            self._escaped, self._hex = False, 4 if char == "u" else 0
            return char in '"\\/bfnrtu'
        self._escaped = char == "\\"
        return char >= " "

    def _end_value(self) -> None:
        self._after_value()
        self.value, self.value_depth = "ends", len(self._stack)

    def _after_value(self) -> None:
        self._state = "comma"
        self.done = not self._stack


class CallScanner:
    """One object {"name": ..., "arguments": {...}} ("parameters" is read as "arguments").

    has_arguments: that member has begun, and `take` gives what is certain of its JSON text. Arguments that are a string
    of JSON are unpacked when they are whole; null becomes {}.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.has_arguments = False
        self.failed = self.done = False
        self._json = JsonScanner()
        self._begun = False
        self._reading: str | None = None  # the member whose value is being read
        self._kept: list[str] = []  # characters of a value that is needed whole
        self._whole = False
        self._fresh: list[str] = []  # of the arguments, not taken yet

    def push(self, char: str) -> bool:
        """False if it is no such object."""
        scanner = self._json
        if self.failed or (not self._begun and char != "{") or not scanner.push(char):
            self.failed = True
            return False
        self._begun = True
        if scanner.value == "begins" and scanner.value_depth == 1:
            # a string or null is needed whole; objects are passed on as they come
            self._reading, self._kept, self._whole = scanner.key, [], char in '"n'
        if self._reading is not None:
            self._read(char)
        self.done = scanner.done
        return not self.failed

    def take(self) -> str:
        """The arguments' text that came since the last call."""
        fresh, self._fresh = "".join(self._fresh), []
        return fresh

    def _read(self, char: str) -> None:
        scanner = self._json
        # a number's end shows one character late: at a "," or at the "}" of the whole object
        late = (scanner.value == "ended" and scanner.value_depth == 1) or scanner.depth == 0
        ended = late or (scanner.value == "ends" and scanner.value_depth == 1)
        if self._reading in ("arguments", "parameters"):
            self._argument("" if late else char, ended)
        elif self._reading == "name":
            self._kept.append("" if late else char)
            if ended:
                value = json.loads("".join(self._kept))
                self.name = value if isinstance(value, str) and value else None
                self.failed = self.name is None
        if ended:
            self._reading = None

    def _argument(self, char: str, ended: bool) -> None:
        if not self._whole:
            self.has_arguments = True
            self._fresh.append(char)
            return
        self._kept.append(char)
        if ended:
            self.has_arguments = True
            value: Any = json.loads("".join(self._kept))
            self._fresh.append(value if isinstance(value, str) else "{}")
