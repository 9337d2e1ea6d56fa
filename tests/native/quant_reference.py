"""Products with quantised weights in numpy: the definition in paceline/native/quant.h, to the bit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline import _native

GROUP = 32
F32 = np.float32
FORMATS = ("INT8", "INT8_CHANNEL", "INT4", "INT4_MIN")


def quant(name: str) -> _native.Quant:
    return getattr(_native.Quant, name)


def padded(x: np.ndarray) -> np.ndarray:
    """[n, k] with zeros up to whole groups: [n, groups, 32]."""
    n, k = x.shape
    groups = -(-k // GROUP)
    out = np.zeros((n, groups * GROUP), x.dtype)
    out[:, :k] = x
    return out.reshape(n, groups, GROUP)


@dataclass
class Rows:
    """Rows quantised by groups: q [rows, groups, 32], scale [rows, groups]."""

    q: np.ndarray
    scale: np.ndarray


def quantise_rows(x: np.ndarray) -> Rows:
    """x: finite fp32 [rows, k]."""
    groups = padded(x.astype(F32))
    most = np.abs(groups).max(2)
    tiny = most < F32(2.0**-100)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(tiny, F32(0), F32(127) / most)
    q = np.rint(groups * inverse[:, :, None]).astype(np.int64)
    return Rows(q, np.where(tiny, F32(0), most / F32(127)))


@dataclass
class Stored:
    """A weight as files hold it: q [n, groups, 32] with its zero subtracted, fp32 scale and minimum [n, groups]."""

    q: np.ndarray
    scale: np.ndarray
    minimum: np.ndarray
    channel: bool

    @property
    def values(self) -> np.ndarray:
        """fp64 [n, groups * 32]."""
        v = self.q * self.scale[:, :, None].astype(np.float64) + self.minimum[:, :, None].astype(np.float64)
        return v.reshape(len(v), -1)


def read_rows(name: str, rows: np.ndarray, k: int) -> Stored:
    """The stored form uint8 [n, row bytes]."""
    n, groups = len(rows), -(-k // GROUP)
    if name == "INT8_CHANNEL":
        scale = np.ascontiguousarray(rows[:, :4]).view(F32)
        q = padded(rows[:, 4:].view(np.int8).astype(np.int64))
        return Stored(q, np.repeat(scale, groups, 1), np.zeros((n, groups), F32), True)
    blocks = rows.reshape(n, groups, -1)

    def half(at: int) -> np.ndarray:
        return np.ascontiguousarray(blocks[:, :, at : at + 2]).view(np.float16)[:, :, 0].astype(F32)

    zero = np.zeros((n, groups), F32)
    if name == "INT8":
        return Stored(np.ascontiguousarray(blocks[:, :, 2:]).view(np.int8).astype(np.int64), half(0), zero, False)
    nibbles = blocks[:, :, 2 if name == "INT4" else 4 :]
    q = np.concatenate([nibbles & 15, nibbles >> 4], 2).astype(np.int64)
    return Stored(q - 8, half(0), zero, False) if name == "INT4" else Stored(q, half(0), half(2), False)


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c of fp32 arrays, rounded once. The product is exact in fp64. The sum is rounded there to odd: to the
    neighbour with an odd last bit unless it is exact, so that rounding to fp32 sees on which side of a tie it lies."""
    product, addend = np.broadcast_arrays(a.astype(np.float64) * b, c.astype(np.float64))
    total = product + addend
    part = total - product  # Knuth's exact error of the sum
    error = (product - (total - part)) + (addend - part)
    beyond = np.where(error > 0, np.inf, -np.inf)  # where the exact sum lies
    even = (total.view(np.int64) & 1) == 0
    return np.where((error != 0) & even, np.nextafter(total, beyond), total).astype(F32)


def product(x: np.ndarray, name: str, rows: np.ndarray) -> np.ndarray:
    """fp32 [x rows, n]: x [rows, k] fp32 times a stored weight."""
    a, w = quantise_rows(x), read_rows(name, rows, x.shape[1])
    out = np.zeros((len(x), len(rows)), F32)
    for g in range(a.scale.shape[1]):
        exact = (a.q[:, g] @ w.q[:, g].T).astype(F32)
        out = fma(exact if w.channel else exact * w.scale[None, :, g], a.scale[:, g, None], out)
        if name == "INT4_MIN":
            out = fma(w.minimum[None, :, g], (a.scale[:, g] * a.q[:, g].sum(1).astype(F32))[:, None], out)
    return out * w.scale[None, :, 0] if w.channel else out


def stored(name: str, values: np.ndarray) -> np.ndarray:
    """fp32 [n, k] in the stored form, by the native quantiser."""
    n, k = values.shape
    out = np.empty((n, _native.quant_row_bytes(quant(name), k)), np.uint8)
    assert _native.quantise_rows(quant(name), np.ascontiguousarray(values, F32), out) == -1
    return out


def random_stored(name: str, n: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """Any codes with plausible scales: also -128, which no quantiser writes but a file may hold."""
    groups = -(-k // GROUP)
    if name == "INT8_CHANNEL":
        scale = rng.uniform(1e-4, 1e-2, (n, 1)).astype(F32).view(np.uint8)
        return np.concatenate([scale, rng.integers(0, 256, (n, k), dtype=np.uint8)], 1)
    size = {"INT8": 34, "INT4": 18, "INT4_MIN": 20}[name]
    rows = rng.integers(0, 256, (n, groups, size), dtype=np.uint8)
    heads = 2 if name == "INT4_MIN" else 1
    scales = rng.normal(0, 1e-2, (n, groups, heads)).astype(np.float16)
    scales[0, 0, 0] = np.float16(6e-8)  # subnormal
    rows[:, :, : 2 * heads] = scales.view(np.uint8)
    if k % GROUP:  # what pads the last group of a file made from narrower rows
        rest = np.arange(GROUP) >= k % GROUP
        if name == "INT8":
            rows[:, -1, 2:][:, rest] = 0
    return rows.reshape(n, -1)


def pack(name: str, *parts: np.ndarray, k: int, gated: bool = False) -> _native.Packed:
    """Stored matrices stacked; gated: gate and up."""
    n = len(parts[0]) if gated else sum(len(p) for p in parts)
    arena = _native.Arena(_native.packed_quant_bytes(quant(name), n, k, gated) + 4096)
    weight = _native.Packed(arena, n, k, False, gated, quant(name))
    row = 0
    for i, part in enumerate(parts):
        weight.fill_quant(part, 0 if gated else row, i if gated else 0)
        row += len(part)
    return weight
