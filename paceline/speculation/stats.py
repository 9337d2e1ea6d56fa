"""Counters of speculative decoding, with the names and definitions of vLLM's metrics.

Everything derives from one histogram, so that the identities hold by construction: acceptance length = 1 + sum of the
per-position rates, and survival never rises with the position.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from typing import Any


@dataclass(slots=True)
class SpecDecodeStats:
    """Counters of one request, or of many (`merge`).

    accepted_histogram[a]: drafts (verify passes with at least one draft token) of which a tokens were accepted, counted
    before stops and length limits cut the block, as vLLM does. drafted_histogram[k]: of them, how many had k draft
    tokens. num_delivered_tokens: tokens that reached the client,
    of all steps: accepted, bonus, and those of passes without drafts. num_cut_tokens: accepted draft tokens that a stop
    or limit cut off. num_found_drafts: drafts that prompt lookup had at hand, for which no drafter was asked.
    """

    accepted_histogram: list[int] = field(default_factory=list)
    drafted_histogram: list[int] = field(default_factory=list)
    num_draft_tokens: int = 0
    num_fully_accepted: int = 0
    num_delivered_tokens: int = 0
    num_cut_tokens: int = 0
    num_found_drafts: int = 0

    def observe(
        self,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_delivered_tokens: int,
        num_nodes: int | None = None,
        *,
        found: bool = False,
    ) -> None:
        """Count one step: a verify pass, or (num_draft_tokens = 0) a pass without drafts, a prefill, an abort.

        num_delivered_tokens: tokens of the step that the client gets, 0 to num_accepted_tokens + 1. num_nodes: draft
        tokens of a tree, whose depth num_draft_tokens then is; positions are counted by depth. found: the drafts were
        at hand, no drafter had to make them.
        """
        if not 0 <= num_accepted_tokens <= num_draft_tokens:
            raise ValueError(
                f"num_accepted_tokens={num_accepted_tokens}: expected 0 to num_draft_tokens={num_draft_tokens}"
            )
        if not 0 <= num_delivered_tokens <= num_accepted_tokens + 1:
            raise ValueError(
                f"num_delivered_tokens={num_delivered_tokens}: expected 0 to {num_accepted_tokens + 1}, "
                "the accepted tokens and one more"
            )
        self.num_delivered_tokens += num_delivered_tokens
        if num_draft_tokens == 0:
            return
        missing = num_draft_tokens + 1 - len(self.accepted_histogram)
        if missing > 0:
            self.accepted_histogram.extend([0] * missing)
            self.drafted_histogram.extend([0] * missing)
        self.accepted_histogram[num_accepted_tokens] += 1
        self.drafted_histogram[num_draft_tokens] += 1
        self.num_draft_tokens += num_draft_tokens if num_nodes is None else num_nodes
        self.num_fully_accepted += num_accepted_tokens == num_draft_tokens
        self.num_found_drafts += found
        self.num_cut_tokens += max(0, num_accepted_tokens - num_delivered_tokens)

    def merge(self, other: SpecDecodeStats) -> None:
        """Add the counters of another request or worker."""
        self.accepted_histogram = _sum(self.accepted_histogram, other.accepted_histogram)
        self.drafted_histogram = _sum(self.drafted_histogram, other.drafted_histogram)
        self.num_draft_tokens += other.num_draft_tokens
        self.num_fully_accepted += other.num_fully_accepted
        self.num_delivered_tokens += other.num_delivered_tokens
        self.num_cut_tokens += other.num_cut_tokens
        self.num_found_drafts += other.num_found_drafts

    def copy(self) -> SpecDecodeStats:
        """The counters as they are now."""
        out = SpecDecodeStats()
        out.merge(self)
        return out

    def since(self, earlier: SpecDecodeStats) -> SpecDecodeStats:
        """What was counted after `earlier`, a copy of these counters from before."""
        return SpecDecodeStats(
            _sum(self.accepted_histogram, [-x for x in earlier.accepted_histogram]),
            _sum(self.drafted_histogram, [-x for x in earlier.drafted_histogram]),
            self.num_draft_tokens - earlier.num_draft_tokens,
            self.num_fully_accepted - earlier.num_fully_accepted,
            self.num_delivered_tokens - earlier.num_delivered_tokens,
            self.num_cut_tokens - earlier.num_cut_tokens,
            self.num_found_drafts - earlier.num_found_drafts,
        )

    @classmethod
    def total(cls, parts: Iterable[SpecDecodeStats]) -> SpecDecodeStats:
        """The sum of several requests' counters."""
        out = cls()
        for part in parts:
            out.merge(part)
        return out

    @property
    def num_drafts(self) -> int:
        """Verify passes with at least one draft token."""
        return sum(self.accepted_histogram)

    @property
    def num_accepted_tokens(self) -> int:
        """Accepted draft tokens, before any cut."""
        return sum(a * count for a, count in enumerate(self.accepted_histogram))

    @property
    def num_accepted_tokens_per_pos(self) -> list[int]:
        """Drafts that survived to each position, position 0 first."""
        survivors, out = 0, []
        for count in reversed(self.accepted_histogram[1:]):
            survivors += count
            out.append(survivors)
        return out[::-1]

    @property
    def acceptance_rate(self) -> float:
        """Accepted per drafted token; 0 without drafts."""
        return _ratio(self.num_accepted_tokens, self.num_draft_tokens)

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per verify pass, the bonus included: 1 + accepted / drafts; 1 without drafts."""
        return 1.0 + _ratio(self.num_accepted_tokens, self.num_drafts)

    @property
    def per_position_acceptance_rates(self) -> list[float]:
        """Survival: share of drafts accepted up to and including each position; never rises."""
        drafts = self.num_drafts
        return [_ratio(n, drafts) for n in self.num_accepted_tokens_per_pos]

    @property
    def conditional_acceptance_rates(self) -> list[float]:
        """Survival at each position relative to the one before (to 1 for position 0); their running product is the
        survival. 0 where nothing survived to the position before."""
        reached = [self.num_drafts, *self.num_accepted_tokens_per_pos]
        return [_ratio(n, before) for before, n in pairwise(reached)]

    def as_dict(self) -> dict[str, Any]:
        """The machine-readable `spec_decode` object."""
        drafts = self.num_drafts
        return {
            "num_drafts": drafts,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "num_delivered_tokens": self.num_delivered_tokens,
            "acceptance_rate": self.acceptance_rate,
            "acceptance_length": self.acceptance_length,
            "per_position_acceptance_rates": self.per_position_acceptance_rates,
            "conditional_acceptance_rates": self.conditional_acceptance_rates,
            "fully_rejected_rate": _ratio(self.accepted_histogram[0] if drafts else 0, drafts),
            "fully_accepted_rate": _ratio(self.num_fully_accepted, drafts),
        }

    def log_line(self, elapsed_s: float) -> str:
        """The line that vLLM logs for the counters of an interval of elapsed_s seconds."""
        rates = ", ".join(f"{rate:.3f}" for rate in self.per_position_acceptance_rates)
        return (
            f"SpecDecoding metrics: Mean acceptance length: {self.acceptance_length:.2f}, "
            f"Accepted throughput: {_ratio(self.num_accepted_tokens, elapsed_s):.2f} tokens/s, "
            f"Drafted throughput: {_ratio(self.num_draft_tokens, elapsed_s):.2f} tokens/s, "
            f"Accepted: {self.num_accepted_tokens} tokens, Drafted: {self.num_draft_tokens} tokens, "
            f"Per-position acceptance rate: {rates}, "
            f"Avg Draft acceptance rate: {100 * self.acceptance_rate:.1f}%"
        )


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator > 0 else 0.0


def _sum(a: list[int], b: list[int]) -> list[int]:
    return [x + y for x, y in zip_longest(a, b, fillvalue=0)]
