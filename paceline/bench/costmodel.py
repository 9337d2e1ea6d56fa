"""What a draft length should bring: (1 + sum of survival) / (T_draft + T_verify), against plain decoding."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.bench.backend import Arm
from paceline.bench.local import LocalBackend
from paceline.speculation.cost_table import CostTable


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds by rows of the pass (one and the drafts for each request): of a pass that verifies drafts with all that
    belongs to its step but making them, of making them, of a plain step where nothing drafts. The last is a table of
    its own: a pass of as many rows that verifies is not the same."""

    verify: CostTable
    draft: CostTable
    plain: CostTable

    def round_seconds(self, length: int, concurrency: int = 1, asked: float = 1.0) -> float:
        """One step in which `concurrency` requests verify drafts of `length` tokens. asked: share of drafts that the
        drafter makes; others are at hand. How many it makes in a step is taken to be chance."""
        if not length:
            return self.plain.seconds(concurrency)
        each = length + 1
        drafting = sum(_chance(n, concurrency, asked) * self.draft.seconds(n * each) for n in range(1, concurrency + 1))
        return self.verify.seconds(concurrency * each) + drafting


def _chance(n: int, of: int, share: float) -> float:
    """That n of so many happen, each with the chance `share`."""
    return math.comb(of, n) * share**n * (1.0 - share) ** (of - n)


@dataclass(frozen=True, slots=True)
class Offer:
    """What drafts of one length were like. survival[j]: chance that draft j + 1 is kept. share: of steps that had
    drafts, which prompt lookup alone often has not. asked: share of these for which the drafter was asked."""

    survival: Sequence[float]
    share: float = 1.0
    asked: float = 1.0


def predicted_speedup(offer: Offer, length: int, costs: Costs, concurrency: int = 1) -> float:
    """Tokens per second with drafts of `length` tokens over those of plain decoding. Positions beyond the offer's
    survival count nothing."""
    plain = costs.round_seconds(0, concurrency)
    drafted = costs.round_seconds(length, concurrency, offer.asked)
    step = offer.share * drafted + (1.0 - offer.share) * plain
    return (1.0 + offer.share * sum(offer.survival[:length])) * plain / step


def measured_costs(backend: LocalBackend) -> Costs:
    """The costs that the arms of fixed length saw in their own full rounds, in one table. Shorter passes (the end of an
    answer) are too few to count."""
    costs = Costs(CostTable(), CostTable(), CostTable())
    for length, policy in backend.policies.items():
        own = {n: s for n, s in policy.verify.medians.items() if n % (length + 1) == 0}
        (costs.verify if length else costs.plain).preset(own)
        costs.draft.preset({n: s for n, s in policy.draft.medians.items() if n % (length + 1) == 0})
    return costs


def offer_of(row: Mapping[str, Any]) -> Offer:
    """From a RESULT row of drafts of fixed length. Every step gives one token of the model's own beside what is
    accepted; the steps that end prompts have no drafts."""
    spec = row["spec_decode"]
    drafts = spec["num_drafts"]
    steps = spec["num_delivered_tokens"] - spec["num_accepted_tokens"] - row["completed"]
    share = min(1.0, drafts / steps) if steps > 0 else 1.0
    asked = 1.0 - row["num_found_drafts"] / drafts if drafts else 1.0
    return Offer(list(spec["per_position_acceptance_rates"]), share, asked)


def offers(rows: Sequence[Mapping[str, Any]]) -> dict[int, Offer]:
    """What to expect of every length from 0 to the longest fixed one of a set's rows: as the shortest measured drafts
    that reach it were. They have the same beginning, but not quite: which source is asked depends on the length."""
    measured = {row["num_speculative_tokens"]: row for row in rows if isinstance(row["num_speculative_tokens"], int)}
    longer = sorted(k for k in measured if k)
    if not longer:
        return {}
    return {k: offer_of(measured[next(m for m in longer if m >= k)]) for k in range(longer[-1] + 1)}


def mean_offer(parts: Iterable[Offer]) -> Offer:
    """The mean over several sets."""
    parts = list(parts)
    length = max(len(part.survival) for part in parts)
    return Offer(
        [statistics.fmean(p.survival[j] if j < len(p.survival) else 0.0 for p in parts) for j in range(length)],
        statistics.fmean(p.share for p in parts),
        statistics.fmean(p.asked for p in parts),
    )


def prediction_rows(rows: Sequence[Mapping[str, Any]], arms: Sequence[Arm]) -> list[dict[str, Any]]:
    """Measured and predicted speed-up per set and draft length at concurrency 1, for arms of one local engine."""
    local = next((arm.backend for arm in arms if isinstance(arm.backend, LocalBackend)), None)
    if local is None or any(arm.backend is not local for arm in arms):
        return []
    costs = measured_costs(local)
    if not costs.plain.known:
        return []
    found = []
    serial = [row for row in rows if row["concurrency"] == 1 and isinstance(row["num_speculative_tokens"], int)]
    for name in dict.fromkeys(row["dataset"] for row in serial):
        mine = [row for row in serial if row["dataset"] == name]
        measured = {row["num_speculative_tokens"]: row["speedup"] for row in mine}
        for length, offer in offers(mine).items():
            predicted = predicted_speedup(offer, length, costs)
            found.append({"dataset": name, "k": length, "predicted": predicted, "measured": measured.get(length)})
    return found


def choice_rows(predictions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Per set: the length that the model would choose among those that were measured, and its measured speed as a share
    of the fastest one's. predictions: from `prediction_rows`. predicted_any_k: its choice among all lengths."""
    found = []
    for name in dict.fromkeys(row["dataset"] for row in predictions):
        mine = [row for row in predictions if row["dataset"] == name]
        measured = [row for row in mine if row["measured"] is not None]
        if not any(row["k"] for row in measured):
            continue
        chosen, best = _largest(measured, "predicted"), _largest(measured, "measured")
        found.append(
            {
                "dataset": name,
                "predicted_k": chosen["k"],
                "predicted": chosen["predicted"],
                "measured": chosen["measured"],
                "best_k": best["k"],
                "best_measured": best["measured"],
                "share_of_best": chosen["measured"] / best["measured"],
                "predicted_any_k": _largest(mine, "predicted")["k"],
            }
        )
    return found


def _largest(rows: Sequence[Mapping[str, Any]], key: str) -> Mapping[str, Any]:
    """Of equals the shortest."""
    return max(rows, key=lambda row: (row[key], -row["k"]))


def choice_lines(choices: Sequence[Mapping[str, Any]]) -> list[str]:
    """For a terminal, a line per set."""
    return [
        f"{row['dataset']}: the cost model would choose k = {row['predicted_k']} ({row['measured']:.2f}x measured), "
        f"the fastest was k = {row['best_k']} ({row['best_measured']:.2f}x): {row['share_of_best']:.2f} of it"
        for row in choices
    ]
