"""Phi-3 and Phi-4: Llama with q, k, v in one tensor and gate, up in another (`views.py` takes them apart), partial
rotation and LongRoPE."""

from __future__ import annotations

from typing import Any

from paceline.models.config import ConfigReader, DecoderConfig, read_decoder

FIELDS = ("original_max_position_embeddings", "partial_rotary_factor")


def read_config(config: dict[str, Any]) -> DecoderConfig:
    reader = ConfigReader(config)
    own = {**config, "use_sliding_window": True, "max_window_layers": 0, "layer_types": None}
    for name in ("rope_parameters", "rope_scaling"):
        rope = reader.mapping(name)
        if rope.get("rope_type", rope.get("type")) in ("su", "yarn"):  # what early configs call LongRoPE
            own[name] = {**rope, "rope_type": "longrope"}
    kind = "full_attention" if config.get("sliding_window") is None else "sliding_attention"
    if any(t != kind for t in config.get("layer_types") or ()):
        raise reader.fail("layer_types", f"a phi3 model has one kind of layer, here {kind}")
    return read_decoder(own)
