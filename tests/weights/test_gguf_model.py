"""GGUF -> Hugging Face: names, configuration, row order; against transformers' own layout of the same weights."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from paceline.errors import CheckpointError
from paceline.weights.checkpoint import open_checkpoint
from paceline.weights.gguf_rope import llama3_factors, rope_config
from paceline.weights.hf_folder import HFFolder
from weights.builders import (
    ARRAY,
    F32,
    I32,
    STRING,
    U32,
    ggml_name,
    gguf_bytes,
    model_metadata,
    model_tensors,
    permute,
    random_weights,
    smollm2_path,
    tiny_gguf,
    tokenizer_metadata,
)

VENDORED = Path(__file__).parent.parent / "golden" / "vendored"


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_names_shapes_and_values(tmp_path, arch, tied):
    weights = tiny_gguf(tmp_path / "m.gguf", arch, tied=tied)
    with open_checkpoint(tmp_path / "m.gguf") as checkpoint:
        assert sorted(checkpoint.names()) == sorted(weights)
        assert checkpoint.config["tie_word_embeddings"] is tied
        for name, expected in weights.items():
            assert checkpoint.shape(name) == expected.shape
            assert checkpoint.stored_dtype(name) == "F32"
            got = checkpoint.load(name)
            assert got.dtype == np.float32
            assert got.flags.c_contiguous
            np.testing.assert_array_equal(got, expected)
            half = checkpoint.load(name, "bfloat16")
            np.testing.assert_array_equal(half.view(np.uint16), expected.astype(ml_dtypes.bfloat16).view(np.uint16))


def test_unpermute_moves_quantised_rows(tmp_path):
    """Q8_0 rows of a llama q_proj come back in Hugging Face order, in both output types."""
    gguf = pytest.importorskip("gguf")
    weights = random_weights("llama")
    q = weights["model.layers.0.self_attn.q_proj.weight"]
    tensors = model_tensors("llama", weights)
    stored = gguf.quantize(np.ascontiguousarray(permute(q, 4)), gguf.GGMLQuantizationType.Q8_0)
    tensors = [(n, s, 8, stored.tobytes()) if n == "blk.0.attn_q.weight" else (n, s, k, d) for n, s, k, d in tensors]
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(model_metadata("llama"), tensors))
    expected = gguf.dequantize(gguf.quantize(q, gguf.GGMLQuantizationType.Q8_0), gguf.GGMLQuantizationType.Q8_0)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    assert checkpoint.stored_dtype("model.layers.0.self_attn.q_proj.weight") == "Q8_0"
    got = checkpoint.load("model.layers.0.self_attn.q_proj.weight")
    np.testing.assert_array_equal(got, expected)
    half = checkpoint.load("model.layers.0.self_attn.q_proj.weight", "bfloat16")
    np.testing.assert_array_equal(half.view(np.uint16), expected.astype(ml_dtypes.bfloat16).view(np.uint16))


def test_bf16_and_f16_tensors(tmp_path):
    weights = random_weights("qwen3")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = []
    for n, s, _, d in model_tensors("qwen3", weights):
        values = np.frombuffer(d, np.float32)
        if n == ggml_name(name):
            tensors.append((n, s, 30, values.astype(ml_dtypes.bfloat16).tobytes()))
        elif len(s) == 2:
            tensors.append((n, s, 1, values.astype(np.float16).tobytes()))
        else:
            tensors.append((n, s, 0, d))
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(model_metadata("qwen3"), tensors))
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    assert checkpoint.load(name).dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(checkpoint.load(name).astype(np.float32),
                                  weights[name].astype(ml_dtypes.bfloat16).astype(np.float32))  # fmt: skip
    np.testing.assert_array_equal(checkpoint.load(name, "float32"), checkpoint.load(name).astype(np.float32))
    other = "model.layers.0.mlp.up_proj.weight"
    np.testing.assert_array_equal(checkpoint.load(other), weights[other].astype(np.float16).astype(np.float32))
    assert checkpoint.config["torch_dtype"] == "bfloat16"


def test_config_of_the_real_model():
    config = open_checkpoint(smollm2_path()).config
    expected = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152, "hidden_size": 576,
        "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "head_dim": 64, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": [2, 0], "rope_theta": 100000.0,
        "rope_scaling": None, "attention_bias": False,
    }  # fmt: skip
    assert {key: config[key] for key in expected} == expected
    json.dumps(config)


@pytest.mark.slow
def test_real_weights_equal_the_gguf_package():
    """A row of each kind of tensor of SmolLM2, the permuted ones included."""
    gguf = pytest.importorskip("gguf")
    path = smollm2_path()
    stored = {t.name: t for t in gguf.GGUFReader(path).tensors}
    checkpoint = open_checkpoint(path)
    parts = ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj", "input_layernorm")
    for name in ("model.embed_tokens.weight", *(f"model.layers.7.{part}.weight" for part in parts)):
        tensor = stored[ggml_name(name)]
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        if "q_proj" in name or "k_proj" in name:
            heads = 9 if "q_proj" in name else 3
            np.testing.assert_array_equal(permute(checkpoint.load(name), heads), expected)
        else:
            np.testing.assert_array_equal(checkpoint.load(name), expected)


def rewritten(arch: str, drop: tuple[str, ...] = (), **changes: object) -> list:
    """Metadata of the tiny model with entries replaced (`arch_key=(kind, value)`) or dropped."""
    rows = [row for row in model_metadata(arch) if row[0] not in drop and row[0] not in changes]
    return rows + [(key, *value) for key, value in changes.items()]  # type: ignore[misc]


def open_with(tmp_path, arch: str, metadata: list, tensors: list | None = None):
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(metadata, model_tensors(arch, random_weights(arch)) if tensors is None else tensors))
    return open_checkpoint(path)


def test_per_layer_counts_that_agree_are_accepted(tmp_path):
    metadata = rewritten("llama", **{"llama.attention.head_count_kv": (ARRAY, (I32, [2, 2]))})
    assert open_with(tmp_path, "llama", metadata).config["num_key_value_heads"] == 2


BAD_METADATA = {
    "architecture": ({"general.architecture": (STRING, "gemma")}, "'gemma' is not among"),
    "architecture of a wrong type": ({"general.architecture": (U32, 7)}, "expected str"),
    "no epsilon": ({"drop": "llama.attention.layer_norm_rms_epsilon"}, "layer_norm_rms_epsilon' is missing"),
    "no context": ({"drop": "llama.context_length"}, "context_length' is missing"),
    "zero heads": ({"llama.attention.head_count": (U32, 0)}, "expected a positive integer"),
    "heads differ": ({"llama.attention.head_count_kv": (ARRAY, (I32, [2, 1]))}, "differs from layer to layer"),
    "text for a count": ({"llama.block_count": (STRING, "two")}, "expected a positive integer"),
    "more layers than tensors": ({"llama.block_count": (U32, 2**31 - 1)}, "missing tensors: blk.2.attn_norm.weight"),
    "fewer layers than tensors": ({"llama.block_count": (U32, 1)}, "beyond llama.block_count = 1"),
    "partial rotation": ({"llama.rope.dimension_count": (U32, 8)}, "partial rotation"),
    "value heads": ({"llama.attention.value_length": (U32, 8)}, "value heads of 8"),
    "rope type": ({"llama.rope.scaling.type": (STRING, "longrope")}, "longrope"),
    "theta": ({"llama.rope.freq_base": (F32, float("nan"))}, "finite number"),
    "heads that do not divide": ({"llama.attention.head_count": (U32, 5), "load": True}, "do not divide into 5 heads"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_METADATA)
def test_bad_metadata(tmp_path, case):
    changes, message = BAD_METADATA[case]
    changes = dict(changes)
    drop, load = changes.pop("drop", ""), changes.pop("load", False)
    with pytest.raises(CheckpointError, match=message):
        checkpoint = open_with(tmp_path, "llama", rewritten("llama", (drop,), **changes))
        if load:
            checkpoint.load("model.layers.0.self_attn.q_proj.weight")


def test_missing_tensors_are_named(tmp_path):
    absent = ("blk.1.attn_q.bias", "blk.1.ffn_up.weight")
    tensors = [t for t in model_tensors("qwen2", random_weights("qwen2")) if t[0] not in absent]
    with pytest.raises(CheckpointError, match=r"missing tensors: blk\.1\.ffn_up\.weight, blk\.1\.attn_q\.bias"):
        open_with(tmp_path, "qwen2", model_metadata("qwen2"), tensors)


def test_tensors_that_the_architecture_does_not_have_are_refused(tmp_path):
    tensors = [*model_tensors("llama", random_weights("llama")), ("blk.0.attn_qkv.weight", (4, 4), 0, b"\0" * 64)]
    with pytest.raises(CheckpointError, match="attn_qkv"):
        open_with(tmp_path, "llama", model_metadata("llama"), tensors)


def test_unknown_name(tmp_path):
    tiny_gguf(tmp_path / "m.gguf")
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    for method in (checkpoint.load, checkpoint.shape, checkpoint.stored_dtype):
        with pytest.raises(CheckpointError, match=r"no tensor 'lm_head\.weight'"):
            method("lm_head.weight")
    assert "lm_head.weight" not in checkpoint
    assert "model.norm.weight" in checkpoint


def test_end_tokens_by_text(tmp_path):
    metadata = model_metadata("qwen2") + tokenizer_metadata()
    metadata.append(("tokenizer.ggml.eot_token_id", U32, 1))
    assert open_with(tmp_path, "qwen2", metadata).config["eos_token_id"] == [2, 1, 0]


# -- rotary embedding ------------------------------------------------------------------------------------------------

LLAMA_31 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192}  # fmt: skip
LLAMA_32 = {**LLAMA_31, "factor": 32.0}


@pytest.mark.parametrize(
    ("scaling", "theta", "head_dim", "metadata"),
    [
        (LLAMA_31, 500000.0, 128, {}),
        (LLAMA_32, 500000.0, 64, {}),
        ({**LLAMA_31, "factor": 4.0, "original_max_position_embeddings": 64}, 10000.0, 16, {}),
        ({**LLAMA_31, "original_max_position_embeddings": 4096}, 500000.0, 128,
         {"llama.rope.scaling.original_context_length": 4096}),
        ({**LLAMA_31, "low_freq_factor": 2.0, "high_freq_factor": 6.0}, 500000.0, 128, {}),
    ],
)  # fmt: skip
def test_llama3_scaling_is_found_from_its_factors(scaling, theta, head_dim, metadata):
    """The parameters may differ from the original's (only two of three are determined); the frequencies may not."""
    factors = llama3_factors(scaling, theta, head_dim).astype(np.float32)
    found = rope_config({"llama.rope.freq_base": theta, **metadata}, "llama", head_dim, factors)
    assert found["rope_theta"] == theta
    assert found["rope_scaling"]["rope_type"] == "llama3"
    np.testing.assert_allclose(llama3_factors(found["rope_scaling"], theta, head_dim), factors, rtol=1e-4)
    if scaling in (LLAMA_31, LLAMA_32):
        assert found["rope_scaling"] == scaling


