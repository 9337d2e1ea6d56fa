"""llama.cpp's GBNF as a grammar of llguidance, whose converter is given what it reads as llama.cpp does."""

from __future__ import annotations

import re
from functools import lru_cache

MAX_GBNF = 16 * 1024  # characters: the converter's time grows with the square of the number of rules
_RULE = re.compile(r"^[ \t]*[A-Za-z0-9][\w-]*[ \t]*::=", re.M)
# literals and classes, to the end of the text where they are not closed: else each beginning would be looked at alone
_PARTS = re.compile(
    r'"(?:\\.|[^"\\])*(?:"|\\?\Z)|\[(?:\\.|[^\]\\])*(?:\]|\\?\Z)|#[^\n]*|\.|\{[^}"\[]*\}|[A-Za-z0-9][\w-]*', re.S
)
# the converter drops the parentheses of a group of one repeated item; an empty literal makes two of it
_REPEATED = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|([?*+}])\s*\)', re.S)
_OURS = re.compile(r"\b[rR](\d+)\b")
_CHAR = re.compile(r"\\x([0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})|\\(.)|(.)", re.S)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", '"': '"', "\\": "\\", "[": "[", "]": "]"}
_TOKENS = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])+/|\b[A-Z][A-Z0-9_]*\b', re.S)
_ANY = "[\\x00-\U0010ffff]"  # "." of the converter's expressions is no line end


def is_gbnf(text: str) -> bool:
    """Whether a grammar has llama.cpp's `name ::= ...`, which Lark does not know."""
    return _RULE.search(text) is not None


def as_lark(text: str) -> str:
    """Raises ValueError for what is no GBNF."""
    lark, error = _converted(text)
    if error:
        raise ValueError(error)
    return lark


@lru_cache(maxsize=16)
def _converted(text: str) -> tuple[str, str]:
    """The grammar, or what is wrong with it: that is remembered, too."""
    try:
        return _convert(text), ""
    except ValueError as error:
        return "", str(error)


def _convert(text: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if len(text) > MAX_GBNF:
        raise ValueError(f"GBNF of more than {MAX_GBNF} characters is not converted; write it in Lark")
    rules: dict[str, str] = {"root": "root"}  # under names that the converter cannot take for others

    def rewritten(part: re.Match[str]) -> str:
        if part[0][0].isalnum():
            return rules.setdefault(part[0], f"r{len(rules)}")
        return part[0] if part[0].startswith("{") else _plain(part[0])

    plain = _REPEATED.sub(lambda found: f'{found[1]} "")' if found[1] else found[0], _PARTS.sub(rewritten, text))
    try:
        lark = str(gbnf_to_lark(plain))
    except RecursionError:
        raise ValueError("GBNF: it is nested too deeply") from None
    except Exception as error:  # the converter's own, and plain ones
        names = {ours[1:]: name for name, ours in rules.items()}
        said = _OURS.sub(lambda found: names.get(found[1], found[0]), str(error))
        raise ValueError(f"GBNF: {said}") from None
    # A rule in capitals would be read as one token, as far as it goes: [a-z]+ would leave no letter to what follows.
    return _TOKENS.sub(lambda found: f"as_rule_{found[0].lower()}" if found[0][0].isupper() else found[0], lark)


def _plain(part: str) -> str:
    """A literal or a class without escapes but \\xHH, and without what an expression in Rust would read otherwise."""
    if part == ".":
        return _ANY
    if part.startswith("#"):
        return ""
    inner, ends = part[1:-1], '"' if part.startswith('"') else "]"
    if len(part) < 2 or not part.endswith(ends):
        raise ValueError(f"GBNF: {part[:20]} is not closed; it lacks a {ends}")
    if ends == '"':
        return '"' + "".join(_written(char, '"\\') for char, _ in _chars(inner)) + '"'
    chars = _chars(inner.removeprefix("^"))
    out, i = "[^" if inner.startswith("^") else "[", 0
    while i < len(chars):
        out += _in_class(chars[i][0])
        if i + 2 < len(chars) and chars[i + 1] == ("-", False):
            out += "-" + _in_class(chars[i + 2][0])
            i += 2
        i += 1
    return out + "]"


def _chars(text: str) -> list[tuple[str, bool]]:
    """(character, whether it was escaped) each."""
    out = []
    for found in _CHAR.finditer(text):
        code = found[1] or found[2] or found[3]
        if code is not None:
            value = int(code, 16)
            if value > 0x10FFFF or 0xD800 <= value < 0xE000:
                raise ValueError(f"GBNF: {found[0]} is no character")
            out.append((chr(value), True))
        elif found[4] is not None:
            if found[4] not in _ESCAPES:
                raise ValueError(f"GBNF: the escape {found[0]} is unknown")
            out.append((_ESCAPES[found[4]], True))
        else:
            out.append((found[5], False))
    return out


def _in_class(char: str) -> str:
    return char if char.isalnum() or char == " " else _written(char, "".join(map(chr, range(0x80))))


def _written(char: str, special: str) -> str:
    return f"\\x{ord(char):02x}" if char in special or ord(char) < 0x20 else char
