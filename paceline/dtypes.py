"""What weights and caches may be stored as, and the defaults: in one place, and quick to import."""

from __future__ import annotations

from typing import Literal, get_args

Quantization = Literal["none", "auto", "int8", "int8_channel", "int4"]
QUANTIZATIONS: tuple[str, ...] = get_args(Quantization)
DEFAULT_QUANTIZATION: Quantization = "auto"

KVCacheDtype = Literal["auto", "bfloat16", "int8"]
KV_CACHE_DTYPES: tuple[str, ...] = get_args(KVCacheDtype)
DEFAULT_KV_CACHE_DTYPE: KVCacheDtype = "auto"
