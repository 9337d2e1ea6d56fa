"""Data parallelism under ``torchrun``: every process works on its share of the same batch, gradients are summed.

A run with N processes makes the same updates as one with a single process, up to the rounding of sums.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among ``world``; ``device`` is where it computes."""

    rank: int = 0
    world: int = 1
    device: str = "cpu"

    @property
    def first(self) -> bool:
        """Whether this process writes files and reports."""
        return self.rank == 0

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Sum each tensor over all processes, in place, in one exchange."""
        if self.world == 1:
            return
        flat = torch.cat([t.reshape(-1).float() for t in tensors])
        dist.all_reduce(flat)
        at = 0
        for t in tensors:
            t.copy_(flat[at : at + t.numel()].view(t.shape))
            at += t.numel()

    def wait(self) -> None:
        """Until every process is here."""
        if self.world > 1:
            dist.barrier()


def join(device: str) -> Ranks:
    """The processes that ``torchrun`` started (gloo on a CPU, nccl on GPUs), or this one alone."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return Ranks(device=device)
    if device == "cuda":
        local = int(os.environ.get("LOCAL_RANK", "0"))
        torch.cuda.set_device(local)
        device = f"cuda:{local}"
    if not dist.is_initialized():
        dist.init_process_group("gloo" if device == "cpu" else "nccl")
    return Ranks(dist.get_rank(), world, device)


def leave() -> None:
    """End the group, if there is one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
