"""Mistral: Llama with a sliding window in every layer, where the config has one."""

from __future__ import annotations

from typing import Any

from paceline.models.config import ConfigReader, DecoderConfig, read_decoder


def read_config(config: dict[str, Any]) -> DecoderConfig:
    reader = ConfigReader(config)
    window = config.get("sliding_window", 4096)  # null is a value: no window
    kind = "full_attention" if window is None else "sliding_attention"
    if any(t != kind for t in config.get("layer_types") or ()):
        raise reader.fail("layer_types", f"a mistral model has one kind of layer, here {kind}")
    return read_decoder({**config, "sliding_window": window, "use_sliding_window": True, "max_window_layers": 0})
