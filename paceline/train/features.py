"""Cache the target's hidden states of its own answers on disk, once, for many training epochs.

A feature folder holds ``meta.json`` and shards. Shard ``i`` is ``features-0000i.bin``, bfloat16 rows of
``[taps * hidden | final hidden]``, one row per token, and ``features-0000i.jsonl``, one line per sequence:
``id``, ``domain``, ``tokens`` (prompt and answer), ``prompt_len``, ``row`` (first row in the shard). A shard counts
once its ``.jsonl`` exists, so an interrupted run continues with the first missing one. Several processes may work on
one folder: each takes shards that no other holds.

This module needs no PyTorch: the engine computes the features. ``feature_store`` reads them for training.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import ml_dtypes
import numpy as np
from filelock import FileLock, Timeout

from .errors import TrainError
from .regenerate import Answer

if TYPE_CHECKING:
    from paceline.models.target import TargetModel

SHARD_SEQUENCES = 512


class FeatureSource(Protocol):
    """A target that can be tapped."""

    hidden_size: int
    num_layers: int
    vocab_size: int

    def groups(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Indices of the sequences that share a pass, group by group; every index once."""

    def rows(self, sequences: Sequence[list[int]], taps: Sequence[int]) -> list[np.ndarray]:
        """Per sequence bfloat16 bits, uint16 ``[length, (len(taps) + 1) * hidden]``: outputs of the layers ``taps``
        in list order (residual stream), and the final hidden state after the norm; the head applied to that gives
        logits."""


