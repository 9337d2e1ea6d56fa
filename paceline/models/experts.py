"""Sparse layers: a router and its experts, of which each row uses a few. The pass sorts its rows by expert
(`native/plan_experts.cpp`), so that an expert's weights are read once for all rows that want it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.models.network import Network, WeightLoader, packed_bytes
from paceline.models.traits import Experts


@dataclass(slots=True)
class ExpertWeights:
    router: Any  # [experts, H], never quantised: it decides, and it is small
    gate_up: list[Any]  # gated [I, H] each
    down: list[Any]  # [H, I] each


def expert_bytes(e: Experts, hidden: int, *, f32: bool, quantised: bool = False) -> int:
    """Bytes of one sparse layer's packed matrices."""
    gate_up = packed_bytes(e.inner, hidden, f32=f32, gated=True, quantised=quantised)
    down = packed_bytes(hidden, e.inner, f32=f32, quantised=quantised)
    return packed_bytes(e.count, hidden, f32=f32) + e.count * (gate_up + down)


def load_experts(loader: WeightLoader, e: Experts, prefix: str, hidden: int) -> ExpertWeights:
    """Tensors `gate.weight` [experts, H] and `experts.E.{gate,up,down}_proj.weight` under `prefix`."""
    router = loader.packed_array(loader.array(f"{prefix}.gate.weight", (e.count, hidden)))
    before = loader.elements
    gate_up, down = [], []
    for i in range(e.count):
        name = f"{prefix}.experts.{i}"
        parts = [(f"{name}.{which}_proj.weight", e.inner) for which in ("gate", "up")]
        gate_up.append(loader.packed(parts, hidden, gated=True))
        down.append(loader.packed([(f"{name}.down_proj.weight", hidden)], e.inner))
    loader.elements = before + (loader.elements - before) * e.per_token // e.count  # what a row multiplies with
    return ExpertWeights(router, gate_up, down)


def add_experts(net: Network, e: Experts, w: ExpertWeights, *, norm: np.ndarray, eps: float) -> None:
    """x += experts(norm(x))."""
    net.linear("x", "router", w.router, norm=norm, eps=eps)
    net.experts("x", "router", "x", w.gate_up, w.down, top_k=e.per_token, normalise=e.normalise, norm=norm, eps=eps)
