"""Gemma 2: windows in every other layer, norms of 1 + weight, also behind attention and MLP; scaled embeddings; soft
caps on scores and logits."""

from __future__ import annotations

from typing import Any

from paceline.models.config import ConfigReader, DecoderConfig, read_decoder
from paceline.models.gemma3 import read_traits

FIELDS = ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "cache_implementation")
DEFAULTS = {
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}


def read_config(config: dict[str, Any]) -> DecoderConfig:
    own = {**DEFAULTS, **config}  # a cap that is null is none, one that is absent has its default
    reader = ConfigReader(own)
    hidden, layers = reader.integer("hidden_size", most=1 << 20), reader.integer("num_hidden_layers", most=4096)
    if own.get("layer_types") is None:
        own["layer_types"] = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
    traits = read_traits(reader, hidden)
    bias = reader.flag("attention_bias", False)
    return read_decoder(own, qkv_bias=bias, output_bias=bias, traits=traits)
