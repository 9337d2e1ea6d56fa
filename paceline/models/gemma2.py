"""Gemma 2: windows in every other layer, norms of 1 + weight, also behind attention and MLP; scaled embeddings; soft
caps on scores and logits."""

from __future__ import annotations

from typing import Any

from paceline.models.config import ConfigReader, DecoderConfig, read_decoder
from paceline.models.gemma3 import softcap
from paceline.models.traits import Traits

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
    traits = Traits(
        activation="gelu_tanh",
        attention_scale=reader.number("query_pre_attn_scalar", 256.0, least=1e-6, most=1e9) ** -0.5,
        attention_softcap=softcap(reader, "attn_logit_softcapping"),
        logit_softcap=softcap(reader, "final_logit_softcapping"),
        embedding_scale=float(hidden) ** 0.5,
        norm_offset=1.0,
        branch_norm_eps=reader.number("rms_norm_eps", 1e-6, least=0, most=1),
    )
    bias = reader.flag("attention_bias", False)
    return read_decoder(own, qkv_bias=bias, output_bias=bias, traits=traits)
