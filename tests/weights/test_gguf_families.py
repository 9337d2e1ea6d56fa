"""GGUF files of families beyond the Llama layout: the same model as the Hugging Face folder with the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models.families import BASE, CONFIGS, LONG, config, tensors, write_family

from paceline.errors import CheckpointError
from paceline.models import load_model
from paceline.weights.checkpoint import open_checkpoint
from paceline.weights.convert import convert
from weights.builders import (
    F32,
    GGML_NAMES,
    STRING,
    U32,
    gguf_bytes,
    permute,
    tokenizer_metadata,
)

MOE = {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
# multiples of 32 wherever a matrix may be quantised
MODELS: dict[str, dict[str, Any]] = {
    "qwen3moe": config("qwen3_moe", **MOE, hidden_size=64, norm_topk_prob=True, rope_theta=1e4),
    "smollm3": config("smollm3", num_hidden_layers=5, hidden_size=64, rope_theta=2e4),
    "phi3": {**CONFIGS["phi4"], "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2},
}
_OTHER = {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up", "mlp.gate": "ffn_gate_inp"}
GLOBAL = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def stored(c: dict[str, Any], arch: str) -> list[tuple[str, np.ndarray]]:
    """Tensors as llama.cpp's converter writes them."""
    out, experts = [], {}
    for name, value in tensors(c).items():
        if name in GLOBAL:
            out.append((GLOBAL[name], value))
            continue
        _, _, layer, rest = name.split(".", 3)
        if ".experts." in rest:
            _, _, _, part, _ = rest.split(".")
            experts.setdefault(f"blk.{layer}.ffn_{part.removesuffix('_proj')}_exps.weight", []).append(value)
            continue
        part, _, kind = rest.rpartition(".")
        if arch == "smollm3" and part.endswith(("q_proj", "k_proj")):
            value = permute(value, c["num_attention_heads" if "q_proj" in part else "num_key_value_heads"])
        out.append((f"blk.{layer}.{ {**GGML_NAMES, **_OTHER}[part] }.{kind}", value))
    return out + [(name, np.stack(values)) for name, values in experts.items()]


def metadata(c: dict[str, Any], arch: str) -> list[tuple[str, int, Any]]:
    heads = c["num_attention_heads"]
    size = c.get("head_dim") or c["hidden_size"] // heads
    rows = [
        ("general.architecture", STRING, arch),
        (f"{arch}.block_count", U32, c["num_hidden_layers"]),
        (f"{arch}.context_length", U32, c["max_position_embeddings"]),
        (f"{arch}.embedding_length", U32, c["hidden_size"]),
        (f"{arch}.feed_forward_length", U32, c["intermediate_size"]),
        (f"{arch}.attention.head_count", U32, heads),
        (f"{arch}.attention.head_count_kv", U32, c["num_key_value_heads"]),
        (f"{arch}.attention.layer_norm_rms_epsilon", F32, c["rms_norm_eps"]),
        (f"{arch}.attention.key_length", U32, size),
        (f"{arch}.attention.value_length", U32, size),
        (f"{arch}.rope.freq_base", F32, c["rope_theta"]),
    ]
    if arch == "qwen3moe":
        rows += [
            (f"{arch}.expert_count", U32, c["num_experts"]),
            (f"{arch}.expert_used_count", U32, c["num_experts_per_tok"]),
            (f"{arch}.expert_feed_forward_length", U32, c["moe_intermediate_size"]),
        ]
    if arch == "phi3":
        rows += [
            (f"{arch}.rope.dimension_count", U32, int(size * c["partial_rotary_factor"])),
            (f"{arch}.rope.scaling.original_context_length", U32, c["original_max_position_embeddings"]),
        ]
    return rows


def write_gguf(path: Path, arch: str, quantised: bool = False) -> Path:
    """fp32, or every matrix but the embedding, the router and odd ones in Q8_0."""
    rows = []
    for name, value in stored(MODELS[arch], arch):
        kind, data = 0, value.tobytes()
        if quantised and value.ndim > 1 and value.shape[-1] % 32 == 0 and "_inp" not in name:
            gguf = pytest.importorskip("gguf")
            kind, data = 8, gguf.quantize(value, gguf.GGMLQuantizationType.Q8_0).tobytes()
        rows.append((name, value.shape, kind, data))
    if arch == "phi3":
        for which in ("long", "short"):
            factors = np.array(LONG[f"{which}_factor"], np.float32)
            rows.append((f"rope_factors_{which}.weight", factors.shape, 0, factors.tobytes()))
    path.write_bytes(gguf_bytes(metadata(MODELS[arch], arch) + tokenizer_metadata(), rows))
    return path


IDS = np.random.default_rng(1).integers(0, BASE["vocab_size"], 90).tolist()


@pytest.mark.parametrize("arch", MODELS)
def test_logits_are_those_of_the_folder(tmp_path, arch):
    folder = write_family(tmp_path / "hf", MODELS[arch])
    want, _ = load_model(folder, dtype="float32", threads=1).logits(IDS)
    got, _ = load_model(write_gguf(tmp_path / "m.gguf", arch), dtype="float32", threads=1).logits(IDS)
    assert (got.view(np.uint32) == want.view(np.uint32)).all()


@pytest.mark.parametrize("arch", MODELS)
def test_quantised_blocks_are_used_as_they_are(tmp_path, arch):
    """Q8_0 files with int8 products, near their bf16 expansion; nothing is converted."""
    path = write_gguf(tmp_path / "m.gguf", arch, quantised=True)
    model = load_model(path, quantization="auto", threads=2)
    assert "int8" in model.formats and not model.conversions.describe()
    want, _ = load_model(path, threads=2).logits(IDS)
    got, _ = model.logits(IDS)
    assert np.sqrt(((got - want) ** 2).mean()) < 0.05 * np.abs(want).max()


@pytest.mark.parametrize("arch", MODELS)
def test_converted_folders_are_the_same_model(tmp_path, arch):
    path = write_gguf(tmp_path / "m.gguf", arch)
    folder = convert(path, tmp_path / "hf", dtype="float32")
    assert json.loads((folder / "config.json").read_text())["model_type"] == MODELS[arch]["model_type"]
    want, _ = load_model(path, dtype="float32", threads=1).logits(IDS)
    got, _ = load_model(folder, dtype="float32", threads=1).logits(IDS)
    assert (got.view(np.uint32) == want.view(np.uint32)).all()


@pytest.mark.parametrize("arch", ["gemma3", "qwen2moe", "llama4", "muse-glimmer"])
def test_other_architectures_are_refused_by_name(tmp_path, arch):
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes([("general.architecture", STRING, arch)], []))
    with pytest.raises(CheckpointError, match=arch):
        open_checkpoint(path)
