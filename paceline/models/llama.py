"""Llama 2 and 3, and models saved under its name (SmolLM2, TinyLlama, ...)."""

from __future__ import annotations

from typing import Any

from paceline.models.config import ConfigReader, DecoderConfig, read_decoder


def read_config(config: dict[str, Any]) -> DecoderConfig:
    reader = ConfigReader(config)
    bias = reader.flag("attention_bias", False)
    return read_decoder(config, qkv_bias=bias, output_bias=bias, mlp_bias=reader.flag("mlp_bias", False))
