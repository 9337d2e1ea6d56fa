"""Norms that stand alone, gates, soft caps and mixtures of experts: their definitions, and rows that do not depend on
each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from models.reference import rms_norm, silu

from paceline import _native
from paceline.models.network import packed_bytes
from paceline.weights.quantise import dequantise_rows, quantise

from .paths import Path, buffer, every_path, every_quantised_path, normal, same_bits

EPS = 1e-5


def run(plan: _native.Plan, x: np.ndarray, width: int) -> np.ndarray:
    """Rows through a plan that reads INPUT and ends in TAPS [rows, width]."""
    out = np.full((len(x), width), np.nan, np.float32)
    positions, starts = np.arange(len(x), dtype=np.int32), np.array([0, len(x)], np.int32)
    plan.forward(None, positions, starts, input=np.ascontiguousarray(x, np.float32), taps=out)
    return out


def rows_in(path: Path, plan: _native.Plan, width: int) -> int:
    """An F32 buffer that holds the INPUT rows (rounded as the path rounds inputs of products)."""
    source, rows = buffer(plan, "INPUT", width), buffer(plan, "F32", width)
    plan.linear(source, rows, path.identity(width), convert=True)
    return rows


@every_path
@pytest.mark.parametrize("width", [7, 16, 45])
@pytest.mark.parametrize("add", [False, True])
def test_norm(isa, f32, width, add):
    path = Path(isa, f32)
    plan, x, weight = path.plan(), normal(1, 9, width), normal(2, width)
    rows, taps = rows_in(path, plan, width), buffer(plan, "TAPS", width)
    out = buffer(plan, "F32", width)
    plan.copy(rows, out, width)
    plan.norm(rows, out, weight, EPS, add)
    plan.copy(out, taps, width)
    exact = path.round(x)
    want = rms_norm(exact, weight, EPS) + (exact if add else 0)
    np.testing.assert_allclose(run(plan, x, width), want, rtol=2e-6, atol=2e-6)


@every_path
@pytest.mark.parametrize("width", [5, 16, 33])
def test_gate(isa, f32, width):
    """Through a product with one, since only products read activations."""
    path = Path(isa, f32)
    plan, x, offset = path.plan(), normal(3, 6, 2 * width + 3), 3
    rows = rows_in(path, plan, 2 * width + 3)
    values, taps = buffer(plan, "F32", width), buffer(plan, "TAPS", width)
    gated = buffer(plan, "ACT", width)
    eye = path.identity(width)
    both = path.pack(
        np.eye(width, 2 * width + 3, dtype=np.float32), np.eye(width, 2 * width + 3, dtype=np.float32), gated=True
    )
    plan.linear(rows, gated, both, epilogue=_native.Epilogue.SWIGLU, convert=True)  # silu(v) * v
    plan.gate(rows, gated, width, offset)
    plan.linear(gated, values, eye)
    plan.copy(values, taps, width)
    exact = path.round(x)
    v, g = exact[:, :width], exact[:, offset : offset + width]
    want = path.round(path.round(silu(v) * v) / (1 + np.exp(-g)))
    np.testing.assert_allclose(run(plan, x, width), want, rtol=1e-6 if f32 else 8e-3, atol=1e-6)


@every_path
@pytest.mark.parametrize(("scale", "cap"), [(1.0, 0.0), (0.5, 0.0), (1.0, 3.0), (2.5, 30.0)])
def test_softcap_of_selected_rows(isa, f32, scale, cap):
    path, width = Path(isa, f32), 37
    plan, x = path.plan(), normal(4, 5, width) * np.float32(10)
    source, logits = buffer(plan, "INPUT", width), buffer(plan, "LOGITS", width)
    plan.linear(source, logits, path.identity(width), convert=True, selected=True)
    plan.softcap(logits, width, scale, cap)
    out, select = np.empty((2, width), np.float32), np.array([4, 1], np.int32)
    plan.forward(None, np.arange(5, dtype=np.int32), np.array([0, 5], np.int32), input=x, select=select, logits=out)
    y = path.round(x)[select] * scale
    np.testing.assert_allclose(out, cap * np.tanh(y / cap) if cap else y, rtol=1e-6, atol=1e-6)


# ---- experts

HIDDEN, INNER, COUNT = 45, 37, 5


def expert_weights(seed: int = 7) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(gate, up, down) of each expert."""
    shapes = ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))
    return [tuple(normal(seed + 10 * e + i, *s) / np.float32(6) for i, s in enumerate(shapes)) for e in range(COUNT)]  # type: ignore[misc]


def mixture(
    x: np.ndarray, router: np.ndarray, top_k: int, normalise: bool, norm: np.ndarray, round_: Any
) -> np.ndarray:
    """x + experts(norm(x)), fp64; ties go to the lower id."""
    h, out = round_(rms_norm(x, norm, EPS)), x.copy()
    weights = np.exp(router - router.max(1, keepdims=True))
    weights /= weights.sum(1, keepdims=True)
    parts = [tuple(round_(m) for m in expert) for expert in expert_weights()]
    for r, row in enumerate(weights):
        chosen = np.argsort(-row, kind="stable")[:top_k]
        total = row[chosen].sum() if normalise else 1.0
        for e in chosen:
            gate, up, down = parts[e]
            out[r] += row[e] / total * (down @ round_(silu(gate @ h[r]) * (up @ h[r])))
    return out


