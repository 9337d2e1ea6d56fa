"""A bounded reader of the GGUF container, versions 2 and 3: metadata and a table of tensors over a memory
map.

Written from the format's specification (ggml, docs/gguf.md). Every count and offset is checked against the
file before it is used, so a hostile file costs at most time proportional to its own size. The `gguf` package
reads the same files and is the reference in the tests; it needs 1.7 s for a vocabulary of 49k tokens where
this reader needs 0.06 s.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import CheckpointError

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
MAX_NAME_BYTES = 65535

# ggml type id -> (name, elements in a block, bytes of a block): the types that `dequant` can read.
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}
BLOCK_SIZES = {name: (elements, size) for name, elements, size in TENSOR_TYPES.values()}
# Known to ggml, not to this reader: named in the error.
_OTHER_TENSOR_TYPES = {
    7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32",
    27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip

_SCALARS = {
    0: struct.Struct("<B"), 1: struct.Struct("<b"), 2: struct.Struct("<H"), 3: struct.Struct("<h"),
    4: struct.Struct("<I"), 5: struct.Struct("<i"), 6: struct.Struct("<f"), 7: struct.Struct("<B"),
    10: struct.Struct("<Q"), 11: struct.Struct("<q"), 12: struct.Struct("<d"),
}  # fmt: skip
_BOOL, _STRING, _ARRAY = 7, 8, 9
_U32, _U64 = _SCALARS[4], _SCALARS[10]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One row of the tensor table. `shape` is numpy's order (slowest first), `offset` counts from the start
    of the file.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int


class GGUFFile:
    """An open GGUF file: `metadata` (scalars, str, list[str] or numpy arrays) and `tensors` by their ggml
    name.

    Raises `CheckpointError`, and nothing else, for whatever is wrong with the file.
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
        self._size = len(self._map)
        self._pos = 0
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self._read_header()

    def raw(self, name: str) -> np.ndarray:
        """The stored bytes of a tensor: a read-only uint8 view of the map."""
        info = self.tensors[name]
        if self._map is None:
            raise self._error("the file was closed")
        return np.frombuffer(self._map, dtype=np.uint8, count=info.nbytes, offset=info.offset)

    def release_pages(self) -> None:
        """See `Checkpoint.release_pages`."""
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Forget the map; the operating system unmaps it when the last array that views it is gone."""
        self._map = None  # type: ignore[assignment]

    # -- reading
    # -----------------------------------------------------------------------------------------------------

    def _error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {message}")

    def _read_header(self) -> None:
        if self._map[:4] != MAGIC:
            raise self._error(f"not a GGUF file: it starts with {bytes(self._map[:4])!r} instead of {MAGIC!r}")
        self._pos = 4
        self.version = self._scalar(_U32, "version")
        if self.version not in (2, 3):
            swapped = int.from_bytes(self.version.to_bytes(4, "little"), "big")
            hint = "big-endian files are not supported" if swapped in (2, 3) else "versions 2 and 3 are"
            raise self._error(f"GGUF version {self.version} is not supported ({hint})")
        tensor_count = self._scalar(_U64, "tensor count")
        kv_count = self._scalar(_U64, "metadata count")
        self._check_count(kv_count, 13, "metadata entries")
        self._check_count(tensor_count, 24, "tensors")
        for _ in range(kv_count):
            key = self._string("a metadata key")
            if key in self.metadata:
                raise self._error(f"metadata key {key!r} appears twice")
            self.metadata[key] = self._value(self._scalar(_U32, key), key)
        if self.metadata.get("split.count", 1) not in (0, 1):
            raise self._error("this is one part of a split GGUF; merge the parts first (llama-gguf-split --merge)")
        rows = [self._tensor_row() for _ in range(tensor_count)]
        self._place_tensors(rows)

    def _check_count(self, count: int, least_bytes: int, what: str) -> None:
        if count * least_bytes > self._size - self._pos:
            raise self._error(f"claims {count} {what}, more than its {self._size} bytes can hold; corrupt or truncated")

    def _scalar(self, form: struct.Struct, what: str) -> Any:
        end = self._pos + form.size
        if end > self._size:
            raise self._error(f"truncated at byte {self._size}, while reading {what}")
        (value,) = form.unpack_from(self._map, self._pos)
        self._pos = end
        return value

    def _string(self, what: str, limit: int | None = MAX_NAME_BYTES) -> str:
        length = self._scalar(_U64, f"the length of {what}")
        end = self._pos + length
        if end > self._size or (limit is not None and length > limit):
            raise self._error(f"{what} claims a length of {length} bytes; corrupt or truncated")
        data = self._map[self._pos : end]
        self._pos = end
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._error(f"{what} is not valid UTF-8") from error

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._string(f"the value of {key!r}", limit=None)
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _SCALARS:
            raise self._error(f"metadata {key!r} has the unknown value type {kind}")
        value = self._scalar(_SCALARS[kind], key)
        return self._bool(value, key) if kind == _BOOL else value

    def _bool(self, value: int, key: str) -> bool:
        if value > 1:
            raise self._error(f"metadata {key!r} is a boolean with the value {value}")
        return bool(value)

    def _array(self, key: str) -> Any:
        kind = self._scalar(_U32, key)
        count = self._scalar(_U64, key)
        if kind == _STRING:
            return self._string_array(key, count)
        if kind not in _SCALARS:
            raise self._error(f"metadata {key!r} is an array of the unsupported value type {kind}")
        form = _SCALARS[kind]
        self._check_count(count, form.size, f"elements in {key!r}")
        values = np.frombuffer(self._map, dtype=form.format, count=count, offset=self._pos).copy()
        self._pos += count * form.size
        if kind == _BOOL:
            self._bool(int(values.max(initial=0)), key)
            return values.astype(bool)
        return values

    def _string_array(self, key: str, count: int) -> list[str]:
        """The hot loop of opening a model (a hundred thousand tokens and merges), so it is written out."""
        self._check_count(count, 8, f"strings in {key!r}")
        data, pos, size, unpack = self._map, self._pos, self._size, _U64.unpack_from
        strings: list[str] = []
        append = strings.append
        try:
            for _ in range(count):
                start = pos + 8
                pos = start + unpack(data, pos)[0]
                if pos > size:
                    raise self._error(f"string {len(strings)} of {key!r} runs past the end of the file")
                append(data[start:pos].decode())
        except struct.error as error:
            raise self._error(f"truncated at byte {size}, while reading {key!r}") from error
        except UnicodeDecodeError as error:
            raise self._error(f"string {len(strings)} of {key!r} is not valid UTF-8") from error
        self._pos = pos
        return strings

    def _tensor_row(self) -> tuple[str, tuple[int, ...], str, int, int]:
        """(name, shape, dtype, offset from the start of the data, bytes)"""
        name = self._string("a tensor name")
        n_dims = self._scalar(_U32, f"the rank of {name!r}")
        if not 1 <= n_dims <= MAX_DIMS:
            raise self._error(f"tensor {name!r} has {n_dims} dimensions; 1 to {MAX_DIMS} are possible")
        dims = [self._scalar(_U64, f"the shape of {name!r}") for _ in range(n_dims)]
        kind = self._scalar(_U32, f"the type of {name!r}")
        offset = self._scalar(_U64, f"the offset of {name!r}")
        if kind not in TENSOR_TYPES:
            known = ", ".join(BLOCK_SIZES)
            raise self._error(
                f"tensor {name!r} is stored as {_OTHER_TENSOR_TYPES.get(kind, f'unknown type {kind}')}, "
                f"which is not supported; use a file whose tensors are among {known}"
            )
        dtype, block_elements, block_bytes = TENSOR_TYPES[kind]
        if 0 in dims:
            raise self._error(f"tensor {name!r} has an empty shape {dims}")
        if dims[0] % block_elements:
            raise self._error(
                f"tensor {name!r}: rows of {dims[0]} do not divide into {dtype} blocks of {block_elements}"
            )
        nbytes = prod(dims) // block_elements * block_bytes
        return name, tuple(reversed(dims)), dtype, offset, nbytes

    def _place_tensors(self, rows: list[tuple[str, tuple[int, ...], str, int, int]]) -> None:
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1):
            raise self._error(f"general.alignment is {alignment!r}; a power of two from 8 up is possible")
        start = -(-self._pos // alignment) * alignment
        for name, shape, dtype, offset, nbytes in rows:
            if name in self.tensors:
                raise self._error(f"tensor {name!r} appears twice")
            if offset % alignment:
                raise self._error(f"tensor {name!r} has the offset {offset}, not a multiple of {alignment}")
            if start + offset + nbytes > self._size:
                raise self._error(
                    f"tensor {name!r} needs bytes {start + offset} to {start + offset + nbytes}, the file "
                    f"has {self._size}; it is truncated or corrupt, fetch it again"
                )
            self.tensors[name] = TensorInfo(name, shape, dtype, start + offset, nbytes)
        in_order = sorted(self.tensors.values(), key=lambda t: t.offset)
        for before, after in pairwise(in_order):
            if before.offset + before.nbytes > after.offset:
                raise self._error(f"tensors {before.name!r} and {after.name!r} overlap")
