"""Measured step costs, kept from run to run: the first request of a process drafts as the last one before it did."""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from hashlib import blake2b
from pathlib import Path
from typing import Any

from paceline.models.target import TargetModel
from paceline.speculation.cost_table import Costs
from paceline.speculation.drafting import Drafter
from paceline.speculation.length import DraftLengthPolicy
from paceline.weights.store_files import cache_dir

SAVE_EVERY = 30.0  # seconds
SAVE_AFTER = 200  # steps: what a shorter run measured is hardly more than its warm-up
MOST_ROWS = 1 << 16
FORMAT = 3


class CostFile:
    """One file per model, drafter, instruction-set path, thread count and processor, in the cache folder
    (PACELINE_COSTS names another). It is a memory, not a setting: one that is missing, damaged or not writable is
    ignored."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._saved = 0
        self._next = 0.0
        self._writing = threading.Lock()

    @classmethod
    def of(cls, model: TargetModel, drafter: Drafter | None) -> CostFile:
        base = os.environ.get("PACELINE_COSTS")
        folder = Path(base) if base else cache_dir() / "costs"
        names = [FORMAT, repr(model.config), model.weight_bytes, model.dtype, model.isa, model.threads, _processor()]
        names += [model.weight_type, model.kv_cache_dtype]
        if drafter is not None:
            precision = getattr(getattr(drafter, "drafter", None), "quantization", "none")
            names += [drafter.name, drafter.cache_bytes(1, 1), precision]
        return cls(folder / f"{blake2b(repr(names).encode(), digest_size=12).hexdigest()}.json")

    def load(self, lengths: DraftLengthPolicy) -> None:
        """Start the tables from the file."""
        try:
            values = json.loads(self.path.read_text())
            tables = {name: _medians(values[name]) for name in ("verify", "draft")}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return
        lengths.verify.preset(tables["verify"])
        lengths.draft.preset(tables["draft"])
        self._saved = _changes(lengths)

    def save_now_and_then(self, lengths: DraftLengthPolicy, *, beside: bool = False) -> None:
        """Save if it is time to. beside: only look at the tables here, and let another thread write the file."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + SAVE_EVERY
        values = self._news(lengths)
        if values is None:
            return
        if beside:
            threading.Thread(target=self._write, args=(values,), name="paceline-costs", daemon=True).start()
        else:
            self._write(values)

    def save(self, lengths: DraftLengthPolicy) -> None:
        """Write the tables, if enough was measured since the last time."""
        if (values := self._news(lengths)) is not None:
            self._write(values)

    def _news(self, lengths: DraftLengthPolicy) -> dict[str, dict[int, float]] | None:
        changes = _changes(lengths)
        if changes - self._saved < SAVE_AFTER:
            return None
        self._saved = changes
        return {name: _rounded(table) for name, table in (("verify", lengths.verify), ("draft", lengths.draft))}

    def _write(self, values: dict[str, dict[int, float]]) -> None:
        with self._writing, contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part = self.path.with_suffix(f".{os.getpid()}.part")
            part.write_text(json.dumps(values))
            part.replace(self.path)


def _rounded(table: Costs) -> dict[int, float]:
    return {rows: float(f"{seconds:.4g}") for rows, seconds in table.medians.items()}


def _changes(lengths: DraftLengthPolicy) -> int:
    return lengths.verify.changes + lengths.draft.changes


def _medians(values: dict[str, Any]) -> dict[int, float]:
    """Raises ValueError or TypeError for what is no table of costs."""
    out = {}
    for rows, seconds in values.items():
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
            raise ValueError(f"{rows}: {seconds!r} is not a time")
        if not 0 < int(rows) <= MOST_ROWS:
            raise ValueError(f"{rows} is not a number of rows")
        out[int(rows)] = float(seconds)
    return out


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
