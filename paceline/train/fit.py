"""Train a drafter on cached features: resumable to the bit, paced by steps and never by the clock."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import journal
from .data import Batch, Phase, training_batches
from .distributed import Ranks
from .errors import TrainError
from .feature_store import Features
from .heads import Heads
from .loss import LossConfig, acceptance, dspark_loss, head_loss, selector_loss
from .model import Drafter
from .schedule import Schedule, build_optimizers


@dataclass(frozen=True, slots=True)
class FitConfig:
    """One run. ``compute_dtype`` (bfloat16 or float32) is that of matrix products; masters are always fp32.

    ``block_sizes``: lengths that blocks are cut to, one drawn for each step; () always takes the drafter's own.
    ``freeze``: "backbone" trains heads of DSpark or the parts of DFlash 2 alone, "" everything.
    """

    schedule: Schedule
    batch_size: int = 16
    anchors: int = 32
    block_sizes: tuple[int, ...] = ()
    lr: float = 2e-3
    muon_lr: float = 0.02
    optimizer: str = "muon"
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    seed: int = 0
    compute_dtype: str = "bfloat16"
    workers: int = 1
    checkpoint_every: int = 100
    log_every: int = 10
    loss: LossConfig = field(default_factory=LossConfig)
    freeze: str = ""


# what may not change in the middle of a run, since the batches or the optimiser's state would be others
FIXED = ("batch_size", "anchors", "block_sizes", "seed", "optimizer", "workers", "freeze")


def batch_loss(
    model: Drafter, heads: Heads, batch: Batch, loss: LossConfig, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Summed loss, sum of weights, hits ``[N, K]`` and validity ``[N, K]`` of a batch (N blocks of K drafts)."""
    device = heads.embed.device
    tokens, valid = batch.tokens.to(device), batch.valid.to(device)
    anchor_first = model.config.anchor_first
    size = tokens.shape[-1] - anchor_first  # an anchor-first block drafts as many tokens as it has slots
    embeds = heads.block_embeds(tokens[..., 0], size)
    hidden = model(embeds, batch.anchors.to(device), batch.taps.to(device), dtype)
    labels = torch.where(valid, heads.row_of[tokens[..., 1:].clamp(min=0)], -1).flatten(0, 1)
    teacher = batch.teacher.to(device).flatten(0, 1) if batch.teacher is not None else None
    valid = valid.flatten(0, 1)
    hidden = hidden[:, :, 0 if anchor_first else 1 :].flatten(0, 1)
    head = heads.head.to(dtype)
    selector = model.candidate_selector
    if selector is not None:
        before = tokens[..., :-1].clamp(min=0).flatten(0, 1)

        def score(values: Tensor, rows: Tensor) -> Tensor:
            return selector.scores(values, heads.rows[rows], hidden, before, dtype)

        total, weight, hit = selector_loss(hidden, head, labels, valid, loss, teacher, selector.top_k, score)
        return total, weight, hit, valid
    if not model.config.dspark:
        total, weight, hit = head_loss(hidden, head, labels, valid, loss, teacher)
        return total, weight, hit, valid
    given = table = None
    if model.markov_head is not None:
        given = model.markov_head.markov_w1(tokens[..., :-1].clamp(min=0)).flatten(0, 1)
        table = model.markov_head.markov_w2.weight[heads.rows]
    confidence = model.confidence(hidden, given)
    total, weight, hit = dspark_loss(hidden, head, labels, valid, loss, teacher, given, table, confidence)
    return total, weight, hit, valid


