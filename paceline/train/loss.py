"""Losses of a block drafter over a frozen head, and what they measure.

The head is frozen, so its loss and the gradient of the hidden states come from one pass over each chunk of logits:
nothing of the size of the logits is kept for the backward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .errors import TrainError

Weighting = Literal["dpace", "decay", "uniform"]
CHUNK_BLOCKS = 32  # on a CPU: their logits fit the cache
CHUNK_BLOCKS_GPU = 2048


@dataclass(frozen=True, slots=True)
class LossConfig:
    """``weighting``: D-PACE (arXiv 2605.18810) with ``alpha``, or ``exp(-(k-1)/gamma)`` (DFlash eq. 4), or none.

    The loss of a slot is ``ce`` x cross-entropy with the answer's token + ``kl`` x cross-entropy with the target's own
    distribution + ``tv`` x L1 distance to that distribution (twice the total variation; DSpark trains 0.1 and 0.9).
    Distributions are over the head's rows. ``confidence``: weight of the loss of DSpark's confidence head,
    ``selector``: of DFlash 2's candidate selector.
    """

    weighting: Weighting = "dpace"
    alpha: float = 0.5
    gamma: float = 4.0
    ce: float = 1.0
    kl: float = 0.0
    tv: float = 0.0
    confidence: float = 1.0
    selector: float = 1.0

    @property
    def needs_teacher(self) -> bool:
        return self.kl > 0 or self.tv > 0


def parse_loss(text: str) -> dict[str, float]:
    """``ce=0.5,kl=0.5`` as a mapping; what is not named is 0. Raises TrainError."""
    out = {"ce": 0.0, "kl": 0.0, "tv": 0.0}
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            out[name.strip()] = number = float(value)
        except ValueError:
            number = -1.0
        if name.strip() not in ("ce", "kl", "tv") or not 0 <= number < float("inf"):
            raise TrainError(f"--loss {text!r}: write weights of ce, kl and tv, such as ce=0.5,kl=0.5")
    if not any(out.values()):
        raise TrainError(f"--loss {text!r}: all weights are 0; such as ce=0.5,kl=0.5")
    return out


def position_weights(config: LossConfig, label_prob: Tensor, valid: Tensor) -> Tensor:
    """Weights ``[N, K]`` of the slots 1..K of N blocks from the probabilities of their labels; no gradient.

    D-PACE: with ``q = (1 - alpha) p + alpha``, ``w_j = sum over m >= j of prod over i <= m of q_i``, which is how much
    slot j still matters for the expected length.
    """
    mask = valid.to(label_prob.dtype)
    if config.weighting == "uniform":
        return mask
    slots = label_prob.shape[-1]
    if config.weighting == "decay":
        steps = torch.arange(slots, device=mask.device, dtype=mask.dtype)
        return torch.exp(-steps / config.gamma) * mask
    q = ((1 - config.alpha) * label_prob + config.alpha) * mask
    reach = torch.cumprod(q, -1)
    return reach.flip(-1).cumsum(-1).flip(-1) * mask


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        labels: Tensor,
        valid: Tensor,
        teacher: Tensor | None,
        config: LossConfig,
        given: Tensor | None,
        table: Tensor | None,
        top_k: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        blocks, slots, width = hidden.shape
        new = functools.partial(torch.zeros, device=hidden.device)
        grad = new(blocks, slots, width) if hidden.requires_grad else None
        hit = new(blocks, slots, dtype=torch.bool)
        weights, overlap = new(blocks, slots), new(blocks, slots)
        total = new(())
        known = labels >= 0
        values = new(blocks, slots, top_k) if top_k else None
        best = new(blocks, slots, top_k, dtype=torch.long) if top_k else None
        markov = given is not None and table is not None
        if markov:
            assert given is not None and table is not None
            grad_given, grad_table = new(given.shape), new(table.shape)
            rows_of_table = table.to(head.dtype)
        chunk = CHUNK_BLOCKS if hidden.device.type == "cpu" else CHUNK_BLOCKS_GPU
        for i in range(0, blocks, chunk):
            part = slice(i, i + chunk)
            rows = hidden[part].reshape(-1, width).to(head.dtype)
            logits = F.linear(rows, head).float()
            if markov:
                assert given is not None
                before = given[part].reshape(-1, given.shape[-1]).to(head.dtype)
                logits += F.linear(before, rows_of_table).float()
            if values is not None and best is not None:
                found, columns = logits.topk(top_k)
                values[part], best[part] = found.view(-1, slots, top_k), columns.view(-1, slots, top_k)
            label = labels[part].reshape(-1)
            index = label.clamp(min=0).unsqueeze(1)
            log_prob = torch.log_softmax(logits, -1)
            picked = log_prob.gather(1, index).squeeze(1)
            seen = known[part].reshape(-1)
            hit[part] = ((logits.argmax(-1) == label) & seen).view(-1, slots)
            prob = (picked.exp() * seen).view(-1, slots)
            weight = position_weights(config, prob, valid[part]).reshape(-1) * seen
            weights[part] = weight.view(-1, slots)
            total -= (weight * picked).sum() * config.ce
            p = log_prob.exp()
            wanted = distance = None
            if teacher is not None:
                wanted = torch.softmax(F.linear(teacher[part].reshape(-1, width).to(head.dtype), head).float(), -1)
                total -= (weight * (wanted * log_prob).sum(-1)).sum() * config.kl
                apart = p - wanted
                l1 = apart.abs().sum(-1)
                overlap[part] = (1 - 0.5 * l1).view(-1, slots)
                if config.tv:
                    total += (weight * l1).sum() * config.tv
                    sign = apart.sign_()
                    distance = (sign - (sign * p).sum(-1, keepdim=True)).mul_(p)  # gradient of L1 by the logits
            delta = p.mul_(config.ce + config.kl)
            delta.scatter_add_(1, index, torch.full_like(picked, -config.ce).unsqueeze(1))
            if wanted is not None:
                delta.add_(wanted, alpha=-config.kl)
            if distance is not None:
                delta.add_(distance, alpha=config.tv)
            delta *= weight.unsqueeze(1)
            delta = delta.to(head.dtype)
            if grad is not None:
                grad[part] = F.linear(delta, head.t()).view(-1, slots, width).float()
            if markov:
                grad_given[part] = F.linear(delta, rows_of_table.t()).view(-1, slots, grad_given.shape[-1]).float()
                grad_table += (delta.t() @ before).float()
        ctx.save_for_backward(grad, grad_given if markov else None, grad_table if markov else None, head, best)
        ctx.hidden_dtype = hidden.dtype
        weight_sum = weights.sum()
        fixed = [hit, weight_sum, weights, overlap, *([] if best is None else [best])]
        ctx.mark_non_differentiable(*fixed)
        return total, hit, weight_sum, weights, overlap, values, best

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *own, head, best = ctx.saved_tensors
        hidden, given, table = (None if g is None else g * grads[0] for g in own)
        if hidden is not None and best is not None:
            by_value = grads[5].to(head.dtype).unsqueeze(-2)
            for i in range(0, len(hidden), CHUNK_BLOCKS):
                part = slice(i, i + CHUNK_BLOCKS)
                hidden[part] += (by_value[part] @ head[best[part]]).squeeze(-2)
        hidden = None if hidden is None else hidden.to(ctx.hidden_dtype)
        return hidden, None, None, None, None, None, given, table, None


def head_loss(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    valid: Tensor,
    config: LossConfig,
    teacher: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted cross-entropy of the slots that draft.

    ``hidden [N, K, H]``: drafter output of these slots; ``head [R, H]``: frozen rows, in the compute dtype;
    ``labels [N, K]``: row numbers of the right tokens, -1 where the token has no row; ``valid [N, K]``: slots inside
    the sequence; ``teacher [N, K, H]``: the target's final hidden state that predicts each slot's token.
    Returns the *sum* of the weighted losses, the sum of the weights (no gradient; divide by it once all parts of a
    batch are summed), and ``hit [N, K]``, where the arg max is right.
    """
    teacher = teacher if config.needs_teacher else None
    total, hit, weight, *_ = _HeadLoss.apply(hidden, head, labels, valid, teacher, config, None, None, 0)
    return total, weight, hit


