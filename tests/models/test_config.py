"""config.json and tensors of a target: every mistake is refused by the name of the field or tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import CheckpointError, ConfigError
from paceline.models import load_model, read_config
from paceline.models.target import FAMILIES
from paceline.values import shown
from paceline.weights.checkpoint import open_checkpoint

from .tiny import Shape, config_of, tensors_of, write, write_target

BASE = config_of(Shape())
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
NUMBERS = (None, 0, -1, "12", True, 1.5, 1 << 40)
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")

WRONG: list[tuple[str, dict[str, Any]]] = [
    *((name, {name: value}) for name in SIZES for value in NUMBERS),
    *(("num_key_value_heads", {"num_key_value_heads": v}) for v in (0, 3, 5, "2")),
    *(("head_dim", {"head_dim": v}) for v in (15, 258, 0, 1, "16")),
    ("hidden_size", {"head_dim": None, "hidden_size": 41}),
    *(("rms_norm_eps", {"rms_norm_eps": v}) for v in ("x", float("nan"), float("inf"), True, -1e-6, 1e39, 10**400)),
    *(("hidden_act", {"hidden_act": v}) for v in ("gelu", "relu", None, 3)),
    *(("max_position_embeddings", {"max_position_embeddings": v}) for v in (0, -5, "x")),
    *(("tie_word_embeddings", {"tie_word_embeddings": v}) for v in ("yes", 1)),
    *(("attention_bias", {"attention_bias": v}) for v in ("false", 1)),
    *(("mlp_bias", {"mlp_bias": v}) for v in ("no", 0)),
    *(
        ("rope_theta", {"rope_theta": v})
        for v in (0, -1.0, "x", float("nan"), 1e-300, 1e-37, 1e308, 10**400, -(10**5000))
    ),
    *(("rope_theta", {"rope_parameters": {"rope_theta": v}}) for v in (0, 1e-300, 1e308)),
    *(("rope_type", {"rope_scaling": {"type": v, "factor": 2.0}}) for v in ("dynamic", "proportional", "mrope", 3)),
    *(("rope_type", {"rope_parameters": {"rope_type": v, "rope_theta": 1e4}}) for v in ("xpos", None)),
    *(
        (name, {"rope_scaling": {"rope_type": "yarn", **YARN, name: v}})
        for name, v in (
            *(("factor", v) for v in (None, 0, 0.5, "2", float("nan"), 1e300)),
            *(("original_max_position_embeddings", v) for v in (None, 0, -1)),
            *(("beta_fast", v) for v in (-1, 0.5, "x")),
            *(("beta_slow", v) for v in (0, -1)),
            *(("attention_factor", v) for v in (0, -1, 1e9, "x")),
            *(("mscale", v) for v in (0.7, 1)),
            ("truncate", "no"),
        )
    ),
    ("rope_scaling", {"rope_scaling": [1]}),
    *(
        ("factor", {"rope_scaling": {"type": "linear", "factor": v}})
        for v in (0, -1, "x", None, 1e-45, 1e-35, 1e300, 10**400)
    ),
    ("factor", {"rope_scaling": {"type": "linear"}}),
    *(
        (name, {"rope_scaling": {k: v for k, v in LLAMA3.items() if k != name}})
        for name in LLAMA3
        if name != "rope_type"
    ),
    *(("factor", {"rope_scaling": {**LLAMA3, "factor": v}}) for v in (0, -1, 1e300, 1e-300)),
    *(("low_freq_factor", {"rope_scaling": {**LLAMA3, "low_freq_factor": v}}) for v in (0, -1)),
    ("low_freq_factor", {"rope_scaling": {**LLAMA3, "low_freq_factor": -1, "high_freq_factor": 0}}),
    ("original_max_position_embeddings", {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 0}}),
    ("high_freq_factor", {"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}),
    *(("partial_rotary_factor", {"partial_rotary_factor": v}) for v in (0.01, 0.0, -1, 1.5, "x", 1e308, 10**400)),
    ("partial_rotary_factor", {"rope_parameters": {"partial_rotary_factor": 1e308}}),
    ("layer_types", {"layer_types": ["full_attention"]}),
    ("layer_types", {"layer_types": ["full_attention", "linear_attention"]}),
    ("layer_types", {"layer_types": "full_attention"}),
    ("layer_types", {"layer_types": [["full_attention"], []]}),
    ("sliding_window", {"layer_types": ["full_attention", "sliding_attention"]}),
    ("sliding_window", {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 0}),
    ("sliding_window", {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 1 << 31}),
    ("sliding_window", {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 1 << 31}),
    ("use_sliding_window", {"use_sliding_window": "yes", "sliding_window": 3}),
    # of a wrong type and not used
    *(("sliding_window", {"sliding_window": v}) for v in ("8", 8.0, [8], True)),
    *(("use_sliding_window", {"use_sliding_window": v}) for v in ("yes", 1)),
    *(("max_window_layers", {"max_window_layers": v}) for v in ("yes", -1)),
    *(
        ("quantization_config = quant_method '" + kind, {"quantization_config": {"quant_method": kind, "bits": 4}})
        for kind in ("gptq", "awq", "fp8", "bitsandbytes", "compressed-tensors")
    ),
    *(("quantization_config", {"quantization_config": v}) for v in ({}, "fp8", 10**5000)),
    ("compression_config", {"compression_config": {"quant_method": "compressed-tensors"}}),
]


@pytest.mark.parametrize(("field", "change"), WRONG, ids=lambda x: shown(x) if isinstance(x, dict) else x)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_mistakes_are_named(family, field, change):
    if field == "mlp_bias":
        family = "llama"  # the others have no such field
    with pytest.raises(ConfigError, match=field):
        FAMILIES[family]({**BASE, **change})


def test_long_values_do_not_flood_the_message():
    with pytest.raises(ConfigError, match="layer_types") as caught:
        FAMILIES["llama"]({**BASE, "layer_types": ["x" * 1000] * 1000})
    assert len(str(caught.value)) < 600


def test_a_quantised_checkpoint_gets_a_remedy():
    with pytest.raises(ConfigError, match=r"'gptq'.*unquantised.*GGUF"):
        FAMILIES["llama"]({**BASE, "quantization_config": {"quant_method": "gptq"}})
    assert FAMILIES["llama"]({**BASE, "quantization_config": None}).hidden_size == BASE["hidden_size"]


@pytest.mark.filterwarnings("error")
@given(st.floats(0, allow_nan=False, allow_infinity=False), st.floats(0, 10), st.floats(0, 10), st.floats(1e-3, 1e300))
def test_rope_is_finite_or_refused(theta, low, high, factor):
    for scaling in (
        None,
        {"type": "linear", "factor": factor},
        {**LLAMA3, "low_freq_factor": low, "high_freq_factor": high, "factor": factor},
    ):
        try:
            rope = FAMILIES["llama"]({**BASE, "rope_theta": theta, "rope_scaling": scaling}).rope
        except ConfigError:
            continue
        assert rope.inv_freq.dtype == np.float32
        assert (rope.inv_freq > 0).all() and np.isfinite(rope.inv_freq).all()


@pytest.mark.parametrize("kind", ["gpt2", "olmo2", "mixtral", "qwen3_next", None, 7])
def test_other_families_are_refused_by_name(tmp_path, kind):
    folder = write(tmp_path, {**BASE, "model_type": kind}, tensors_of(Shape()))
    with pytest.raises(ConfigError, match=rf"model_type = {kind!r}.*llama, .*qwen2, qwen3"):
        load_model(folder)
    with open_checkpoint(folder) as checkpoint, pytest.raises(ConfigError, match="model_type"):
        read_config(checkpoint)


def test_defaults_and_styles():
    """What may be left out, and the two styles in which rope is written."""
    c = FAMILIES["llama"](
        {k: v for k, v in BASE.items() if k not in ("num_key_value_heads", "head_dim", "rms_norm_eps")}
    )
    assert (c.num_kv_heads, c.head_dim, c.rms_norm_eps) == (4, 10, 1e-6)
    old = FAMILIES["qwen2"]({**BASE, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}})
    parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
    new = FAMILIES["qwen2"]({**BASE, "rope_theta": 1e4, "rope_parameters": parameters})
    assert np.array_equal(old.rope.inv_freq, new.rope.inv_freq)
    assert old.qkv_bias and not old.output_bias and not old.qk_norm


def test_windows():
    def windows(family: str, **change: Any) -> tuple[int, ...]:
        return FAMILIES[family]({**BASE, "model_type": family, "num_hidden_layers": 4, **change}).windows

    assert windows("llama", sliding_window=8) == (0, 0, 0, 0)
    assert windows("qwen2", sliding_window=8, use_sliding_window=False, max_window_layers=1) == (0, 0, 0, 0)
    assert windows("qwen2", sliding_window=8, use_sliding_window=True, max_window_layers=1) == (0, 8, 8, 8)
    # transformers' default for Qwen, so that a config without the key means the same in both
    assert windows("qwen3", sliding_window=8, use_sliding_window=True) == (0, 0, 0, 0)
    kinds = ["sliding_attention", "full_attention"] * 2
    assert windows("qwen3", sliding_window=8, layer_types=kinds) == (8, 0, 8, 0)
    assert windows("qwen3", sliding_window=None, layer_types=["full_attention"] * 4) == (0, 0, 0, 0)


SHAPES = {
    "llama": Shape(bias=True, mlp_bias=True),
    "qwen2": Shape("qwen2"),
    "qwen3": Shape("qwen3", tied=True),
}


@pytest.mark.parametrize("family", SHAPES)
def test_missing_and_misshapen_tensors_are_named(tmp_path, family):
    shape = SHAPES[family]
    tensors = tensors_of(shape)
    load_model(write(tmp_path / "whole", config_of(shape), tensors), threads=1)
    for i, name in enumerate(n for n in tensors if "layers.1" not in n):
        without = {n: t for n, t in tensors.items() if n != name}
        with pytest.raises(CheckpointError, match=name.replace(".", r"\.") + ".*missing"):
            load_model(write(tmp_path / f"without{i}", config_of(shape), without), threads=1)
        grown = np.zeros(np.array(tensors[name].shape) + np.eye(tensors[name].ndim, dtype=int)[0], np.float32)
        with pytest.raises(CheckpointError, match=name.replace(".", r"\.") + ".*shape"):
            load_model(write(tmp_path / f"grown{i}", config_of(shape), {**tensors, name: grown}), threads=1)
        if tensors[name].ndim == 2:
            turned = np.ascontiguousarray(tensors[name].T)
            if turned.shape != tensors[name].shape:
                with pytest.raises(CheckpointError, match="shape"):
                    load_model(write(tmp_path / f"turned{i}", config_of(shape), {**tensors, name: turned}), threads=1)


def test_taps_outside_the_model_are_refused(tmp_path):
    model = load_model(write_target(tmp_path, Shape()), threads=1, dtype="float32")
    for layer in (-2, 2, 100):
        with pytest.raises(ConfigError, match=f"target_layer_ids: {layer}"):
            model.plan((0, layer))
    assert model.plan((1, -1)) is model.plan([1, -1])


def test_a_tied_model_may_store_its_head(tmp_path):
    """A checkpoint that says "tied" and stores a head: transformers ties, and so does the engine."""
    shape = Shape(tied=True)
    tensors = tensors_of(shape)
    plain = load_model(write(tmp_path / "a", config_of(shape), tensors), threads=1, dtype="float32")
    head = np.random.default_rng(0).normal(size=(shape.vocab, shape.hidden)).astype(np.float32)
    stored = write(tmp_path / "b", config_of(shape), {**tensors, "lm_head.weight": head})
    both = load_model(stored, threads=1, dtype="float32")
    assert np.array_equal(plain.logits([1, 2, 3])[0], both.logits([1, 2, 3])[0])


def test_logits_in_one_pass_or_many_and_of_nothing(tmp_path):
    folder: Path = write_target(tmp_path, Shape())
    ids = [i % 97 for i in range(50)]
    whole, chunked = (load_model(folder, threads=1, dtype="float32", max_rows=n) for n in (512, 7))
    for a, b in zip(whole.logits(ids, taps=(0,)), chunked.logits(ids, taps=(0,)), strict=True):
        assert np.array_equal(a, b)
    assert whole.logits([])[0].shape == (0, 97)
