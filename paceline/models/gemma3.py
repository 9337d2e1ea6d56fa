"""Gemma 3 (text): windows in most layers, with a rope base of their own; norms of 1 + weight, also behind attention and
MLP; scaled embeddings; soft caps where the config has them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paceline.models.config import ConfigReader, DecoderConfig, Rope, read_decoder, read_rope
from paceline.models.traits import Traits

FIELDS = (
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "rope_local_base_freq",
    "sliding_window_pattern",
    "_sliding_window_pattern",
)
GLOBAL_THETA, LOCAL_THETA = 1e6, 1e4


def read_config(config: dict[str, Any]) -> DecoderConfig:
    reader = ConfigReader(config)
    hidden, layers = reader.integer("hidden_size", most=1 << 20), reader.integer("num_hidden_layers", most=4096)
    own = {"tie_word_embeddings": True, "head_dim": 256, "sliding_window": 4096, **config}
    head_dim = ConfigReader(own).integer("head_dim")
    local, own = _read_ropes(reader, own, head_dim)
    if own.get("layer_types") is None:
        pattern = reader.integer("sliding_window_pattern", reader.integer("_sliding_window_pattern", 6))
        own["layer_types"] = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers)]
    traits = replace(read_traits(reader, hidden), local_rope=local)
    bias = reader.flag("attention_bias", False)
    return read_decoder(own, qkv_bias=bias, output_bias=bias, qk_norm=True, traits=traits)


def read_traits(reader: ConfigReader, hidden: int) -> Traits:
    """What Gemma 2 and Gemma 3 have in common."""
    return Traits(
        activation="gelu_tanh",
        attention_scale=reader.number("query_pre_attn_scalar", 256.0, least=1e-6, most=1e9) ** -0.5,
        attention_softcap=softcap(reader, "attn_logit_softcapping"),
        logit_softcap=softcap(reader, "final_logit_softcapping"),
        embedding_scale=float(hidden) ** 0.5,
        norm_offset=1.0,
        branch_norm_eps=reader.number("rms_norm_eps", 1e-6, least=0, most=1),
    )


def softcap(reader: ConfigReader, name: str) -> float:
    """A cap; null: none."""
    return 0.0 if reader.config.get(name) is None else reader.scale(name, 0.0)


def _read_ropes(reader: ConfigReader, own: dict[str, Any], head_dim: int) -> tuple[Rope, dict[str, Any]]:
    """(rope of sliding layers, the config with the rope of full layers as other families have it).

    Old style: `rope_theta`, `rope_local_base_freq`, and a `rope_scaling` of full layers alone. New style: one set of
    parameters for each kind of layer.
    """
    parameters = reader.mapping("rope_parameters")
    if parameters and not {"full_attention", "sliding_attention"} & set(parameters):
        raise reader.fail("rope_parameters", "must have parameters for full_attention and sliding_attention")
    inner = ConfigReader(parameters, f"{reader.where}: rope_parameters")
    whole = {"rope_theta": reader.number("rope_theta", GLOBAL_THETA), **reader.mapping("rope_scaling")}
    whole |= inner.mapping("full_attention")
    local = {
        "rope_theta": reader.number("rope_local_base_freq", LOCAL_THETA, least=1e-3),
        **inner.mapping("sliding_attention"),
    }
    own = {**own, "rope_theta": None, "rope_scaling": None, "rope_parameters": whole}
    sliding = {**own, "rope_parameters": local}
    return read_rope(ConfigReader(sliding, f"{reader.where}: sliding_attention"), head_dim), own
