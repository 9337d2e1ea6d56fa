"""SmolLM3: Llama in which every fourth layer does not rotate (NoPE)."""

from __future__ import annotations

import dataclasses
from typing import Any

from paceline.models.config import ConfigReader, DecoderConfig, read_decoder
from paceline.models.traits import Traits

FIELDS = ("no_rope_layers", "no_rope_layer_interval")


def read_config(config: dict[str, Any]) -> DecoderConfig:
    reader = ConfigReader(config)
    rotated = read_rotated(reader, reader.integer("num_hidden_layers", most=4096))
    own = {"tie_word_embeddings": True, **config}
    if config.get("rope_theta") is None and not config.get("rope_parameters"):
        own["rope_theta"] = 2000000.0
    if config.get("layer_types") is None and reader.flag("use_sliding_window", False):
        local = config.get("sliding_window") is not None
        own["layer_types"] = ["sliding_attention" if local and not r else "full_attention" for r in rotated]
    bias = reader.flag("attention_bias", False)
    decoder = read_decoder(own, qkv_bias=bias, output_bias=bias, mlp_bias=reader.flag("mlp_bias", False))
    if not reader.flag("use_sliding_window", False) and any(decoder.windows):
        raise reader.fail("use_sliding_window", "must be true: layer_types names sliding layers")
    return dataclasses.replace(decoder, traits=Traits(unrotated=tuple(not r for r in rotated)))


def read_rotated(reader: ConfigReader, layers: int) -> list[bool]:
    """`no_rope_layers`, which lists 1 for layers that do rotate; else every `no_rope_layer_interval`-th does not."""
    stated = reader.config.get("no_rope_layers")
    if stated is None:
        interval = reader.integer("no_rope_layer_interval", 4)
        return [(i + 1) % interval != 0 for i in range(layers)]
    if not isinstance(stated, list) or len(stated) < layers or any(v not in (0, 1) for v in stated):
        raise reader.fail("no_rope_layers", f"must list {layers} of 1 (rotates) and 0 (does not)")
    return [bool(v) for v in stated[:layers]]
