"""Single values that a user wrote: read strictly, numpy's scalars included, and shown in error messages."""

from __future__ import annotations

import json
import math
import numbers
import operator
from typing import Any

MAX_INT32 = 2**31 - 1
_SHOWN = 160


def shown(value: object) -> str:
    """`repr` for an error message: cut to one line's length, and never an error itself.

    Python refuses to print integers beyond some thousand digits, and repr of a foreign object may raise anything.
    """
    try:
        text = repr(value)
    except Exception:
        if isinstance(value, int):
            return f"<an integer of {value.bit_length()} bits>"
        return f"<a value of type {type(value).__name__}>"
    return _cut(text)


def shown_as_json(value: object) -> str:
    """The same of a value of a request, as JSON; a string alone stands in single quotes, as names do."""
    if isinstance(value, str):
        return shown(value)
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return shown(value)
    return _cut(text)


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 20]}... ({len(text)} characters)"


def as_integer(value: Any) -> int | None:
    """The integer a value is (int, numpy integer, anything with `__index__`), or None; booleans are none."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def as_number(value: Any) -> float | None:
    """The finite double nearest to a real number (int, float, numpy scalar), or None; booleans are none."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer beyond the doubles
        return None
    return number if math.isfinite(number) else None
