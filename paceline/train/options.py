"""Options of the trainer that are lists in one text."""

from __future__ import annotations

from .errors import TrainError


def parse_block_sizes(text: str) -> tuple[int, ...]:
    """``--block-sizes``; () for an empty text. Raises TrainError."""
    if not text:
        return ()
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 2:
        raise TrainError(f"--block-sizes {text!r}: write lengths of at least 2 with commas, such as 6,6,8")
    return sizes
