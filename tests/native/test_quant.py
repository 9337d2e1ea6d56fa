"""Quantised weights: every path gives the bits of the definition in numpy, for any rows, threads and neighbours."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models.reference import silu

from paceline import _native

from . import quant_reference as ref
from .paths import NAMES, Path, buffer, epilogue, normal, run_rows, runs_here, same_bits

PATHS = [
    pytest.param(isa, marks=[] if runs_here(isa) else [pytest.mark.skip(reason=f"this processor has no {isa}")])
    for isa in NAMES
]
every_path = pytest.mark.parametrize("isa", PATHS)
every_format = pytest.mark.parametrize("name", ref.FORMATS)


def product(isa: str, weight: _native.Packed, x: np.ndarray, *, threads: int = 1, f32: bool = False) -> np.ndarray:
    plan = Path(isa, f32, threads).plan(max_rows=max(64, len(x)))
    plan.linear(buffer(plan, "INPUT", weight.k), buffer(plan, "LOGITS", weight.n), weight, convert=True, selected=True)
    return run_rows(plan, x, weight.n)


def test_fma_of_the_definition_rounds_once():
    """Against exact fractions: also ties that only a bit far below decides, cancellation and subnormal products."""
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=4000).astype(np.float32) for _ in range(2))
    c = (rng.normal(size=4000) * 2.0 ** rng.integers(-60, 60, 4000)).astype(np.float32)
    c[::4] = -(a[::4].astype(np.float64) * b[::4]).astype(np.float32)  # all but cancels
    a[1::8], b[1::8], c[1::8] = np.float32(1 + 2**-12), np.float32(1 + 2**-12), np.float32(2.0**-70)  # a tie but for c
    c[1::16] *= -1
    a[2::8] *= np.float32(2.0**-130)
    got = ref.fma(a, b, c)
    for x, y, z, value in zip(*(v.tolist() for v in (a, b, c, got)), strict=True):
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        near = [Fraction(float(v)) for v in (np.nextafter(np.float32(value), s) for s in np.float32([-np.inf, np.inf]))]
        error = abs(exact - Fraction(value))
        assert all(error <= abs(exact - n) for n in near)
        if any(error == abs(exact - n) for n in near):
            assert np.float32(value).view(np.int32) % 2 == 0


sizes = st.tuples(st.integers(1, 40), st.integers(1, 200), st.integers(1, 140))


@every_path
@every_format
@settings(max_examples=20, deadline=None)
@given(size=sizes, seed=st.integers(0, 1 << 20), scale=st.sampled_from([1e-30, 1e-3, 1.0, 1e6]))
def test_products_are_the_definition_to_the_bit(isa, name, size, seed, scale):
    rows, k, n = size
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=(rows, k)) * scale * rng.choice([1.0, 1e-3, 0.0], (rows, k))).astype(np.float32)
    weight = ref.random_stored(name, n, k, rng)
    got = product(isa, ref.pack(name, weight, k=k), x)
    assert same_bits(got, ref.product(x, name, weight)), np.abs(got - ref.product(x, name, weight)).max()


@every_path
@every_format
def test_every_row_count_gives_the_bits_of_one_row(isa, name):
    k, n = 75, 171  # a padded group, a padded panel
    x, weight = normal(1, 40, k), ref.pack(name, ref.stored(name, normal(2, n, k)), k=k)
    alone = np.concatenate([product(isa, weight, x[i : i + 1]) for i in range(40)])
    assert same_bits(alone, ref.product(x, name, ref.stored(name, normal(2, n, k))))
    for rows in range(1, 41):
        assert same_bits(product(isa, weight, x[:rows]), alone[:rows]), f"{rows} rows"
    for threads in (2, 3, 5):
        for rows in (1, 16, 40):
            assert same_bits(product(isa, weight, x[:rows], threads=threads), alone[:rows]), f"{rows} rows, {threads}"


@every_path
@every_format
@pytest.mark.parametrize("scale", [6e-8, 1e-2, 65504.0])
def test_the_largest_sums_and_scales_are_exact(isa, name, scale):
    """Every code and every activation at its end, of either sign, with scales at the ends of fp16."""
    n, k, rows = 33, 96, 17
    weight = ref.random_stored(name, n, k, np.random.default_rng(3)).reshape(n, -1)
    if name == "INT8_CHANNEL":
        weight[:, :4] = np.full((n, 1), scale, np.float32).view(np.uint8)
        weight[:, 4:] = np.where(np.arange(n) % 2, 127, 128)[:, None]
    else:
        blocks = weight.reshape(n, k // 32, -1)
        heads = 2 if name == "INT4_MIN" else 1
        codes = (127, 128) if name == "INT8" else (0, 255)
        blocks[:, :, : 2 * heads] = np.full((n, k // 32, heads), scale, np.float16).view(np.uint8)
        blocks[:, :, 2 * heads :] = np.where(np.arange(n) % 2, *codes)[:, None, None]
    x = np.where(np.arange(rows) % 2, 1.0, -1.0)[:, None] * np.ones((rows, k))
    x = (x * 10.0 ** np.arange(-8, 9)[:, None]).astype(np.float32)
    want = ref.product(x, name, weight)
    assert np.isfinite(want).all()
    for count in (1, rows):
        assert same_bits(product(isa, ref.pack(name, weight, k=k), x[:count]), want[:count])


@every_path
@every_format
def test_a_poisoned_row_stays_alone(isa, name):
    """NaN and infinity spread inside their row, visibly, and nowhere else."""
    k, n = 96, 64
    weight = ref.pack(name, ref.stored(name, normal(3, n, k)), k=k)
    x = normal(4, 30, k).copy()  # enough for every kind of tile
    clean = product(isa, weight, x)
    x[3, 40], x[17, 0] = np.nan, np.inf
    got = product(isa, weight, x)
    others = [i for i in range(30) if i not in (3, 17)]
    assert same_bits(got[others], clean[others])
    assert np.isnan(got[3]).all() and not np.isfinite(got[17]).any()


@every_path
@every_format
@pytest.mark.parametrize("rows", [3, 20, 30])
def test_epilogues_and_inputs(isa, name, rows):
    """norm, bias and add: the same sums with what the path does to them."""
    k, n = 64, 72
    x, bias, norm = normal(5, rows, k), normal(6, 1, n)[0], 1 + normal(7, 1, k)[0] / 8
    first, second = ref.stored(name, normal(8, n, k)), ref.stored(name, normal(9, n, k))
    path = Path(isa, True)
    plan = path.plan()
    source, sums, taps = buffer(plan, "INPUT", k), buffer(plan, "F32", n), buffer(plan, "TAPS", 3 * n)
    plan.linear(source, sums, ref.pack(name, first, k=k), convert=True, bias=bias)
    plan.copy(sums, taps, n, 0)
    plan.linear(source, sums, ref.pack(name, second, k=k), convert=True, epilogue=epilogue("ADD"))
    plan.copy(sums, taps, n, n)
    plan.linear(source, sums, ref.pack(name, first, k=k), norm=norm, eps=1e-5)
    plan.copy(sums, taps, n, 2 * n)
    out = np.empty((rows, 3 * n), np.float32)
    plan.forward(None, np.arange(rows, dtype=np.int32), np.array([0, rows], np.int32), input=x, taps=out)
    want = ref.product(x, name, first) + bias
    assert same_bits(out[:, :n], want)
    assert same_bits(out[:, n : 2 * n], want + ref.product(x, name, second))
    scale = 1 / np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True) + 1e-5)
    normed = ref.product((x * scale * norm).astype(np.float32), name, first)
    # the norm differs in its last bits, so now and then a value falls on the other side of a rounding to int8
    assert np.abs(out[:, 2 * n :] - normed).max() <= 0.02 * np.abs(normed).max()


@every_path
@every_format
@pytest.mark.parametrize("f32", [True, False])
def test_gated_product_feeds_the_next(isa, name, f32):
    k, n, rows = 48, 70, 19
    x, gate, up, down = (normal(s, a, b) for s, a, b in ((1, rows, k), (2, n, k), (3, n, k), (4, k, n)))
    stored = [ref.stored(name, m) for m in (gate, up, down)]
    path = Path(isa, f32)
    plan = path.plan()
    act = buffer(plan, "ACT", n)
    weight = ref.pack(name, stored[0], stored[1], k=k, gated=True)
    plan.linear(buffer(plan, "INPUT", k), act, weight, convert=True, epilogue=epilogue("SWIGLU"))
    plan.linear(act, buffer(plan, "LOGITS", k), ref.pack(name, stored[2], k=n), selected=True)
    got = run_rows(plan, x, k)
    g, u = ref.product(x, name, stored[0]), ref.product(x, name, stored[1])
    activated = path.round((silu(g.astype(np.float64)) * u).astype(np.float32)).astype(np.float32)
    want = ref.product(activated, name, stored[2])
    assert np.abs(got - want).max() <= 0.02 * np.abs(want).max()


@every_path
@every_format
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_rows_that_are_written_as_records_keep_every_bit(isa, name, threads):
    """A gated product writes records for a quantised one, but values where another one reads them as well."""
    k, n, most = 48, 150, 30  # the last group is padded
    gate, up, down = (ref.stored(name, normal(s, *shape)) for s, shape in ((2, (n, k)), (3, (n, k)), (4, (k, n))))
    gate_up, down_weight = ref.pack(name, gate, up, k=k, gated=True), ref.pack(name, down, k=n)
    path = Path(isa, False, threads)
    values = path.pack(normal(5, 8, n))
    plans = []
    for read_as_values in (False, True):
        plan = path.plan()
        act = buffer(plan, "ACT", n)
        plan.linear(buffer(plan, "INPUT", k), act, gate_up, convert=True, epilogue=epilogue("SWIGLU"))
        if read_as_values:
            plan.linear(act, buffer(plan, "F32", 8), values)
        out = buffer(plan, "F32", k)
        plan.linear(act, out, down_weight)
        plan.copy(out, buffer(plan, "TAPS", k), k)
        plans.append(plan)
    for rows in range(1, most + 1):
        x, taps = normal(1, most, k)[:rows], np.full((2, rows, k), np.nan, np.float32)
        for plan, out in zip(plans, taps, strict=True):
            starts = np.array([0, rows], np.int32)
            plan.forward(None, np.arange(rows, dtype=np.int32), starts, input=x, taps=out)
        assert np.isfinite(taps).all()
        assert same_bits(taps[0], taps[1]), f"{rows} rows"


@every_format
def test_rows_come_back_and_views_share_them(name):
    n, k = 130, 50
    values = normal(10, n, k)
    stored = ref.stored(name, values)
    weight = ref.pack(name, stored[:40], stored[40:], k=k)
    want = ref.read_rows(name, stored, k).values[:, :k].astype(np.float32)
    out = np.empty((1, k), np.float32)
    for row in range(n):
        weight.row(row, out)
        np.testing.assert_allclose(out[0], want[row], rtol=1e-6, atol=1e-7)
    view = weight.view(64, 66)
    x = normal(11, 5, k)
    assert same_bits(product("", view, x), product("", weight, x)[:, 64:])


@every_format
def test_embedding_reads_the_packed_rows(name):
    n, k = 40, 64
    weight = ref.pack(name, ref.stored(name, normal(12, n, k)), k=k)
    plan = Path("", False).plan()
    rows, taps = buffer(plan, "F32", k), buffer(plan, "TAPS", k)
    plan.embed_packed(rows, weight)
    plan.copy(rows, taps, k)
    tokens = np.array([3, 39, 0, 3], np.int32)
    out = np.empty((4, k), np.float32)
    plan.forward(None, np.arange(4, dtype=np.int32), np.array([0, 4], np.int32), tokens=tokens, taps=out)
    row = np.empty((1, k), np.float32)
    for i, token in enumerate(tokens):
        weight.row(int(token), row)
        assert same_bits(out[i], row[0])


ERRORS = {"INT8": 0.5 / 127, "INT8_CHANNEL": 0.5 / 127, "INT4": 1 / 8, "INT4_MIN": 0.5 / 15}


@every_format
@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 9), k=st.integers(1, 100), seed=st.integers(0, 1 << 20), scale=st.sampled_from([1e-3, 1.0, 1e3])
)
def test_quantised_values_are_near(name, n, k, seed, scale):
    """No further from what they stand for than half a step, with room for the scale's rounding to fp16, whose steps
    never are below 2^-24."""
    values = (np.random.default_rng(seed).normal(size=(n, k)) * scale).astype(np.float32)
    got = ref.read_rows(name, ref.stored(name, values), k).values[:, :k]
    groups = ref.padded(values) if name != "INT8_CHANNEL" else values.reshape(n, 1, k)
    low = groups.min(2) if name == "INT4_MIN" else 0
    span = groups.max(2) - low if name == "INT4_MIN" else np.abs(groups).max(2)
    limit = (ERRORS[name] * 1.02 + 1.5e-3) * span + (0 if name == "INT8_CHANNEL" else 130 * 2.0**-25)
    if name == "INT4_MIN":
        limit = limit + np.abs(low) * 2.0**-10
    error = np.abs(got - values)
    each = np.repeat(limit, groups.shape[2], 1)[:, :k]
    assert (error <= each).all(), (error / each).max()


@every_format
def test_quantising_again_changes_nothing_much(name):
    """Values that are representable come back: what a file holds is kept when it is quantised to its own format."""
    values = normal(13, 6, 64)
    once = ref.read_rows(name, ref.stored(name, values), 64).values
    again = ref.read_rows(name, ref.stored(name, once.astype(np.float32)), 64).values
    np.testing.assert_allclose(again, once, rtol=2e-3, atol=2e-3 * np.abs(once).max())


@every_path
@settings(max_examples=60, deadline=None)
@given(
    k=st.integers(1, 100),
    seed=st.integers(0, 1 << 20),
    exponent=st.integers(-44, 38),
    zeros=st.booleans(),
)
def test_rows_are_quantised_alike_on_every_path(isa, k, seed, exponent, zeros):
    rng = np.random.default_rng(seed)
    x = (rng.uniform(-1, 1, (3, k)) * 10.0**exponent).astype(np.float32)
    if zeros:
        x[1] = 0
    out = np.empty((3, -(-k // 32) * 48), np.uint8)
    _native.quantise_activations(x, out, isa)
    records = out.reshape(3, -1, 48)
    want = ref.quantise_rows(x)
    assert (np.ascontiguousarray(records[:, :, :32]).view(np.int8) == want.q).all()
    rest = np.ascontiguousarray(records[:, :, 32:])
    assert same_bits(rest.view(np.float32)[:, :, 0], want.scale)
    total = want.q.sum(2)
    starts = rest.view(np.int32)[:, :, 1:3] - np.float32(1.5 * 2**23).view(np.int32)
    assert (starts[:, :, 0] == -128 * total).all() and (starts[:, :, 1] == -8 * total).all()
    assert same_bits(rest.view(np.float32)[:, :, 3], want.scale * total.astype(np.float32))


WRONG: dict[str, Any] = {
    "rows of another format": lambda w: w.fill_quant(np.zeros((4, 18 * 2), np.uint8)),
    "rows past the end": lambda w: w.fill_quant(np.zeros((41, 34 * 2), np.uint8)),
    "rows from a negative one on": lambda w: w.fill_quant(np.zeros((4, 34 * 2), np.uint8), -1),
    "an up part without a gate": lambda w: w.fill_quant(np.zeros((4, 34 * 2), np.uint8), 0, 1),
    "numbers": lambda w: w.fill(np.zeros((4, 64), np.float32)),
    "bf16 numbers": lambda w: w.fill_bf16(np.zeros((4, 64), np.uint16)),
}


@pytest.mark.parametrize("what", WRONG)
def test_packing_refuses(what):
    weight = _native.Packed(_native.Arena(1 << 16), 40, 64, False, False, _native.Quant.INT8)
    with pytest.raises((ValueError, TypeError)):
        WRONG[what](weight)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e9])
@every_format
def test_quantising_refuses_what_no_scale_holds(name, value):
    values = np.ones((3, 32), np.float32)
    values[1, 7] = value
    out = np.empty((3, _native.quant_row_bytes(ref.quant(name), 32)), np.uint8)
    bad = _native.quantise_rows(ref.quant(name), values, out)
    assert bad == (-1 if name == "INT8_CHANNEL" and np.isfinite(value) else 1)


BUILDS: dict[str, Any] = {
    "no format for a row": lambda: _native.quant_row_bytes(_native.Quant.NONE, 32),
    "a row of nothing": lambda: _native.quant_row_bytes(_native.Quant.INT8, 0),
    "no format for a matrix": lambda: _native.packed_quant_bytes(_native.Quant.NONE, 3, 32),
    "a matrix of nothing": lambda: _native.packed_quant_bytes(_native.Quant.INT8, 0, 32),
    "room of another size": lambda: _native.quantise_rows(
        _native.Quant.INT8, np.zeros((2, 32), np.float32), np.zeros((2, 33), np.uint8)
    ),
    "room for fewer rows": lambda: _native.quantise_rows(
        _native.Quant.INT8, np.zeros((2, 32), np.float32), np.zeros((1, 34), np.uint8)
    ),
    "activations that do not fit": lambda: _native.quantise_activations(
        np.zeros((2, 33), np.float32), np.zeros((2, 48), np.uint8)
    ),
    "an arena too small": lambda: _native.Packed(_native.Arena(1), 1 << 16, 1 << 12, False, False, _native.Quant.INT8),
}


@pytest.mark.parametrize("what", BUILDS)
def test_wrong_arguments_are_refused(what):
    with pytest.raises((ValueError, TypeError, RuntimeError)):
        BUILDS[what]()


def test_a_view_must_start_a_panel():
    weight = ref.pack("INT4", ref.stored("INT4", normal(14, 96, 64)), k=64)
    with pytest.raises(ValueError, match="multiple of 32"):
        weight.view(16, 32)


def test_quantised_and_plain_weights_share_a_plan():
    """The plan's type is that of its plain weights and its cache; quantised ones fit beside them."""
    for f32 in (True, False):
        path, plan = Path("", f32), Path("", f32).plan()
        source, mid = buffer(plan, "INPUT", 64), buffer(plan, "F32", 32)
        plan.linear(source, mid, ref.pack("INT8", ref.stored("INT8", normal(15, 32, 64)), k=64), convert=True)
        plan.linear(mid, buffer(plan, "LOGITS", 32), path.identity(32), convert=True, selected=True)
        x = normal(16, 20, 64)
        want = path.round(ref.product(x, "INT8", ref.stored("INT8", normal(15, 32, 64))))
        assert (run_rows(plan, x, 32) == want.astype(np.float32)).all()
