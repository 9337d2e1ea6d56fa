"""Which format a matrix gets, and that files in blocks are used as they are."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import _native
from paceline.errors import CheckpointError, ConfigError
from paceline.models import load_model
from paceline.weights.checkpoint import open_checkpoint
from paceline.weights.dequant import dequantize
from paceline.weights.gguf_file import BLOCK_SIZES, TENSOR_TYPES
from paceline.weights.quantise import (
    QUANTIZATIONS,
    STORED,
    Conversions,
    Quant,
    check_quantization,
    choose_format,
    dequantise_rows,
    expected_bytes,
    quantise,
    quantised_rows,
)
from weights.builders import gguf_bytes, model_metadata, model_tensors, random_weights, tokenizer_metadata

TYPE_IDS = {name: number for number, (name, _, _) in TENSOR_TYPES.items()}
RNG = np.random.default_rng(5)


def blocks(kind: str, n: int, k: int, rng: np.random.Generator) -> bytes:
    """Random blocks with scales near 0.01."""
    elements, size = BLOCK_SIZES[kind]
    raw = rng.integers(0, 256, (n * k // elements, size), dtype=np.uint8)

    def halves(at: int, scale: float) -> None:
        raw[:, at : at + 2] = (rng.normal(0, scale, len(raw))).astype(np.float16)[:, None].view(np.uint8)

    halves(208 if kind == "Q6_K" else 0, 0.01 if size < 64 else 3e-4)
    if kind in ("Q4_1", "Q4_K", "Q5_K"):
        halves(2, 0.05 if size < 64 else 3e-4)
    return raw.tobytes()


def write_gguf(path: Path, kinds: dict[str, str] | str, *, tied: bool = True) -> Path:
    """A tiny llama whose matrices are stored as one kind, or as `kinds` says by the end of their names."""
    hidden, ffn = 256, 512
    weights = random_weights("llama", hidden=hidden, ffn=ffn, tied=tied)
    tensors = []
    for name, shape, number, data in model_tensors("llama", weights):
        kind = kinds if isinstance(kinds, str) else next((k for end, k in kinds.items() if name.endswith(end)), "F32")
        if len(shape) == 2 and kind != "F32":
            number, data = TYPE_IDS[kind], blocks(kind, *shape, RNG)
        tensors.append((name, shape, number, data))
    metadata = [*model_metadata("llama", hidden=hidden, ffn=ffn), *tokenizer_metadata("smollm")]
    path.write_bytes(gguf_bytes(metadata, tensors))
    return path


def unpacked(weight: Any) -> np.ndarray:
    out = np.empty((weight.n, weight.k), np.float32)
    for row in range(weight.n):
        weight.row(row, out[row : row + 1])
    return out


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_blocks_of_a_file_are_used_as_they_are(tmp_path, kind, caplog):
    """The packed rows are the file's values to the last bit, the query and key rows in Hugging Face order."""
    path = write_gguf(tmp_path / "m.gguf", kind)
    with caplog.at_level(logging.WARNING):
        model = load_model(path, quantization="auto", threads=1)
    assert not caplog.records
    assert model.formats.keys() == {"int8" if kind == "Q8_0" else "int4"}
    with open_checkpoint(path) as checkpoint:
        w = model.weights
        assert (unpacked(w.head) == checkpoint.load("model.embed_tokens.weight", "float32")).all()
        for i, layer in enumerate(w.layers):
            prefix = f"model.layers.{i}."
            qkv = np.concatenate([checkpoint.load(f"{prefix}self_attn.{p}_proj.weight", "float32") for p in "qkv"])
            assert (unpacked(layer.qkv) == qkv).all()
            assert (unpacked(layer.down) == checkpoint.load(f"{prefix}mlp.down_proj.weight", "float32")).all()
        assert abs(model.weight_bytes - expected_bytes(checkpoint, "auto")) < 0.05 * model.weight_bytes
    exact = load_model(path, quantization="none", dtype="float32", threads=1).logits([1, 2, 3, 4, 5])[0]
    got = model.logits([1, 2, 3, 4, 5])[0]
    assert np.linalg.norm(got - exact) < 0.12 * np.linalg.norm(exact)


@pytest.mark.parametrize("kind", ["Q5_0", "Q4_K", "Q5_K", "Q6_K"])
def test_other_blocks_are_converted_and_it_is_said(tmp_path, kind, caplog):
    path = write_gguf(tmp_path / "m.gguf", kind)
    with caplog.at_level(logging.WARNING):
        model = load_model(path, quantization="auto", threads=2)
    errors = model.conversions.relative_errors()
    assert errors.keys() == {(kind, "int8")} and 0 < errors[kind, "int8"] < 0.01
    assert any(kind in r.message and "relative error" in r.message for r in caplog.records)
    exact = load_model(path, quantization="none", dtype="float32", threads=1).logits([1, 2, 3, 4, 5])[0]
    assert np.linalg.norm(model.logits([1, 2, 3, 4, 5])[0] - exact) < 0.12 * np.linalg.norm(exact)


def test_mixed_files(tmp_path):
    """As llama-quantize writes them: another type for some tensors, floats for others."""
    kinds = {"token_embd.weight": "Q8_0", "attn_v.weight": "Q8_0", "ffn_down.weight": "F32", ".weight": "Q4_0"}
    model = load_model(write_gguf(tmp_path / "m.gguf", kinds), quantization="auto", threads=1)
    layer = model.weights.layers[0]
    assert layer.qkv.quant == Quant.INT8  # q and k are widened: exactly
    assert layer.output.quant == layer.gate_up.quant == Quant.INT4
    assert layer.down.quant == Quant.NONE and model.weights.head.quant == Quant.INT8
    assert not model.conversions.describe()


