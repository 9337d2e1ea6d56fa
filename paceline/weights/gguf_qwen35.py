"""What GGUF files of Qwen3.5 (architecture "qwen35") have of their own.

Layers of two kinds, whose tensors differ. Norms are stored with their 1, the decay as -exp(A_log). Value heads come in
another order: those of the first key head, of the second, ... there take turns, so that head r * key_heads + k stands
for Hugging Face's k * (value_heads / key_heads) + r. The multi-token-prediction layer is one more layer at the end.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from paceline.errors import CheckpointError

_DELTA = {
    "attn_qkv.weight": "linear_attn.in_proj_qkv.weight",
    "attn_gate.weight": "linear_attn.in_proj_z.weight",
    "ssm_beta.weight": "linear_attn.in_proj_b.weight",
    "ssm_alpha.weight": "linear_attn.in_proj_a.weight",
    "ssm_conv1d.weight": "linear_attn.conv1d.weight",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm.weight": "linear_attn.norm.weight",
    "ssm_out.weight": "linear_attn.out_proj.weight",
}
_ATTENTION = tuple(f"attn_{part}.weight" for part in ("q", "k", "v", "output", "q_norm", "k_norm"))
_BOTH = ("attn_norm.weight", "post_attention_norm.weight", "ffn_gate.weight", "ffn_up.weight", "ffn_down.weight")
_PREDICTOR = {
    "nextn.eh_proj.weight": "fc.weight",
    "nextn.enorm.weight": "pre_fc_norm_embedding.weight",
    "nextn.hnorm.weight": "pre_fc_norm_hidden.weight",
    "nextn.shared_head_norm.weight": "norm.weight",
    "nextn.embed_tokens.weight": "embed_tokens.weight",
    "nextn.shared_head_head.weight": "lm_head.weight",
}
_OPTIONAL = ("nextn.embed_tokens.weight", "nextn.shared_head_head.weight")
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


def layer_names(common: dict[str, str]) -> dict[str, str]:
    """ggml name -> Hugging Face name of a layer's tensors, those of all kinds of layers."""
    kept = {k: v for k, v in common.items() if k.endswith(".weight") and k != "ffn_norm.weight"}
    return {**kept, "post_attention_norm.weight": "post_attention_layernorm.weight", **_DELTA, **_PREDICTOR}


def predictor_name(name: str, layers: int) -> str:
    """The name of a tensor of layer `layers`, the first one behind the model's own: it is the prediction layer's."""
    match = _LAYER.fullmatch(name)
    if match is None or int(match[1]) != layers:
        return name
    return f"mtp.{match[2]}" if match[2] in _PREDICTOR.values() else f"mtp.layers.0.{match[2]}"


def required(layer: int, config: dict[str, Any]) -> tuple[str, ...]:
    """ggml names that a layer has. The one behind the model's own is the prediction layer."""
    layers = config["num_hidden_layers"]
    if layer >= layers:
        return (*_BOTH, *_ATTENTION, *(name for name in _PREDICTOR if name not in _OPTIONAL))
    linear = config["layer_types"][layer] == "linear_attention"
    return (*_BOTH, *(_DELTA if linear else _ATTENTION))


def extra_config(file: Any, count: Any, rotary: int, head_dim: int) -> dict[str, Any]:
    """Config fields. count(key, default): a positive whole number of the metadata. Raises CheckpointError."""
    predictors = file.metadata.get("qwen35.nextn_predict_layers", 0)
    if predictors not in (0, 1) or isinstance(predictors, bool):
        raise CheckpointError(f"metadata 'qwen35.nextn_predict_layers' is {str(predictors)[:60]!r}, expected 0 or 1")
    layers, every = count("qwen35.block_count") - predictors, count("qwen35.full_attention_interval", 4)
    if not 0 < layers <= 4096:
        raise CheckpointError(f"metadata 'qwen35.block_count' leaves {layers} layers beside the prediction layer")
    heads, inner = count("qwen35.ssm.time_step_rank"), count("qwen35.ssm.inner_size")
    if inner % heads:
        raise CheckpointError(f"metadata 'qwen35.ssm.inner_size' is {inner}, which {heads} heads do not divide")
    return {
        "num_hidden_layers": layers,
        "partial_rotary_factor": rotary / head_dim,
        "layer_types": ["linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)],
        "linear_num_key_heads": count("qwen35.ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": count("qwen35.ssm.state_size"),
        "linear_value_head_dim": inner // heads,
        "linear_conv_kernel_dim": count("qwen35.ssm.conv_kernel"),
        "mtp_num_hidden_layers": predictors,
        "mtp_use_dedicated_embeddings": bool(predictors)
        and any(name.endswith("nextn.embed_tokens.weight") for name in file.tensors),
    }


def stored_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Hugging Face's shape of a stored tensor: the convolution has a middle axis there."""
    return (shape[0], 1, shape[1]) if name.endswith("conv1d.weight") and len(shape) == 2 else shape


def _heads(c: dict[str, Any], size: int) -> np.ndarray:
    """Which stored row each of Hugging Face's is, for value heads of `size` rows."""
    keys, values = c["linear_num_key_heads"], c["linear_num_value_heads"]
    if values % keys:
        raise CheckpointError(f"qwen35: {values} value heads, which {keys} key heads do not divide")
    heads = np.arange(values).reshape(values // keys, keys).T.reshape(-1)
    return (heads[:, None] * size + np.arange(size)).reshape(-1)


def row_order(c: dict[str, Any], name: str) -> np.ndarray | None:
    """Stored rows of a tensor in Hugging Face's order; None: they are."""
    part = name.rpartition("linear_attn.")[2]
    if part in ("in_proj_qkv.weight", "conv1d.weight"):
        keys = 2 * c["linear_num_key_heads"] * c["linear_key_head_dim"]
        return np.concatenate([np.arange(keys), keys + _heads(c, c["linear_value_head_dim"])])
    if part == "in_proj_z.weight":
        return _heads(c, c["linear_value_head_dim"])
    return _heads(c, 1) if part in ("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias") else None


def restore(c: dict[str, Any], name: str, values: np.ndarray) -> np.ndarray:
    """A tensor's values as Hugging Face has them."""
    order = row_order(c, name)
    if order is not None:
        if len(order) != len(values):
            raise CheckpointError(f"qwen35: {name} has {len(values)} rows, its metadata says {len(order)}")
        values = values[order]
    if name.endswith("out_proj.weight") and "linear_attn" in name:
        values = values[:, _heads(c, c["linear_value_head_dim"])]
    elif name.endswith("A_log"):
        with np.errstate(divide="ignore", invalid="ignore"):
            values = np.log(-values.astype(np.float32)).astype(values.dtype)
    return np.ascontiguousarray(values.reshape(stored_shape(name, values.shape)))


def restore_blocks(c: dict[str, Any], name: str, blocks: np.ndarray) -> np.ndarray:
    """The same of a matrix in blocks of 32 columns, uint8 [n, bytes of a row]; nothing is expanded."""
    order = row_order(c, name)
    if order is not None:
        return np.ascontiguousarray(blocks[order])
    if not (name.endswith("out_proj.weight") and "linear_attn" in name):
        return blocks
    heads, size = c["linear_num_value_heads"], c["linear_value_head_dim"]
    if size % 32:
        raise CheckpointError(f"qwen35: {name}: value heads of {size} columns in blocks of 32; use quantization none")
    each = blocks.reshape(len(blocks), heads, -1)
    return np.ascontiguousarray(each[:, _heads(c, 1)]).reshape(blocks.shape)
