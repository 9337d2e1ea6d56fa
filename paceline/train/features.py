"""Cache the target's hidden states of its own answers on disk, once, for many training epochs.

A feature folder holds ``meta.json`` and shards. Shard ``i`` is ``features-0000i.bin``, bfloat16 rows of
``[taps * hidden | final hidden]``, one row per token, and ``features-0000i.jsonl``, one line per sequence:
``id``, ``domain``, ``tokens`` (prompt and answer), ``prompt_len``, ``row`` (first row in the shard). A shard counts
once its ``.jsonl`` exists, so an interrupted run continues with the first missing one.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .errors import TrainError
from .regenerate import Answer, usable
from .target import TorchTarget

__all__ = ["Answer", "FeatureStore", "batches_by_length", "extract", "usable"]

SHARD_SEQUENCES = 512


def batches_by_length(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Indices grouped by similar length so that each padded batch has at most ``max_tokens`` tokens (or one row)."""
    group: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda j: (lengths[j], j)):
        if group and lengths[i] * (len(group) + 1) > max_tokens:
            yield group
            group = []
        group.append(i)
    if group:
        yield group


def extract(
    target: TorchTarget,
    answers: Sequence[Answer],
    taps: Sequence[int],
    out: Path,
    *,
    batch_tokens: int = 4096,
    shard_sequences: int = SHARD_SEQUENCES,
    meta: dict[str, Any] | None = None,
    report: Callable[[str], None] = print,
) -> None:
    """Write the features of ``answers`` under ``out``; shards already there are kept.

    Each row holds the outputs of layers ``taps`` and the final hidden state, in bfloat16.
    """
    c = target.config
    bad = [t for t in taps if not 0 <= t < c.num_layers]
    if bad or len(set(taps)) != len(taps):
        raise TrainError(f"target_layer_ids {list(taps)}: must be distinct and within 0..{c.num_layers - 1}")
    out.mkdir(parents=True, exist_ok=True)
    description = {
        **(meta or {}),
        "hidden_size": c.hidden_size,
        "num_target_layers": c.num_layers,
        "vocab_size": c.vocab_size,
        "target_layer_ids": list(taps),
        "columns": (len(taps) + 1) * c.hidden_size,
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
    meta_file.write_text(json.dumps(description, indent=1))
    started, done = time.monotonic(), 0
    for number, first in enumerate(range(0, len(answers), shard_sequences)):
        index_file = out / f"features-{number:05d}.jsonl"
        if index_file.exists():
            continue
        part = answers[first : first + shard_sequences]
        done += _extract_shard(target, part, taps, index_file, batch_tokens)
        rate = done / (time.monotonic() - started)
        report(f"features: {first + len(part)}/{len(answers)} sequences, {rate:.0f} tokens/s")


def _extract_shard(
    target: TorchTarget, part: Sequence[Answer], taps: Sequence[int], index_file: Path, batch_tokens: int
) -> int:
    rows = 0
    lines = []
    partial = index_file.with_suffix(".bin.partial")
    with partial.open("wb") as f:
        for group in batches_by_length([len(a.prompt) + len(a.answer) for a in part], batch_tokens):
            sequences = [part[i].prompt + part[i].answer for i in group]
            ids = torch.zeros(len(group), max(map(len, sequences)), dtype=torch.long)
            for r, s in enumerate(sequences):
                ids[r, : len(s)] = torch.tensor(s)
            tapped, final = target.forward(ids.to(target.device), taps)
            rows_of = torch.cat([t.to(torch.bfloat16) for t in (*tapped, final)], dim=-1).cpu()
            for r, (i, s) in enumerate(zip(group, sequences, strict=True)):
                f.write(rows_of[r, : len(s)].contiguous().view(torch.int16).numpy().tobytes())
                line = {"id": part[i].id, "domain": part[i].domain, "tokens": s, "prompt_len": len(part[i].prompt)}
                lines.append(json.dumps({**line, "row": rows}, separators=(",", ":")))
                rows += len(s)
    os.replace(partial, index_file.with_suffix(".bin"))
    temporary = index_file.with_suffix(".jsonl.partial")
    temporary.write_text("\n".join(lines) + "\n")
    os.replace(temporary, index_file)
    return rows


class FeatureStore:
    """Random access to a feature folder. ``len()`` is the number of sequences in the shards that are complete."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.meta: dict[str, Any] = json.loads((folder / "meta.json").read_text())
        self.sequences: list[dict[str, Any]] = []
        self._maps: dict[int, np.ndarray] = {}
        for index_file in sorted(folder.glob("features-*.jsonl")):
            shard = int(index_file.stem.split("-")[1])
            columns = self.meta["columns"]
            self._maps[shard] = np.memmap(index_file.with_suffix(".bin"), dtype=np.int16, mode="r").reshape(-1, columns)
            for line in index_file.read_text().splitlines():
                self.sequences.append({**json.loads(line), "shard": shard})
        self.sequences.sort(key=lambda s: (s["shard"], s["id"]))

    def __len__(self) -> int:
        return len(self.sequences)

    def rows(self, index: int) -> torch.Tensor:
        """``[length, (taps + 1) * hidden]`` bfloat16 rows of one sequence (a copy)."""
        s = self.sequences[index]
        view = self._maps[s["shard"]][s["row"] : s["row"] + len(s["tokens"])]
        return torch.from_numpy(np.array(view)).view(torch.bfloat16)
