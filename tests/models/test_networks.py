"""Whole networks: tiny random ones against fp64, and against `transformers`; SmolLM2 against `transformers`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline import _native
from paceline.models import load_model

from .reference import Reference
from .tiny import Shape, config_of, tensors_of, write_target

LLAMA3 = {
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
}
SHAPES = {
    "llama": Shape(),
    "llama biases": Shape(bias=True, mlp_bias=True, tied=True, hidden=44, inner=33, head_dim=10),
    "yarn rope": Shape(
        "qwen3",
        rope={"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40}},
    ),
    "yarn rope, all fields": Shape(
        hidden=42,
        head_dim=32,
        heads=6,
        kv_heads=3,
        rope={
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 5000.0,
                "factor": 2.0,
                "original_max_position_embeddings": 50,
                "beta_fast": 6.0,
                "beta_slow": 2.0,
                "attention_factor": 1.3,
                "truncate": False,
            }
        },
    ),
    "llama 3 rope": Shape(hidden=42, head_dim=32, heads=6, kv_heads=3, rope=LLAMA3),
    "llama linear rope": Shape(rope={"rope_scaling": {"rope_type": "linear", "factor": 3.0}}, heads=8, kv_heads=1),
    "qwen2": Shape("qwen2", vocab=131, hidden=33, inner=49, heads=6, kv_heads=3, head_dim=6),
    "qwen2 windows": Shape("qwen2", layers=3, window=17, sliding=(1, 2), tied=True),
    "qwen3": Shape("qwen3", hidden=48, head_dim=64, heads=3, kv_heads=1),
    "qwen3 windows, bias": Shape("qwen3", bias=True, window=40, sliding=(0,), head_dim=34, kv_heads=4),
    "head_dim 2": Shape(head_dim=2, heads=5, kv_heads=5, hidden=10, inner=7),
    "head_dim 256": Shape(head_dim=256, heads=2, kv_heads=1, hidden=70),
}
LENGTH = 150


def ids_for(shape: Shape) -> list[int]:
    return np.random.default_rng(0).integers(0, shape.vocab, LENGTH).tolist()


def paths() -> list[str]:
    names = ["portable", "avx2", "avx512", "avx512_bf16", "amx"]
    return names[: names.index(_native.best_isa()) + 1]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_taps_and_cache_follow_the_definition(tmp_path, name, dtype):
    """fp32 to 1e-4; bfloat16 to what differs when a sum lies near the middle between two roundings."""
    shape, ids = SHAPES[name], ids_for(SHAPES[name])
    folder = write_target(tmp_path, shape)
    want = Reference(config_of(shape), tensors_of(shape), half=dtype == "bfloat16").forward(ids)
    layers = list(want.taps)
    want_taps = np.concatenate([want.taps[i] for i in layers], 1)
    for isa in paths():
        model = load_model(folder, dtype=dtype, isa=isa, threads=1)
        logits, taps = model.logits(ids, taps=layers)
        if dtype == "float32":
            np.testing.assert_allclose(logits, want.logits, rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(taps, want_taps, rtol=1e-4, atol=1e-4)
        else:
            scale = np.abs(want.logits).max()
            assert np.abs(logits - want.logits).max() < 0.02 * scale
            assert np.sqrt(((logits - want.logits) ** 2).mean()) < 0.003 * scale
            assert np.abs(taps - want_taps).max() < 0.02 * np.abs(want_taps).max()


def test_sums_differ_from_exact_ones_by_rounding_alone(tmp_path):
    """bfloat16 and fp32 runs of one model differ: the comparison above would notice a path that ignores its type."""
    folder = write_target(tmp_path, SHAPES["llama"])
    ids = ids_for(SHAPES["llama"])
    full, half = (load_model(folder, dtype=d, threads=1).logits(ids)[0] for d in ("float32", "bfloat16"))
    assert 1e-4 < np.abs(full - half).max() < 0.3


# ---- transformers


def with_transformers(folder: Path, ids: list[int]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Logits [n, V] and hidden states (embedding, then behind each layer; the last one normed) in fp32."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.set_verbosity_error()
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        out = model(torch.tensor([ids]), output_hidden_states=True)
    return out.logits[0].numpy(), [h[0].numpy() for h in out.hidden_states]


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_tiny_models_equal_transformers(tmp_path, name):
    shape, ids = SHAPES[name], ids_for(SHAPES[name])
    folder = write_target(tmp_path, shape)
    want, hidden = with_transformers(folder, ids)
    model = load_model(folder, dtype="float32", threads=1)
    logits, taps = model.logits(ids, taps=range(-1, shape.layers - 1))
    np.testing.assert_allclose(logits, want, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(taps, np.concatenate(hidden[:-1], 1), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_windows_without_layer_types_equal_transformers(tmp_path):
    """`use_sliding_window` with and without `max_window_layers`: the defaults are transformers'."""
    from .tiny import write

    shape = replace(SHAPES["qwen2 windows"], window=0)
    for i, change in enumerate(({"max_window_layers": 1}, {}, {"max_window_layers": 0})):
        config = {**config_of(shape), "use_sliding_window": True, "sliding_window": 17, **change}
        folder = write(tmp_path / str(i), config, tensors_of(shape))
        want, _ = with_transformers(folder, ids_for(shape))
        got, _ = load_model(folder, dtype="float32", threads=1).logits(ids_for(shape))
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


TEXT = """The sea had been rough since morning, and the ferry was late. On the quay a dozen people waited with their
bags, their bicycles and one very large dog. def area(radius): return 3.14159 * radius ** 2  # not exact, but near
enough. In 1969 three men flew 384,400 km to the Moon; 1 + 1 = 2, and 17 * 23 = 391. «Où est la gare?» asked the tall
woman, and the harbour master pointed up the hill: past the church, left at the bakery, then straight on until you see
the clock. Nobody believed him. The list on the door said: apples, pears, plums, nails (four inch), rope, lamp oil.

Question: which of the following is not a prime number? (a) 2 (b) 9 (c) 13 (d) 31. Answer: (b), because 9 = 3 * 3."""


@pytest.mark.slow
def test_smollm2_equals_transformers(tmp_path):
    """fp32, the same ids, every row and every layer of a text of 200 tokens: 1e-3."""
    pytest.importorskip("transformers")
    from paceline.tokenizer import load_tokenizer
    from paceline.weights.convert import convert
    from paceline.weights.store import resolve_model

    source = resolve_model("smollm2-135m")
    folder = convert(source, tmp_path / "smollm2", dtype="float32")
    ids = load_tokenizer(folder).encode(TEXT)[:200]
    assert len(ids) == 200
    want, hidden = with_transformers(folder, ids)
    for path in (source, folder):
        model = load_model(path, dtype="float32")
        layers = range(-1, model.config.num_layers - 1)
        logits, taps = model.logits(ids, taps=layers)
        assert np.abs(logits - want).max() < 1e-3
        want_taps = np.concatenate(hidden[:-1], 1)
        assert (np.abs(taps - want_taps) <= 1e-3 + 1e-4 * np.abs(want_taps)).all()
