"""Invariant 1: a row's result does not depend on the rows it shares a pass with, on where its blocks lie, on threads.

Every text runs once alone, one row per pass on one thread. Then the same texts run in ragged batches that hypothesis
draws: any chunks, drafts that are taken back, neighbours, scattered and reused blocks, several threads. Logits, taps
and stored keys and values must keep every bit.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from models.tiny import Shape, config_of, tensors_of, write

from paceline import _native
from paceline.models import TargetModel, load_model

from .paths import every_path, every_quantised_path, same_bits

MAX_ROWS = 64
LENGTH = 170  # three partitions of 64 keys
TEXTS = 3
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SHAPES = {
    "llama": Shape(hidden=40, inner=72, heads=4, kv_heads=2, head_dim=16),
    "one-kv-head": Shape(
        "qwen2", vocab=131, hidden=33, inner=49, heads=7, kv_heads=1, head_dim=6, tied=True, seed=3
    ),
    "windows": Shape(
        "qwen3", vocab=64, hidden=54, inner=35, layers=3, heads=3, kv_heads=3, head_dim=34, window=21, sliding=(0, 2)
    ),
    "wide-heads": Shape(
        vocab=33, hidden=70, inner=40, layers=1, heads=2, kv_heads=1, head_dim=256, bias=True, mlp_bias=True,
        rope={"rope_scaling": LLAMA3},
    ),
    "tiled-heads": Shape(
        "qwen3", vocab=64, hidden=54, inner=35, layers=2, heads=6, kv_heads=2, head_dim=96, window=21, sliding=(0,)
    ),
    "narrow": Shape(vocab=200, hidden=10, inner=7, heads=5, kv_heads=5, head_dim=2),
}  # fmt: skip
POISON = 0  # this token's embedding is NaN where the head is untied: neighbours and stale blocks are full of it


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = {}
    for name, shape in SHAPES.items():
        tensors = tensors_of(shape)
        if not shape.tied:
            tensors["model.embed_tokens.weight"][POISON] = np.nan
        out[name] = write(tmp_path_factory.mktemp(name), config_of(shape), tensors)
    return out


@functools.cache
def open_model(folder: Path, isa: str, f32: bool | str, threads: int) -> TargetModel:
    """f32: whether the weights are fp32, bf16 otherwise; or how they are quantised; ", int8 cache" may follow."""
    kind, _, cache = f32.partition(", ") if isinstance(f32, str) else ("float32" if f32 else "none", "", "")
    options: Any = {"kv_cache_dtype": "int8" if cache else "auto"}
    options |= {"dtype": "float32"} if kind == "float32" else {"quantization": kind}
    return load_model(folder, isa=isa, threads=threads, max_rows=MAX_ROWS, **options)


@functools.cache
def text(vocab: int, index: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(index).integers(1, vocab, LENGTH).tolist())


@dataclass
class Alone:
    """What one text gives on its own."""

    logits: np.ndarray
    taps: np.ndarray
    stored: np.ndarray  # [layers, length, 2 * kv_heads * head_dim]


def taps_of(model: TargetModel) -> tuple[int, ...]:
    return tuple(range(model.config.num_layers - 1, -2, -1))


def stored_rows(model: TargetModel, cache: _native.KVCache, table: np.ndarray, length: int) -> np.ndarray:
    c = model.config
    width = c.num_kv_heads * c.head_dim
    out = np.empty((c.num_layers, length, 2, 1, width), np.float32)
    for layer in range(c.num_layers):
        for at in range(length):
            cache.read(layer, int(table[at // 16]), at % 16, *out[layer, at])
    return out.reshape(c.num_layers, length, 2 * width)


@functools.cache
def alone(folder: Path, isa: str, f32: bool | str, index: int) -> Alone:
    model = open_model(folder, isa, f32, 1)
    taps = taps_of(model)
    tokens = text(model.vocab_size, index)
    blocks = -(-LENGTH // 16)
    cache, table = model.new_cache(blocks), np.arange(blocks, dtype=np.int32)
    logits = np.empty((LENGTH, model.vocab_size), np.float32)
    tapped = np.empty((LENGTH, len(taps) * model.config.hidden_size), np.float32)
    for at, token in enumerate(tokens):
        model.plan(taps).forward(
            cache,
            np.array([at], np.int32),
            np.array([0, 1], np.int32),
            tokens=np.array([token], np.int32),
            block_tables=table[None],
            select=np.array([0], np.int32),
            logits=logits[at : at + 1],
            taps=tapped[at : at + 1],
        )
    assert not np.isnan(tapped).any()
    return Alone(logits, tapped, stored_rows(model, cache, table, LENGTH))


@dataclass
class Lane:
    """A sequence of a batch: rows computed so far, its blocks."""

    index: int
    table: np.ndarray
    done: int = 0


counts = st.one_of(st.integers(0, 9), st.integers(0, 40), st.sampled_from([1, 15, 16, 17, 31, 32, 33, 40]))


class Batch:
    """Runs what hypothesis draws, and compares every committed row with the text alone."""

    def __init__(self, folder: Path, isa: str, f32: bool | str, threads: int, data: st.DataObject) -> None:
        self.model = open_model(folder, isa, f32, threads)
        self.alone = [alone(folder, isa, f32, i) for i in range(TEXTS)]
        self.data = data
        self.taps = taps_of(self.model)
        self.rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30), label="seed"))
        lanes = data.draw(st.integers(1, 4), label="sequences")
        each = -(-(LENGTH + 40) // 16)
        self.cache = self.model.new_cache(lanes * each + 3)
        order = self.rng.permutation(self.cache.blocks).astype(np.int32)
        self._fill_with_stale_rows()
        self.lanes = [Lane(i % TEXTS, order[i * each : (i + 1) * each]) for i in range(lanes)]

    def _fill_with_stale_rows(self) -> None:
        """Every block is used: it held another sequence, whose values are NaN where the model allows."""
        for first in range(0, self.cache.blocks, MAX_ROWS // 16):
            table = np.arange(first, min(self.cache.blocks, first + MAX_ROWS // 16), dtype=np.int32)
            rows = len(table) * 16
            self.model.plan().forward(
                self.cache,
                np.arange(rows, dtype=np.int32),
                np.array([0, rows], np.int32),
                tokens=np.full(rows, POISON, np.int32),
                block_tables=table[None],
            )

    def step(self) -> None:
        """One pass: per sequence some committed rows and some drafts that will be taken back."""
        tokens: list[int] = []
        positions: list[int] = []
        starts = [0]
        parts: list[tuple[Lane, int, int]] = []
        for lane in self.lanes:
            room = MAX_ROWS - len(tokens)
            rows = min(self.data.draw(counts), room, LENGTH - lane.done)
            if rows <= 0:
                continue
            drafts = min(self.data.draw(st.sampled_from([0, 0, 0, 1, 7])), room - rows)
            known = text(self.model.vocab_size, lane.index)[lane.done : lane.done + rows]
            parts.append((lane, rows, len(tokens)))
            tokens += [*known, *self.rng.integers(1, self.model.vocab_size, drafts).tolist()]
            positions += range(lane.done, lane.done + rows + drafts)
            starts.append(len(tokens))
        if not tokens:
            return
        note(f"pass: {[(lane.index, lane.done, rows) for lane, rows, _ in parts]}, row starts {starts}")
        self._forward(tokens, positions, starts, parts)
        for lane, rows, _ in parts:
            lane.done += rows

    def _forward(self, tokens: Any, positions: Any, starts: Any, parts: list[tuple[Lane, int, int]]) -> None:
        total, model = len(tokens), self.model
        select = self.rng.permutation(total)[: self.data.draw(st.integers(1, total))].astype(np.int32)
        logits = np.full((len(select), model.vocab_size), np.nan, np.float32)
        taps = np.full((total, len(self.taps) * model.config.hidden_size), np.nan, np.float32)
        model.plan(self.taps).forward(
            self.cache,
            np.array(positions, np.int32),
            np.array(starts, np.int32),
            tokens=np.array(tokens, np.int32),
            block_tables=np.array([lane.table for lane, _, _ in parts]),
            select=select,
            logits=logits,
            taps=taps,
        )
        row_of = {int(row): i for i, row in enumerate(select)}
        for lane, rows, at in parts:
            want = self.alone[lane.index]
            span = slice(lane.done, lane.done + rows)
            assert same_bits(taps[at : at + rows], want.taps[span]), f"taps of text {lane.index} at {span}"
            for i in range(rows):
                if at + i in row_of:
                    got = logits[row_of[at + i]]
                    assert same_bits(got, want.logits[lane.done + i]), f"logits of text {lane.index}, {lane.done + i}"

    def check_cache(self) -> None:
        for lane in self.lanes:
            got = stored_rows(self.model, self.cache, lane.table, lane.done)
            want = self.alone[lane.index].stored[:, : lane.done]
            assert same_bits(got, want), f"cache of text {lane.index}"


def check(
    folders: dict[str, Path], isa: str, f32: bool | str, threads: list[int], data: st.DataObject, steps: int
) -> None:
    name = data.draw(st.sampled_from(sorted(SHAPES)), label="model")
    count = data.draw(st.sampled_from(threads), label="threads")
    batch = Batch(folders[name], isa, f32, count, data)
    for _ in range(steps):
        batch.step()
    batch.check_cache()


# No shrinking: it takes minutes here, and the passes that the notes list say enough.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
QUICK = settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck), phases=PHASES)


@every_path
@settings(QUICK)
@given(data=st.data())
def test_any_batch_keeps_every_bit(folders, isa, f32, data):
    check(folders, isa, f32, [1, 1, 1, 1, 2, 3], data, steps=6)


@every_quantised_path
@settings(QUICK, max_examples=3)
@given(data=st.data())
def test_any_batch_keeps_every_bit_with_quantised_weights(folders, isa, quantization, data):
    check(folders, isa, quantization, [1, 1, 2, 3], data, steps=6)


@pytest.mark.slow
@every_quantised_path
@settings(QUICK, max_examples=80)
@given(data=st.data())
def test_any_batch_keeps_every_bit_with_quantised_weights_at_length(folders, isa, quantization, data):
    check(folders, isa, quantization, [1, 1, 2, 3, 5], data, steps=16)


@pytest.mark.slow
@every_path
@settings(QUICK, max_examples=150)
@given(data=st.data())
def test_any_batch_keeps_every_bit_at_length(folders, isa, f32, data):
    check(folders, isa, f32, [1, 1, 2, 3, 5], data, steps=16)


@every_path
@pytest.mark.parametrize("name", SHAPES)
def test_every_row_count_behind_a_long_context(folders, isa, f32, name):
    """1 to 40 rows from position 129 on: three partitions, and every tile shape of the matrix products."""
    start = 129
    model, want = open_model(folders[name], isa, f32, 1), alone(folders[name], isa, f32, 0)
    tokens = np.array(text(model.vocab_size, 0), np.int32)
    blocks = -(-LENGTH // 16)
    cache, table = model.new_cache(blocks), np.arange(blocks, dtype=np.int32)[None]

    def forward(first: int, rows: int) -> np.ndarray:
        logits = np.empty((rows, model.vocab_size), np.float32)
        model.plan().forward(
            cache,
            np.arange(first, first + rows, dtype=np.int32),
            np.array([0, rows], np.int32),
            tokens=tokens[first : first + rows],
            block_tables=table,
            select=np.arange(rows, dtype=np.int32),
            logits=logits,
        )
        return logits

    for first in range(0, start, 43):
        assert same_bits(forward(first, 43), want.logits[first : first + 43])
    for rows in range(1, 41):
        assert same_bits(forward(start, rows), want.logits[start : start + rows]), f"{rows} rows"


def check_partitions(folder: Path, isa: str, f32: bool | str, threads: int) -> None:
    want, model = alone(folder, isa, f32, 1), open_model(folder, isa, f32, threads)
    tokens = np.array(text(model.vocab_size, 1), np.int32)
    blocks = -(-LENGTH // 16)
    cache, table = model.new_cache(blocks), np.arange(blocks, dtype=np.int32)[None]
    for first, end in ((0, 60), (60, 120), (120, 150), (150, 158), (158, 159), (159, 160), (160, LENGTH)):
        logits = np.empty((end - first, model.vocab_size), np.float32)
        model.plan().forward(
            cache,
            np.arange(first, end, dtype=np.int32),
            np.array([0, end - first], np.int32),
            tokens=tokens[first:end],
            block_tables=table,
            select=np.arange(end - first, dtype=np.int32),
            logits=logits,
        )
        assert same_bits(logits, want.logits[first:end]), (threads, first, end)


@every_path
def test_partitions_shared_out_among_threads(folders, isa, f32):
    """Few heads on several threads: attention is split by partition and folded afterwards, to the same bits."""
    check_partitions(folders["one-kv-head"], isa, f32, threads=3)


@pytest.mark.slow
@every_path
@pytest.mark.parametrize("threads", [2, 3, 5, 8])
@pytest.mark.parametrize("name", SHAPES)
def test_partitions_shared_out_among_any_threads(folders, isa, f32, name, threads):
    check_partitions(folders[name], isa, f32, threads)
