"""An int8 key/value cache: what is stored, attention over it, and rows that depend on no other row, on every path."""

from __future__ import annotations

from pathlib import Path as FilePath
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models.reference import attention, visible
from models.tiny import Shape, config_of, tensors_of, write

from paceline import _native

from .paths import Path, buffer, every_path, normal
from .test_invariance import POISON, QUICK, Batch, check_partitions
from .test_kernels import HALF, read_cache


def rounded(x: np.ndarray) -> np.ndarray:
    """fp32 [..., dim] as an int8 cache holds it: a scale per vector, its largest magnitude 127."""
    x = x.astype(np.float32)
    top = np.abs(x).max(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        inverse = np.where(top < np.float32(2.0**-100), np.float32(0), np.float32(127) / top).astype(np.float32)
    return (top / np.float32(127)) * np.rint(x * inverse)


def layer(path: Path, heads: int, kv_heads: int, dim: int, max_rows: int = 64, **options: Any) -> _native.Plan:
    """INPUT rows of queries, keys and values -> LOGITS: the mix of their attention."""
    width = (heads + 2 * kv_heads) * dim
    plan = path.plan(max_rows)
    source, qkv = buffer(plan, "INPUT", width), buffer(plan, "F32", width)
    q, mix = buffer(plan, "ACT", heads * dim), buffer(plan, "ACT", heads * dim)
    out = buffer(plan, "LOGITS", heads * dim)
    cos, sin = buffer(plan, "F32", 1), buffer(plan, "F32", 1)
    geometry = {"layer": 0, "heads": heads, "kv_heads": kv_heads, "head_dim": dim}
    plan.rope(cos, sin, np.zeros(1, np.float32))  # no rotation
    plan.linear(source, qkv, path.identity(width), convert=True)
    plan.qkv_post(qkv, q, cos, sin, **geometry, rotary_dim=2)
    plan.attention(q, mix, **geometry, **options)
    plan.linear(mix, out, path.identity(heads * dim), selected=True)
    return plan


def run(plan: _native.Plan, cache: _native.KVCache, table: np.ndarray, x: np.ndarray, start: int, end: int, width: int):
    got = np.empty((end - start, width), np.float32)
    plan.forward(
        cache,
        np.arange(start, end, dtype=np.int32),
        np.array([0, end - start], np.int32),
        block_tables=table[None],
        input=x[start:end],
        select=np.arange(end - start, dtype=np.int32),
        logits=got,
    )
    return got


CASES = [
    # heads, kv_heads, head_dim, causal, window, softcap
    (3, 1, 8, True, 0, 0.0),
    (4, 4, 34, True, 0, 0.0),
    (9, 3, 64, True, 70, 0.0),
    (7, 1, 40, True, 5, 30.0),
    (6, 2, 14, False, 0, 0.0),
    (2, 2, 128, False, 33, 0.0),
    (2, 1, 256, True, 0, 0.0),
]


@every_path
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"h{c[0]}-{c[1]}x{c[2]}-{'causal' if c[3] else 'both'}-w{c[4]}")
def test_what_is_stored_and_attention_over_it(isa, f32, case):
    """Keys and values exactly as defined; the mix against exact attention over them and queries rounded alike."""
    heads, kv_heads, dim, causal, window, softcap = case
    path = Path(isa, f32, threads=3 if heads == 3 else 1)
    width, scale = heads * dim, 1.5 * dim**-0.5
    plan = layer(path, heads, kv_heads, dim, scale=scale, causal=causal, window=window, softcap=softcap)
    cache = _native.KVCache(1, kv_heads, dim, 16, f32, True)
    table = np.random.default_rng(1).permutation(16)[:13].astype(np.int32)
    x = normal(15, 200, (heads + 2 * kv_heads) * dim).copy()
    x[5], x[77, : 2 * dim], x[150] = 0.0, 1e-35, 8 * x[150]  # no scale, a tiny one, a large one
    exact_x = path.round(x).astype(np.float32).reshape(200, heads + 2 * kv_heads, dim)
    keys, values = rounded(exact_x[:, heads : heads + kv_heads]), rounded(exact_x[:, heads + kv_heads :])
    queries = rounded(exact_x[:, :heads])
    start = 0
    for rows in (40, 1, 16, 7, 33, 2, 25, 40, 12, 8, 3, 1, 12):
        end = start + rows
        got = run(plan, cache, table, x, start, end, width)
        positions = np.arange(start, end)
        allowed = visible(positions, np.arange(end), causal=causal, window=window)
        want = attention(queries[start:end], keys[:end], values[:end], allowed, scale=scale, softcap=softcap)
        want = want.reshape(rows, -1)
        slack = 2e-5 * max(1.0, np.abs(values[:end]).max()) + (0 if f32 else HALF * np.abs(want))
        assert (np.abs(got - want) <= slack).all(), (start, rows, np.abs(got - want).max())
        start = end
    stored = read_cache(cache, 0, table, 200, kv_heads, dim)
    np.testing.assert_array_equal(stored[0], keys)
    np.testing.assert_array_equal(stored[1], values)


