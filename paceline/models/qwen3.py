"""Qwen3: Llama with an RMSNorm on each head of q and k."""

from __future__ import annotations

from typing import Any

from paceline.models.config import DecoderConfig, read_decoder


def read_config(config: dict[str, Any]) -> DecoderConfig:
    bias = bool(config.get("attention_bias", False))
    return read_decoder(config, qkv_bias=bias, output_bias=bias, qk_norm=True)