class EngineFeatures:
    """The engine's own target: what it computes here is, bit for bit, what it hands its drafter when it generates."""

    def __init__(self, model: TargetModel) -> None:
        from paceline._native import KEYS_PER_BLOCK

        c = model.config
        self.model, self.hidden_size, self.num_layers, self.vocab_size = (
            model,
            c.hidden_size,
            c.num_layers,
            c.vocab_size,
        )
        self._block = KEYS_PER_BLOCK
        self._cache: Any = None
        self._blocks = 0
        self._norm = np.asarray(model.weights.final_norm, np.float32)
        self._eps = np.float32(c.rms_norm_eps)

    def groups(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """In order, as many as fit the rows of a pass (a longer sequence has passes of its own)."""
        return packed(lengths, self.model.max_rows)

    def rows(self, sequences: Sequence[list[int]], taps: Sequence[int]) -> list[np.ndarray]:
        """See ``FeatureSource``."""
        last = self.num_layers - 1
        layers = (*taps, last) if last not in taps else tuple(taps)
        width = self.hidden_size
        tapped = self._forward(sequences, layers)
        final = tapped[:, layers.index(last) * width :][:, :width]
        out = np.empty((len(tapped), (len(taps) + 1) * width), ml_dtypes.bfloat16)
        out[:, :-width] = tapped[:, : len(taps) * width]
        scale = 1 / np.sqrt(np.mean(np.square(final), axis=1, keepdims=True) + self._eps)
        out[:, -width:] = final * scale * self._norm
        ends = np.cumsum([len(s) for s in sequences])
        return np.split(out.view(np.uint16), ends[:-1])

    def _forward(self, sequences: Sequence[list[int]], layers: tuple[int, ...]) -> np.ndarray:
        """The residual stream behind ``layers``, fp32 ``[tokens, len(layers) * hidden]``, in one pass if it fits."""
        lengths = [len(s) for s in sequences]
        total, limit = sum(lengths), self.model.max_rows
        tapped = np.empty((total, len(layers) * self.hidden_size), np.float32)
        plan = self.model.plan(layers)
        blocks = [-(-n // self._block) for n in lengths]
        if sum(blocks) > self._blocks:
            self._blocks = max(sum(blocks), -(-limit // self._block) + 64)
            self._cache = self.model.new_cache(self._blocks)
        cache = self._cache
        tables = np.full((len(sequences), max(blocks)), -1, np.int32)
        first = 0
        for i, count in enumerate(blocks):
            tables[i, :count] = range(first, first + count)
            first += count
        if total <= limit:
            plan.forward(
                cache,
                np.concatenate([np.arange(n, dtype=np.int32) for n in lengths]),
                np.cumsum([0, *lengths]).astype(np.int32),
                tokens=np.concatenate([np.asarray(s, np.int32) for s in sequences]),
                block_tables=tables,
                taps=tapped,
            )
            return tapped
        row = 0
        for s, table in zip(sequences, tables, strict=True):
            for at in range(0, len(s), limit):
                part = np.asarray(s[at : at + limit], np.int32)
                plan.forward(
                    cache,
                    np.arange(at, at + len(part), dtype=np.int32),
                    np.array([0, len(part)], np.int32),
                    tokens=part,
                    block_tables=table[None],
                    taps=tapped[row : row + len(part)],
                )
                row += len(part)
        return tapped


def packed(lengths: Sequence[int], limit: int) -> Iterator[list[int]]:
    """Consecutive indices whose lengths sum up to at most ``limit``; a longer sequence is alone."""
    group: list[int] = []
    total = 0
    for i, length in enumerate(lengths):
        if group and total + length > limit:
            yield group
            group, total = [], 0
        group.append(i)
        total += length
    if group:
        yield group


def extract(
    source: FeatureSource,
    answers: Sequence[Answer],
    taps: Sequence[int],
    out: Path,
    *,
    shard_sequences: int = SHARD_SEQUENCES,
    meta: dict[str, Any] | None = None,
    report: Callable[[str], None] = print,
) -> None:
    """Write the features of ``answers`` under ``out``; shards already there are kept, as are those being written by
    another process. Raises TrainError for taps that the target lacks and for a folder of another kind of features."""
    bad = [t for t in taps if not 0 <= t < source.num_layers]
    if bad or len(set(taps)) != len(taps) or not taps:
        raise TrainError(f"target_layer_ids {list(taps)}: must be distinct and within 0..{source.num_layers - 1}")
    out.mkdir(parents=True, exist_ok=True)
    description = {
        **(meta or {}),
        "hidden_size": source.hidden_size,
        "num_target_layers": source.num_layers,
        "vocab_size": source.vocab_size,
        "target_layer_ids": list(taps),
        "columns": (len(taps) + 1) * source.hidden_size,
        "shard_sequences": shard_sequences,
        "sequences": len(answers),
    }
    meta_file = out / "meta.json"
    if meta_file.exists():
        old = json.loads(meta_file.read_text())
        for key in ("target_layer_ids", "hidden_size", "shard_sequences", "vocab_size"):
            if old[key] != description[key]:
                raise TrainError(
                    f"{meta_file}: {key} is {old[key]}, this run has {description[key]}; use another folder"
                )
    _replace(meta_file, json.dumps(description, indent=1))
    started, done = time.monotonic(), 0
    for number, first in enumerate(range(0, len(answers), shard_sequences)):
        index_file = out / f"features-{number:05d}.jsonl"
        part = answers[first : first + shard_sequences]
        try:
            with FileLock(index_file.with_suffix(".lock"), timeout=0):
                if index_file.exists():
                    continue
                done += _extract_shard(source, part, taps, index_file)
        except Timeout:
            continue  # another process is at it
        index_file.with_suffix(".lock").unlink(missing_ok=True)
        rate = done / (time.monotonic() - started)
        report(f"features: {first + len(part)}/{len(answers)} sequences, {rate:.0f} tokens/s")


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.partial")
    temporary.write_text(text)
    os.replace(temporary, path)


def _extract_shard(source: FeatureSource, part: Sequence[Answer], taps: Sequence[int], index_file: Path) -> int:
    rows = 0
    lines = []
    partial = index_file.with_suffix(".bin.partial")
    with partial.open("wb") as f:
        for group in source.groups([len(a.prompt) + len(a.answer) for a in part]):
            sequences = [part[i].prompt + part[i].answer for i in group]
            for i, s, bits in zip(group, sequences, source.rows(sequences, taps), strict=True):
                f.write(np.ascontiguousarray(bits).data)
                line = {"id": part[i].id, "domain": part[i].domain, "tokens": s, "prompt_len": len(part[i].prompt)}
                lines.append(json.dumps({**line, "row": rows}, separators=(",", ":")))
                rows += len(s)
    os.replace(partial, index_file.with_suffix(".bin"))
    _replace(index_file, "\n".join(lines) + "\n")
    return rows
