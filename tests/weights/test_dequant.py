"""The block formats, bit for bit: numpy against the gguf package, the native core against numpy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from paceline.weights import dequant
from paceline.weights.dequant import BFLOAT16, dequantize_numpy, to_bfloat16
from paceline.weights.gguf_file import BLOCK_SIZES

FORMATS = sorted(BLOCK_SIZES)


def random_blocks(dtype: str, seed: int, blocks: int = 3000) -> np.ndarray:
    """Random bytes: every scale, subnormal, infinite and NaN ones included."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, blocks * BLOCK_SIZES[dtype][1], dtype=np.uint8)


def tame_blocks(dtype: str, seed: int, blocks: int = 3000) -> np.ndarray:
    """The same with every half-precision scale below 2, so that all values are finite."""
    raw = random_blocks(dtype, seed, blocks).reshape(blocks, -1)
    high_bytes = {"Q4_0": [1], "Q4_1": [1, 3], "Q5_0": [1], "Q8_0": [1], "Q4_K": [1, 3], "Q5_K": [1, 3],
                  "Q6_K": [209], "F16": [1], "BF16": [1], "F32": [3]}  # fmt: skip
    for column in high_bytes[dtype]:
        raw[:, column] &= 0xBF
    return raw.reshape(-1)


def numpy_values(raw: np.ndarray, dtype: str, out: np.dtype | type) -> np.ndarray:
    elements, size = BLOCK_SIZES[dtype]
    return dequantize_numpy(raw, dtype, np.empty(raw.size // size * elements, dtype=out))


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal bits, or NaN in both (which payload a NaN carries depends on the order of a commutative instruction)."""
    nan_a, nan_b = np.isnan(a.astype(np.float32)), np.isnan(b.astype(np.float32))
    unsigned = np.uint16 if a.dtype == BFLOAT16 else np.uint32
    return a.dtype == b.dtype and bool(
        (nan_a == nan_b).all() and ((a.view(unsigned) == b.view(unsigned)) | nan_a).all()
    )


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("make", [random_blocks, tame_blocks])
def test_numpy_equals_the_gguf_package(dtype, make):
    gguf = pytest.importorskip("gguf")
    raw = make(dtype, seed=len(dtype))
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(raw.reshape(1, -1), gguf.GGMLQuantizationType[dtype]).reshape(-1)
    got = numpy_values(raw, dtype, np.float32)
    assert same_bits(got, expected.astype(np.float32))
    if make is tame_blocks:
        assert np.isfinite(got).all()


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("make", [random_blocks, tame_blocks])
@pytest.mark.parametrize("out", ["float32", "bfloat16"])
def test_native_equals_numpy(dtype, make, out):
    pytest.importorskip("paceline._native")
    raw = make(dtype, seed=7)
    got = dequant.dequantize(raw, dtype, out)
    assert same_bits(got, numpy_values(raw, dtype, BFLOAT16 if out == "bfloat16" else np.float32))


def test_a_block_of_each_small_format_by_hand():
    """Values worked out from the format's description, independent of any other implementation."""
    half = np.float16(0.5).tobytes()
    one = np.float16(1.0).tobytes()
    nibbles = bytes([0x10 | 0x02] + [0x00] * 15)  # element 0 is 2, element 16 is 1
    q4_0 = numpy_values(np.frombuffer(half + nibbles, np.uint8), "Q4_0", np.float32)
    assert (q4_0[0], q4_0[16], q4_0[1]) == (-3.0, -3.5, -4.0)
    q4_1 = numpy_values(np.frombuffer(half + one + nibbles, np.uint8), "Q4_1", np.float32)
    assert (q4_1[0], q4_1[16], q4_1[1]) == (2.0, 1.5, 1.0)
    high = (1 << 0 | 1 << 16).to_bytes(4, "little")
    q5_0 = numpy_values(np.frombuffer(half + high + nibbles, np.uint8), "Q5_0", np.float32)
    assert (q5_0[0], q5_0[16], q5_0[1]) == (1.0, 0.5, -8.0)
    q8_0 = numpy_values(np.frombuffer(half + bytes([0x80, 0x7F] + [0] * 30), np.uint8), "Q8_0", np.float32)
    assert (q8_0[0], q8_0[1], q8_0[2]) == (-64.0, 63.5, 0.0)


def test_every_half_value_converts_exactly():
    halves = np.arange(1 << 16, dtype=np.uint16)
    expected = halves.view(np.float16).astype(np.float32)
    assert same_bits(dequant.dequantize(halves.view(np.uint8), "F16"), expected)


def test_bfloat16_rounds_to_nearest_even():
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 1 << 32, 200_000, dtype=np.uint32)
    ties = (rng.integers(0, 1 << 16, 5_000, dtype=np.uint32) << 16) | 0x8000
    values = np.concatenate([bits, ties, ties ^ 1, ties - 1]).view(np.float32)
    with np.errstate(invalid="ignore"):
        expected = values.astype(ml_dtypes.bfloat16)
    assert same_bits(to_bfloat16(values), expected)
    assert same_bits(dequant.dequantize(values.view(np.uint8), "F32", "bfloat16"), expected)


def test_native_refuses_sizes_that_do_not_match():
    native = pytest.importorskip("paceline._native")
    out = np.empty(32, np.float32)
    with pytest.raises(ValueError, match="sizes"):
        native.dequantize_f32("Q8_0", np.zeros(33, np.uint8), out)
    with pytest.raises(ValueError, match="sizes"):
        native.dequantize_f32("Q8_0", np.zeros(68, np.uint8), out)
    with pytest.raises(ValueError, match="unknown format"):
        native.dequantize_f32("Q9_9", np.zeros(34, np.uint8), out)