@pytest.mark.slow
def test_llama3_factors_equal_transformers():
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.LlamaConfig(head_dim=128, hidden_size=512, num_attention_heads=4,
                                      max_position_embeddings=131072,
                                      rope_parameters={**LLAMA_31, "rope_theta": 500000.0})  # fmt: skip
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device="cpu")
    plain = 500000.0 ** -(np.arange(0, 128, 2) / 128)
    np.testing.assert_allclose(frequencies.numpy(), plain / llama3_factors(LLAMA_31, 500000.0, 128), rtol=1e-5)


def test_factors_that_are_not_llama3_are_refused():
    factors = np.array([1, 3, 1, 8, 2, 1, 1, 1], np.float32)
    with pytest.raises(CheckpointError, match="Llama 3's scaling"):
        rope_config({}, "llama", 16, factors)
    for bad in (0.5, np.nan, np.inf):
        with pytest.raises(CheckpointError, match="rope_freqs"):
            rope_config({}, "llama", 16, np.full(8, bad, np.float32))


def test_linear_and_yarn():
    linear = {"x.rope.scaling.type": "linear", "x.rope.scaling.factor": 4.0}
    assert rope_config(linear, "x", 16, None)["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    assert rope_config({"x.rope.scale_linear": 2.0}, "x", 16, None)["rope_scaling"] == {
        "rope_type": "linear",
        "factor": 2.0,
    }
    yarn = {
        "x.rope.scaling.type": "yarn",
        "x.rope.scaling.factor": 4.0,
        "x.rope.scaling.original_context_length": 32768,
    }
    assert rope_config(yarn, "x", 16, None)["rope_scaling"] == {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768,
    }  # fmt: skip
    assert rope_config({}, "x", 16, None) == {"rope_theta": 10000.0, "rope_scaling": None}


