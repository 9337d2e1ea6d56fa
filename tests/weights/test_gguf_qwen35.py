"""GGUF files of Qwen3.5, as llama.cpp's converter writes them: the same model as the Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models.hybrid import HybridShape, config_of
from models.predictor import all_tensors, write_predicting

from paceline import LLM, SamplingParams
from paceline.errors import CheckpointError
from paceline.models import load_model
from paceline.outputs import own_logprob
from paceline.weights.checkpoint import open_checkpoint
from paceline.weights.convert import convert
from weights.builders import ARRAY, F32, I32, STRING, U32, gguf_bytes, tokenizer_metadata

# multiples of 32 wherever a matrix may be quantised, value heads that are not key heads
SHAPE = HybridShape(
    vocab=300, hidden=64, inner=96, layers=4, full=(3,), key_heads=2, value_heads=6, key_dim=32, value_dim=32, seed=7
)
TIED = HybridShape(**{name: getattr(SHAPE, name) for name in SHAPE.__slots__} | {"tied": True, "value_heads": 2})
IDS = np.random.default_rng(1).integers(0, 300, 60).tolist()
DELTA = {
    "in_proj_qkv.weight": "attn_qkv.weight",
    "in_proj_z.weight": "attn_gate.weight",
    "in_proj_b.weight": "ssm_beta.weight",
    "in_proj_a.weight": "ssm_alpha.weight",
    "conv1d.weight": "ssm_conv1d.weight",
    "A_log": "ssm_a",
    "dt_bias": "ssm_dt.bias",
    "norm.weight": "ssm_norm.weight",
    "out_proj.weight": "ssm_out.weight",
}
PLAIN = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    **{f"self_attn.{n}_proj.weight": f"attn_{n}.weight" for n in "qkv"},
    **{f"self_attn.{n}_norm.weight": f"attn_{n}_norm.weight" for n in "qk"},
    "self_attn.o_proj.weight": "attn_output.weight",
    **{f"mlp.{n}_proj.weight": f"ffn_{n}.weight" for n in ("gate", "up", "down")},
}
PREDICTOR = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head_norm",
}
GLOBAL = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def in_turns(s: HybridShape, values: np.ndarray, size: int, axis: int = 0) -> np.ndarray:
    """Value heads of `size` along an axis, one of each key head in turn."""
    values = np.moveaxis(values, axis, 0)
    rest = values.shape[1:]
    heads = values.reshape(s.key_heads, s.value_heads // s.key_heads, size, *rest).swapaxes(0, 1)
    return np.ascontiguousarray(np.moveaxis(heads.reshape(-1, *rest), 0, axis))


def stored(s: HybridShape) -> list[tuple[str, np.ndarray]]:
    out, keys = [], 2 * s.key_heads * s.key_dim
    for name, value in all_tensors(s).items():
        if name.endswith("norm.weight") or "_norm_" in name:
            value = value if "linear_attn" in name else value + np.float32(1)
        if name in GLOBAL:
            out.append((GLOBAL[name], value))
            continue
        if name.startswith("mtp.") and not name.startswith("mtp.layers."):
            part, _, kind = name.removeprefix("mtp.").rpartition(".")
            out.append((f"blk.{s.layers}.nextn.{PREDICTOR[part]}.{kind}", value))
            continue
        layer, rest = (str(s.layers), name[13:]) if name.startswith("mtp.") else name.split(".", 3)[2:]
        if not rest.startswith("linear_attn."):
            out.append((f"blk.{layer}.{PLAIN[rest]}", value))
            continue
        rest = rest.removeprefix("linear_attn.")
        if rest == "conv1d.weight":
            value = value[:, 0]
        if rest == "A_log":
            value = -np.exp(value)
        if rest in ("in_proj_qkv.weight", "conv1d.weight"):
            value = np.concatenate([value[:keys], in_turns(s, value[keys:], s.value_dim)])
        elif rest == "in_proj_z.weight":
            value = in_turns(s, value, s.value_dim)
        elif rest == "out_proj.weight":
            value = in_turns(s, value, s.value_dim, axis=1)
        elif rest != "norm.weight":
            value = in_turns(s, value, 1)
        out.append((f"blk.{layer}.{DELTA[rest]}", value))
    return out


def metadata(s: HybridShape, **changes: Any) -> list[tuple[str, int, Any]]:
    c = config_of(s)
    numbers = {
        "block_count": s.layers + 1,
        "nextn_predict_layers": 1,
        "context_length": s.context,
        "embedding_length": s.hidden,
        "feed_forward_length": s.inner,
        "attention.head_count": s.heads,
        "attention.head_count_kv": s.kv_heads,
        "attention.key_length": s.head_dim,
        "attention.value_length": s.head_dim,
        "full_attention_interval": 4,
        "rope.dimension_count": int(s.head_dim * s.rotated),
        "ssm.conv_kernel": s.kernel,
        "ssm.state_size": s.key_dim,
        "ssm.group_count": s.key_heads,
        "ssm.time_step_rank": s.value_heads,
        "ssm.inner_size": s.value_heads * s.value_dim,
        **changes,
    }
    rows = [("general.architecture", STRING, "qwen35")]
    rows += [(f"qwen35.{key}", U32, value) for key, value in numbers.items() if value is not None]
    return [
        *rows,
        ("qwen35.rope.dimension_sections", ARRAY, (I32, [1, 1, 0, 0])),
        ("qwen35.attention.layer_norm_rms_epsilon", F32, c["rms_norm_eps"]),
        ("qwen35.rope.freq_base", F32, c["rope_parameters"]["rope_theta"]),
        *tokenizer_metadata("qwen35"),
    ]


def write_gguf(path: Path, s: HybridShape, *, quantised: bool = False, without: str = "", **changes: Any) -> Path:
    """fp32, or the layers' matrices in Q8_0."""
    rows = []
    for name, value in stored(s):
        if without and without in name:
            continue
        kind, data = 0, np.ascontiguousarray(value).tobytes()
        if quantised and value.ndim == 2 and name.startswith("blk.") and "conv1d" not in name:
            gguf = pytest.importorskip("gguf")
            kind, data = 8, gguf.quantize(np.ascontiguousarray(value), gguf.GGMLQuantizationType.Q8_0).tobytes()
        rows.append((name, value.shape, kind, data))
    path.write_bytes(gguf_bytes(metadata(s, **changes), rows))
    return path


