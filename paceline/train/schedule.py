"""Learning rates and optimisers of a run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from .errors import TrainError


@dataclass(frozen=True, slots=True)
class Schedule:
    """``steps`` long: linear warm-up, then ``wsd`` (constant, cosine tail over the last ``decay`` of it) or ``cosine``.

    The tail ends at ``min_ratio`` of the peak.
    """

    steps: int
    kind: str = "wsd"
    warmup: int = 40
    decay: float = 0.3
    min_ratio: float = 0.1

    @property
    def warm(self) -> int:
        """Steps of warm-up; of a short run at most a tenth."""
        return max(1, min(self.warmup, self.steps // 10))

    @property
    def decay_start(self) -> int:
        """First step below the peak rate: until then a WSD run may be made longer or shorter."""
        return self.warm if self.kind == "cosine" else self.steps - max(1, round(self.decay * self.steps))

    def factor(self, step: int) -> float:
        """Factor on the peak rate at ``step`` (0-based)."""
        if step < self.warm:
            return (step + 1) / self.warm
        start = self.decay_start
        if step < start:
            return 1.0
        progress = min(1.0, (step - start) / max(1, self.steps - start))
        return self.min_ratio + (1 - self.min_ratio) * 0.5 * (1 + math.cos(math.pi * progress))


def build_optimizers(
    parameters: Iterable[nn.Parameter],
    kind: str,
    *,
    lr: float,
    muon_lr: float,
    weight_decay: float,
    betas: tuple[float, float],
    shares: int,
    tables: Iterable[nn.Parameter] = (),
) -> list[torch.optim.Optimizer]:
    """AdamW for everything, or Muon for the matrices and AdamW for the rest; each group remembers its ``peak_lr``.

    ``tables``: matrices that are lists of rows rather than maps, such as embeddings, and maps of added parts, which
    start at zero and whose every direction Muon would move alike: never Muon's. Muon's orthogonalisation costs as much
    as several sequences: its matrices come in ``shares`` optimisers that can step at the same time.
    """
    found = list(parameters)
    apart = {id(p) for p in tables}
    matrices = sorted((p for p in found if p.ndim == 2 and id(p) not in apart), key=lambda p: -p.numel())
    vectors = [p for p in found if p.ndim != 2 or id(p) in apart]
    if kind == "muon":
        out: list[torch.optim.Optimizer] = [
            torch.optim.Muon(
                matrices[i::shares],
                lr=muon_lr,
                weight_decay=weight_decay,
                momentum=0.95,
                adjust_lr_fn="original",
            )
            for i in range(min(shares, len(matrices)))
        ]
        out.append(torch.optim.AdamW(vectors, lr=lr, betas=betas, weight_decay=0.0))
    elif kind == "adamw":
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        out = [torch.optim.AdamW(groups, lr=lr, betas=betas)]
    else:
        raise TrainError(f"optimizer is {kind!r}: choose muon or adamw")
    for optimizer in out:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return out
