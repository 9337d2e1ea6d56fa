"""Tiny random models of every family beyond Llama's, as `transformers` would save them: config.json and tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from .tiny import Tensors, write_tokenizer

BASE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 95,
    "eos_token_id": 96,
    "pad_token_id": 0,
    "torch_dtype": "float32",
}
WINDOW = 24
SLIDING = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]


def config(kind: str, **fields: Any) -> dict[str, Any]:
    names = {
        "gemma2": "Gemma2",
        "gemma3_text": "Gemma3",
        "mistral": "Mistral",
        "phi3": "Phi3",
        "smollm3": "SmolLM3",
        "qwen3_moe": "Qwen3Moe",
    }
    return {**BASE, "architectures": [f"{names[kind]}ForCausalLM"], "model_type": kind, **fields}


GEMMA = {
    "head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 24,
    "sliding_window": WINDOW,
    "tie_word_embeddings": True,
}
LONG = {
    "type": "longrope",
    "short_factor": [1.0, 1.1, 1.25, 1.5],
    "long_factor": [1.5, 3.0, 6.0, 11.0],
}
MOE = {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 36}
MUSE_TEXT: dict[str, Any] = {
    **{k: v for k, v in BASE.items() if k != "torch_dtype"},
    "model_type": "muse_glimmer_text",
    "head_dim": 16,
    "hidden_activation": "silu",
    "sliding_window": WINDOW,
    "num_hidden_layers": 6,
    "post_norm_eps": 1e-6,
    "output_multiplier": 0.6,
    "final_logit_softcapping": 4.0,
    "qk_scale_factor": 2.5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}
VISION = {
    "model_type": "muse_glimmer_vision",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 2,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
}

CONFIGS: dict[str, dict[str, Any]] = {
    # hidden states of tiny models are small: caps of 50 and 30 would do nothing
    "gemma2": config("gemma2", **GEMMA, attn_logit_softcapping=2.0, final_logit_softcapping=4.0, rope_theta=1e4),
    "gemma2 without caps": config(
        "gemma2",
        **{**GEMMA, "tie_word_embeddings": False},
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        layer_types=SLIDING,
        attention_bias=True,
        rope_theta=1e4,
    ),
    "gemma3": config(
        "gemma3_text",
        **GEMMA,
        layer_types=SLIDING,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    ),
    "gemma3 capped, new style": config(
        "gemma3_text",
        **GEMMA,
        num_hidden_layers=6,
        final_logit_softcapping=3.0,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 3e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
        },
    ),
    "mistral": config("mistral", sliding_window=WINDOW, head_dim=16, rope_theta=1e4),
    "mistral without window": config("mistral", sliding_window=None, head_dim=16, rope_theta=1e4),
    "phi3": config("phi3", sliding_window=WINDOW, rope_theta=1e4),
    "phi4": config(
        "phi3",
        num_attention_heads=3,
        num_key_value_heads=1,
        rope_theta=1e4,
        partial_rotary_factor=0.5,
        original_max_position_embeddings=64,
        rope_scaling=LONG,
    ),
    "smollm3": config("smollm3", num_hidden_layers=5, rope_theta=2e4, attention_bias=True, mlp_bias=True),
    "smollm3 windows": config(
        "smollm3", no_rope_layers=[1, 0, 0, 1], use_sliding_window=True, sliding_window=WINDOW, rope_theta=2e4
    ),
    "qwen3_moe": config("qwen3_moe", **MOE, norm_topk_prob=True, rope_theta=1e4),
    "qwen3_moe mixed": config(
        "qwen3_moe", **MOE, norm_topk_prob=False, decoder_sparse_step=2, mlp_only_layers=[3], rope_theta=1e4
    ),
    "muse_glimmer": {
        "architectures": ["MuseGlimmerForConditionalGeneration"],
        "model_type": "muse_glimmer",
        "text_config": MUSE_TEXT,
        "vision_config": VISION,
        "out_hidden_size": 64,
        "projector_hidden_size": 16,
        "image_token_id": 1000,
        "video_token_id": 1001,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    },
}


def text(c: dict[str, Any]) -> dict[str, Any]:
    return c.get("text_config", c)


def tensors(c: dict[str, Any], seed: int = 0, sharp: float = 1.0) -> Tensors:
    """Every tensor of the text model under its published name, fp32. sharp scales the last norm."""
    rng = np.random.default_rng(seed)
    t, kind = text(c), text(c)["model_type"]
    hidden, inner = t["hidden_size"], t["intermediate_size"]
    heads, kv_heads = t["num_attention_heads"], t["num_key_value_heads"]
    size = t.get("head_dim") or hidden // heads
    q, kv = heads * size, kv_heads * size
    centred = kind in ("gemma2", "gemma3_text", "muse_glimmer_text")

    def matrix(n: int, k: int, scale: float = 1.0) -> np.ndarray:
        return rng.normal(0, scale / np.sqrt(k), (n, k)).astype(np.float32)

    def norm(n: int, scale: float = 1.0) -> np.ndarray:
        return (rng.uniform(0.6, 1.4, n) * scale - (1.0 if centred else 0.0)).astype(np.float32)

    prefix = "model.language_model" if kind == "muse_glimmer_text" else "model"
    out: Tensors = {f"{prefix}.embed_tokens.weight": rng.normal(0, 0.5, (t["vocab_size"], hidden)).astype(np.float32)}
    for i in range(t["num_hidden_layers"]):
        at = f"{prefix}.layers.{i}"
        rows = {"q_proj": matrix(q, hidden, 1.5), "k_proj": matrix(kv, hidden, 1.5), "v_proj": matrix(kv, hidden)}
        mlp = {"gate_proj": matrix(inner, hidden), "up_proj": matrix(inner, hidden), "down_proj": matrix(hidden, inner)}
        rows["o_proj"] = matrix(hidden, q)
        out |= {f"{at}.{n}.weight": norm(hidden) for n in ("input_layernorm", "post_attention_layernorm")}
        if centred:
            out |= {f"{at}.{n}_feedforward_layernorm.weight": norm(hidden) for n in ("pre", "post")}
        if kind in ("gemma3_text", "qwen3_moe"):
            out |= {f"{at}.self_attn.{n}_norm.weight": norm(size) for n in "qk"}
        if kind == "muse_glimmer_text":
            rows["gate_proj"] = matrix(q, hidden, 2.0)
        if kind == "phi3":
            rows = {"qkv_proj": np.concatenate([rows[f"{n}_proj"] for n in "qkv"]), "o_proj": rows["o_proj"]}
            mlp = {
                "gate_up_proj": np.concatenate([mlp["gate_proj"], mlp["up_proj"]]),
                "down_proj": mlp["down_proj"],
            }
        out |= {f"{at}.self_attn.{n}.weight": m for n, m in rows.items()}
        if t.get("attention_bias"):
            out |= {f"{at}.self_attn.{n}.bias": rng.normal(0, 0.3, len(m)).astype(np.float32) for n, m in rows.items()}
        if kind == "qwen3_moe" and is_sparse(t, i):
            out[f"{at}.mlp.gate.weight"] = matrix(t["num_experts"], hidden, 2.0)
            width = t["moe_intermediate_size"]
            for e in range(t["num_experts"]):
                for n, shape in (("gate", (width, hidden)), ("up", (width, hidden)), ("down", (hidden, width))):
                    out[f"{at}.mlp.experts.{e}.{n}_proj.weight"] = matrix(*shape)
            continue
        out |= {f"{at}.mlp.{n}.weight": m for n, m in mlp.items()}
        if t.get("mlp_bias"):
            out |= {f"{at}.mlp.{n}.bias": rng.normal(0, 0.3, len(m)).astype(np.float32) for n, m in mlp.items()}
    if kind == "muse_glimmer_text":
        out["lm_head.weight"] = matrix(t["vocab_size"], hidden, sharp)
        return out
    out["model.norm.weight"] = norm(hidden, sharp)
    if not c["tie_word_embeddings"]:
        out["lm_head.weight"] = matrix(t["vocab_size"], hidden)
    return out


def is_sparse(c: dict[str, Any], layer: int) -> bool:
    return layer not in c.get("mlp_only_layers", []) and (layer + 1) % c.get("decoder_sparse_step", 1) == 0


def write_family(
    folder: Path, c: dict[str, Any], *, seed: int = 0, sharp: float = 1.0, tokenizer: bool = False
) -> Path:
    """A Hugging Face folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(c))
    save_file(tensors(c, seed, sharp), str(folder / "model.safetensors"))
    if tokenizer:
        write_tokenizer(folder, text(c)["vocab_size"])
    return folder


