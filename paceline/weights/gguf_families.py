"""What GGUF architectures have beyond the Llama layout: tensor names, which a layer must have, config fields."""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.errors import CheckpointError
from paceline.weights import gguf_gemma, gguf_qwen35

# architecture -> (transformers class, model_type)
ARCHITECTURES = {
    "gemma2": ("Gemma2ForCausalLM", "gemma2"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen35": ("Qwen3_5ForCausalLM", "qwen3_5_text"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "phi3": ("Phi3ForCausalLM", "phi3"),
    "smollm3": ("SmolLM3ForCausalLM", "smollm3"),
}
# whose q and k rows are stored for a rotation of neighbours
PERMUTED = frozenset({"llama", "smollm3"})
# whose norms are stored with the 1 that Hugging Face's layers add
NORMS_WITH_ONE = frozenset({*gguf_gemma.ARCHITECTURES, "qwen35"})
WITHOUT_BIAS_FIELD = frozenset({"qwen2", "phi3"})
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"

_EXPERTS = {
    "ffn_gate_inp.weight": "mlp.gate.weight",
    "ffn_gate_exps.weight": "mlp.experts.gate_proj.weight",
    "ffn_up_exps.weight": "mlp.experts.up_proj.weight",
    "ffn_down_exps.weight": "mlp.experts.down_proj.weight",
}
_MLP = ("ffn_gate.weight", "ffn_up.weight", "ffn_down.weight")
_QKV = ("attn_q.weight", "attn_k.weight", "attn_v.weight")
_FUSED = {"attn_qkv.weight": "self_attn.qkv_proj.weight", "ffn_up.weight": "mlp.gate_up_proj.weight"}


def layer_names(arch: str, common: dict[str, str]) -> dict[str, str]:
    """ggml name -> Hugging Face name of a layer's tensors."""
    if arch == "qwen35":
        return gguf_qwen35.layer_names(common)
    if arch in gguf_gemma.ARCHITECTURES:
        return gguf_gemma.layer_names(arch, common)
    if arch == "qwen3moe":
        return {**{k: v for k, v in common.items() if not k.startswith("ffn_") or k == "ffn_norm.weight"}, **_EXPERTS}
    if arch == "phi3":
        left_out = {*_QKV, "ffn_gate.weight"}
        return {**{k: v for k, v in common.items() if k.endswith(".weight") and k not in left_out}, **_FUSED}
    return common


def required(arch: str, weights: list[str]) -> list[str]:
    """Tensors that every layer has; `weights` are those of the Llama layout."""
    if arch in gguf_gemma.ARCHITECTURES:
        return gguf_gemma.required(arch, weights)
    if arch == "qwen3moe":
        weights = [n for n in weights if n not in _MLP] + list(_EXPERTS)
    if arch == "phi3":
        weights = [n for n in weights if n not in (*_QKV, "ffn_gate.weight")] + ["attn_qkv.weight"]
    if arch == "qwen2":
        weights = [*weights, "attn_q.bias", "attn_k.bias", "attn_v.bias"]
    if arch in ("qwen3", "qwen3moe"):
        weights = [*weights, "attn_q_norm.weight", "attn_k_norm.weight"]
    return weights


def extra_config(arch: str, file: Any, count: Any, rotary: int, head_dim: int) -> dict[str, Any]:
    """Config fields of one architecture. count(key, default): a positive whole number of the metadata."""
    if arch == "qwen35":
        return gguf_qwen35.extra_config(file, count, rotary, head_dim)
    if arch in gguf_gemma.ARCHITECTURES:
        return gguf_gemma.extra_config(arch, file, count, head_dim)
    if arch == "qwen3moe":
        return {
            "num_experts": count("qwen3moe.expert_count"),
            "num_experts_per_tok": count("qwen3moe.expert_used_count"),
            "moe_intermediate_size": count("qwen3moe.expert_feed_forward_length"),
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
        }
    if arch == "smollm3":
        return {"no_rope_layer_interval": 4, "mlp_bias": False}
    if arch != "phi3":
        return {}
    config: dict[str, Any] = {"partial_rotary_factor": rotary / head_dim}
    window = file.metadata.get("phi3.attention.sliding_window")
    config["sliding_window"] = None if window in (None, 0) else count("phi3.attention.sliding_window")
    original = count("phi3.rope.scaling.original_context_length", count("phi3.context_length"))
    config["original_max_position_embeddings"] = original
    return config


def longrope_config(file: Any, rotary: int) -> dict[str, Any] | None:
    """`rope_scaling` of a file with LongRoPE's two sets of factors; None if it has none. Raises CheckpointError."""
    present = [name for name in (SHORT_FACTORS, LONG_FACTORS) if name in file.tensors]
    if not present:
        return None
    factors = []
    for name in (SHORT_FACTORS, LONG_FACTORS):
        info = file.tensors.get(name)
        if info is None or info.dtype != "F32" or info.shape != (rotary // 2,):
            found = "missing" if info is None else f"{info.dtype} {info.shape}"
            raise CheckpointError(f"{name} is {found}, expected F32 ({rotary // 2},)")
        factors.append([float(v) for v in file.raw(name).view(np.float32)])
    scaling: dict[str, Any] = {"rope_type": "longrope", "short_factor": factors[0], "long_factor": factors[1]}
    factor = file.metadata.get("phi3.rope.scaling.attn_factor")
    if isinstance(factor, float) and factor > 0:
        scaling["attention_factor"] = float(str(np.float32(factor)))
    return scaling