@pytest.mark.parametrize("shape", [SHAPE, TIED], ids=["heads in turns", "tied, a value head for each key head"])
def test_logits_are_those_of_the_folder(shape, tmp_path):
    """But for the rounding of norms that are stored with their 1, and of the decay's exponential."""
    want, _ = load_model(write_predicting(tmp_path / "hf", shape), dtype="float32", threads=1).logits(IDS)
    got, _ = load_model(write_gguf(tmp_path / "m.gguf", shape), dtype="float32", threads=1).logits(IDS)
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)


def test_quantised_blocks_are_used_as_they_are(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", SHAPE, quantised=True)
    model = load_model(path, quantization="auto", threads=2)
    assert "int8" in model.formats and not model.conversions.describe()
    with open_checkpoint(path) as checkpoint:
        name = "model.layers.0.linear_attn.out_proj.weight"
        from paceline.weights.dequant import dequantize

        blocks = checkpoint.blocks(name)
        expanded = dequantize(blocks.reshape(-1), "Q8_0").reshape(len(blocks), -1)
        np.testing.assert_array_equal(expanded, checkpoint.load(name))
    want, _ = load_model(path, threads=2, quantization="none").logits(IDS)
    got, _ = model.logits(IDS)
    assert np.sqrt(((got - want) ** 2).mean()) < 0.05 * np.abs(want).max()


@pytest.mark.parametrize("quantised", [False, True])
def test_its_prediction_layer_drafts(tmp_path, quantised):
    path = write_gguf(tmp_path / "m.gguf", SHAPE, quantised=quantised)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    options: dict[str, Any] = {"threads": 1} if quantised else {"threads": 1, "dtype": "float32"}
    want = LLM(path, speculative_config=None, **options).generate(IDS, params)[0]
    got = LLM(path, speculative_config={"method": "mtp"}, **options).generate(IDS, params, num_speculative_tokens=3)[0]
    assert got.outputs[0].token_ids == want.outputs[0].token_ids
    assert got.metrics.spec_decode.num_draft_tokens
    if not quantised:
        folder = write_predicting(tmp_path / "hf", SHAPE)
        hf = LLM(folder, speculative_config={"method": "mtp"}, **options)
        assert hf.generate(IDS, params, num_speculative_tokens=3)[0].metrics.spec_decode == got.metrics.spec_decode


def test_a_file_without_the_prediction_layer(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", SHAPE, without="blk.4.", block_count=4, nextn_predict_layers=None)
    whole = write_gguf(tmp_path / "whole.gguf", SHAPE)
    got, want = (load_model(p, dtype="float32", threads=1).logits(IDS)[0] for p in (path, whole))
    np.testing.assert_array_equal(got, want)
    with pytest.raises(CheckpointError, match="has no multi-token-prediction layer"):
        LLM(path, threads=1, dtype="float32", speculative_config={"method": "mtp"})


def test_converted_folders_are_the_same_model(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", SHAPE)
    folder = convert(path, tmp_path / "hf", dtype="float32")
    config = json.loads((folder / "config.json").read_text())
    kept = [config[key] for key in ("model_type", "num_hidden_layers", "mtp_num_hidden_layers")]
    assert kept == ["qwen3_5_text", 4, 1]
    got, want = (load_model(p, dtype="float32", threads=1).logits(IDS)[0] for p in (folder, path))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("without", "changes", "message"),
    [
        ("blk.0.ssm_a", {}, r"blk\.0\.ssm_a"),
        ("blk.3.attn_k.", {}, r"blk\.3\.attn_k\.weight"),
        ("nextn.eh_proj", {}, r"blk\.4\.nextn\.eh_proj\.weight"),
        ("", {"nextn_predict_layers": 2}, "nextn_predict_layers"),
        ("", {"ssm.inner_size": 191}, "inner_size"),
        ("", {"ssm.group_count": 4}, "must be a multiple of linear_num_key_heads"),
        ("", {"ssm.state_size": None}, "state_size"),
        ("", {"full_attention_interval": 3}, "missing tensors"),
    ],
)
def test_what_is_missing_or_wrong_is_named(without, changes, message, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", SHAPE, without=without, **changes)
    with pytest.raises(Exception, match=message) as caught:
        load_model(path, dtype="float32", threads=1)
    assert type(caught.value).__module__ == "paceline.errors"


def test_names_are_those_of_llama_cpp():
    gguf = pytest.importorskip("gguf")
    constants = gguf.constants
    known = {constants.TENSOR_NAMES[t] for t in constants.MODEL_TENSORS[constants.MODEL_ARCH.QWEN35]}
    for name, _ in stored(SHAPE):
        if "nextn" not in name:
            plain = name.removesuffix(".weight").removesuffix(".bias")
            layer = plain.split(".")[1] if plain.startswith("blk.") else None
            assert plain.replace(f"blk.{layer}.", "blk.{bid}.") in known, name


@pytest.mark.parametrize("shape", [SHAPE, TIED], ids=["heads in turns", "tied"])
def test_tokens_are_those_of_llama_cpp(shape, tmp_path):
    httpx, xllamacpp = pytest.importorskip("httpx"), pytest.importorskip("xllamacpp")
    path, count = write_gguf(tmp_path / "m.gguf", shape), 16
    parameters = xllamacpp.CommonParams()
    parameters.model.path, parameters.n_ctx, parameters.warmup = str(path), 256, False
    parameters.cpuparams.n_threads = 1
    server = xllamacpp.Server(parameters)
    body = {"prompt": IDS, "n_predict": count, "temperature": 0, "ignore_eos": True}
    body |= {"return_tokens": True, "n_probs": 1}
    answer = httpx.post(server.listening_address + "/completion", json=body, timeout=600).json()
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=1)
    got = LLM(path, threads=1, dtype="float32", speculative_config=None).generate(IDS, params)[0].outputs[0]
    assert got.token_ids == answer["tokens"]
    mine = iter(got.logprobs)
    for each in answer["completion_probabilities"]:  # those of tokens that end a character
        assert abs(next(p for i, p in map(own_logprob, mine) if i == each["id"]).logprob - each["logprob"]) < 5e-3