# ---- Muse Glimmer's own drafter

ASSISTANT: dict[str, Any] = {
    "architectures": ["MuseGlimmerAssistantModel"],
    "model_type": "muse_glimmer_assistant",
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "max_position_embeddings": 512,
    "sliding_window": 20,
    "layer_types": ["sliding_attention", "sliding_attention"],
    "hidden_act": "silu",
    "block_size": 6,
    "mask_token_id": 92,
    "target_layer_ids": [1, 3],
    "bos_token_id": 95,
    "eos_token_id": 96,
    "pad_token_id": 0,
    "torch_dtype": "float32",
}


def write_assistant(folder: Path, c: dict[str, Any], seed: int = 5) -> Path:
    rng = np.random.default_rng(seed)
    hidden, inner = c["hidden_size"], c["intermediate_size"]
    q, kv = c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]

    def matrix(n: int, k: int) -> np.ndarray:
        return rng.normal(0, 1 / np.sqrt(k), (n, k)).astype(np.float32)

    def norm(n: int) -> np.ndarray:
        return rng.uniform(0.6, 1.4, n).astype(np.float32)

    out: Tensors = {
        "encoder.fc.weight": matrix(hidden, len(c["target_layer_ids"]) * hidden),
        "encoder.output_norm_enc.weight": norm(hidden),
        "norm.weight": norm(hidden),
    }
    for i in range(c["num_hidden_layers"]):
        at = f"layers.{i}"
        shapes = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, q)}
        out |= {f"{at}.self_attn.{n}.weight": matrix(*shape) for n, shape in shapes.items()}
        out |= {f"{at}.self_attn.{n}_norm.weight": norm(c["head_dim"]) for n in "qk"}
        out |= {f"{at}.{n}_layernorm.weight": norm(hidden) for n in ("input", "post_attention")}
        shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
        out |= {f"{at}.mlp.{n}.weight": matrix(*shape) for n, shape in shapes.items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(c))
    save_file(out, str(folder / "model.safetensors"))
    return folder
