"""Qwen3-MoE: Qwen3 with a mixture of experts in place of most MLPs."""

from __future__ import annotations

from typing import Any

from paceline.models.config import ConfigReader, DecoderConfig, read_decoder
from paceline.models.traits import Experts, Traits

FIELDS = (
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "norm_topk_prob",
    "decoder_sparse_step",
    "mlp_only_layers",
)


def read_config(config: dict[str, Any]) -> DecoderConfig:
    reader = ConfigReader(config)
    bias = reader.flag("attention_bias", False)
    own = {**config, "max_window_layers": 0, "layer_types": None}  # a window, where it is used, is in every layer
    if any(t != "full_attention" for t in config.get("layer_types") or ()) and not config.get("use_sliding_window"):
        raise reader.fail("layer_types", "must be full_attention in every layer: use_sliding_window is off")
    return read_decoder(own, qkv_bias=bias, output_bias=bias, qk_norm=True, traits=Traits(experts=_experts(reader)))


def _experts(reader: ConfigReader) -> Experts:
    name = "num_local_experts" if reader.config.get("num_experts") is None else "num_experts"
    count = reader.integer(name, most=4096)
    layers = reader.integer("num_hidden_layers", most=4096)
    step = reader.integer("decoder_sparse_step", 1)
    dense = reader.config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in dense):
        raise reader.fail("mlp_only_layers", "must list numbers of layers")
    return Experts(
        count=count,
        per_token=reader.integer("num_experts_per_tok", most=count),
        inner=reader.integer("moe_intermediate_size", most=1 << 22),
        normalise=reader.flag("norm_topk_prob", False),
        layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(layers)),
    )
