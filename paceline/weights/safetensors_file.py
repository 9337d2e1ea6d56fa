"""A strict reader of one safetensors file over a memory map, and the writer that `convert` streams through.

Written from the format's specification: 8 bytes of little-endian header length, a JSON header, then the
tensors packed without gaps. The `safetensors` package reads the same files and is the reference in the tests;
it copies every tensor and does not hand out bfloat16 views, which is why the engine does not use it.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any

import ml_dtypes
import numpy as np

from paceline.errors import CheckpointError
from paceline.weights.checkpoint import LoadDtype
from paceline.weights.dequant import BFLOAT16, to_bfloat16

MAX_HEADER_BYTES = 100_000_000  # the specification's own limit

_DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of the header; `begin` and `end` count from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """An open safetensors file: `entries` by tensor name. Raises `CheckpointError` for whatever is wrong with
    it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:  # an empty file cannot be mapped
            raise CheckpointError(f"{self.path}: the file is empty") from error
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read: {error.strerror}") from error
        self.entries = self._read_header()

    def load(self, name: str, dtype: LoadDtype | None = None) -> np.ndarray:
        """See `Checkpoint.load`."""
        if self._map is None:
            raise self._error("the file was closed")
        entry = self.entries[name]
        kind = _DTYPES[entry.dtype]
        count = (entry.end - entry.begin) // kind.itemsize
        # frombuffer refuses an empty range, and a tensor may begin at any byte: numpy handles unaligned views
        # by copying.
        values = np.frombuffer(self._map, kind, count, entry.begin) if count else np.empty(0, kind)
        if entry.dtype == "BOOL":
            values = values.view(np.uint8) != 0  # bytes other than 0 and 1 would make an invalid numpy bool
        values = np.require(values, requirements=["C", "A"]).reshape(entry.shape)
        return _convert(values, entry.dtype, dtype, lambda: f"{self.path}: tensor {name!r}")

    def release_pages(self) -> None:
        """See `Checkpoint.release_pages`."""
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Forget the map; the operating system unmaps it when the last array that views it is gone."""
        self._map = None  # type: ignore[assignment]

    # -- header
    # ------------------------------------------------------------------------------------------------------

    def _error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {message}")

    def _read_header(self) -> dict[str, Entry]:
        size = len(self._map)
        length = int.from_bytes(self._map[:8], "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            if self._map[:2] == b"PK" or self._map[:1] == b"\x80":
                raise self._error(
                    "this is a PyTorch pickle, not safetensors; pickles are refused because they run code"
                )
            raise self._error(f"header of {length} bytes in a file of {size}: not safetensors, truncated or corrupt")
        try:
            header = json.loads(self._map[8 : 8 + length].decode("utf-8"), object_pairs_hook=_no_duplicates)
        except (ValueError, RecursionError) as error:
            raise self._error(f"the header is not valid JSON: {error}") from error
        if not isinstance(header, dict):
            raise self._error("the header is not a JSON object")
        header.pop("__metadata__", None)
        entries = {name: self._entry(name, row, 8 + length, size) for name, row in header.items()}
        self._check_packing(entries, 8 + length, size)
        return entries

    def _entry(self, name: str, row: Any, start: int, size: int) -> Entry:
        if not isinstance(row, dict) or set(row) != {"dtype", "shape", "data_offsets"}:
            raise self._error(f"tensor {name!r}: the header entry is not {{dtype, shape, data_offsets}}")
        dtype, shape, offsets = row["dtype"], row["shape"], row["data_offsets"]
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            raise self._error(f"tensor {name!r} has the type {str(dtype)[:40]!r}; supported are {', '.join(_DTYPES)}")
        if not _is_sizes(shape) or len(shape) > 8:
            raise self._error(
                f"tensor {name!r} has the shape {str(shape)[:60]}; up to 8 non-negative integers are possible"
            )
        if not _is_sizes(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= size - start:
            raise self._error(
                f"tensor {name!r} has the offsets {str(offsets)[:60]}, outside the {size - start} bytes of "
                "data; the file is truncated or corrupt"
            )
        if prod(shape) * _DTYPES[dtype].itemsize != offsets[1] - offsets[0]:
            raise self._error(f"tensor {name!r}: {dtype} {shape} does not take {offsets[1] - offsets[0]} bytes")
        return Entry(dtype, tuple(shape), start + offsets[0], start + offsets[1])

    def _check_packing(self, entries: dict[str, Entry], start: int, size: int) -> None:
        """The specification allows neither gaps nor overlaps: every byte of data belongs to one tensor."""
        position = start
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
            if entry.begin != position:
                fault = "overlaps another tensor" if entry.begin < position else "follows bytes that no tensor owns"
                raise self._error(f"tensor {name!r} {fault}")
            position = entry.end
        if position != size:
            raise self._error(f"{size - position} bytes at the end belong to no tensor")


def _convert(values: np.ndarray, stored: str, wanted: LoadDtype | None, what: Any) -> np.ndarray:
    """Apply `Checkpoint.load`'s dtype rules to an array as stored."""
    if stored not in _FLOATS:
        if wanted is not None:
            raise CheckpointError(f"{what()} is stored as {stored} and cannot be loaded as {wanted}")
        return values
    if stored == "BF16" and wanted != "float32":
        return values
    if stored != "F32":
        with np.errstate(over="ignore"):  # a float64 beyond float32 becomes infinity, as everywhere
            values = values.astype(np.float32)
    return to_bfloat16(values) if wanted == "bfloat16" else values


def _is_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 2**63 for v in values)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name appears twice")
    return table


def write_safetensors(
    file: IO[bytes],
    tensors: Iterable[tuple[str, np.dtype[Any], tuple[int, ...]]],
    values: Iterator[np.ndarray],
) -> None:
    """Write a safetensors file tensor by tensor, so that only one is in memory.

    `tensors` announces (name, dtype, shape) in order; `values` yields the arrays in the same order.
    """
    names = {dtype: name for name, dtype in _DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    announced = list(tensors)
    for name, dtype, shape in announced:
        end = position + prod(shape) * dtype.itemsize
        header[name] = {"dtype": names[dtype], "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for (name, dtype, shape), array in zip(announced, values, strict=True):
        if array.dtype != dtype or array.shape != shape:
            raise ValueError(f"{name}: announced {dtype} {shape}, got {array.dtype} {array.shape}")
        file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


__all__ = ["BFLOAT16", "Entry", "SafetensorsFile", "write_safetensors"]
