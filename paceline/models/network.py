"""Builds native plans from named weights: the vocabulary in which model files describe their networks."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from paceline import _native
from paceline.errors import CheckpointError
from paceline.weights.checkpoint import Checkpoint
from paceline.weights.quantise import NAMES, STORED, Conversions, Quantization, choose_format, quantise, quantised_rows

PANEL = 32
PIECE_BYTES = 64 << 20  # of a tensor that are packed before what was read of its file is released


def packed_bytes(n: int, k: int, *, f32: bool, gated: bool = False, quantised: bool = False) -> int:
    """Bytes of a packed [n, k] weight (gated: two of them), the arena's page rounding included.

    quantised: at most, whichever format it gets.
    """
    panels = -(-n // PANEL) * (2 if gated else 1)
    size = panels * (k if f32 else -(-k // 2)) * 128
    if quantised:
        widest = (_native.Quant.INT8, _native.Quant.INT8_CHANNEL)
        size = max(size, *(_native.packed_quant_bytes(quant, n, k, gated) for quant in widest))
    return size + 4096


class WeightLoader:
    """Reads tensors of a checkpoint into packed weights, several at a time, checking every shape.

    At most `workers` tensors are unpacked at once, so peak memory stays near the packed size.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        f32: bool,
        capacity: int,
        workers: int,
        quantization: Quantization = "none",
    ) -> None:
        self.checkpoint = checkpoint
        self.f32 = f32
        self.quantization = quantization
        self.conversions = Conversions()
        self.formats: dict[str, int] = {}  # bytes of packed matrices by what they are stored as in memory
        self.elements = 0  # of packed matrices: the multiplications of a row
        self.arena = _native.Arena(capacity)
        self._pool = ThreadPoolExecutor(max_workers=max(1, workers))
        self._jobs: list[Future[None]] = []
        self.used: set[str] = set()

    def vector(self, name: str, size: int) -> np.ndarray:
        """A norm weight or bias as fp32 [size]."""
        return np.ascontiguousarray(self._load(name, (size,), "float32"))

    def packed(self, parts: Sequence[tuple[str, int]], k: int, *, gated: bool = False) -> Any:
        """Matrices [n_i, k] stacked along their rows; gated: exactly two of equal size, gate and up."""
        n = parts[0][1] if gated else sum(rows for _, rows in parts)
        for name, rows in parts:
            self._expect(name, (rows, k))
        quant = choose_format([self.checkpoint.stored_dtype(name) for name, _ in parts], self.quantization)
        weight = self._new(n, k, gated, quant)
        row = 0
        for index, (name, rows) in enumerate(parts):
            job = self._pool.submit(self._fill, weight, name, (rows, k), 0 if gated else row, index if gated else 0)
            self._jobs.append(job)
            row += rows
        return weight

    def packed_rows(self, parts: Sequence[tuple[str, int, np.ndarray | None]], k: int) -> Any:
        """Like `packed`, of matrices (name, rows) of which the rows listed are taken, in that order (None: all)."""
        for name, rows, _ in parts:
            self._expect(name, (rows, k))
        quant = choose_format([self.checkpoint.stored_dtype(name) for name, *_ in parts], self.quantization)
        sizes = [rows if order is None else len(order) for _, rows, order in parts]
        weight, row = self._new(sum(sizes), k, False, quant), 0
        for (name, rows, order), size in zip(parts, sizes, strict=True):
            self._jobs.append(self._pool.submit(self._fill, weight, name, (rows, k), row, 0, order))
            row += size
        return weight

    def _new(self, n: int, k: int, gated: bool, quant: Any | None) -> Any:
        weight = _native.Packed(self.arena, n, k, self.f32, gated, quant or _native.Quant.NONE)
        kind = NAMES[quant] if quant else "float32" if self.f32 else "bfloat16"
        self.formats[kind] = self.formats.get(kind, 0) + weight.nbytes
        self.elements += n * k * (2 if gated else 1)
        return weight

    def quantised(self, values: np.ndarray, quant: Any) -> Any:
        """fp32 [n, k], not of the checkpoint, packed in a format."""
        n, k = values.shape
        weight = self._new(n, k, False, quant)
        weight.fill_quant(quantise(values, quant)[0])
        return weight

    def table(self, name: str, n: int, k: int) -> Any:
        """An embedding table [n, k]: packed as it is where a quantised file may stay so, else left in memory as fp32
        or bf16 bits (uint16)."""
        self._expect(name, (n, k))
        stored = self.checkpoint.stored_dtype(name)
        if self.quantization != "none" and stored in STORED:
            weight = _native.Packed(self.arena, n, k, False, False, STORED[stored])
            weight.fill_quant(self.checkpoint.blocks(name))
            return weight
        values = np.ascontiguousarray(self._load(name, (n, k), "float32" if self.f32 else "bfloat16"))
        return values if self.f32 else values.view(np.uint16)

    def array(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """A small tensor as fp32, not packed."""
        return self._load(name, shape, "float32")

    def packed_array(self, values: np.ndarray) -> Any:
        """An fp32 matrix [n, k] packed in the loader's precision."""
        weight = _native.Packed(self.arena, len(values), values.shape[1], self.f32, False)
        weight.fill(np.ascontiguousarray(values, np.float32))
        return weight

    def refuse_unused(self, also: Sequence[str] = ()) -> None:
        """Tensors nothing asked for belong to another network than the config describes. Raises CheckpointError."""
        known = self.used | set(also)
        extra = sorted(n for n in self.checkpoint.names() if n not in known and not n.endswith("rotary_emb.inv_freq"))
        if extra:
            raise CheckpointError(
                f"{self.checkpoint.path}: tensor {extra[0]} and {len(extra) - 1} more have no place in this network; "
                "its config lacks what they belong to, or it is of another kind"
            )

    def finish(self) -> None:
        """Wait until everything is packed. Raises what a reader raised."""
        try:
            for job in self._jobs:
                job.result()
        finally:
            self._pool.shutdown(cancel_futures=True)

    def _fill(
        self,
        weight: Any,
        name: str,
        shape: tuple[int, int],
        row: int,
        part: int,
        order: np.ndarray | None = None,
    ) -> None:
        if weight.quant != _native.Quant.NONE:
            blocks = quantised_rows(self.checkpoint, name, weight.quant, self.conversions)
            weight.fill_quant(blocks if order is None else np.ascontiguousarray(blocks[order]), row, part)
            self.checkpoint.release_pages()
            return
        values = self._load(name, shape, "float32" if self.f32 else "bfloat16")
        if order is not None:
            values = values[order]
        step = max(1, PIECE_BYTES // (values.itemsize * shape[1]))
        for first in range(0, len(values), step):  # a vocabulary's matrix takes gigabytes
            self._put(weight, values[first : first + step], row + first, part)
            self.checkpoint.release_pages()

    def _put(self, weight: Any, values: np.ndarray, row: int, part: int) -> None:
        values = np.ascontiguousarray(values)
        if self.f32:
            weight.fill(values, row, part)
        else:
            weight.fill_bf16(values.view(np.uint16), row, part)

    def _expect(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self.checkpoint:
            raise CheckpointError(
                f"{self.checkpoint.path}: tensor {name} {list(shape)} is missing; the file is not a whole model"
            )
        self.used.add(name)
        found = self.checkpoint.shape(name)
        if tuple(found) != shape:
            raise CheckpointError(
                f"{self.checkpoint.path}: tensor {name} has shape {list(found)}, its config says {list(shape)}"
            )

    def _load(self, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        self._expect(name, shape)
        return self.checkpoint.load(name, dtype)


class Network:
    """A native plan under construction, with named row buffers."""

    def __init__(self, pool: Any, isa: str, *, f32: bool, max_rows: int) -> None:
        self.f32 = f32
        self.plan = _native.Plan(pool, isa, f32, max_rows)
        self._buffers: dict[str, tuple[int, Any, int]] = {}

    def buffer(self, name: str, width: int, kind: str = "F32") -> str:
        """Declare a row buffer (kinds: F32, ACT, INPUT, LOGITS, TAPS); declaring it twice alike is fine."""
        key = (getattr(_native.BufferKind, kind), width)
        if name in self._buffers:
            assert self._buffers[name][1:] == key, f"buffer {name} declared twice"
        else:
            self._buffers[name] = (self.plan.buffer(*key), *key)
        return name

    def __getitem__(self, name: str) -> int:
        return self._buffers[name][0]

    def embed(self, out: str, weight: Any, scale: float = 1.0) -> None:
        if isinstance(weight, np.ndarray):
            self.plan.embed_table(self[out], weight, scale)
        else:
            self.plan.embed_packed(self[out], weight, scale)

    def rope(self, rope: Any, suffix: str = "") -> None:
        """Angles of the pass's positions, into the buffers "cos" and "sin" with a suffix."""
        cos, sin = (self[self.buffer(name + suffix, len(rope.inv_freq))] for name in ("cos", "sin"))
        self.plan.rope(cos, sin, rope.inv_freq, rope.scale)

    def linear(self, source: str, out: str, weight: Any, *, epilogue: str = "STORE", **options: Any) -> None:
        self.plan.linear(self[source], self[out], weight, epilogue=getattr(_native.Epilogue, epilogue), **options)

    def qkv_post(self, source: str, out: str, *, rope: Any = "", **options: Any) -> None:
        """rope: the suffix of the angles' buffers."""
        self.plan.qkv_post(self[source], self[out], self["cos" + rope], self["sin" + rope], **options)

    def attention(self, source: str, out: str, **options: Any) -> None:
        self.plan.attention(self[source], self[out], **options)

    def local_conv(self, source: str, out: str, delta: str, **options: Any) -> None:
        self.plan.local_conv(self[source], self[out], self[delta], **options)

    def norm(self, source: str, out: str, weight: np.ndarray, eps: float, *, add: bool = False) -> None:
        """out = norm(source), or with `add` out += norm(source)."""
        self.plan.norm(self[source], self[out], weight, eps, add)

    def gate(self, source: str, out: str, width: int, offset: int = 0) -> None:
        """out *= sigmoid(source), the latter's columns from `offset` on."""
        self.plan.gate(self[source], self[out], width, offset)

    def softcap(self, out: str, width: int, scale: float, cap: float) -> None:
        """out *= scale; then cap * tanh(out / cap) if there is a cap."""
        self.plan.softcap(self[out], width, scale, cap)

    def experts(
        self, source: str, router: str, out: str, gate_up: Sequence[Any], down: Sequence[Any], **o: Any
    ) -> None:
        """out += the experts that `router` chooses for each row of norm(source)."""
        self.plan.experts(self[source], self[router], self[out], list(gate_up), list(down), **o)

    def short_conv(self, source: str, rows: str, **options: Any) -> None:
        self.plan.short_conv(self[source], self[rows], **options)

    def delta_rule(self, source: str, rows: str, out: str, **options: Any) -> None:
        self.plan.delta_rule(self[source], self[rows], self[out], **options)

    def copy(self, source: str, out: str, width: int, offset: int = 0) -> None:
        self.plan.copy(self[source], self[out], width, offset)
