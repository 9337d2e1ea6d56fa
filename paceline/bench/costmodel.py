"""What a draft length should bring: (1 + sum of survival) / (T_draft + T_verify), against plain decoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.bench.backend import Arm
from paceline.bench.local import LocalBackend
from paceline.speculation.cost_table import CostTable


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of drafting and of everything else in a step, by rows of the pass (drafts + 1 for each request)."""

    verify: CostTable
    draft: CostTable

    def round_seconds(self, length: int, concurrency: int = 1) -> float:
        """One step in which `concurrency` requests verify drafts of `length` tokens."""
        rows = concurrency * (length + 1)
        return self.verify.seconds(rows) + (self.draft.seconds(rows) if length else 0.0)


def predicted_speedup(
    survival: Sequence[float], length: int, costs: Costs, concurrency: int = 1, share: float = 1.0
) -> float:
    """Tokens per second with drafts of `length` tokens over those of plain decoding. survival[j]: chance that draft
    j + 1 is kept; positions beyond it count nothing. share: of steps in which the drafter has something to offer, which
    prompt lookup often has not."""
    plain = costs.round_seconds(0, concurrency)
    step = share * costs.round_seconds(length, concurrency) + (1.0 - share) * plain
    return (1.0 + share * sum(survival[:length])) * plain / step


def measured_costs(backend: LocalBackend) -> Costs:
    """The costs that the arms of fixed length saw in their own full rounds, in one table. Shorter passes (the end of an
    answer) are too few to count."""
    verify, draft = CostTable(), CostTable()
    for length, policy in backend.policies.items():
        verify.preset({n: s for n, s in policy.verify.medians.items() if n % (length + 1) == 0})
        draft.preset({n: s for n, s in policy.draft.medians.items() if n % (length + 1) == 0})
    return Costs(verify, draft)


def draft_share(row: Mapping[str, Any]) -> float:
    """Share of a row's steps that had drafts. Every step gives one token of the model's own beside what is accepted."""
    spec = row["spec_decode"]
    steps = spec["num_delivered_tokens"] - spec["num_accepted_tokens"] - row["completed"]  # prompts' steps apart
    return min(1.0, spec["num_drafts"] / steps) if steps > 0 else 1.0


def longest_row(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The row of the longest fixed drafts."""
    fixed = [row for row in rows if isinstance(row["num_speculative_tokens"], int) and row["num_speculative_tokens"]]
    return max(fixed, key=lambda row: row["num_speculative_tokens"], default=None)


def longest_survival(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Survival per position from the row with the longest fixed drafts: shorter ones have the same beginning."""
    longest = longest_row(rows)
    return list(longest["spec_decode"]["per_position_acceptance_rates"]) if longest is not None else []


def prediction_rows(rows: Sequence[Mapping[str, Any]], arms: Sequence[Arm]) -> list[dict[str, Any]]:
    """Measured and predicted speed-up per set and draft length at concurrency 1, for arms of one local engine."""
    local = next((arm.backend for arm in arms if isinstance(arm.backend, LocalBackend)), None)
    if local is None or any(arm.backend is not local for arm in arms):
        return []
    costs = measured_costs(local)
    if not costs.verify.known:
        return []
    found = []
    serial = [row for row in rows if row["concurrency"] == 1 and isinstance(row["num_speculative_tokens"], int)]
    for name in dict.fromkeys(row["dataset"] for row in serial):
        mine = [row for row in serial if row["dataset"] == name]
        survival, longest = longest_survival(mine), longest_row(mine)
        share = draft_share(longest) if longest is not None else 1.0
        measured = {row["num_speculative_tokens"]: row["speedup"] for row in mine}
        for length in range(len(survival) + 1):
            predicted = predicted_speedup(survival, length, costs, share=share)
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
