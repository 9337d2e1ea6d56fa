"""The one place that ties the golden harness to Paceline's own interfaces."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from paceline import _native
from paceline.errors import PacelineError
from paceline.models import TargetModel, load_model

from .cases import Case
from .checks import Speculator, Target


class NotBuilt(PacelineError):
    """A part of a case for which Paceline has nothing to run yet."""


class NativeTarget:
    """A target of the native engine in fp32; see `checks.Target`."""

    def __init__(self, folder: Path) -> None:
        self.model: TargetModel = load_model(folder, dtype="float32")

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        return self.model.logits(ids)[0]

    def greedy(self, ids: Sequence[int], count: int) -> list[int]:
        """One prefill and then one-row passes through a paged cache, as plain decoding runs them."""
        blocks = -(-(len(ids) + count) // _native.KEYS_PER_BLOCK)
        cache = self.model.new_cache(blocks)
        table = np.arange(blocks, dtype=np.int32)[None]
        logits = np.empty((1, self.model.vocab_size), np.float32)
        produced: list[int] = []
        rows = list(ids)
        position = 0
        while len(produced) < count:
            self.model.plan().forward(
                cache,
                np.arange(position, position + len(rows), dtype=np.int32),
                np.array([0, len(rows)], np.int32),
                tokens=np.asarray(rows, np.int32),
                block_tables=table,
                select=np.array([len(rows) - 1], np.int32),
                logits=logits,
            )
            position += len(rows)
            rows = [int(_native.argmax_rows(logits)[0])]
            produced += rows
        return produced

    def hidden_states(self, ids: Sequence[int]) -> list[np.ndarray]:
        layers = range(-1, self.model.config.num_layers)
        _, taps = self.model.logits(ids, taps=layers)
        states = np.split(taps, len(layers), axis=1)
        last = states[-1]
        # A tap is the residual stream; the reference's last entry is after the final norm.
        scale = np.sqrt(np.mean(last**2, axis=1, keepdims=True) + self.model.config.rms_norm_eps)
        weight = np.asarray(self.model.checkpoint.load("model.norm.weight"), np.float32)
        return [*states[:-1], last / scale * weight]


def open_target(folder: Path) -> Target:
    """Load a target in fp32. Raises PacelineError for a family that is not built."""
    return NativeTarget(folder)


def open_speculator(target: Path, drafter: Path) -> Speculator:
    """Load a target with its drafter in fp32. Raises PacelineError for a family that is not built."""
    raise NotBuilt(f"{drafter}: no drafter can be loaded yet")


def check_sampling(case: Case) -> None:
    """Compare the sampling functions with a case of kind "sampling"."""
    raise NotBuilt(f"{case.name}: rejection sampling is not built yet")