def test_untied_embedding_stays_in_blocks(tmp_path):
    model = load_model(write_gguf(tmp_path / "m.gguf", "Q4_1", tied=False), quantization="auto", threads=1)
    assert model.weights.embed.quant == Quant.INT4_MIN and model.weights.head.quant == Quant.INT4_MIN
    model = load_model(write_gguf(tmp_path / "k.gguf", "Q6_K", tied=False), quantization="auto", threads=1)
    assert isinstance(model.weights.embed, np.ndarray)  # bf16: exact, and read by the row


CHOICES = [
    (["Q8_0"], "none", None),
    (["BF16"], "auto", None),
    (["F32", "Q4_1"], "auto", None),
    (["Q8_0", "Q8_0"], "auto", Quant.INT8),
    (["Q4_0"], "auto", Quant.INT4),
    (["Q4_0", "Q4_1"], "auto", Quant.INT4_MIN),
    (["Q4_0", "Q8_0"], "auto", Quant.INT8),
    (["Q4_K", "Q6_K"], "auto", Quant.INT8),
    (["I8_CHANNEL"], "auto", Quant.INT8_CHANNEL),
    (["I8_CHANNEL", "Q8_0"], "auto", Quant.INT8),
    (["BF16"], "int8", Quant.INT8),
    (["Q4_1"], "int8", Quant.INT8),
    (["F16"], "int8_channel", Quant.INT8_CHANNEL),
    (["BF16"], "int4", Quant.INT4_MIN),
    (["Q4_0"], "int4", Quant.INT4),
    (["Q4_0", "BF16"], "int4", Quant.INT4_MIN),
]


@pytest.mark.parametrize(("stored", "quantization", "want"), CHOICES)
def test_choice(stored, quantization, want):
    assert choose_format(stored, quantization) == want


class _Stored:
    """A checkpoint of one tensor of blocks."""

    path = Path("here")

    def __init__(self, kind: str, raw: np.ndarray, n: int) -> None:
        self.kind, self.raw, self.n = kind, raw, n

    def stored_dtype(self, name: str) -> str:
        return self.kind

    def blocks(self, name: str) -> np.ndarray:
        return self.raw.reshape(self.n, -1)

    def load(self, name: str, dtype: str) -> np.ndarray:
        return dequantize(self.raw, self.kind).reshape(self.n, -1)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 20), quant=st.sampled_from([Quant.INT4, Quant.INT8, Quant.INT4_MIN]))
def test_q4_0_widens_without_loss(seed, quant):
    rng = np.random.default_rng(seed)
    raw = np.frombuffer(blocks("Q4_0", 3, 64, rng), np.uint8).copy()
    conversions = Conversions()
    rows = quantised_rows(_Stored("Q4_0", raw, 3), "w", quant, conversions)  # type: ignore[arg-type]
    assert (dequantise_rows(rows, quant, 64) == dequantize(raw, "Q4_0").reshape(3, 64)).all()
    assert not conversions.kinds


def test_q4_0_whose_minimum_overflows_is_converted():
    raw = np.zeros((1, 18), np.uint8)
    raw[:, :2] = np.array([[30000.0]], np.float16).view(np.uint8)
    conversions = Conversions()
    rows = quantised_rows(_Stored("Q4_0", raw.reshape(-1), 1), "w", Quant.INT8, conversions)  # type: ignore[arg-type]
    assert (dequantise_rows(rows, Quant.INT8, 32) == -240000.0).all()
    with pytest.raises(CheckpointError, match="row 0"):
        quantised_rows(_Stored("Q4_0", raw.reshape(-1), 1), "w", Quant.INT4_MIN, conversions)  # type: ignore[arg-type]


@pytest.mark.parametrize("quant", STORED.values())
def test_the_error_is_that_of_the_values(quant):
    values = RNG.normal(size=(5000, 40)).astype(np.float32)  # more rows than are converted at once
    rows, error, size = quantise(values, quant)
    difference = dequantise_rows(rows, quant, 40) - values
    assert error == pytest.approx((difference.astype(np.float64) ** 2).sum(), rel=1e-4)
    assert size == pytest.approx((values.astype(np.float64) ** 2).sum(), rel=1e-4)
    assert (error / size) ** 0.5 < (0.012 if quant in (Quant.INT8, Quant.INT8_CHANNEL) else 0.12)


def test_values_that_are_not_numbers_are_refused():
    values = np.ones((4, 32), np.float32)
    values[2, 1] = np.nan
    with pytest.raises(CheckpointError, match="tensor x: row 2"):
        quantise(values, Quant.INT8, "tensor x")


def test_quantizations_are_checked():
    assert [check_quantization(q) for q in QUANTIZATIONS] == list(QUANTIZATIONS)
    with pytest.raises(ConfigError, match="int8"):
        check_quantization("q8")


def test_sizes():
    for name, quant in STORED.items():
        width = _native.quant_row_bytes(quant, 64)
        assert width == (68 if name == "I8_CHANNEL" else 2 * BLOCK_SIZES[name][1])
        assert _native.quant_row_bytes(quant, 33) == (37 if name == "I8_CHANNEL" else width)