class Trainer:
    """Owns the model, the optimisers and the step count; ``run`` goes on from wherever they are."""

    def __init__(
        self,
        model: Drafter,
        heads: Heads,
        store: Features,
        phases: Sequence[Phase],
        config: FitConfig,
        out: Path,
        ranks: Ranks | None = None,
    ) -> None:
        self.model, self.heads, self.store, self.phases = model, heads, store, list(phases)
        self.config, self.out, self.step, self.seen = config, out, 0, 0
        self.ranks = ranks or Ranks()
        c = config
        if c.freeze == "backbone":
            model.freeze_backbone()
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.optimizers = build_optimizers(
            self.params,
            c.optimizer,
            lr=c.lr,
            muon_lr=c.muon_lr,
            weight_decay=c.weight_decay,
            betas=c.betas,
            shares=c.workers,
            tables=model.added_parameters(),
        )
        self.dtype = getattr(torch, config.compute_dtype)
        self.pool = ThreadPoolExecutor(config.workers) if config.workers > 1 else None
        self.out.mkdir(parents=True, exist_ok=True)

    @property
    def checkpoint(self) -> Path:
        return self.out / "checkpoint.pt"

    def save(self) -> None:
        """Write the checkpoint atomically: a kill at any moment leaves the old one or the new one."""
        if not self.ranks.first:
            return
        config = asdict(self.config)
        state = {
            "step": self.step,
            "seen": self.seen,
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "config": {**config, "schedule": config["schedule"]},
        }
        temporary = self.checkpoint.with_suffix(".partial")
        with temporary.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.checkpoint)

    def resume(self) -> bool:
        """Load the checkpoint if there is one. Raises TrainError where this run's settings would not go on as that
        one's; the length of a WSD schedule may change until the rate begins to fall."""
        if not self.checkpoint.exists():
            return False
        state = torch.load(self.checkpoint, map_location=self.heads.embed.device, weights_only=True)
        now = asdict(self.config)
        for key in FIXED:
            before = state["config"].get(key, "")  # checkpoints of earlier versions lack the last one
            if before != now[key]:
                raise TrainError(
                    f"{key} was {before} when {self.checkpoint} was written and is "
                    f"{now[key]} now: resume with the same value or choose another --out"
                )
        old, new = Schedule(**state["config"]["schedule"]), self.config.schedule
        if old != new and state["step"] > min(old.decay_start, new.decay_start):
            raise TrainError(
                f"the schedule was {old} when {self.checkpoint} was written and is {new} now, and at step "
                f"{state['step']} the rate is past its peak in one of them: resume with the same one"
            )
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            rates = [g["peak_lr"] for g in optimizer.param_groups]
            optimizer.load_state_dict(saved)
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["peak_lr"] = rate
        self.step, self.seen = state["step"], state["seen"]
        return True

    def train_step(self, batch: Batch) -> tuple[float, Tensor, Tensor]:
        """One update; returns the loss before it, and hits and validity of this process's share."""
        factor = self.config.schedule.factor(self.step)
        self.seen += int(batch.valid.sum())
        mine = batch.share(self.ranks.rank, self.ranks.world)
        parts = mine.split(self.config.workers) if mine is not None else []
        # each worker thread runs its own forward and backward with one intra-op thread: no barriers between them, which
        # on a shared machine is several times faster than splitting every operation
        results = list((self.pool.map if self.pool else map)(self._gradients, parts))
        device = self.heads.embed.device
        scalars = torch.zeros(2, device=device)
        for r in results:
            scalars += torch.stack((r[1], r[2]))
        grads = [sum((r[0][i] for r in results), torch.zeros_like(p)) for i, p in enumerate(self.params)]
        self.ranks.sum([*grads, scalars])
        weight = scalars[0].clamp(min=1e-6)
        for param, grad in zip(self.params, grads, strict=True):
            param.grad = grad / weight
        loss = scalars[1] / weight
        norm = torch.nn.utils.clip_grad_norm_(self.params, self.config.clip)
        if not torch.isfinite(norm):
            raise TrainError(f"gradient norm is {norm.item()} at step {self.step}: lower the learning rate")
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * factor
        list((self.pool.map if self.pool else map)(lambda o: o.step(), self.optimizers))
        self.step += 1
        slots = self.model.config.drafts
        hits = [_widen(r[3], slots) for r in results] or [torch.zeros(0, slots, dtype=torch.bool, device=device)]
        valid = [_widen(r[4], slots) for r in results] or hits
        return loss.item(), torch.cat(hits).cpu(), torch.cat(valid).cpu()

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
        stop_at: float | None = None,
    ) -> list[float]:
        """Train to step ``until`` (default: the end of the schedule). Returns the loss of every step made.

        ``stop_at`` (``time.monotonic()``): save and return at the first step after it.
        """
        c = self.config
        shape, steps = self.model.config, c.schedule.steps
        stop = min(steps, until if until is not None else steps)
        batches = training_batches(
            self.store,
            self.phases,
            batch_size=c.batch_size,
            anchors=c.anchors,
            block_sizes=[size + shape.anchor_first for size in c.block_sizes or (shape.block_size,)],
            seed=c.seed,
            first_step=self.step,
            with_teacher=c.loss.needs_teacher or shape.confidence,
        )
        losses: list[float] = []
        window: list[tuple[float, Tensor, Tensor]] = []
        started = time.monotonic()
        while self.step < stop:
            window.append(self.train_step(next(batches)))
            losses.append(window[-1][0])
            late = stop_at is not None and time.monotonic() >= stop_at
            last = late or self.step == stop
            if self.ranks.first and (self.step % c.log_every == 0 or last):
                pace = round((time.monotonic() - started) / len(window), 3)
                line = summary(window) | {"step": self.step, "tokens": self.seen, "seconds_per_step": pace}
                journal.append(self.out / "log.jsonl", line)
                report(progress_line(line, steps))
                window, started = [], time.monotonic()
            if self.step % c.checkpoint_every == 0 or last:
                self.save()
                if on_checkpoint and self.ranks.first:
                    on_checkpoint(self)
                self.ranks.wait()
            if late:
                break
        return losses


def _widen(part: Tensor, slots: int) -> Tensor:
    """``[N, k]`` to ``[N, slots]`` with False: blocks of a step may be shorter than the drafter's."""
    return torch.nn.functional.pad(part, (0, slots - part.shape[1])) if part.shape[1] < slots else part


def summary(window: list[tuple[float, Tensor, Tensor]]) -> dict[str, Any]:
    """Mean loss, accuracy of each slot on its own, survival, and the acceptance length that follows: None where all
    blocks were shorter than the drafter's."""
    hit, valid = torch.cat([w[1] for w in window]), torch.cat([w[2] for w in window])
    accuracy = (hit & valid).sum(0) / valid.sum(0).clamp(min=1)
    survival, length = acceptance(hit, valid)
    whole = bool(valid.all(-1).any())
    return {
        "loss": round(sum(w[0] for w in window) / len(window), 5),
        "accuracy": [round(a, 4) for a in accuracy.tolist()],
        "survival": [round(a, 4) for a in survival.tolist()],
        "acceptance_length": round(float(length), 4) if whole else None,
    }


def progress_line(line: dict[str, Any], steps: int) -> str:
    """One readable line of ``summary``."""
    accuracy = " ".join(f"{a:.2f}".lstrip("0") for a in line["accuracy"])
    length = line["acceptance_length"]
    found = "" if length is None else f"acceptance ~{length:.2f}  "
    left = (steps - line["step"]) * line["seconds_per_step"] / 60
    return (
        f"step {line['step']}/{steps}  loss {line['loss']:.3f}  slot accuracy {accuracy}  "
        f"{found}{line['seconds_per_step']:.2f} s/step, {left:.0f} min left"
    )
