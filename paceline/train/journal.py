"""Logs of a run: JSON lines that are appended one at a time and survive a kill in the middle of one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def append(path: Path, line: dict[str, Any]) -> None:
    """Add a line; one that a kill cut off before is ended first, so that it spoils no other."""
    with path.open("ab+") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(json.dumps(line).encode() + b"\n")


def read(path: Path) -> list[dict[str, Any]]:
    """All whole lines."""
    found = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found
