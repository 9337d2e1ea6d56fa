"""Qwen2 and Qwen2.5: Llama with biases on q, k and v."""

from __future__ import annotations

from typing import Any

from paceline.models.config import DecoderConfig, read_decoder


def read_config(config: dict[str, Any]) -> DecoderConfig:
    return read_decoder(config, qkv_bias=True)