def test_a_golden_model_survives_the_way_through_gguf(tmp_path):
    """Llama with Llama 3 scaling, as transformers wrote it -> GGUF as llama.cpp would -> the same weights and
    rotation.
    """
    original = HFFolder(VENDORED / "H" / "llama" / "target")
    c = original.config
    weights = {name: original.load(name) for name in original.names()}
    metadata = model_metadata(
        "llama",
        layers=c["num_hidden_layers"],
        hidden=c["hidden_size"],
        heads=c["num_attention_heads"],
        kv_heads=c["num_key_value_heads"],
        ffn=c["intermediate_size"],
        head_dim=c["head_dim"],
    )
    factors = llama3_factors(c["rope_scaling"], c["rope_theta"], c["head_dim"]).astype(np.float32)
    tensors = model_tensors("llama", weights, heads=c["num_attention_heads"], kv_heads=c["num_key_value_heads"])
    tensors.append(("rope_freqs.weight", factors.shape, 0, factors.tobytes()))
    checkpoint = open_with(tmp_path, "llama", metadata, tensors)
    for name, expected in weights.items():
        np.testing.assert_array_equal(checkpoint.load(name), expected)
    same = ("vocab_size", "hidden_size", "num_hidden_layers", "head_dim", "tie_word_embeddings", "rope_theta")
    assert {key: checkpoint.config[key] for key in same} == {key: c[key] for key in same}
    np.testing.assert_allclose(
        llama3_factors(checkpoint.config["rope_scaling"], c["rope_theta"], c["head_dim"]), factors, rtol=1e-4
    )
