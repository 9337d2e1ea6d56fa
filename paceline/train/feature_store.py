"""Feature folders as training reads them, and targets in PyTorch as another source of features."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from .target import TorchTarget


class Features(Protocol):
    """Features of many sequences. ``meta`` as in ``meta.json``; a sequence has ``id``, ``domain``, ``tokens``,
    ``prompt_len`` and ``shard``."""

    meta: dict[str, Any]
    sequences: list[dict[str, Any]]

    def rows(self, index: int) -> torch.Tensor:
        """``[length, (taps + 1) * hidden]`` bfloat16 rows of one sequence, on the device where they are kept."""


class MemoryStore:
    """Features kept in memory, on a GPU for instance: ``rows [all tokens, columns]`` of ``sequences`` one after the
    other."""

    def __init__(self, meta: dict[str, Any], sequences: list[dict[str, Any]], rows: torch.Tensor) -> None:
        self.meta, self.sequences, self._rows = meta, sequences, rows
        self._starts = np.cumsum([0, *(len(s["tokens"]) for s in sequences)])

    def __len__(self) -> int:
        return len(self.sequences)

    def rows(self, index: int) -> torch.Tensor:
        """A view of the rows of one sequence."""
        return self._rows[self._starts[index] : self._starts[index + 1]]


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


class TorchFeatures:
    """A PyTorch target as a source of features: the way on a GPU, and the reference that the engine's are tested by."""

    def __init__(self, target: TorchTarget, batch_tokens: int = 4096) -> None:
        c = target.config
        self.target, self.batch_tokens = target, batch_tokens
        self.hidden_size, self.num_layers, self.vocab_size = c.hidden_size, c.num_layers, c.vocab_size

    def groups(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        return batches_by_length(lengths, self.batch_tokens)

    def tensors(self, sequences: Sequence[list[int]], taps: Sequence[int]) -> torch.Tensor:
        """bfloat16 ``[sequences, longest, (len(taps) + 1) * hidden]`` on the target's device, padded on the right."""
        ids = torch.zeros(len(sequences), max(map(len, sequences)), dtype=torch.long)
        for r, s in enumerate(sequences):
            ids[r, : len(s)] = torch.tensor(s)
        tapped, final = self.target.forward(ids.to(self.target.device), taps)
        return torch.cat([t.to(torch.bfloat16) for t in (*tapped, final)], dim=-1)

    def rows(self, sequences: Sequence[list[int]], taps: Sequence[int]) -> list[np.ndarray]:
        """See ``FeatureSource``."""
        padded = self.tensors(sequences, taps).cpu().view(torch.int16).numpy().view(np.uint16)
        return [padded[r, : len(s)] for r, s in enumerate(sequences)]
