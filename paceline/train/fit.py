"""Train a drafter on cached features: resumable to the bit, paced by steps and never by the clock."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .data import Batch, training_batches
from .errors import TrainError
from .features import FeatureStore
from .heads import Heads
from .loss import LossConfig, acceptance, head_loss
from .model import Drafter


@dataclass(frozen=True, slots=True)
class FitConfig:
    """One run. ``steps`` fixes the schedule; ``compute_dtype`` is bfloat16 or float32 (masters are always fp32)."""

    steps: int
    batch_size: int = 32
    anchors: int = 24
    lr: float = 6e-4
    min_lr_ratio: float = 0.1
    warmup: float = 0.04
    decay: float = 0.3
    schedule: str = "wsd"
    optimizer: str = "muon"
    muon_lr: float = 0.01
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    seed: int = 0
    compute_dtype: str = "bfloat16"
    workers: int = 1
    checkpoint_every: int = 100
    log_every: int = 10
    loss: LossConfig = field(default_factory=LossConfig)


def learning_rate(config: FitConfig, step: int) -> float:
    """Factor on the peak rate at ``step`` (0-based): linear warm-up, then WSD with a cosine tail, or cosine."""
    warm = max(1, round(config.warmup * config.steps))
    if step < warm:
        return (step + 1) / warm
    if config.schedule == "cosine":
        start, span = warm, config.steps - warm
    else:
        span = max(1, round(config.decay * config.steps))
        start = config.steps - span
    if step < start:
        return 1.0
    progress = min(1.0, (step - start) / max(1, span))
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))


def build_optimizers(model: Drafter, config: FitConfig) -> list[torch.optim.Optimizer]:
    """AdamW for everything, or Muon for the matrices and AdamW for the norms."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim != 2]
    if config.optimizer == "muon":
        # Muon's orthogonalisation costs as much as several sequences: share the matrices out among the workers
        matrices.sort(key=lambda p: -p.numel())
        out: list[torch.optim.Optimizer] = [
            torch.optim.Muon(
                matrices[i :: config.workers],
                lr=config.muon_lr,
                weight_decay=config.weight_decay,
                momentum=0.95,
                adjust_lr_fn="original",
            )
            for i in range(min(config.workers, len(matrices)))
        ]
        out.append(torch.optim.AdamW(vectors, lr=config.lr, betas=config.betas, weight_decay=0.0))
    elif config.optimizer == "adamw":
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        out = [torch.optim.AdamW(groups, lr=config.lr, betas=config.betas)]
    else:
        raise TrainError(f"optimizer is {config.optimizer!r}: choose muon or adamw")
    for optimizer in out:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return out


