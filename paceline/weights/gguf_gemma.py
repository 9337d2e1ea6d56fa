"""What GGUF files of Gemma 2 and Gemma 3 (architectures "gemma2" and "gemma3") have of their own.

Norms are stored with their 1. Windows, and how attention is scaled, follow llama.cpp (models/gemma2.cpp and
models/gemma3.cpp), which knows the largest model by its number of layers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.errors import CheckpointError

ARCHITECTURES = ("gemma2", "gemma3")
_NORMS = {
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
}
_HEAD_NORMS = ("attn_q_norm.weight", "attn_k_norm.weight")
# layers of the 27B model, whose attention is scaled by the width of the hidden states over the heads
_LARGEST = {"gemma2": 46, "gemma3": 62}
_EVERY = {"gemma2": 2, "gemma3": 6}  # which layer has no window
_WINDOW = {"gemma2": 4096, "gemma3": 0}


def layer_names(arch: str, common: dict[str, str]) -> dict[str, str]:
    """ggml name -> Hugging Face name of a layer's tensors."""
    kept = {k: v for k, v in common.items() if k.endswith(".weight") and (arch == "gemma3" or k not in _HEAD_NORMS)}
    return {**kept, **_NORMS}


def required(arch: str, weights: list[str]) -> list[str]:
    """Tensors that every layer has; `weights` are those of the Llama layout."""
    return [*weights, *(n for n in _NORMS if n not in weights), *(_HEAD_NORMS if arch == "gemma3" else ())]


def extra_config(arch: str, file: Any, count: Any, head_dim: int) -> dict[str, Any]:
    """Config fields. count(key, default): a positive whole number of the metadata. Raises CheckpointError."""
    layers = count(f"{arch}.block_count")
    if layers > 4096:
        raise CheckpointError(f"metadata '{arch}.block_count' is {layers}, expected 4096 at most")
    key = f"{arch}.attention.sliding_window"
    window = 0 if file.metadata.get(key, _WINDOW[arch]) == 0 else count(key, _WINDOW[arch])
    sliding = _sliding(arch, file.metadata, layers) if window else [False] * layers
    wide = layers == _LARGEST[arch]
    config: dict[str, Any] = {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": (
            count(f"{arch}.embedding_length") // count(f"{arch}.attention.head_count") if wide else head_dim
        ),
        "sliding_window": window or None,
        "layer_types": ["sliding_attention" if s else "full_attention" for s in sliding],
        "final_logit_softcapping": _cap(file.metadata, f"{arch}.final_logit_softcapping", arch, 30.0),
        "attn_logit_softcapping": _cap(file.metadata, f"{arch}.attn_logit_softcapping", arch, 50.0),
    }
    local = file.metadata.get(f"{arch}.rope.freq_base_swa")
    if arch == "gemma3":
        config["rope_local_base_freq"] = _number(file.metadata, f"{arch}.rope.freq_base_swa", 10000.0)
    elif local is not None and local != file.metadata.get(f"{arch}.rope.freq_base", 10000.0):
        raise CheckpointError(
            f"metadata '{arch}.rope.freq_base_swa' is {str(local)[:40]}, a base of its own for layers with a window, "
            "which this architecture has none of here"
        )
    return config


def _sliding(arch: str, metadata: dict[str, Any], layers: int) -> list[bool]:
    """Which layers have the window."""
    key = f"{arch}.attention.sliding_window_pattern"
    pattern = metadata.get(key, _EVERY[arch])
    if isinstance(pattern, np.ndarray) and pattern.dtype == bool and len(pattern) == layers:
        return pattern.tolist()
    if type(pattern) is int and 0 <= pattern < 2**31:
        return [pattern == 0 or i % pattern < pattern - 1 for i in range(layers)]
    found = f"{len(pattern)} entries" if isinstance(pattern, np.ndarray | list) else repr(str(pattern)[:40])
    raise CheckpointError(f"metadata {key!r} is {found}, expected a whole number or true or false for {layers} layers")


def _cap(metadata: dict[str, Any], key: str, arch: str, default: float) -> float | None:
    return _number(metadata, key, default if arch == "gemma2" else 0.0) or None


def _number(metadata: dict[str, Any], key: str, default: float) -> float:
    value = metadata.get(key, default)
    if type(value) not in (int, float) or not np.isfinite(value) or value < 0:
        raise CheckpointError(f"metadata {key!r} is {str(value)[:40]!r}, expected a finite number that is not negative")
    return float(str(np.float32(value)))
