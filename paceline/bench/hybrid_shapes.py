"""Tensors of Qwen3.5 models by shape; see `shapes.py`."""

from __future__ import annotations

from typing import Any

# what one layer of either kind is without weights: an offset norm of 1, the slowest decay that is published
NEUTRAL = {"A_log": 0.0, "dt_bias": 0.0, "linear_attn.norm.weight": 1.0}


def is_hybrid(config: dict[str, Any]) -> bool:
    return config.get("model_type") == "qwen3_5_text"


def layer_shapes(config: dict[str, Any], index: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a layer's mixer: a delta net, or gated attention in every fourth layer."""
    hidden, at = config["hidden_size"], f"model.layers.{index}"
    if (index + 1) % config.get("full_attention_interval", 4) == 0:
        dim, heads, kv = config["head_dim"], config["num_attention_heads"], config["num_key_value_heads"]
        attn = f"{at}.self_attn"
        return {
            f"{attn}.q_proj.weight": (2 * heads * dim, hidden),
            f"{attn}.k_proj.weight": (kv * dim, hidden),
            f"{attn}.v_proj.weight": (kv * dim, hidden),
            f"{attn}.o_proj.weight": (hidden, heads * dim),
            f"{attn}.q_norm.weight": (dim,),
            f"{attn}.k_norm.weight": (dim,),
        }
    heads, value_dim = config["linear_num_value_heads"], config["linear_value_head_dim"]
    values = heads * value_dim
    channels = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"] + values
    delta = f"{at}.linear_attn"
    return {
        f"{delta}.in_proj_qkv.weight": (channels, hidden),
        f"{delta}.in_proj_z.weight": (values, hidden),
        f"{delta}.in_proj_b.weight": (heads, hidden),
        f"{delta}.in_proj_a.weight": (heads, hidden),
        f"{delta}.conv1d.weight": (channels, 1, config["linear_conv_kernel_dim"]),
        f"{delta}.A_log": (heads,),
        f"{delta}.dt_bias": (heads,),
        f"{delta}.norm.weight": (value_dim,),
        f"{delta}.out_proj.weight": (hidden, values),
    }


def neutral(name: str) -> float:
    """What a vector of this name holds: norms store their weight less 1, but for the one inside the delta net."""
    return next((value for end, value in NEUTRAL.items() if name.endswith(end)), 0.0)