def selector_loss(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    valid: Tensor,
    config: LossConfig,
    teacher: Tensor | None,
    top_k: int,
    score: Callable[[Tensor, Tensor], Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """As ``head_loss`` with DFlash 2's selector, whose loss is the cross-entropy over each slot's best rows.

    ``score(values [N, K, C], rows [N, K, C])`` scores the best C = ``top_k`` rows, given the right token before each
    slot. Slots weigh what they weigh in the loss of the logits. ``hit``: where the best score is the right token's.
    """
    top_k = min(top_k, len(head))
    teacher = teacher if config.needs_teacher else None
    total, hit, weight, weights, _, values, rows = _HeadLoss.apply(
        hidden, head, labels, valid, teacher, config, None, None, top_k
    )
    scores = score(values, rows)
    right = rows == labels.unsqueeze(-1)
    # A slot whose right token is not among the candidates has no part in this loss. (Speculators puts it in the last
    # one's place, a set of candidates that drafting never meets; the loss of the logits pulls it in already.)
    log_prob = torch.log_softmax(scores, -1).masked_fill(~right, 0.0).sum(-1)
    total = total - config.selector * (weights * log_prob).sum()
    hit = right.gather(-1, scores.argmax(-1, keepdim=True)).squeeze(-1)
    return total, weight, hit


def dspark_loss(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    valid: Tensor,
    config: LossConfig,
    teacher: Tensor | None,
    given: Tensor | None,
    table: Tensor | None,
    confidence: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As ``head_loss`` with DSpark's heads (arXiv 2607.05147).

    ``given [N, K, r]``: Markov embedding of the token before each slot's; ``table [R, r]``: what it adds to the logits
    of the head's rows (both None: no Markov head). ``confidence [N, K]``: logits of the chance that the draft is kept;
    their loss is the binary cross-entropy with the overlap 1 - L1 / 2 of drafter and target, weighted as the rest.
    """
    teacher = teacher if config.needs_teacher or confidence is not None else None
    total, hit, weight, weights, overlap, *_ = _HeadLoss.apply(
        hidden, head, labels, valid, teacher, config, given, table, 0
    )
    if confidence is not None:
        judged = F.binary_cross_entropy_with_logits(confidence, overlap, reduction="none")
        total = total + config.confidence * (weights * judged).sum()
    return total, weight, hit


def acceptance(hit: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Survival per slot ``[K]`` (all drafts up to it right) over blocks that are wholly inside their sequence, and the
    expected tokens per round, bonus included: ``1 + sum(survival)``."""
    whole = valid.all(-1)
    alive = torch.cumprod(hit[whole].float(), -1)
    survival = alive.mean(0) if len(alive) else torch.zeros(hit.shape[-1])
    return survival, 1.0 + survival.sum()
