"""Qwen3: Llama with an RMSNorm on each head of q and k."""

from __future__ import annotations

from typing import Any

from paceline.models.config import ConfigReader, DecoderConfig, read_decoder


def read_config(config: dict[str, Any]) -> DecoderConfig:
    bias = ConfigReader(config).flag("attention_bias", False)
    return read_decoder(config, qkv_bias=bias, output_bias=bias, qk_norm=True)
