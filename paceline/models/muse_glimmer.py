"""Muse Glimmer (text): layers with a window that rotate and full ones that do not, gated attention, norms of heads and
of embeddings without weights, norms behind attention and MLP, logits scaled and softly capped."""

from __future__ import annotations

from typing import Any

from paceline.models.config import ConfigReader, DecoderConfig, read_decoder
from paceline.models.gemma3 import softcap
from paceline.models.traits import Traits

FIELDS = ("final_logit_softcapping", "qk_scale_factor", "output_multiplier", "post_norm_eps", "layer_rope_theta")


def read_config(config: dict[str, Any]) -> DecoderConfig:
    reader = ConfigReader(config)
    layers = reader.integer("num_hidden_layers", most=4096)
    full = [(layers - 1 - i) % 4 == 0 for i in range(layers)]  # unless stated: every fourth, counted from the last
    own = {"head_dim": 128, "sliding_window": 2048, "final_logit_softcapping": 20.0, "rms_norm_eps": 1e-5, **config}
    own["use_sliding_window"] = True
    if config.get("layer_types") is None:
        own["layer_types"] = ["full_attention" if f else "sliding_attention" for f in full]
    filled = ConfigReader(own)
    traits = Traits(
        logit_scale=filled.scale("output_multiplier", 0.19611613513818404),
        logit_softcap=softcap(filled, "final_logit_softcapping"),
        embedding_norm=True,
        norm_offset=1.0,
        branch_norm_eps=filled.number("post_norm_eps", 1e-8, least=0, most=1),
        head_norm_scale=filled.scale("qk_scale_factor", 3.87),
        final_norm_weight=False,
        attention_gate=True,
        unrotated=_unrotated(reader, full),
    )
    bias = reader.flag("attention_bias", False)
    return read_decoder(own, qkv_bias=bias, output_bias=bias, traits=traits)


def _unrotated(reader: ConfigReader, full: list[bool]) -> tuple[bool, ...]:
    """`layer_rope_theta`: 0 for layers that do not rotate, else the base, which is one for all layers."""
    bases = reader.config.get("layer_rope_theta")
    if bases is None:
        return tuple(full)
    theta = reader.mapping("rope_parameters").get("rope_theta", reader.config.get("rope_theta"))
    if not isinstance(bases, list) or len(bases) != len(full) or any(base not in (0, theta) for base in bases):
        raise reader.fail("layer_rope_theta", f"must list {len(full)} of 0 (does not rotate) and rope_theta = {theta}")
    return tuple(base == 0 for base in bases)
