"""Which drafter and draft length suit a user's prompts: scan, predict, measure the candidates, say why.

The scan measures a few draft lengths once. Its survival and step times feed the cost model, which predicts every length
in between; the best predicted, the best scanned and the adaptive length are then measured against plain decoding in
interleaved repeats, and the fastest of these is recommended.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.bench.backend import Arm, DraftLength
from paceline.bench.costmodel import Costs, Offer, mean_offer, measured_costs, offers, predicted_speedup
from paceline.bench.datasets import BenchPrompt
from paceline.bench.figures import result_rows
from paceline.bench.local import LocalBackend
from paceline.bench.runner import measure
from paceline.sampling_params import SamplingParams

WORTHWHILE = 1.02  # a speed-up below this is not worth a drafter's memory


@dataclass(frozen=True, slots=True)
class Candidate:
    """A drafter as a speculative configuration, without a number of tokens; longest: the most it should draft."""

    name: str
    config: dict[str, Any]
    longest: int


@dataclass(slots=True)
class Tuned:
    """What one drafter showed. speedups: measured in the final repeats, by length; scanned: in the scan; predicted: by
    the cost model for every length."""

    candidate: Candidate
    concurrency: int
    scanned: dict[DraftLength, float] = field(default_factory=dict)
    predicted: dict[int, float] = field(default_factory=dict)
    speedups: dict[DraftLength, float] = field(default_factory=dict)
    ranges: dict[DraftLength, tuple[float, float]] = field(default_factory=dict)
    offers: dict[int, Offer] = field(default_factory=dict)
    costs: Costs | None = None
    warnings: list[str] = field(default_factory=list)
    identical: bool = True

    @property
    def best_predicted(self) -> int:
        """The length that the cost model would take; 0 = plain decoding."""
        return max(self.predicted, key=lambda k: (self.predicted[k], -k))

    @property
    def best(self) -> DraftLength:
        """The fastest arm of the final repeats; the adaptive one where it is as good as a fixed length, since it also
        adapts to prompts and load that were not measured."""
        fixed = {k: v for k, v in self.speedups.items() if isinstance(k, int)}
        winner = max(fixed, key=lambda k: (fixed[k], -k))
        adaptive = self.speedups.get("auto", 0.0)
        return "auto" if adaptive >= 0.98 * fixed[winner] and adaptive > 1.0 else winner

    @property
    def speedup(self) -> float:
        return self.speedups[self.best]

    @property
    def prediction_ratio(self) -> float:
        """Throughput at the length that the model predicts over the best of the fixed lengths that were measured."""
        fixed = [v for k, v in self.speedups.items() if isinstance(k, int)]
        return self.speedups[self.best_predicted] / max(fixed)

    @property
    def most_tokens(self) -> int:
        """`num_speculative_tokens` to configure: lengths are chosen at each step up to it."""
        if isinstance(self.best, int) and self.best:
            return self.best
        fixed = {k: v for k, v in (self.speedups | self.scanned).items() if isinstance(k, int) and k}
        return max(self.best_predicted, max(fixed, key=lambda k: fixed[k], default=1), 1)

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "drafter": self.candidate.name,
            "speedups": {str(k): v for k, v in self.speedups.items()},
            "scanned": {str(k): v for k, v in self.scanned.items()},
            "predicted": {str(k): v for k, v in self.predicted.items()},
            "predicted_best": self.best_predicted,
            "predicted_best_vs_measured_best": self.prediction_ratio,
            "survival": list(self.offers[max(self.offers)].survival) if self.offers else [],
            "identical": self.identical,
            "warnings": self.warnings,
        }


def scan_lengths(longest: int) -> list[int]:
    """0, 1, 3, 5, 7, 11, 15 ... as far as a drafter goes, its longest included."""
    steps = [k for k in (1, 3, 5, 7, 11, 15, 23, 31) if k < longest]
    return [0, *steps, longest]


def tune(
    candidate: Candidate,
    backend: LocalBackend,
    sets: Mapping[str, Sequence[BenchPrompt]],
    params: SamplingParams,
    *,
    concurrency: int = 1,
    repeats: int = 3,
    on_step: Callable[[str], None] = lambda _label: None,
) -> Tuned:
    """Scan and measure one drafter."""
    found = Tuned(candidate, concurrency)

    def run(lengths: Sequence[DraftLength], times: int) -> list[dict[str, Any]]:
        arms = [Arm(backend, k) for k in lengths]
        rows = []
        for name, prompts in sets.items():
            rows += result_rows(
                measure(name, prompts, arms, params, concurrency=concurrency, repeats=times, on_step=on_step)
            )
        failed = next((w for row in rows if row["failed"] for w in row["warnings"]), None)
        found.warnings += [] if failed is None else [failed]
        found.identical &= not any(row["identical"] is False for row in rows)
        return rows

    rows = run(scan_lengths(candidate.longest), 1)
    found.scanned = _by_length(rows, concurrency)
    found.offers = _mean_offers(rows)
    found.costs = measured_costs(backend)
    found.predicted = {k: predicted_speedup(offer, k, found.costs, concurrency) for k, offer in found.offers.items()}
    scanned_best = max(found.scanned, key=lambda k: found.scanned[k], default=0)
    final: list[DraftLength] = [*dict.fromkeys([0, found.best_predicted, scanned_best]), "auto"]
    rows = run(final, repeats)
    found.speedups = _by_length(rows, concurrency)
    key = _ratio(concurrency)
    for row in rows:
        low, high = row["spread"].get(key, (0.0, 0.0))
        before = found.ranges.get(row["num_speculative_tokens"], (low, high))
        found.ranges[row["num_speculative_tokens"]] = (min(low, before[0]), max(high, before[1]))
        found.warnings += [f"{row['dataset']}, {row['arm']}: {w}" for w in row["warnings"]]
    return found


def _ratio(concurrency: int) -> str:
    return "speedup" if concurrency == 1 else "output_speedup"


def _by_length(rows: Sequence[Mapping[str, Any]], concurrency: int) -> dict[DraftLength, float]:
    """Mean speed-up over the sets."""
    found: dict[DraftLength, list[float]] = {}
    for row in rows:
        if row[_ratio(concurrency)] is not None:
            found.setdefault(row["num_speculative_tokens"], []).append(row[_ratio(concurrency)])
    return {length: statistics.fmean(values) for length, values in found.items()}


def _mean_offers(rows: Sequence[Mapping[str, Any]]) -> dict[int, Offer]:
    """Of every length, the mean over the sets."""
    each = [
        offers([row for row in rows if row["dataset"] == name])
        for name in dict.fromkeys(row["dataset"] for row in rows)
    ]
    return {k: mean_offer(found[k] for found in each) for k in each[0]}


def reason(best: Tuned, all_tuned: Sequence[Tuned]) -> str:
    """The recommendation in two sentences."""
    where = "one request at a time" if best.concurrency == 1 else f"{best.concurrency} requests at once"
    others = [t for t in all_tuned if t is not best]
    if best.speedup < WORTHWHILE:
        tried = " and ".join(t.candidate.name for t in all_tuned)
        return (
            f"Plain decoding is as fast as any drafts on these prompts with {where}: the best of {tried} reached "
            f"{best.speedup:.2f}x. A draft's first token is kept {_share(best)} of the time, which does not pay for "
            f"the rows it adds to a pass."
        )
    low, high = best.ranges.get(best.best, (best.speedup, best.speedup))
    length = f"up to {best.most_tokens}" if best.best == "auto" else f"{best.most_tokens}"
    first = (
        f"Drafts of {length} tokens by {best.candidate.name} decode {best.speedup:.2f}x as fast as plain decoding on "
        f"these prompts with {where} ({low:.2f} to {high:.2f} over sets and repeats)"
    )
    first += "".join(f", {other.candidate.name} {other.speedup:.2f}x" for other in others) + "."
    k = best.most_tokens
    offer = best.offers[k]
    kept = 1 + sum(offer.survival[:k])
    assert best.costs is not None
    drafted = best.costs.round_seconds(k, best.concurrency, offer.asked)
    cost = drafted / best.costs.round_seconds(0, best.concurrency)
    second = f"A round with {k} drafts gives {kept:.2f} tokens and takes {cost:.2f}x as long as a plain step"
    longer = [j for j in best.predicted if j > k]
    if longer:
        last = max(longer)
        second += (
            f"; the drafts beyond cost more than they bring ({last} drafts: {best.predicted[last]:.2f}x predicted)."
        )
    else:
        second += "; longer drafts were not tried."
    return f"{first} {second}"


def _share(tuned: Tuned) -> str:
    survival = tuned.offers[1].survival if 1 in tuned.offers else []
    return f"{survival[0]:.0%}" if survival else "0%"
