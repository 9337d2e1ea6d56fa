"""ggml's block formats to float32 or bfloat16.

`dequantize` calls the native core when it is there; the numpy functions below are the definition and the
reference of its tests, bit for bit: every value is built with the same roundings (q times scale in float32,
then plus or minus the offset). Layouts: ggml, ggml-common.h and ggml-quants.c. Each numpy function takes
blocks uint8 [n, block bytes] and returns float32 [n, block elements].
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from paceline.weights.gguf_file import BLOCK_SIZES

_native: Any
try:
    _native = importlib.import_module("paceline._native")
except ImportError:  # a source tree that was not built: slower, the same bits
    _native = None

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
# Blocks that the numpy path converts at a time: its temporaries then stay in the cache.
_CHUNK_ELEMENTS = 1 << 16


def dequantize(raw: np.ndarray, dtype: str, out_dtype: str = "float32") -> np.ndarray:
    """Convert the stored bytes of a tensor: uint8 [bytes] of format `dtype` -> flat "float32" or "bfloat16"
    array.

    Releases the GIL in the native path, so callers can convert several tensors at once.
    """
    elements, size = BLOCK_SIZES[dtype]
    out = np.empty(raw.size // size * elements, dtype=BFLOAT16 if out_dtype == "bfloat16" else np.float32)
    if _native is not None:
        if out_dtype == "bfloat16":
            _native.dequantize_bf16(dtype, raw, out.view(np.uint16))
        else:
            _native.dequantize_f32(dtype, raw, out)
        return out
    return dequantize_numpy(raw, dtype, out)


def dequantize_numpy(raw: np.ndarray, dtype: str, out: np.ndarray) -> np.ndarray:
    """The reference: the same conversion into `out` (float32 or bfloat16), in numpy alone."""
    elements, size = BLOCK_SIZES[dtype]
    blocks = raw.reshape(-1, size)
    target = out.reshape(-1, elements)
    step = max(1, _CHUNK_ELEMENTS // elements)
    convert = _CONVERT[dtype]
    with np.errstate(invalid="ignore", over="ignore"):  # a corrupt scale may be infinite; that is the caller's to judge
        for start in range(0, len(blocks), step):
            values = convert(blocks[start : start + step])
            target[start : start + step] = to_bfloat16(values) if out.dtype == BFLOAT16 else values
    return out


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """float32 -> bfloat16, round to nearest even; a NaN stays a quiet NaN with its sign and upper payload."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(nan, quiet, rounded).astype(np.uint16).view(BFLOAT16)


def _half(columns: np.ndarray) -> np.ndarray:
    """Two bytes per block -> float32 [n, 1]."""
    return np.ascontiguousarray(columns).view(np.float16).astype(np.float32)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """[n, b] -> [n, 2 b]: all low nibbles, then all high ones (the order of the 32-element formats)."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=1)


def _f32(blocks: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(blocks).view(np.float32)


def _f16(blocks: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(blocks).view(np.float16).astype(np.float32)


def _bf16(blocks: np.ndarray) -> np.ndarray:
    return (np.ascontiguousarray(blocks).view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    return _half(blocks[:, :2]) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _q4_0(blocks: np.ndarray) -> np.ndarray:
    q = _nibbles(blocks[:, 2:]).astype(np.float32) - np.float32(8)
    return _half(blocks[:, :2]) * q


def _q4_1(blocks: np.ndarray) -> np.ndarray:
    q = _nibbles(blocks[:, 4:]).astype(np.float32)
    return _half(blocks[:, :2]) * q + _half(blocks[:, 2:4])


def _q5_0(blocks: np.ndarray) -> np.ndarray:
    high = np.unpackbits(blocks[:, 2:6], axis=1, bitorder="little")
    q = (_nibbles(blocks[:, 6:]) | (high << 4)).astype(np.float32) - np.float32(16)
    return _half(blocks[:, :2]) * q


def _k_scales(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The 12 bytes of Q4_K and Q5_K -> eight 6-bit scales and eight 6-bit minima, float32 [n, 8] each."""
    d, m, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([d & 0x3F, (high & 0x0F) | ((d >> 2) & 0x30)], axis=1)
    minima = np.concatenate([m & 0x3F, (high >> 4) | ((m >> 2) & 0x30)], axis=1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _k_values(blocks: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Scale eight groups of 32: d * scale * q - dmin * minimum."""
    scales, minima = _k_scales(blocks[:, 4:16])
    d = (_half(blocks[:, :2]) * scales)[:, :, None]
    m = (_half(blocks[:, 2:4]) * minima)[:, :, None]
    return (d * q.astype(np.float32) - m).reshape(len(blocks), 256)


def _k_nibbles(packed: np.ndarray) -> np.ndarray:
    """128 bytes -> [n, 8, 32]: each run of 32 bytes holds two groups, low nibbles first."""
    runs = packed.reshape(len(packed), 4, 1, 32)
    return np.concatenate([runs & 0x0F, runs >> 4], axis=2).reshape(len(packed), 8, 32)


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    return _k_values(blocks, _k_nibbles(blocks[:, 16:]))


def _q5_k(blocks: np.ndarray) -> np.ndarray:
    shifts = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    high = (blocks[:, 16:48].reshape(-1, 1, 32) >> shifts) & 1
    return _k_values(blocks, _k_nibbles(blocks[:, 48:]) | (high << 4))


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    n = len(blocks)
    packed = blocks[:, :128].reshape(n, 2, 1, 64)
    low = np.concatenate([packed & 0x0F, packed >> 4], axis=2).reshape(n, 8, 32)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8).reshape(1, 1, 4, 1)
    high = ((blocks[:, 128:192].reshape(n, 2, 1, 32) >> shifts) & 3).reshape(n, 8, 32)
    q = (low | (high << 4)).astype(np.float32).reshape(n, 16, 16) - np.float32(32)
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    return ((_half(blocks[:, 208:210]) * scales)[:, :, None] * q).reshape(n, 256)


_CONVERT: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
