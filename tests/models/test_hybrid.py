"""Qwen3.5 models: against their equations, from every kind of checkpoint, and what is refused."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.errors import CheckpointError, ConfigError
from paceline.models import load_model
from paceline.models.qwen3_5 import HybridConfig, read_config

from .hybrid import HybridReference, HybridShape, config_of, tensors_of, write_hybrid
from .tiny import write, write_tokenizer

SHAPES = {
    "plain": HybridShape(),
    "biases, tied, long kernel": HybridShape(bias=True, tied=True, kernel=6, rotated=0.5, seed=1),
    "one key head, ends with attention": HybridShape(layers=4, full=(0, 3), key_heads=1, value_heads=3, seed=2),
    "wide heads": HybridShape(layers=2, full=(0,), key_dim=64, value_dim=72, kernel=2, value_heads=2, seed=3),
}
TOKENS = np.random.default_rng(0).integers(0, 120, 90).tolist()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_logits_and_taps_are_those_of_the_equations(shape: HybridShape, tmp_path: Path) -> None:
    model = load_model(write_hybrid(tmp_path, shape), dtype="float32", threads=2, max_rows=32)
    want = HybridReference(config_of(shape), tensors_of(shape)).forward(TOKENS)
    layers = tuple(range(-1, shape.layers))
    logits, taps = model.logits(TOKENS, taps=layers)
    np.testing.assert_allclose(logits, want.logits, rtol=2e-4, atol=2e-4)
    for layer, got in zip(layers, np.split(taps, len(layers), axis=1), strict=True):
        np.testing.assert_allclose(got, want.taps[layer], rtol=2e-4, atol=2e-4, err_msg=f"layer {layer}")


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_half_precision_stays_close(quantization: Any, tmp_path: Path) -> None:
    shape = SHAPES["plain"]
    model = load_model(write_hybrid(tmp_path, shape), quantization=quantization, threads=1)
    got, want = model.logits(TOKENS)[0], HybridReference(config_of(shape), tensors_of(shape)).forward(TOKENS).logits
    cosine = (got * want).sum(1) / np.linalg.norm(got, axis=1) / np.linalg.norm(want, axis=1)
    # rows behind a badly rounded one carry its error on in their state
    assert np.median(cosine) > 0.998 and cosine.min() > (0.995 if quantization == "none" else 0.95)


def whole_model(folder: Path, shape: HybridShape, **outer: Any) -> Path:
    """The text model inside a checkpoint that also sees, as `Qwen3_5ForConditionalGeneration` is saved."""
    inner = config_of(shape)
    tied = inner.pop("tie_word_embeddings")
    del inner["architectures"]
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": inner,
        "vision_config": {"model_type": "qwen3_5", "depth": 2, "hidden_size": 8},
        "image_token_id": 5,
        "tie_word_embeddings": tied,
        **outer,
    }
    tensors = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: value
        for name, value in tensors_of(shape).items()
    }
    tensors["model.visual.blocks.0.attn.qkv.weight"] = np.ones((24, 8), np.float32)
    tensors["model.visual.patch_embed.proj.bias"] = np.ones(8, np.float32)
    tensors["mtp.fc.weight"] = np.ones((shape.hidden, 2 * shape.hidden), np.float32)
    return write(folder, config, tensors)


@pytest.mark.parametrize("tied", [False, True])
def test_the_text_model_of_a_larger_one(tied: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shape = replace(SHAPES["plain"], tied=tied)
    alone = load_model(write_hybrid(tmp_path / "alone", shape), dtype="float32", threads=1)
    with caplog.at_level(logging.INFO, "paceline"):
        part = load_model(whole_model(tmp_path / "whole", shape), dtype="float32", threads=1)
    assert "3 tensors of other parts (vision, drafting) are not used" in caplog.text
    assert part.config == replace(alone.config, rope=part.config.rope)
    np.testing.assert_array_equal(part.logits(TOKENS)[0].view(np.uint32), alone.logits(TOKENS)[0].view(np.uint32))


def test_a_tensor_that_belongs_nowhere_is_refused(tmp_path: Path) -> None:
    shape = SHAPES["plain"]
    tensors = tensors_of(shape) | {"model.layers.0.self_attn.q_proj.weight": np.ones((4, 4), np.float32)}
    with pytest.raises(CheckpointError, match="no place in this network"):
        load_model(write(tmp_path, config_of(shape), tensors), dtype="float32", threads=1)


def test_defaults_are_those_of_transformers() -> None:
    """The config of a published 9B model says little."""
    c = read_config({"model_type": "qwen3_5_text", "hidden_size": 4096, "intermediate_size": 12288} | SIZES)
    assert isinstance(c, HybridConfig)
    assert (c.head_dim, c.rope.rotary_dim, c.num_attention, c.num_linear) == (256, 64, 8, 24)
    assert [i for i, linear in enumerate(c.linear) if not linear] == list(range(3, 32, 4))
    assert (c.delta.key_heads, c.delta.value_heads, c.delta.channels, c.delta.mixed) == (16, 32, 8192, 12352)
    assert c.cache_layers[:9] == (0, 1, 2, 0, 3, 4, 5, 1, 6)


SIZES = {"num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 248320}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attn_output_gate", False),
        ("use_sliding_window", True),
        ("layer_types", ["linear_attention"] * 3),
        ("layer_types", ["linear_attention", "sliding_attention", "full_attention"]),
        ("layer_types", "full_attention"),
        ("linear_num_value_heads", 3),
        ("linear_num_value_heads", 0),
        ("linear_key_head_dim", 257),
        ("linear_conv_kernel_dim", 1),
        ("linear_conv_kernel_dim", "4"),
        ("full_attention_interval", 0),
        ("hidden_act", "gelu"),
    ],
)
def test_what_would_be_another_network_is_refused_by_name(field: str, value: Any) -> None:
    config = config_of(SHAPES["plain"])
    if field == "full_attention_interval":
        del config["layer_types"]
    with pytest.raises(ConfigError, match=field):
        read_config(config | {field: value})


def test_a_config_without_its_text_part_is_refused(tmp_path: Path) -> None:
    folder = whole_model(tmp_path, SHAPES["plain"])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "text_config"}))
    with pytest.raises(ConfigError, match="text_config"):
        load_model(folder, dtype="float32", threads=1)


def test_info_of_a_model_with_more_parts(tmp_path: Path) -> None:
    from paceline.cli.models import describe
    from paceline.weights.checkpoint import open_checkpoint

    facts = describe(open_checkpoint(whole_model(tmp_path, SHAPES["plain"])))
    assert (facts["architecture"], facts["num_layers"], facts["head_dim"], facts["vocab_size"]) == (
        "qwen3_5",
        3,
        16,
        120,
    )


def test_generating_from_a_model_with_more_parts(tmp_path: Path) -> None:
    """The end of a text may be named in the nested config alone."""
    from paceline import LLM, SamplingParams

    shape = SHAPES["plain"]
    outputs = []
    for folder in (write_hybrid(tmp_path / "alone", shape), whole_model(tmp_path / "whole", shape)):
        write_tokenizer(folder, shape.vocab)
        (folder / "tokenizer_config.json").unlink()
        llm = LLM(folder, dtype="float32", threads=1, kv_cache_space=0.02)
        assert llm.tokenizer.eos_token_ids == (shape.vocab - 1,)
        (output,) = llm.generate([TOKENS], SamplingParams(temperature=0.0, max_tokens=12))
        outputs.append(output.outputs[0].token_ids)
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("whole", [False, True])
def test_a_quantised_copy_is_what_quantising_at_load_gives(whole: bool, tmp_path: Path) -> None:
    from paceline.weights.quantised_writer import quantise_model

    shape = SHAPES["plain"]
    source = (whole_model if whole else write_hybrid)(tmp_path / "source", shape)
    write_tokenizer(source, shape.vocab)
    quantise_model(source, tmp_path / "copy", "int8")
    want = load_model(source, quantization="int8", threads=1).logits(TOKENS)[0]
    got = load_model(tmp_path / "copy", quantization="auto", threads=1).logits(TOKENS)[0]
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))
