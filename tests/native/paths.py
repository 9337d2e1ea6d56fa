"""The instruction-set paths of this machine, and small plans that show one operation each."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from models.reference import bf16, exact

from paceline import _native
from paceline.models.network import packed_bytes
from paceline.runtime import thread_pool

NAMES = ("portable", "avx2", "avx512", "avx512_bf16", "amx")


def runs_here(isa: str) -> bool:
    try:
        _native.select_isa(isa)
    except RuntimeError:
        return False
    return True


def every_path(test: Any) -> Any:
    """Parametrises a test over isa x f32; paths that this machine lacks are skipped by name."""
    cases = [
        pytest.param(
            isa,
            f32,
            id=f"{isa}-{'fp32' if f32 else 'bf16'}",
            marks=[] if runs_here(isa) else [pytest.mark.skip(reason=f"this processor has no {isa}")],
        )
        for isa in NAMES
        for f32 in (True, False)
    ]
    return pytest.mark.parametrize(("isa", "f32"), cases)(test)


def every_quantised_path(test: Any) -> Any:
    """Parametrises a test over isa x quantization."""
    cases = [
        pytest.param(
            isa,
            quantization,
            id=f"{isa}-{quantization}",
            marks=[] if runs_here(isa) else [pytest.mark.skip(reason=f"this processor has no {isa}")],
        )
        for isa in NAMES
        for quantization in ("int8", "int8_channel", "int4")
    ]
    return pytest.mark.parametrize(("isa", "quantization"), cases)(test)


@dataclass(frozen=True)
class Path:
    """One way to compute. `round`: what the path does to the inputs of a matrix product; `unit`: its relative error."""

    isa: str
    f32: bool
    threads: int = 1

    @property
    def round(self) -> Any:
        return exact if self.f32 else bf16

    def plan(self, max_rows: int = 64) -> _native.Plan:
        return _native.Plan(thread_pool(self.threads), self.isa, self.f32, max_rows)

    def pack(self, *parts: np.ndarray, gated: bool = False) -> _native.Packed:
        """Matrices [n_i, k] stacked; gated: gate and up."""
        n, k = (parts[0].shape[0] if gated else sum(len(p) for p in parts)), parts[0].shape[1]
        arena = _native.Arena(packed_bytes(n, k, f32=self.f32, gated=gated))
        weight = _native.Packed(arena, n, k, self.f32, gated)
        row = 0
        for i, part in enumerate(parts):
            weight.fill(np.ascontiguousarray(part, np.float32), 0 if gated else row, i if gated else 0)
            row += len(part)
        return weight

    def identity(self, n: int) -> _native.Packed:
        return self.pack(np.eye(n, dtype=np.float32))


def buffer(plan: _native.Plan, kind: str, width: int) -> int:
    return plan.buffer(getattr(_native.BufferKind, kind), width)


def epilogue(name: str) -> _native.Epilogue:
    return getattr(_native.Epilogue, name)


def run_rows(plan: _native.Plan, x: np.ndarray, width: int) -> np.ndarray:
    """A pass of a plan without a cache from INPUT rows to LOGITS [rows, width]."""
    rows = len(x)
    out = np.full((rows, width), np.nan, np.float32)
    plan.forward(
        None,
        np.arange(rows, dtype=np.int32),
        np.array([0, rows], np.int32),
        input=np.ascontiguousarray(x, np.float32),
        select=np.arange(rows, dtype=np.int32),
        logits=out,
    )
    return out


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and bool(
        (np.ascontiguousarray(a).view(np.uint32) == np.ascontiguousarray(b).view(np.uint32)).all()
    )


@functools.cache
def normal(seed: int, *shape: int) -> np.ndarray:
    out = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    out.flags.writeable = False
    return out
