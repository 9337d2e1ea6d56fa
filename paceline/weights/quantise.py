"""Quantised weights at load: which format a matrix gets, and its rows in that format.

Formats (paceline/native/quant.h): INT8 and INT4 are ggml's Q8_0 and Q4_0, INT4_MIN is Q4_1, INT8_CHANNEL has one scale
per output row. Files in these formats are used as they are. Everything else is converted, and what that costs is
measured: `Conversions` keeps the relative error of every kind of conversion.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline import _native
from paceline.dtypes import QUANTIZATIONS, Quantization
from paceline.errors import CheckpointError, ConfigError
from paceline.weights.checkpoint import Checkpoint
from paceline.weights.dequant import dequantize

log = logging.getLogger(__name__)

Quant = _native.Quant
# How files name the formats that need no conversion; I8_CHANNEL is this package's own.
STORED = {"Q8_0": Quant.INT8, "I8_CHANNEL": Quant.INT8_CHANNEL, "Q4_0": Quant.INT4, "Q4_1": Quant.INT4_MIN}
STORED_NAMES = {quant: name for name, quant in STORED.items()}
NAMES = {Quant.INT8: "int8", Quant.INT8_CHANNEL: "int8_channel", Quant.INT4: "int4", Quant.INT4_MIN: "int4"}
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_WANTED = {"int8": Quant.INT8, "int8_channel": Quant.INT8_CHANNEL, "int4": Quant.INT4_MIN}
_ROWS_AT_ONCE = 4096


def check_quantization(value: Any) -> Quantization:
    """Raises ConfigError for what is none of QUANTIZATIONS."""
    if value not in QUANTIZATIONS:
        raise ConfigError(f"quantization: {value!r} is not supported; use {', '.join(QUANTIZATIONS)}")
    return value


def choose_format(stored: Sequence[str], quantization: Quantization) -> Any | None:
    """The format of a matrix whose parts a file stores so ("Q4_1", "BF16", ...); None: bf16.

    "auto": the file's own format, int8 for those without kernels of their own (K quants and Q5_0), bf16 for floats.
    Parts of one matrix share a format that holds all of them: int4 parts with and without a minimum get one, int4
    beside int8 becomes int8.
    """
    if quantization == "none" or (quantization == "auto" and not FLOATS.isdisjoint(stored)):
        return None
    kinds = set(stored)
    if quantization == "int4" and kinds == {"Q4_0"}:
        return Quant.INT4
    if quantization != "auto":
        return _WANTED[quantization]
    formats = {STORED.get(kind, Quant.INT8) for kind in stored}
    if len(formats) == 1:
        return formats.pop()
    return Quant.INT4_MIN if formats == {Quant.INT4, Quant.INT4_MIN} else Quant.INT8


def expected_bytes(checkpoint: Checkpoint, quantization: Quantization) -> int:
    """Bytes of all packed matrices, parts of one that end in different formats left aside."""
    total = 0
    for name in checkpoint.names():
        shape = checkpoint.shape(name)
        if len(shape) != 2:
            continue
        quant = choose_format([checkpoint.stored_dtype(name)], quantization)
        total += math.prod(shape) * 2 if quant is None else _native.packed_quant_bytes(quant, *shape)
    return total


@dataclass
class _Error:
    tensors: int = 0
    error: float = 0.0  # sums of squares
    size: float = 0.0


@dataclass
class Conversions:
    """What was converted on the way to quantised weights, by (stored as, format). Safe to share between threads."""

    kinds: dict[tuple[str, str], _Error] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, stored: str, quant: Any, error: float, size: float) -> None:
        with self._lock:
            entry = self.kinds.setdefault((stored, NAMES[quant]), _Error())
            entry.tensors += 1
            entry.error += error
            entry.size += size

    def relative_errors(self) -> dict[tuple[str, str], float]:
        """Root of (sum of squared errors / sum of squares) of the weights, by kind."""
        return {kind: math.sqrt(e.error / e.size) if e.size else 0.0 for kind, e in self.kinds.items()}

    def describe(self) -> list[str]:
        """A line for each kind of conversion that lost something."""
        errors = self.relative_errors()
        return [
            f"{entry.tensors} {'tensor' if entry.tensors == 1 else 'tensors'} stored as {stored} converted to {name}, "
            f"relative error {errors[stored, name]:.2%}"
            for (stored, name), entry in sorted(self.kinds.items())
            if errors[stored, name] > 0
        ]


def quantised_rows(checkpoint: Checkpoint, name: str, quant: Any, conversions: Conversions) -> np.ndarray:
    """A tensor [n, k] in the stored form of `quant`, uint8 [n, row bytes]; its error goes to `conversions`.

    Raises CheckpointError for values that no scale can hold.
    """
    stored = checkpoint.stored_dtype(name)
    if STORED.get(stored) is not None:
        blocks = checkpoint.blocks(name)
        if STORED[stored] == quant:
            return blocks
        exact = _exact(blocks, stored, quant)
        if exact is not None:
            return exact
    # halves are a view of the file, and become fp32 a few rows at a time
    values = checkpoint.load(name, None if stored == "BF16" else "float32")
    rows, error, size = quantise(values, quant, f"{checkpoint.path}: tensor {name}")
    conversions.add(stored, quant, error, size)
    return rows


def _exact(blocks: np.ndarray, stored: str, quant: Any) -> np.ndarray | None:
    """Q4_0 as Q8_0 or Q4_1 without loss, None where it cannot be."""
    if stored != "Q4_0" or quant not in (Quant.INT8, Quant.INT4_MIN):
        return None
    n = len(blocks)
    parts = blocks.reshape(-1, 18)
    scale = np.ascontiguousarray(parts[:, :2])
    if quant == Quant.INT8:
        q = np.concatenate([parts[:, 2:] & 15, parts[:, 2:] >> 4], axis=1).astype(np.int8) - np.int8(8)
        return np.concatenate([scale, q.view(np.uint8)], axis=1).reshape(n, -1)
    with np.errstate(over="ignore"):
        minimum = scale.view(np.float16) * np.float16(-8)
    if not np.isfinite(minimum).all():
        return None
    return np.concatenate([scale, minimum.view(np.uint8), parts[:, 2:]], axis=1).reshape(n, -1)


def quantise(values: np.ndarray, quant: Any, what: str = "matrix") -> tuple[np.ndarray, float, float]:
    """fp32 or bf16 [n, k] -> (uint8 [n, row bytes], sum of squared errors, sum of squares)."""
    n, k = values.shape
    rows = np.empty((n, _native.quant_row_bytes(quant, k)), np.uint8)
    error = size = 0.0
    for start in range(0, n, _ROWS_AT_ONCE):
        part = np.ascontiguousarray(values[start : start + _ROWS_AT_ONCE], np.float32)
        bad = _native.quantise_rows(quant, part, rows[start : start + len(part)])
        if bad >= 0:
            raise CheckpointError(
                f"{what}: row {start + bad} holds values that are not finite or too large for the scale of "
                f"{NAMES[quant]}; use quantization none"
            )
        difference = dequantise_rows(rows[start : start + len(part)], quant, k) - part
        error += float(np.vdot(difference, difference))
        size += float(np.vdot(part, part))
    return rows, error, size


def dequantise_rows(rows: np.ndarray, quant: Any, k: int) -> np.ndarray:
    """uint8 [n, row bytes] -> fp32 [n, k]."""
    if quant == Quant.INT8_CHANNEL:
        scale = np.ascontiguousarray(rows[:, :4]).view(np.float32)
        return scale * rows[:, 4:].view(np.int8).astype(np.float32)
    values = dequantize(np.ascontiguousarray(rows).reshape(-1), STORED_NAMES[quant]).reshape(len(rows), -1)
    return values[:, :k]
