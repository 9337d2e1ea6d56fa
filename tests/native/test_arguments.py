"""Whatever Python hands to the native core, a wrong argument ends in an exception, and the next pass is right again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from models.tiny import Shape, write_target

from paceline import _native
from paceline.models import TargetModel, load_model
from paceline.runtime import thread_pool

from .paths import buffer, epilogue, same_bits

SHAPE = Shape()  # two layers, two kv heads of 16, vocabulary 97, hidden 40
ROWS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    folder = write_target(tmp_path_factory.mktemp("target"), SHAPE)
    return load_model(folder, dtype="float32", threads=2, max_rows=16)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def span(n: int) -> np.ndarray:
    return np.arange(n, dtype=np.int32)


def forward(model: TargetModel, *, rows: int = ROWS, taps_of: tuple[int, ...] = (), **wrong: Any) -> np.ndarray:
    """A correct pass, but for the arguments in `wrong`."""
    arguments: dict[str, Any] = {
        "cache": model.new_cache(4),
        "positions": span(rows),
        "row_starts": ints(0, rows),
        "tokens": span(rows),
        "block_tables": span(4)[None],
        "select": span(rows),
        "logits": np.empty((rows, model.vocab_size), np.float32),
    }
    arguments |= wrong
    model.plan(taps_of).forward(**arguments)
    return arguments["logits"]


def floats(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.empty(shape, dtype)


def frozen(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def tables(count: int, width: int = 4, fill: int = 0) -> np.ndarray:
    return np.full((count, width), fill, np.int32)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "more rows than max_rows": ({"rows": 17}, "rows"),
    "no rows": ({"rows": 0}, "rows"),
    "starts: only one": ({"row_starts": ints(0)}, "one per sequence"),
    "starts: empty": ({"row_starts": ints()}, "one per sequence"),
    "starts: one far outside": ({"row_starts": ints(0, 1_000_000, 4), "block_tables": tables(2)}, "row_starts"),
    "starts: negative": ({"row_starts": ints(0, -5, 4), "block_tables": tables(2)}, "row_starts"),
    "starts: an empty sequence": ({"row_starts": ints(0, 3, 3, 4), "block_tables": tables(3)}, "row_starts"),
    "starts: end early": ({"row_starts": ints(0, 3)}, "row_starts"),
    "starts: begin late": ({"row_starts": ints(1, 4)}, "row_starts"),
    "positions: negative": ({"positions": ints(-1, 0, 1, 2)}, "positions"),
    "positions: a gap": ({"positions": ints(0, 1, 3, 4)}, "positions"),
    "positions: near the largest int": ({"positions": span(4) + np.int32(2**31 - 4)}, "block_tables"),
    "positions: past the blocks": ({"positions": ints(61, 62, 63, 64)}, "block_tables"),
    "token below 0": ({"tokens": ints(0, 1, 2, -1)}, "token id -1"),
    "token past the vocabulary": ({"tokens": ints(0, 1, 2, 97)}, "token id 97"),
    "too few tokens": ({"tokens": ints(0, 1, 2)}, "tokens"),
    "no block tables": ({"block_tables": None}, "block_tables"),
    "block tables too narrow": ({"positions": ints(15, 16, 17, 18), "block_tables": tables(1, 1)}, "block_tables"),
    "block tables empty": ({"block_tables": tables(1, 0)}, "block_tables"),
    "block below 0": ({"block_tables": tables(1, fill=-1)}, "no such block"),
    "block past the cache": ({"block_tables": tables(1, fill=4)}, "no such block"),
    "a table too many": ({"block_tables": tables(2)}, "one per sequence"),
    "selected row below 0": ({"select": ints(-1)}, "selected row"),
    "selected row past the rows": ({"select": ints(4)}, "selected row"),
    "more selected rows than a pass holds": (
        {"select": np.zeros(3000, np.int32), "logits": floats(3000, 97)},
        "select",
    ),
    "no logits": ({"logits": None}, "logits"),
    "too few logits": ({"logits": floats(3, 97)}, "logits"),
    "logits too narrow": ({"logits": floats(4, 96)}, "logits"),
    "logits in fp64": ({"logits": floats(4, 97, dtype=np.float64)}, "forward"),
    "logits with gaps": ({"logits": floats(4, 194)[:, ::2]}, "forward"),
    "logits read-only": ({"logits": frozen(floats(4, 97))}, "forward"),
    "no taps": ({"taps_of": (0,)}, "taps"),
    "too few taps": ({"taps_of": (0,), "taps": floats(3, 40)}, "taps"),
    "taps too narrow": ({"taps_of": (0,), "taps": floats(4, 39)}, "taps"),
    "taps in fp64": ({"taps_of": (0,), "taps": floats(4, 40, dtype=np.float64)}, "forward"),
    "no cache": ({"cache": None}, "cache"),
    "cache of fewer layers": ({"cache": _native.KVCache(1, 2, 16, 4, True)}, "cache"),
    "cache of other heads": ({"cache": _native.KVCache(2, 4, 16, 4, True)}, "cache"),
    "cache of another head_dim": ({"cache": _native.KVCache(2, 2, 8, 4, True)}, "cache"),
    "cache of another type": ({"cache": _native.KVCache(2, 2, 16, 4, False)}, "cache"),
    "positions in two dimensions": ({"positions": tables(2, 2)}, "forward"),
    "positions as a tuple": ({"positions": (0, 1, 2, 3)}, "forward"),
    "positions that are no numbers": ({"positions": [0, 1, 2, "3"]}, "forward"),
    "positions of many bits": ({"positions": [0, 1, 2, 1 << 31]}, "forward"),
    "positions of more bits": ({"positions": [0, 1, 2, -(1 << 70)]}, "forward"),
    "no positions": ({"positions": []}, "row"),
    "no row_starts": ({"row_starts": []}, "block_tables"),
    "tokens outside the vocabulary in a list": ({"tokens": [0, 1, 2, -1]}, "token id -1"),
}


def test_lists_are_taken_like_arrays(model):
    as_lists = forward(model, positions=[0, 1, 2, 3], row_starts=[0, 4], tokens=[0, 1, 2, 3], select=[0, 1, 2, 3])
    assert (as_lists == forward(model)).all()


@pytest.mark.parametrize("name", WRONG)
def test_forward_refuses(model, name):
    before = forward(model)
    wrong, message = WRONG[name]
    with pytest.raises((ValueError, TypeError), match=message):
        forward(model, **wrong)
    assert same_bits(forward(model), before)


def test_integers_of_another_width_are_taken(model):
    wide: dict[str, Any] = {name: span(4).astype(np.int64) for name in ("positions", "tokens")}
    assert same_bits(forward(model, **wide), forward(model))


def test_a_plan_with_input_rows_needs_them():
    plan = _native.Plan(thread_pool(1), "portable", True, 8)
    taps = buffer(plan, "TAPS", 8)
    rows = buffer(plan, "F32", 8)
    plan.linear(buffer(plan, "INPUT", 8), rows, weight(8, 8), convert=True)
    plan.copy(rows, taps, 8)
    with pytest.raises(ValueError, match="input"):
        plan.forward(None, span(2), ints(0, 2), taps=floats(2, 8))
    with pytest.raises(ValueError, match="input"):
        plan.forward(None, span(2), ints(0, 2), taps=floats(2, 8), input=floats(1, 8))
    with pytest.raises(ValueError, match="input"):
        plan.forward(None, span(2), ints(0, 2), taps=floats(2, 8), input=floats(2, 7))


# ---- building plans

Build = Callable[[_native.Plan], Any]


def weight(n: int, k: int, *, f32: bool = True, gated: bool = False) -> _native.Packed:
    return _native.Packed(_native.Arena(1 << 20), n, k, f32, gated)


def attention(in_width: int = 64, out_width: int = 64, **options: Any) -> Build:
    geometry = {"layer": 0, "heads": 4, "kv_heads": 2, "head_dim": 16, "scale": 1.0} | options
    return lambda p: p.attention(buffer(p, "ACT", in_width), buffer(p, "ACT", out_width), **geometry)


def qkv_post(in_width: int = 128, out_width: int = 64, half: int = 8, **options: Any) -> Build:
    geometry = {"layer": 0, "heads": 4, "kv_heads": 2, "head_dim": 16, "rotary_dim": 16} | options

    def build(p: _native.Plan) -> None:
        cos, sin = buffer(p, "F32", half), buffer(p, "F32", 8)
        p.qkv_post(buffer(p, "F32", in_width), buffer(p, "ACT", out_width), cos, sin, **geometry)

    return build


def linear(source: str = "INPUT", out: str = "LOGITS", *, w: Any = None, width: int = 8, **options: Any) -> Build:
    arguments = {"convert": True, "selected": out == "LOGITS"} | options

    def build(p: _native.Plan) -> None:
        p.linear(buffer(p, source, width), buffer(p, out, 8), weight(8, 8) if w is None else w(), **arguments)

    return build


def copy(source: str = "F32", out: str = "TAPS", *, width: int = 8, offset: int = 0) -> Build:
    return lambda p: p.copy(buffer(p, source, 8), buffer(p, out, 1000), width, offset)


def embed(table: Any) -> Build:
    def build(p: _native.Plan) -> None:
        out = buffer(p, "F32", 8)
        p.embed_table(out, table) if isinstance(table, np.ndarray) else p.embed_packed(out, table())

    return build


def norm(source: str = "F32", width: int = 8, *, out: int = 8, **options: Any) -> Build:
    return lambda p: p.norm(buffer(p, source, 8), buffer(p, "F32", out), np.ones(width, np.float32), 1e-6, **options)


def gate(source: str = "F32", width: int = 8, offset: int = 0, out: str = "ACT") -> Build:
    return lambda p: p.gate(buffer(p, source, 12), buffer(p, out, 10), width, offset)


def softcap(out: str = "LOGITS", width: int = 8, cap: float = 1.0) -> Build:
    return lambda p: p.softcap(buffer(p, out, 8), width, 1.0, cap)


def experts(count: int = 3, top_k: int = 2, *, router: int = 3, inner: int = 5, **options: Any) -> Build:
    def build(p: _native.Plan) -> None:
        x, logits = buffer(p, "F32", 8), buffer(p, "F32", router)
        gate_up = options.get("gate_up", [weight(inner, 8, gated=True) for _ in range(count)])
        down = [weight(8, options.get("down", inner)) for _ in range(options.get("downs", count))]
        norm = np.ones(options.get("norm", 8), np.float32)
        p.experts(x, logits, x, gate_up, down, top_k, True, norm, 1e-6)

    return build


def two_sizes(p: _native.Plan) -> None:
    experts()(p)
    experts(inner=6)(p)


RIGHT: dict[str, Build] = {
    "attention": attention(),
    "norm": norm(),
    "norm that adds": norm(add=True),
    "norm of a part": norm(width=5),
    "gate": gate(offset=4),
    "softcap": softcap(),
    "softcap without a cap": softcap(cap=0.0),
    "experts": experts(),
    "experts, all of them": experts(top_k=3),
    "qkv_post": qkv_post(),
    "linear": linear(),
    "copy": copy(),
    "embed": embed(np.zeros((3, 8), np.float32)),
    "embed bf16": embed(np.zeros((3, 8), np.uint16)),
    "embed packed": embed(lambda: weight(3, 8)),
}
WRONG_PLANS: dict[str, Build] = {
    "norm: wide weight": norm(width=9),
    "norm: narrow out": norm(out=7),
    "norm: without a weight": norm(width=0),
    "norm: of activations": norm("ACT"),
    "gate: narrow in": gate(offset=5),
    "gate: negative offset": gate(offset=-1),
    "gate: narrow out": gate(width=11),
    "gate: of fp32 rows": gate(out="F32"),
    "softcap: of activations": softcap("ACT"),
    "softcap: wide": softcap(width=9),
    "softcap: negative": softcap(cap=-1.0),
    "softcap: not a number": softcap(cap=float("nan")),
    "experts: none": experts(0, router=1),
    "experts: more than there are": experts(top_k=4),
    "experts: no choice": experts(top_k=0),
    "experts: router of another width": experts(router=4),
    "experts: down of another width": experts(down=6),
    "experts: one down missing": experts(downs=2),
    "experts: norm of another size": experts(norm=7),
    "experts: plain weights": experts(gate_up=[weight(5, 8) for _ in range(3)]),
    "experts: weights of another type": experts(gate_up=[weight(5, 8, f32=False, gated=True) for _ in range(3)]),
    "experts: no weights": experts(gate_up=[1, 2, 3]),
    "experts: sparse layers of two sizes": two_sizes,
    "buffer without width": lambda p: buffer(p, "F32", 0),
    "copy of no buffer": lambda p: p.copy(0, 1, 4),
    "copy wider than its source": copy(width=900),
    "copy at a negative offset": copy(offset=-1),
    "copy past the end": copy(offset=993),
    "copy from logits": copy("LOGITS"),
    "rope with narrow buffers": lambda p: p.rope(buffer(p, "F32", 1), buffer(p, "F32", 9), np.ones(2, np.float32)),
    "attention: narrow in": attention(63),
    "attention: narrow out": attention(64, 63),
    "attention: odd head_dim": attention(head_dim=15),
    "attention: head_dim past 256": attention(2000, 2000, head_dim=258),
    "attention: no heads": attention(heads=0),
    "attention: heads that kv_heads do not divide": attention(heads=3),
    "attention: no kv heads": attention(kv_heads=0),
    "attention: negative window": attention(window=-1),
    "attention: negative first key": attention(first_key=-1),
    "qkv: narrow in": qkv_post(127),
    "qkv: narrow out": qkv_post(128, 63),
    "qkv: rotary past head_dim": qkv_post(rotary_dim=18),
    "qkv: negative rotary": qkv_post(rotary_dim=-2),
    "qkv: narrow cos": qkv_post(half=7),
    "qkv: norm of another size": qkv_post(q_norm=np.ones(15, np.float32)),
    "linear: input of another width": linear(width=9),
    "linear: logits of unselected rows": linear(selected=False),
    "linear: norm of another size": linear(norm=np.ones(7, np.float32)),
    "linear: bias of another size": linear(bias=np.ones(7, np.float32)),
    "linear: weight of another type": linear(w=lambda: weight(8, 8, f32=False)),
    "linear: gated weight, plain epilogue": linear(out="ACT", w=lambda: weight(8, 8, gated=True)),
    "linear: plain weight, gated epilogue": linear(out="ACT", epilogue=epilogue("SWIGLU")),
    "linear: too narrow out": linear(w=lambda: weight(9, 8)),
    "linear: fp32 rows not converted": linear(convert=False),
    "linear: no weight": linear(w=lambda: 3),
    "embed: wide table": embed(np.zeros((3, 9), np.float32)),
    "embed: table of integers": embed(np.zeros((3, 8), np.int32)),
    "embed: table of doubles": embed(np.zeros((3, 8))),
    "embed: gated weight": embed(lambda: weight(8, 8, gated=True)),
}


@pytest.mark.parametrize("name", RIGHT)
def test_plan_takes(name):
    RIGHT[name](_native.Plan(thread_pool(1), "portable", True, 8))


@pytest.mark.parametrize("name", WRONG_PLANS)
def test_plan_refuses(name):
    plan = _native.Plan(thread_pool(1), "portable", True, 8)
    with pytest.raises((ValueError, TypeError, RuntimeError)):
        WRONG_PLANS[name](plan)


def row_of(
    cache: _native.KVCache, layer: int, block: int, slot: int, *, dtype: Any = np.float32, width: int = 16
) -> None:
    cache.read(layer, block, slot, floats(2, width, dtype=dtype), floats(2, width, dtype=dtype))


STORAGE: dict[str, Callable[[TargetModel], Any]] = {
    "cache without layers": lambda m: _native.KVCache(0, 1, 16, 4, True),
    "cache with negative heads": lambda m: _native.KVCache(1, -1, 16, 4, True),
    "cache without head_dim": lambda m: _native.KVCache(1, 1, 0, 4, True),
    "cache without blocks": lambda m: _native.KVCache(1, 1, 16, 0, True),
    "cache beyond the address space": lambda m: _native.KVCache(100_000, 1000, 256, 2**31 - 1, True),
    "read past the slots": lambda m: row_of(m.new_cache(2), 0, 0, 16),
    "read past the blocks": lambda m: row_of(m.new_cache(2), 0, 2, 0),
    "read past the layers": lambda m: row_of(m.new_cache(2), 2, 0, 0),
    "read below 0": lambda m: row_of(m.new_cache(2), 0, -1, 0),
    "read into too little": lambda m: row_of(m.new_cache(2), 0, 0, 0, width=15),
    "read into fp64": lambda m: row_of(m.new_cache(2), 0, 0, 0, dtype=np.float64),
    "arena too small": lambda m: _native.Packed(_native.Arena(100), 10_000, 10_000, True),
    "weight of negative size": lambda m: weight(-1, 5),
    "fill with wide rows": lambda m: weight(8, 5).fill(floats(4, 6)),
    "fill past the end": lambda m: weight(8, 5).fill(floats(4, 5), 5),
    "fill before the start": lambda m: weight(8, 5).fill(floats(4, 5), -1),
    "fill the up half of a plain weight": lambda m: weight(8, 5).fill(floats(4, 5), 0, 1),
    "view inside a panel": lambda m: weight(80, 5).view(16, 16),
    "view past the end": lambda m: weight(80, 5).view(64, 32),
    "row past the end": lambda m: weight(80, 5).row(80, floats(1, 5)),
    "plan without rows": lambda m: _native.Plan(thread_pool(1), "", True, 0),
    "plan on an unknown path": lambda m: _native.Plan(thread_pool(1), "sse9", True, 4),
}


@pytest.mark.parametrize("name", STORAGE)
def test_storage_refuses(model, name):
    with pytest.raises((ValueError, TypeError, RuntimeError, MemoryError)):
        STORAGE[name](model)


def test_views_and_rows_read_what_was_filled():
    values = np.random.default_rng(0).normal(size=(70, 9)).astype(np.float32)
    packed = weight(70, 9)
    packed.fill(values[:33])
    packed.fill(values[33:], 33)
    view = packed.view(32, 38)
    for row in range(38):
        out = floats(1, 9)
        view.row(row, out)
        assert same_bits(out[0], values[32 + row])


def test_isa_can_be_forced_and_is_refused_by_name(monkeypatch):
    from paceline.errors import ConfigError
    from paceline.runtime import choose_isa

    assert choose_isa("portable") == "portable"
    monkeypatch.setenv("PACELINE_ISA", "portable")
    assert choose_isa() == "portable"
    monkeypatch.setenv("PACELINE_ISA", "neon")
    with pytest.raises(ConfigError, match="neon"):
        choose_isa()
