"""A drafter's tensors besides its layers: which rows of which head it drafts from, which embedding it reads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from paceline import _native
from paceline.errors import CheckpointError
from paceline.models.drafter_config import HEAD_ROWS_FILE, DFlashConfig
from paceline.models.network import WeightLoader, packed_bytes
from paceline.models.target import TargetModel
from paceline.weights.checkpoint import Checkpoint
from paceline.weights.quantise import Quantization, choose_format

EMBED, HEAD, MASK_FILE = "embed_tokens.weight", "lm_head.weight", "mask_embedding.pt"


def read_head_rows(folder: Path, vocab_size: int) -> np.ndarray | None:
    """Ascending target ids the drafter may propose, from the sidecar file; None: the whole vocabulary."""
    path = folder / HEAD_ROWS_FILE
    if not os.path.lexists(path):
        return None
    if not path.is_file():
        raise CheckpointError(
            f"{path}: the list of head_rows is not a file (a link to nothing, or a folder); put the file there, "
            "or remove it to draft from the whole vocabulary"
        )
    from paceline.weights.safetensors_file import SafetensorsFile

    file = SafetensorsFile(path)
    if "head_rows" not in file.entries:
        raise CheckpointError(f"{path}: there is no tensor head_rows; found {sorted(file.entries)[:5]}")
    rows = np.array(file.load("head_rows"))
    if rows.dtype.kind not in "iu":
        raise CheckpointError(f"{path}: head_rows are of type {rows.dtype}; token ids are whole numbers")
    rows = rows.astype(np.int64)
    if rows.ndim != 1 or not len(rows) or rows[0] < 0 or rows[-1] >= vocab_size or (np.diff(rows) <= 0).any():
        raise CheckpointError(f"{path}: head_rows must be ascending token ids below {vocab_size}")
    return rows.astype(np.int32)


class FiniteLoader(WeightLoader):
    """Refuses NaN and infinities by the tensor's name: a drafter with them proposes noise, and nobody notices."""

    def _load(self, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        values = super()._load(name, shape, dtype)
        if not all_finite(values):
            raise CheckpointError(
                f"{self.checkpoint.path}: tensor {name} holds values that are infinite or not numbers; "
                "the file is damaged or its training diverged: fetch it again, or use another drafter"
            )
        return values


def all_finite(values: np.ndarray) -> bool:
    """Whether a float32 or bfloat16 array has no NaN or infinity: their exponent bits are all ones.

    The largest bit pattern without its sign tells; pieces fit the cache, so that it costs one read of the tensor.
    """
    wide = values.dtype.itemsize == 4
    bits: np.ndarray[Any, np.dtype[Any]] = (
        np.ascontiguousarray(values).reshape(-1).view(np.uint32 if wide else np.uint16)
    )
    mask, limit = (0x7FFFFFFF, 0x7F800000) if wide else (0x7FFF, 0x7F80)
    step = 1 << 16
    return all(int((bits[i : i + step] & mask).max()) < limit for i in range(0, len(bits), step))


def read_draft_ids(checkpoint: Checkpoint, size: int, vocab_size: int) -> np.ndarray:
    """Target ids int64 [size] of the rows of a reduced head: `d2t` holds offsets, id = row + d2t[row].

    `t2d`, where present, must mark exactly these ids. Raises CheckpointError.
    """
    where = checkpoint.path
    if "d2t" not in checkpoint:
        raise CheckpointError(f"{where}: tensor d2t [{size}] is missing; draft_vocab_size = {size} needs it")
    offsets = checkpoint.load("d2t")
    if offsets.dtype.kind not in "iu" or offsets.shape != (size,):
        raise CheckpointError(f"{where}: d2t is {offsets.dtype} {list(offsets.shape)}, expected integers [{size}]")
    ids = np.arange(size, dtype=np.int64) + offsets.astype(np.int64)
    if ids.min() < 0 or ids.max() >= vocab_size or len(np.unique(ids)) != size:
        raise CheckpointError(f"{where}: d2t must give {size} different token ids below {vocab_size}")
    if "t2d" in checkpoint:
        marked = checkpoint.load("t2d")
        if marked.shape != (vocab_size,) or not np.array_equal(np.flatnonzero(marked), np.sort(ids)):
            raise CheckpointError(f"{where}: t2d does not mark the ids that d2t lists; one of them is wrong")
    return ids


class DraftHeads:
    """Finds a drafter's embedding and head: its own, or the target's where it has none or an equal copy.

    rows: ascending target ids int32 of the head's columns; None: all of the vocabulary.
    """

    def __init__(
        self, checkpoint: Checkpoint, c: DFlashConfig, target: TargetModel, quantization: Quantization = "none"
    ) -> None:
        self.checkpoint, self.config, self.target = checkpoint, c, target
        self.quantization = quantization
        folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
        if os.path.lexists(folder / MASK_FILE):
            raise CheckpointError(
                f"{folder / MASK_FILE}: this drafter replaces the mask token's embedding, in a PyTorch pickle; "
                "pickles are refused because loading one runs the code inside it"
            )
        vocab = target.vocab_size
        self.rows = read_head_rows(folder, vocab)
        self.order: np.ndarray | None = None  # which row of the checkpoint's reduced head each column is
        if c.draft_vocab_size is not None:
            if self.rows is not None:
                raise CheckpointError(f"{folder / HEAD_ROWS_FILE}: the checkpoint has d2t already; remove one of them")
            ids = read_draft_ids(checkpoint, c.draft_vocab_size, vocab)
            self.order = np.argsort(ids)
            self.rows = ids[self.order].astype(np.int32)
        copies = c.packaging != "z-lab"  # where there is no such tensor by definition, one is a mistake
        self.own_head = self.order is not None or (copies and self._differs(HEAD))
        self.own_embed = copies and self._differs(EMBED)

    @property
    def columns(self) -> int:
        return self.target.vocab_size if self.rows is None else len(self.rows)

    def capacity(self) -> int:
        """Packed bytes of what `head` allocates."""
        shared = self.rows is None and not self.own_head
        quantised = self.quantization != "none"
        hidden = self.config.decoder.hidden_size
        return 0 if shared else packed_bytes(self.columns, hidden, f32=self.target.f32, quantised=quantised)

    def unused(self) -> list[str]:
        """Tensors that are known and need not be packed."""
        if self.config.packaging == "z-lab":
            return ["head_rows"]
        names = ["head_rows", EMBED, HEAD]
        return names + (["d2t", "t2d"] if self.config.packaging == "speculators" else [])

    def embed(self, loader: WeightLoader) -> Any:
        if not self.own_embed:
            return self.target.weights.embed
        return loader.table(EMBED, self.target.vocab_size, self.config.decoder.hidden_size)

    def head(self, loader: WeightLoader) -> Any:
        hidden, vocab = self.config.decoder.hidden_size, self.target.vocab_size
        if self.order is not None:
            return loader.packed_rows([(HEAD, len(self.order), self.order)], hidden)
        if self.own_head:
            return loader.packed_rows([(HEAD, vocab, self.rows)], hidden)
        return self.target.weights.head if self.rows is None else self._target_rows(loader)

    def _target_rows(self, loader: WeightLoader) -> Any:
        """The chosen rows of the target's head, copied out of its packed form so that one pass streams only them."""
        source = self.target.weights.head
        assert self.rows is not None
        values = np.empty((len(self.rows), source.k), np.float32)
        for i, row in enumerate(self.rows):
            source.row(int(row), values[i : i + 1])
        if self.quantization != "none":
            return loader.quantised(values, choose_format(["F32"], self.quantization))
        weight = _native.Packed(loader.arena, len(self.rows), source.k, self.target.f32, False)
        weight.fill(values)
        return weight

    def _differs(self, name: str) -> bool:
        """Whether the checkpoint has a tensor that is not a copy of the target's, in the precision that runs.

        Frozen copies are common, and sharing one saves its memory and its traffic.
        """
        if name not in self.checkpoint:
            return False
        c, target = self.config, self.target
        theirs = "model.embed_tokens.weight"
        if name == HEAD and "lm_head.weight" in target.checkpoint:
            theirs = "lm_head.weight"
        shape = (target.vocab_size, c.decoder.hidden_size)
        if self.checkpoint.shape(name) != shape:
            found = list(self.checkpoint.shape(name))
            raise CheckpointError(f"{self.checkpoint.path}: tensor {name} has shape {found}, expected {list(shape)}")
        mine = self.checkpoint.load(name, "float32" if target.f32 else "bfloat16")
        his = target.checkpoint.load(theirs, "float32" if target.f32 else "bfloat16")
        bits = np.uint32 if target.f32 else np.uint16
        same = np.array_equal(np.ascontiguousarray(mine).view(bits), np.ascontiguousarray(his).view(bits))
        self.checkpoint.release_pages()
        target.checkpoint.release_pages()
        return not same