@every_path
def test_what_is_not_finite_stays_visible(isa, f32):
    """A NaN or infinity in a query, key or value reaches the rows that see it, and no row before."""
    dim = 16
    plan = layer(Path(isa, f32), 1, 1, dim, scale=1.0)
    for bad in (np.nan, np.inf):
        for part in range(3):
            x = normal(3, 20, 3 * dim).copy()
            x[7, part * dim + 3] = bad
            cache = _native.KVCache(1, 1, dim, 2, f32, True)
            table = np.arange(2, dtype=np.int32)
            got = run(plan, cache, table, x, 0, 7, dim), run(plan, cache, table, x, 7, 20, dim)
            assert np.isfinite(got[0]).all()
            assert not np.isfinite(got[1][0]).any()
            assert part == 0 or not np.isfinite(got[1]).any()


def test_half_the_bytes():
    """64 values of a head and two scales in 68 bytes each, where bf16 takes 128."""
    half, full = (_native.KVCache(30, 3, 64, 1, False, int8).bytes_per_block for int8 in (True, False))
    assert (half, full) == (30 * 3 * 16 * 2 * 68, 30 * 3 * 16 * 2 * 128)


def test_heads_that_are_too_narrow_are_refused():
    with pytest.raises(ValueError, match="8 values or more"):
        _native.KVCache(1, 1, 6, 4, False, True)


SHAPES = {
    "llama": Shape(hidden=40, inner=72, heads=4, kv_heads=2, head_dim=16),
    "one-kv-head": Shape("qwen2", vocab=131, hidden=33, inner=49, heads=7, kv_heads=1, head_dim=14, tied=True, seed=3),
    "windows": Shape(
        "qwen3", vocab=64, hidden=54, inner=35, layers=3, heads=3, kv_heads=3, head_dim=34, window=21, sliding=(0, 2)
    ),
    "wide-heads": Shape(vocab=33, hidden=70, inner=40, layers=1, heads=2, kv_heads=1, head_dim=256),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, FilePath]:
    out = {}
    for name, shape in SHAPES.items():
        tensors = tensors_of(shape)
        if not shape.tied:
            tensors["model.embed_tokens.weight"][POISON] = np.nan  # stale blocks hold scales that are none
        out[name] = write(tmp_path_factory.mktemp(name), config_of(shape), tensors)
    return out


def check(folders: dict[str, FilePath], isa: str, kind: str, threads: list[int], data: st.DataObject, steps: int):
    name = data.draw(st.sampled_from(sorted(SHAPES)), label="model")
    batch = Batch(folders[name], isa, kind, data.draw(st.sampled_from(threads), label="threads"), data)
    for _ in range(steps):
        batch.step()
    batch.check_cache()


@every_path
@settings(QUICK, max_examples=4)
@given(data=st.data())
def test_any_batch_keeps_every_bit(folders, isa, f32, data):
    check(folders, isa, "float32, int8 cache" if f32 else "int4, int8 cache", [1, 1, 2, 3], data, steps=6)


@pytest.mark.slow
@every_path
@settings(QUICK, max_examples=60)
@given(data=st.data())
def test_any_batch_keeps_every_bit_at_length(folders, isa, f32, data):
    kinds = ["float32, int8 cache"] if f32 else ["none, int8 cache", "int8, int8 cache", "int4, int8 cache"]
    check(folders, isa, data.draw(st.sampled_from(kinds)), [1, 1, 2, 3, 5], data, steps=16)


@every_path
def test_partitions_shared_out_among_threads(folders, isa, f32):
    kind = "float32, int8 cache" if f32 else "none, int8 cache"
    check_partitions(folders["one-kv-head"], isa, kind, threads=3)