def expert_plan(path: Path, top_k: int, normalise: bool, norm: np.ndarray, quant: Any = None) -> _native.Plan:
    """INPUT rows [hidden | router logits] -> TAPS [hidden]."""
    plan, width = path.plan(), HIDDEN + COUNT
    rows, x, router = rows_in(path, plan, width), buffer(plan, "F32", HIDDEN), buffer(plan, "F32", COUNT)
    plan.copy(rows, x, HIDDEN)
    pick = np.eye(width, dtype=np.float32)[HIDDEN:]
    plan.linear(rows, router, path.pack(pick), convert=True)
    gate_up, down = [], []
    for g, u, d in expert_weights():
        if quant is None:
            gate_up.append(path.pack(g, u, gated=True))
            down.append(path.pack(d))
            continue
        size = packed_bytes(INNER, HIDDEN, f32=False, gated=True, quantised=True)
        both = _native.Packed(_native.Arena(size), INNER, HIDDEN, False, True, quant)
        for part, m in enumerate((g, u)):
            both.fill_quant(quantise(m, quant)[0], 0, part)
        one = _native.Packed(_native.Arena(size), HIDDEN, INNER, False, False, quant)
        one.fill_quant(quantise(d, quant)[0])
        gate_up.append(both)
        down.append(one)
    plan.experts(x, router, x, gate_up, down, top_k, normalise, norm, EPS)
    plan.copy(x, buffer(plan, "TAPS", HIDDEN), HIDDEN)
    return plan


def inputs(rows: int = 30) -> np.ndarray:
    """Rows with their router logits; the first few have ties."""
    x = normal(5, rows, HIDDEN + COUNT).copy()
    x[0, HIDDEN:] = 0.5
    x[1, HIDDEN:] = [1, 2, 2, 2, 0]
    x[2, HIDDEN:] = [3, -1, 3, -1, -1]
    return x


@every_path
@pytest.mark.parametrize(("top_k", "normalise"), [(1, True), (2, True), (2, False), (5, False)])
def test_experts_follow_the_definition(isa, f32, top_k, normalise):
    path, norm, x = Path(isa, f32), normal(6, HIDDEN), inputs()
    got = run(expert_plan(path, top_k, normalise, norm), x, HIDDEN)
    exact = path.round(x)
    want = mixture(exact[:, :HIDDEN], exact[:, HIDDEN:], top_k, normalise, norm, path.round)
    np.testing.assert_allclose(got, want, rtol=1e-4 if f32 else 2e-2, atol=1e-5 if f32 else 2e-2)


def test_ties_go_to_the_lower_expert():
    """Row 0 ties all five, row 1 ties the second to fourth: with one expert each it is the lowest of them."""
    path, norm, x = Path("portable", True), np.ones(HIDDEN, np.float32), inputs(3)
    got = run(expert_plan(path, 1, True, norm), x, HIDDEN)
    for row, expert in ((0, 0), (1, 1), (2, 0)):
        alone = x[row : row + 1].copy()
        alone[0, HIDDEN:] = -9
        alone[0, HIDDEN + expert] = 9
        assert same_bits(run(expert_plan(path, 1, True, norm), alone, HIDDEN)[0], got[row])


@every_path
@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_does_not_depend_on_who_shares_its_experts(isa, f32, threads):
    norm, x = normal(6, HIDDEN), inputs()
    alone = expert_plan(Path(isa, f32), 2, True, norm)
    want = np.concatenate([run(alone, row[None], HIDDEN) for row in x])
    plan = expert_plan(Path(isa, f32, threads), 2, True, norm)
    order = np.random.default_rng(0).permutation(len(x))
    for some in (np.arange(len(x)), order, order[:7], order[7:20], np.repeat(order[:3], 9)):
        assert same_bits(run(plan, x[some], HIDDEN), want[some])


@every_quantised_path
def test_quantised_experts(isa, quantization):
    """The same bits alone and in company, and near what the dequantised weights give."""
    quant = {"int8": _native.Quant.INT8, "int8_channel": _native.Quant.INT8_CHANNEL, "int4": _native.Quant.INT4_MIN}
    kind, norm, x = quant[quantization], normal(6, HIDDEN), inputs()
    alone = expert_plan(Path(isa, False), 2, True, norm, kind)
    want = np.concatenate([run(alone, row[None], HIDDEN) for row in x])
    plan = expert_plan(Path(isa, False, 2), 2, True, norm, kind)
    order = np.random.default_rng(0).permutation(len(x))
    for some in (order, order[:5], np.repeat(order[:2], 15)):
        assert same_bits(run(plan, x[some], HIDDEN), want[some])
    exact = Path(isa, False).round(x)
    plain = mixture(exact[:, :HIDDEN], exact[:, HIDDEN:], 2, True, norm, lambda m: np.asarray(m, np.float64))
    lost = max(
        np.abs(dequantise_rows(quantise(m, kind)[0], kind, m.shape[1]) - m).max() for e in expert_weights() for m in e
    )
    assert np.abs(want - plain).max() < 60 * lost + 0.1
    assert not np.array_equal(want, exact[:, :HIDDEN].astype(np.float32))
