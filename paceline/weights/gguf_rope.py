"""Rotary embedding settings of a GGUF file -> `rope_theta` and `rope_scaling` of a config.json."""

from __future__ import annotations

from math import pi
from typing import Any

import numpy as np

from paceline.errors import CheckpointError


def rope_config(metadata: dict[str, Any], arch: str, head_dim: int, factors: np.ndarray | None) -> dict[str, Any]:
    """`{"rope_theta": float, "rope_scaling": dict | None}`.

    `factors` is the tensor rope_freqs.weight [head_dim / 2] if the file has one: llama.cpp stores Llama 3's
    scaling as the divisor of each frequency instead of its four parameters. Raises `CheckpointError` for what
    cannot be expressed.
    """
    theta = _number(metadata, f"{arch}.rope.freq_base", 10000.0)
    kind = metadata.get(f"{arch}.rope.scaling.type", "none")
    factor = _number(metadata, f"{arch}.rope.scaling.factor", 0.0)
    if f"{arch}.rope.scale_linear" in metadata and kind == "none":  # the older spelling of linear scaling
        factor = _number(metadata, f"{arch}.rope.scale_linear", 1.0)
        kind = "linear" if factor != 1.0 else "none"
    if factors is not None:
        if kind not in ("none", "linear") or (kind == "linear" and factor not in (0.0, 1.0)):
            raise CheckpointError(f"rope_freqs.weight beside rope.scaling.type {kind!r} is not supported")
        original = metadata.get(f"{arch}.rope.scaling.original_context_length")
        return {"rope_theta": theta, "rope_scaling": _llama3(factors, theta, head_dim, original)}
    if kind == "none":
        return {"rope_theta": theta, "rope_scaling": None}
    if kind == "linear" and factor > 0:
        return {"rope_theta": theta, "rope_scaling": {"rope_type": "linear", "factor": factor}}
    if kind == "yarn" and factor > 0:
        scaling: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
        original = metadata.get(f"{arch}.rope.scaling.original_context_length")
        if original is not None:
            scaling["original_max_position_embeddings"] = original
        return {"rope_theta": theta, "rope_scaling": scaling}
    raise CheckpointError(
        f"{arch}.rope.scaling.type {kind!r} with factor {factor} is not supported (linear and yarn are)"
    )


def _number(metadata: dict[str, Any], key: str, default: float) -> float:
    value = metadata.get(key, default)
    if type(value) not in (int, float) or not np.isfinite(value) or value < 0:
        raise CheckpointError(f"metadata {key!r} is {str(value)[:60]!r}, expected a finite number that is not negative")
    return float(str(np.float32(value)))


def llama3_factors(scaling: dict[str, Any], theta: float, head_dim: int) -> np.ndarray:
    """The divisor of each of the head_dim / 2 frequencies, float64, by Llama 3.1's reference code."""
    wavelengths = 2 * pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    original = scaling["original_max_position_embeddings"]
    smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / factor + smooth)


def _llama3(factors: np.ndarray, theta: float, head_dim: int, original: Any) -> dict[str, Any] | None:
    """Find the parameters whose factors are the stored ones.

    The factors fix original / low and original / high alone, so any consistent triple gives the same model.
    The published one (1, 4, 8192) and its neighbours are tried first, then the line that the factors in the
    ramp lie on.
    """
    stored = factors.astype(np.float64)
    if not np.isfinite(stored).all() or (stored < 1).any():
        raise CheckpointError("rope_freqs.weight holds values that are not finite or below 1")
    factor = float(str(np.float32(stored.max())))
    if factor == 1.0:
        return None

    def scaling(low: float, high: float, original: float) -> dict[str, Any]:
        return {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": round(original),
        }

    candidates = [scaling(1.0, 4.0, o) for o in (original, 8192) if type(o) is int and o > 0]
    wavelengths = 2 * pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    ramp = (stored > 1.0 + 1e-5) & (stored < factor * (1 - 1e-5))
    if ramp.sum() >= 2:
        smooth = (1 / stored[ramp] - 1 / factor) / (1 - 1 / factor)
        slope, intercept = np.polyfit(1 / wavelengths[ramp], smooth, 1)  # original / (high - low), -low / (high - low)
        if slope > 0 > intercept:
            span = -1 / intercept  # high - low, for low = 1
            candidates.append(scaling(1.0, float(f"{1 + span:.4g}"), slope * span))
    for candidate in candidates:
        if np.allclose(llama3_factors(candidate, theta, head_dim), stored, rtol=1e-4, atol=0):
            return candidate
    raise CheckpointError(
        "rope_freqs.weight does not follow Llama 3's scaling, the only kind of frequency factors supported"
    )
