"""Acceptance of a drafter on the target's own greedy answers, without running the generation loop.

The target is greedy, so the text is known: a draft is accepted exactly when it equals the answer's token. One pass
drafts at every position of an answer; walking from accepted draft to accepted draft then gives the very rounds that
the loop would have made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from .data import make_batch
from .feature_store import Features
from .heads import Heads
from .model import Drafter


@dataclass(slots=True)
class Acceptance:
    """Counts over the rounds of one set of answers. ``survived[k]``: rounds that accepted at least ``k + 1`` drafts."""

    rounds: int = 0
    tokens: int = 0
    survived: list[int] = field(default_factory=list)

    @property
    def length(self) -> float:
        """Mean tokens per round, the bonus token included; 1.0 is plain decoding."""
        return self.tokens / self.rounds if self.rounds else 1.0

    @property
    def survival(self) -> list[float]:
        """Share of rounds in which the draft at each position was accepted."""
        return [s / self.rounds if self.rounds else 0.0 for s in self.survived]

    def add(self, accepted: Sequence[int], slots: int) -> None:
        """Count rounds by how many drafts each of them accepted."""
        self.survived = self.survived or [0] * slots
        for a in accepted:
            self.rounds += 1
            self.tokens += a + 1
            for k in range(a):
                self.survived[k] += 1


def walk(run_lengths: np.ndarray, first: int, end: int) -> list[int]:
    """Accepted drafts of each round of the loop over one answer.

    ``run_lengths[i]`` is how many drafts in a row are right when the anchor is at answer position ``i``; the loop
    starts at anchor ``first`` and stops when the answer, ``end`` tokens long, is complete. Drafts beyond the end do
    not count.
    """
    accepted = []
    at = first
    while at < end - 1:
        # a round commits its accepted drafts and one token more: the answer's last token counts as that one
        accepted.append(int(min(run_lengths[at], end - 2 - at)))
        at += accepted[-1] + 1
    return accepted


@torch.inference_mode()
def draft_run_lengths(
    model: Drafter, heads: Heads, store: Features, index: int, drafts: int, dtype: torch.dtype
) -> np.ndarray:
    """For each anchor of one answer: how many of its ``drafts`` drafts are right before the first wrong one.

    A Markov head or a selector sees the answer's own tokens before a slot: up to the first wrong draft these are the
    drafts.
    """
    sequence = store.sequences[index]
    anchors = np.arange(sequence["prompt_len"], len(sequence["tokens"]) - 1)
    batch = make_batch(store, [index], [anchors], drafts + 1, with_teacher=False)
    device = heads.embed.device
    tokens = batch.tokens.to(device)
    skip = 0 if model.config.anchor_first else 1
    embeds = heads.block_embeds(tokens[..., 0], drafts + skip)
    hidden = model(embeds, batch.anchors.to(device), batch.taps.to(device), dtype)[:, :, skip:]
    logits = torch.nn.functional.linear(hidden.to(dtype), heads.head.to(dtype)).float()
    best = model.best_tokens(hidden, logits, tokens[..., :-1].clamp(min=0), heads.rows, dtype)
    hit = (best == tokens[..., 1:])[0]
    return torch.cumprod(hit.long(), -1).sum(-1).cpu().numpy()


def evaluate(
    model: Drafter,
    heads: Heads,
    store: Features,
    members: Sequence[int],
    *,
    drafts: int | None = None,
    max_tokens: int = 128,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Acceptance]:
    """Acceptance by domain over the first ``max_tokens`` tokens of the answers ``members``, greedy.

    ``drafts`` per round: as many as a block has unless given. The key ``"all"`` holds the sum over domains.
    """
    slots = drafts if drafts is not None else model.config.drafts
    out: dict[str, Acceptance] = {}
    for index in members:
        sequence = store.sequences[index]
        runs = draft_run_lengths(model, heads, store, index, slots, dtype)
        end = min(len(sequence["tokens"]) - sequence["prompt_len"], max_tokens)
        accepted = walk(runs, 0, end)
        for name in (sequence["domain"], "all"):
            out.setdefault(name, Acceptance()).add(accepted, slots)
    return out


def mean_length(result: dict[str, Acceptance]) -> float:
    """Unweighted mean over the domains, as benchmarks report it."""
    lengths = [a.length for name, a in result.items() if name != "all"]
    return sum(lengths) / max(1, len(lengths))


def curve_line(result: dict[str, Acceptance], step: int, tokens: int) -> dict[str, Any]:
    """One point of a learning curve: acceptance length by domain after ``step`` updates on ``tokens`` labels."""
    lengths = {name: round(a.length, 4) for name, a in result.items() if name != "all"}
    survival = {name: [round(x, 3) for x in a.survival] for name, a in result.items() if name != "all"}
    return {
        "step": step,
        "tokens": tokens,
        "length": {**lengths, "mean": round(mean_length(result), 4)},
        "survival": survival,
    }
