"""Each native operation against its definition in fp64, on every path, with error bounds from the arithmetic."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models.reference import attention, bf16, inverse_frequencies, rms_norm, rotate, silu, visible

from paceline import _native

from .paths import Path, buffer, epilogue, every_path, normal, run_rows, same_bits

EPS = 2.0**-24  # half an ulp of fp32, relative
HALF = 1.01 * 2.0**-8  # half an ulp of bfloat16, relative


def bound(x: np.ndarray, w: np.ndarray, k: int) -> np.ndarray:
    """Largest error of a sum of k products in any order of fp32 additions (Higham, gamma_k), and a denormal or two."""
    return 1.05 * (k + 3) * EPS * (np.abs(x) @ np.abs(w).T) + k * 2.0**-126


sizes = st.tuples(st.integers(1, 40), st.integers(1, 200), st.integers(1, 140))


@every_path
@settings(max_examples=25, deadline=None)
@given(size=sizes, seed=st.integers(0, 1 << 20), bias=st.booleans())
def test_matrix_product(isa, f32, size, seed, bias):
    rows, k, n = size
    path = Path(isa, f32)
    rng = np.random.default_rng(seed)
    x, w = rng.normal(size=(rows, k)).astype(np.float32), rng.normal(size=(n, k)).astype(np.float32)
    b = rng.normal(size=n).astype(np.float32) if bias else None
    plan = path.plan()
    plan.linear(buffer(plan, "INPUT", k), buffer(plan, "LOGITS", n), path.pack(w), convert=True, selected=True, bias=b)
    got = run_rows(plan, x, n)
    rx, rw = path.round(x), path.round(w)
    want = rx @ rw.T + (0 if b is None else b)
    limit = bound(rx, rw, k) + 2 * EPS * np.abs(want) + (0 if b is None else 2 * EPS * np.abs(b))
    assert (np.abs(got - want) <= limit).all(), f"worst {np.max(np.abs(got - want) / limit)} of the bound"


@every_path
def test_every_row_count_gives_the_bits_of_one_row(isa, f32):
    k, n = 75, 171  # odd: a padded pair of k, a padded panel
    path = Path(isa, f32)
    x, weight = normal(1, 40, k), path.pack(normal(2, n, k))

    def product(threads: int, rows: np.ndarray) -> np.ndarray:
        plan = Path(isa, f32, threads).plan()
        plan.linear(buffer(plan, "INPUT", k), buffer(plan, "LOGITS", n), weight, convert=True, selected=True)
        return run_rows(plan, rows, n)

    alone = np.concatenate([product(1, x[i : i + 1]) for i in range(40)])
    for rows in range(1, 41):
        assert same_bits(product(1, x[:rows]), alone[:rows]), f"{rows} rows"
    for threads in (2, 3, 5):
        for rows in (1, 16, 40):
            assert same_bits(product(threads, x[:rows]), alone[:rows]), f"{rows} rows, {threads} threads"


@every_path
@pytest.mark.parametrize("rows", [3, 20])
def test_an_odd_sum_ends_in_zero_whatever_came_before(isa, f32, rows):
    """Products share scratch rows: the unused half of the last pair must not read what a wider product left there."""
    path, plan = Path(isa, f32), Path(isa, f32).plan()
    wide, narrow = np.full((2, 64), np.nan, np.float32), normal(16, 2, 33)
    a, b, taps = buffer(plan, "F32", 64), buffer(plan, "F32", 33), buffer(plan, "TAPS", 40)
    spoiled, sums = buffer(plan, "F32", 8), buffer(plan, "F32", 40)
    weight = normal(17, 40, 33)
    plan.embed_table(a, wide)
    plan.embed_table(b, narrow)
    plan.linear(a, spoiled, path.pack(normal(18, 8, 64)), convert=True)
    plan.linear(b, sums, path.pack(weight), convert=True)
    plan.copy(sums, taps, 40)
    out = np.empty((rows, 40), np.float32)
    tokens = np.arange(rows, dtype=np.int32) % 2
    plan.forward(None, np.arange(rows, dtype=np.int32), np.array([0, rows], np.int32), tokens=tokens, taps=out)
    x, w = path.round(narrow), path.round(weight)
    assert (np.abs(out - (x @ w.T)[tokens]) <= bound(x, w, 33)[tokens]).all()


@every_path
def test_product_with_selected_rows_in_any_order(isa, f32):
    path, k, n = Path(isa, f32), 33, 40
    x, w = normal(3, 30, k), normal(4, n, k)
    plan = path.plan()
    plan.linear(buffer(plan, "INPUT", k), buffer(plan, "LOGITS", n), path.pack(w), convert=True, selected=True)
    everything = run_rows(plan, x, n)
    chosen = np.array([29, 0, 7, 7, 13], np.int32)
    out = np.full((8, n + 3), 77, np.float32)  # more room than needed stays as it is
    plan.forward(None, np.arange(30, dtype=np.int32), np.array([0, 30], np.int32), input=x, select=chosen, logits=out)
    assert same_bits(out[:5, :n], everything[chosen])
    assert (out[5:] == 77).all() and (out[:, n:] == 77).all()


@every_path
def test_product_added_to_what_is_there(isa, f32):
    path, k, n, rows = Path(isa, f32), 51, 70, 21
    x, first, second, b = normal(5, rows, k), normal(6, n, k), normal(7, n, k), normal(8, 1, n)[0]
    plan = path.plan()
    source, sums = buffer(plan, "INPUT", k), buffer(plan, "F32", n)
    taps = buffer(plan, "TAPS", 2 * n)
    plan.linear(source, sums, path.pack(first), convert=True)
    plan.copy(sums, taps, n, 0)
    plan.linear(source, sums, path.pack(second), convert=True, epilogue=epilogue("ADD"), bias=b)
    plan.copy(sums, taps, n, n)
    out = np.empty((rows, 2 * n), np.float32)
    plan.forward(None, np.arange(rows, dtype=np.int32), np.array([0, rows], np.int32), input=x, taps=out)
    rx, r1, r2 = path.round(x), path.round(first), path.round(second)
    limit = bound(rx, r1, k)
    assert (np.abs(out[:, :n] - rx @ r1.T) <= limit).all()
    want = rx @ r1.T + rx @ r2.T + b
    assert (np.abs(out[:, n:] - want) <= limit + bound(rx, r2, k) + 4 * EPS * (np.abs(want) + np.abs(b))).all()


@every_path
@pytest.mark.parametrize("n", [1, 16, 45, 64, 97])
@pytest.mark.parametrize("kind", ["SWIGLU", "GELU_TANH"])
def test_gated_product(isa, f32, n, kind):
    path, k, rows = Path(isa, f32), 37, 19
    x, gate, up, b = normal(9, rows, k) * 3, normal(10, n, k) / 4, normal(11, n, k) / 4, normal(12, 1, 2 * n)[0]
    plan = path.plan()
    act = buffer(plan, "ACT", n)
    weight = path.pack(gate, up, gated=True)
    plan.linear(buffer(plan, "INPUT", k), act, weight, convert=True, epilogue=epilogue(kind), bias=b)
    plan.linear(act, buffer(plan, "LOGITS", n), path.identity(n), selected=True)
    got = run_rows(plan, x, n)
    rx, rg, ru = path.round(x), path.round(gate), path.round(up)
    g, u = rx @ rg.T + b[:n], rx @ ru.T + b[n:]
    gelu = 0.5 * g * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3)))
    activated = silu(g) if kind == "SWIGLU" else gelu
    want = activated * u
    error = bound(rx, rg, k) * np.abs(u) * 1.2 + bound(rx, ru, k) * np.abs(activated) + 3e-6 * np.abs(g * u) + 1e-9
    assert (np.abs(got - want) <= error + (0 if f32 else HALF * np.abs(want))).all()


@every_path
@settings(max_examples=25, deadline=None)
@given(
    width=st.integers(1, 150),
    rows=st.integers(1, 20),
    scale=st.sampled_from([1e-6, 1e-2, 1.0, 1e4]),
    seed=st.integers(0, 1 << 20),
)
def test_rms_norm(isa, f32, width, rows, scale, seed):
    path, rng, eps = Path(isa, f32), np.random.default_rng(seed), 1e-6
    x = (rng.normal(size=(rows, width)) * scale).astype(np.float32)
    weight = rng.uniform(-2, 2, width).astype(np.float32)
    plan = path.plan()
    source, out = buffer(plan, "INPUT", width), buffer(plan, "LOGITS", width)
    plan.linear(source, out, path.identity(width), norm=weight, eps=eps, selected=True)
    got = run_rows(plan, x, width)
    want = rms_norm(x.astype(np.float64), weight.astype(np.float64), eps)
    assert (np.abs(got - want) <= ((width + 8) * EPS + (0 if f32 else HALF)) * np.abs(want) + 1e-30).all()


def test_paths_round_to_bfloat16_like_the_reference():
    """Ties, denormals, overflow to infinity and NaN, through a one-to-one product."""
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0xFF7FFFFF, 0x00800000, 0x3F807FFF], np.uint32)
    x = np.concatenate([bits.view(np.float32), np.array([0.0, -0.0, 1.0, 3.14159, -2.71828], np.float32)])[:, None]
    want = bf16(x)
    for isa in ("portable", "avx2", "avx512", "avx512_bf16", "amx"):
        try:
            _native.select_isa(isa)
        except RuntimeError:
            continue
        path = Path(isa, f32=False)
        plan = path.plan()
        weight = path.identity(1)
        plan.linear(buffer(plan, "INPUT", 1), buffer(plan, "LOGITS", 1), weight, convert=True, selected=True)
        assert np.array_equal(run_rows(plan, x, 1).astype(np.float64), want), isa


# ---- rope and the cache


def read_cache(cache: _native.KVCache, layer: int, table: np.ndarray, length: int, heads: int, dim: int) -> np.ndarray:
    """Keys and values of positions 0..length-1: [2, length, heads, dim]."""
    out = np.empty((2, length, heads, dim), np.float32)
    for at in range(length):
        keys, values = np.empty((heads, dim), np.float32), np.empty((heads, dim), np.float32)
        cache.read(layer, int(table[at // 16]), at % 16, keys, values)
        out[0, at], out[1, at] = keys, values
    return out


ROPES: dict[str, dict[str, Any]] = {
    "plain": {"rope_theta": 10000.0},
    "theta": {"rope_theta": 500000.0},
    "partial": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "linear": {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama3": {
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 96,
        },
    },
    "parameters": {"rope_parameters": {"rope_theta": 777.0, "rope_type": "default", "partial_rotary_factor": 0.25}},
}


@every_path
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("kind", ROPES)
def test_rope_of_keys_as_stored(isa, f32, kind, interleaved):
    from paceline.models.config import ConfigReader, read_rope

    path = Path(isa, f32)
    for dim in (8, 40, 136, 256):
        heads, rows, start = 2, 37, 70
        rope = read_rope(ConfigReader(ROPES[kind]), dim)
        want_frequencies = inverse_frequencies(dim, ROPES[kind])
        assert rope.rotary_dim == 2 * len(want_frequencies)
        np.testing.assert_allclose(rope.inv_freq, want_frequencies, rtol=3e-6)
        plan = path.plan()
        width = 2 * heads * dim
        source, kv = buffer(plan, "INPUT", width), buffer(plan, "F32", width)
        half = len(rope.inv_freq)
        cos, sin = buffer(plan, "F32", half), buffer(plan, "F32", half)
        plan.rope(cos, sin, rope.inv_freq)
        plan.linear(source, kv, path.identity(width), convert=True)
        norm = 1 + normal(13, 1, dim)[0] / 8
        geometry: dict[str, Any] = {"layer": 0, "heads": 0, "kv_heads": heads, "head_dim": dim}
        geometry["rotary_dim"] = rope.rotary_dim
        plan.qkv_post(kv, kv, cos, sin, **geometry, interleaved=interleaved, k_norm=norm, eps=1e-6)
        cache = _native.KVCache(1, heads, dim, 9, f32)
        table = np.random.default_rng(0).permutation(9).astype(np.int32)
        positions = np.arange(start, start + rows, dtype=np.int32)
        x = normal(14, rows, width)
        plan.forward(cache, positions, np.array([0, rows], np.int32), block_tables=table[None], input=x)
        stored = read_cache(cache, 0, table, start + rows, heads, dim)[:, start:]
        x = path.round(x).reshape(rows, 2, heads, dim)
        # the engine rounds the angle to fp32 as the reference implementations do
        want = rotate(rms_norm(x[:, 0], norm, 1e-6), positions, want_frequencies, interleaved=interleaved)
        slack = 1e-4 if f32 else 1.5e-2
        np.testing.assert_allclose(stored[0], want, rtol=0, atol=slack * np.abs(want).max())
        np.testing.assert_array_equal(stored[1], x[:, 1])


# ---- attention

CASES = [
    # heads, kv_heads, head_dim, causal, window, softcap, first_key
    (3, 1, 16, True, 0, 0.0, 0),
    (4, 4, 34, True, 0, 0.0, 1),
    (8, 2, 64, True, 70, 0.0, 21),
    (7, 1, 40, True, 5, 30.0, 0),
    (6, 2, 24, False, 0, 0.0, 0),
    (2, 2, 128, False, 33, 0.0, 0),
    (2, 1, 256, True, 0, 0.0, 0),
    (5, 5, 2, False, 1, 5.0, 0),
    (3, 1, 64, True, 0, 0.0, 130),
    (6, 2, 96, True, 21, 0.0, 0),
    (9, 3, 64, True, 0, 12.0, 0),
    (4, 2, 32, False, 0, 0.0, 0),
]


@every_path
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"h{c[0]}-{c[1]}x{c[2]}-{'causal' if c[3] else 'both'}-w{c[4]}")
def test_attention(isa, f32, case):
    """Passes of 1 to 40 rows up to position 200, against all keys at once."""
    heads, kv_heads, dim, causal, window, softcap, first_key = case
    path = Path(isa, f32, threads=3 if heads == 3 else 1)
    q_width, kv_width = heads * dim, kv_heads * dim
    width = q_width + 2 * kv_width
    plan = path.plan()
    source, qkv = buffer(plan, "INPUT", width), buffer(plan, "F32", width)
    q, mix, out = buffer(plan, "ACT", q_width), buffer(plan, "ACT", q_width), buffer(plan, "LOGITS", q_width)
    cos, sin = buffer(plan, "F32", 1), buffer(plan, "F32", 1)
    geometry = {"layer": 1, "heads": heads, "kv_heads": kv_heads, "head_dim": dim}
    scale = 0.7 * dim**-0.5
    plan.rope(cos, sin, np.zeros(1, np.float32))  # no rotation: rope has its own test
    plan.linear(source, qkv, path.identity(width), convert=True)
    plan.qkv_post(qkv, q, cos, sin, **geometry, rotary_dim=2)
    seen: dict[str, Any] = {"causal": causal, "window": window, "first_key": first_key}
    plan.attention(q, mix, **geometry, scale=scale, softcap=softcap, **seen)
    plan.linear(mix, out, path.identity(q_width), selected=True)

    cache = _native.KVCache(2, kv_heads, dim, 16, f32)
    table = np.random.default_rng(1).permutation(16)[:13].astype(np.int32)
    x = normal(15, 200, width)
    exact_x = path.round(x)
    start = 0
    for rows in (40, 1, 16, 7, 33, 2, 25, 40, 12, 8, 3, 1, 12):
        end = start + rows
        positions = np.arange(start, end, dtype=np.int32)
        got = np.empty((rows, q_width), np.float32)
        plan.forward(
            cache,
            positions,
            np.array([0, rows], np.int32),
            block_tables=table[None],
            input=x[start:end],
            select=np.arange(rows, dtype=np.int32),
            logits=got,
        )
        keys = exact_x[:end, q_width : q_width + kv_width].reshape(end, kv_heads, dim)
        values = exact_x[:end, q_width + kv_width :].reshape(end, kv_heads, dim)
        queries = exact_x[start:end, :q_width].reshape(rows, heads, dim)
        allowed = visible(positions, np.arange(end), causal=causal, window=window)
        allowed &= np.arange(end) >= np.minimum(first_key, positions)[:, None]  # a row sees itself in any case
        want = attention(queries, keys, values, allowed, scale=scale, softcap=softcap).reshape(rows, -1)
        slack = 2e-5 if f32 else HALF * np.abs(want) + 2e-5
        assert (np.abs(got - want) <= slack).all(), (start, rows, np.abs(got - want).max())
        start = end
    assert start == 200


@every_path
@pytest.mark.parametrize("dim", [16, 64])
@pytest.mark.parametrize("threads", [1, 3])
def test_scores_far_apart(isa, f32, threads, dim):
    """Maxima of partitions that differ by hundreds, either way: the fold neither overflows nor loses the larger one."""
    length = 256
    path = Path(isa, f32, threads)
    plan = path.plan(max_rows=length)
    source, qkv = buffer(plan, "INPUT", 3 * dim), buffer(plan, "F32", 3 * dim)
    q, mix, out = buffer(plan, "ACT", dim), buffer(plan, "ACT", dim), buffer(plan, "LOGITS", dim)
    cos, sin = buffer(plan, "F32", 1), buffer(plan, "F32", 1)
    plan.rope(cos, sin, np.zeros(1, np.float32))
    plan.linear(source, qkv, path.identity(3 * dim), convert=True)
    plan.qkv_post(qkv, q, cos, sin, layer=0, heads=1, kv_heads=1, head_dim=dim, rotary_dim=2)
    plan.attention(q, mix, layer=0, heads=1, kv_heads=1, head_dim=dim, scale=1.0)
    plan.linear(mix, out, path.identity(dim), selected=True)
    x = normal(19, length, 3 * dim).copy()
    x[:, :dim] = 1.0
    x[:, dim : 2 * dim] /= 8
    for part, level in enumerate((0.0, 30.0, -30.0, 25.0)):  # scores of 0, 480, -480, 400
        x[part * 64 : (part + 1) * 64, dim : 2 * dim] += level * 16 / dim
    rows = np.arange(length, dtype=np.int32)
    got = np.empty((length, dim), np.float32)
    cache = _native.KVCache(1, 1, dim, 16, f32)
    table = np.arange(16, dtype=np.int32)[None]
    for first in (0, length - 1):  # all rows at once, then the last one alone: shared out by tile and by partition
        plan.forward(
            cache,
            rows[first:],
            np.array([0, length - first], np.int32),
            block_tables=table,
            input=x[first:],
            select=rows[: length - first],
            logits=got[first:],
        )
    queries, keys, values = np.split(path.round(x)[:, None], 3, axis=2)
    want = attention(queries, keys, values, visible(rows, rows), scale=1.0)[:, 0]
    # an error of a few ulps of a score of 480 is an error of 1e-4 in its weight
    assert (np.abs(got - want) <= 1e-3 + (0 if f32 else HALF * np.abs(want))).all(), np.abs(got - want).max()
