"""Modules of PyTorch that every part of a drafter is made of."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps)


class Linear(nn.Module):
    """A bias-free linear layer; the fp32 master weight is rounded to the compute dtype at each use.

    std 0: starts at zero, and draws no random numbers.
    """

    def __init__(self, inputs: int, outputs: int, std: float = 0.02) -> None:
        super().__init__()
        weight = torch.empty(outputs, inputs)
        self.weight = nn.Parameter(weight.normal_(0.0, std) if std else weight.zero_())

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return F.linear(x.to(dtype), self.weight.to(dtype))