def batch_loss(
    model: Drafter, heads: Heads, batch: Batch, loss: LossConfig, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Summed loss, sum of weights, hits ``[N, K]`` and validity ``[N, K]`` of a batch (N blocks of K mask slots)."""
    device = heads.embed.device
    tokens, valid = batch.tokens.to(device), batch.valid.to(device)
    size = tokens.shape[-1]
    embeds = heads.block_embeds(tokens[..., 0], size)
    hidden = model(embeds, batch.anchors.to(device), batch.taps.to(device), dtype)
    labels = torch.where(valid, heads.row_of[tokens[..., 1:].clamp(min=0)], -1).flatten(0, 1)
    teacher = batch.teacher.to(device).flatten(0, 1) if batch.teacher is not None else None
    valid = valid.flatten(0, 1)
    total, weight, hit = head_loss(hidden[:, :, 1:].flatten(0, 1), heads.head.to(dtype), labels, valid, loss, teacher)
    return total, weight, hit, valid


class Trainer:
    """Owns the model, the optimisers and the step count; ``run`` goes on from wherever they are."""

    def __init__(
        self, model: Drafter, heads: Heads, store: FeatureStore, members: list[int], config: FitConfig, out: Path
    ) -> None:
        self.model, self.heads, self.store, self.members = model, heads, store, members
        self.config, self.out, self.step = config, out, 0
        self.optimizers = build_optimizers(model, config)
        self.dtype = getattr(torch, config.compute_dtype)
        self.params = list(model.parameters())
        self.pool = ThreadPoolExecutor(config.workers) if config.workers > 1 else None
        self.out.mkdir(parents=True, exist_ok=True)

    @property
    def checkpoint(self) -> Path:
        return self.out / "checkpoint.pt"

    def save(self) -> None:
        """Write the checkpoint atomically: a kill at any moment leaves the old one or the new one."""
        state = {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "config": asdict(self.config),
            "members": len(self.members),
        }
        temporary = self.checkpoint.with_suffix(".partial")
        torch.save(state, temporary)
        os.replace(temporary, self.checkpoint)

    def resume(self, *, new_schedule: bool = False) -> bool:
        """Load the checkpoint if there is one.

        Raises TrainError where data or schedule differ from that run's, unless ``new_schedule``: then weights,
        optimiser state and step count go on under the present data and schedule.
        """
        if not self.checkpoint.exists():
            return False
        state = torch.load(self.checkpoint, map_location=self.heads.embed.device, weights_only=True)
        if state["members"] != len(self.members) and not new_schedule:
            raise TrainError(
                f"{self.checkpoint} was trained on {state['members']} sequences, this run has {len(self.members)}: "
                "the data order would change; choose another --out or restore the features"
            )
        fixed = {"steps", "batch_size", "anchors", "seed", "optimizer", "schedule", "workers"}
        for key in fixed:
            if state["config"][key] != asdict(self.config)[key] and not new_schedule:
                raise TrainError(
                    f"{key} was {state['config'][key]} when {self.checkpoint} was written and is "
                    f"{asdict(self.config)[key]} now: resume with the same value or choose another --out"
                )
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step = state["step"]
        return True

    def train_step(self, batch: Batch) -> tuple[float, Tensor, Tensor]:
        """One update; returns the loss before it, and hits and validity."""
        factor = learning_rate(self.config, self.step)
        parts = batch.split(self.config.workers)
        # each worker thread runs its own forward and backward with one intra-op thread: no barriers between them, which
        # on a shared machine is several times faster than splitting every operation
        results = list((self.pool.map if self.pool else map)(self._gradients, parts))
        weight = torch.stack([r[1] for r in results]).sum().clamp(min=1e-6)
        for i, param in enumerate(self.params):
            param.grad = sum(r[0][i] for r in results) / weight
        loss = sum(r[2] for r in results) / weight
        hit, valid = torch.cat([r[3] for r in results]), torch.cat([r[4] for r in results])
        norm = torch.nn.utils.clip_grad_norm_(self.params, self.config.clip)
        if not torch.isfinite(norm):
            raise TrainError(f"gradient norm is {norm.item()} at step {self.step}: lower the learning rate")
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * factor
        list((self.pool.map if self.pool else map)(lambda o: o.step(), self.optimizers))
        self.step += 1
        return loss.item(), hit, valid

    def _gradients(self, batch: Batch) -> tuple[tuple[Tensor, ...], Tensor, Tensor, Tensor, Tensor]:
        c = self.config
        total, weight, hit, valid = batch_loss(self.model, self.heads, batch, c.loss, self.dtype)
        return torch.autograd.grad(total, self.params), weight, total.detach(), hit, valid

    def run(
        self,
        *,
        until: int | None = None,
        report: Callable[[str], None] = print,
        on_checkpoint: Callable[[Trainer], None] | None = None,
    ) -> list[float]:
        """Train to step ``until`` (default: the end of the schedule). Returns the loss of every step made."""
        c = self.config
        stop = min(c.steps, until if until is not None else c.steps)
        batches = training_batches(
            self.store,
            self.members,
            batch_size=c.batch_size,
            anchors=c.anchors,
            block_size=self.model.config.block_size,
            seed=c.seed,
            first_step=self.step,
            with_teacher=c.loss.distill > 0,
        )
        losses: list[float] = []
        window: list[tuple[float, Tensor, Tensor]] = []
        started = time.monotonic()
        log = (self.out / "log.jsonl").open("a")
        while self.step < stop:
            window.append(self.train_step(next(batches)))
            losses.append(window[-1][0])
            if self.step % c.log_every == 0 or self.step == stop:
                line = summary(window) | {"step": self.step, "seconds_per_step": _pace(started, len(window))}
                log.write(json.dumps(line) + "\n")
                log.flush()
                report(progress_line(line, c.steps))
                window, started = [], time.monotonic()
            if self.step % c.checkpoint_every == 0 or self.step == stop:
                self.save()
                if on_checkpoint:
                    on_checkpoint(self)
        log.close()
        return losses


def _pace(started: float, steps: int) -> float:
    return round((time.monotonic() - started) / steps, 3)


def summary(window: list[tuple[float, Tensor, Tensor]]) -> dict[str, Any]:
    """Mean loss, accuracy of each slot on its own, survival, and the acceptance length that follows."""
    hit, valid = torch.cat([w[1] for w in window]), torch.cat([w[2] for w in window])
    accuracy = (hit & valid).sum(0) / valid.sum(0).clamp(min=1)
    survival, length = acceptance(hit, valid)
    return {
        "loss": round(sum(w[0] for w in window) / len(window), 5),
        "accuracy": [round(a, 4) for a in accuracy.tolist()],
        "survival": [round(a, 4) for a in survival.tolist()],
        "acceptance_length": round(float(length), 4),
    }


def progress_line(line: dict[str, Any], steps: int) -> str:
    """One readable line of ``summary``."""
    accuracy = " ".join(f"{a:.2f}".lstrip("0") for a in line["accuracy"])
    left = (steps - line["step"]) * line["seconds_per_step"] / 60
    return (
        f"step {line['step']}/{steps}  loss {line['loss']:.3f}  slot accuracy {accuracy}  "
        f"acceptance ~{line['acceptance_length']:.2f}  {line['seconds_per_step']:.2f} s/step, {left:.0f} min left"
    )
