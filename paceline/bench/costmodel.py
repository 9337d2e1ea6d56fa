"""What a draft length should bring: (1 + sum of survival) / (T_draft + T_verify), against plain decoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.bench.backend import Arm
from paceline.bench.local import LocalBackend
from paceline.speculation.length import CostTable


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of drafting and of everything else in a step, by rows of the pass (drafts + 1 for each request)."""

    verify: CostTable
    draft: CostTable

    def round_seconds(self, length: int, concurrency: int = 1) -> float:
        """One step in which `concurrency` requests verify drafts of `length` tokens."""
        rows = concurrency * (length + 1)
        return self.verify.seconds(rows) + (self.draft.seconds(rows) if length else 0.0)


def predicted_speedup(survival: Sequence[float], length: int, costs: Costs, concurrency: int = 1) -> float:
    """Tokens per second with drafts of `length` tokens over those of plain decoding. survival[j]: chance that draft
    j + 1 is kept; positions beyond it count nothing."""
    plain = 1.0 / costs.round_seconds(0, concurrency)
    return (1.0 + sum(survival[:length])) / costs.round_seconds(length, concurrency) / plain


def measured_costs(backend: LocalBackend) -> Costs:
    """The costs that the arms of fixed length saw while they ran, in one table."""
    verify, draft = CostTable(), CostTable()
    for policy in backend.policies.values():
        verify.preset(policy.verify.medians)
        draft.preset(policy.draft.medians)
    return Costs(verify, draft)


def longest_survival(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Survival per position from the row with the longest fixed drafts: shorter ones have the same beginning."""
    fixed = [row for row in rows if isinstance(row["num_speculative_tokens"], int)]
    longest = max(fixed, key=lambda row: row["num_speculative_tokens"], default=None)
    return list(longest["spec_decode"]["per_position_acceptance_rates"]) if longest is not None else []


def prediction_rows(rows: Sequence[Mapping[str, Any]], arms: Sequence[Arm]) -> list[dict[str, Any]]:
    """Measured and predicted speed-up per set and draft length at concurrency 1, for an engine in this process."""
    local = next((arm.backend for arm in arms if isinstance(arm.backend, LocalBackend)), None)
    if local is None:
        return []
    costs = measured_costs(local)
    if not costs.verify.known:
        return []
    found = []
    serial = [row for row in rows if row["concurrency"] == 1 and isinstance(row["num_speculative_tokens"], int)]
    for name in dict.fromkeys(row["dataset"] for row in serial):
        mine = [row for row in serial if row["dataset"] == name]
        survival = longest_survival(mine)
        measured = {row["num_speculative_tokens"]: row["speedup"] for row in mine}
        for length in range(len(survival) + 1):
            predicted = predicted_speedup(survival, length, costs)
            found.append({"dataset": name, "k": length, "predicted": predicted, "measured": measured.get(length)})
    return found
