"""Discovery of the golden cases: which folders hold one, which parts each has, which parts are pending."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

HERE = Path(__file__).parent
VENDORED = HERE / "vendored"
PENDING_FILE = HERE / "PENDING"
PARTS = ("target", "speculation", "sampling")


@dataclass(frozen=True)
class Case:
    """One folder with ``expected.json``; ``name`` is its path under the golden root ("A", "H/llama")."""

    name: str
    root: Path

    @property
    def folder(self) -> Path:
        return self.root / self.name

    @property
    def target(self) -> Path:
        return self.folder / "target"

    @property
    def drafter(self) -> Path:
        return self.folder / "drafter"

    @property
    def parts(self) -> tuple[str, ...]:
        """What can be checked: the target alone, a drafter's speculative runs, or pure sampling functions."""
        folders = {"target": self.target, "speculation": self.drafter}
        return tuple(part for part, folder in folders.items() if folder.is_dir()) or ("sampling",)

    @cached_property
    def expected(self) -> dict[str, Any]:
        return json.loads((self.folder / "expected.json").read_text())

    @cached_property
    def tensors(self) -> dict[str, np.ndarray]:
        """Every expected tensor by name."""
        with safe_open(self.folder / "expected.safetensors", framework="numpy") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)


def golden_root() -> Path:
    """The folder with more cases: ``PACELINE_GOLDEN_DIR``, else ``../shared/golden`` beside the checkout."""
    configured = os.environ.get("PACELINE_GOLDEN_DIR")
    if configured:
        root = Path(configured)
        if not root.is_dir():
            raise FileNotFoundError(f"PACELINE_GOLDEN_DIR: {configured!r} is no folder; correct or unset it")
        return root
    return HERE.parents[2] / "shared" / "golden"


def discover(root: Path) -> list[Case]:
    """Every case under ``root``, by name; none when the folder does not exist."""
    found = sorted(path.parent.relative_to(root).as_posix() for path in root.glob("**/expected.json"))
    return [Case(name, root) for name in found]


def all_parts() -> Iterator[tuple[str, Case, str]]:
    """(test id, case, part) of everything to check: the vendored cases, then those of the golden root."""
    for prefix, root in (("vendored/", VENDORED), ("", golden_root())):
        for case in discover(root):
            for part in case.parts:
                yield f"{prefix}{case.name}:{part}", case, part


def read_pending(text: str) -> frozenset[tuple[str, str]]:
    """The (case, part) pairs that a PENDING file lists; a bare case name stands for all of its parts."""
    pairs: set[tuple[str, str]] = set()
    for line in text.splitlines():
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        name, colon, part = entry.partition(":")
        if colon and part not in PARTS:
            raise ValueError(f"PENDING: {entry!r}: part {part!r} is none of {', '.join(PARTS)}")
        pairs.update((name, each) for each in ((part,) if colon else PARTS))
    return frozenset(pairs)


def pending() -> frozenset[tuple[str, str]]:
    return read_pending(PENDING_FILE.read_text())
