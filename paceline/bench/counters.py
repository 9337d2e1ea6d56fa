"""Acceptance as servers tell it: counters of /metrics (vLLM's names), fields of a response (vLLM, SGLang, llama.cpp).

Everything becomes `SpecDecodeStats`, so that the figures of any server have one definition. What a server does not tell
stays unknown: llama.cpp counts draft tokens but not drafts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from paceline.speculation.stats import SpecDecodeStats

PLACES = ("metrics", "timings", "meta_info")  # keys of a chunk that may hold figures: vLLM, llama.cpp, SGLang

DRAFTS = "vllm:spec_decode_num_drafts"
DRAFT_TOKENS = "vllm:spec_decode_num_draft_tokens"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_POSITION = re.compile(r'(?:^|,)\s*position="(\d+)"')


class TokenCounts(SpecDecodeStats):
    """Counters of a server that tells draft tokens but not drafts: rates exist, lengths and positions do not."""

    accepted = 0

    @property
    def num_accepted_tokens(self) -> int:
        return self.accepted

    def merge(self, other: SpecDecodeStats) -> None:
        super().merge(other)
        self.accepted += other.num_accepted_tokens

    def as_dict(self) -> dict[str, Any]:
        """The `spec_decode` object with None for what is not known."""
        known = ("num_draft_tokens", "num_accepted_tokens", "num_delivered_tokens", "acceptance_rate")
        return {
            key: value if key in known else [] if isinstance(value, list) else None
            for key, value in super().as_dict().items()
        }


def total(parts: Sequence[SpecDecodeStats]) -> SpecDecodeStats:
    """The sum of counters; of token counts alone, if one of the parts is no more."""
    out = TokenCounts() if any(isinstance(part, TokenCounts) for part in parts) else SpecDecodeStats()
    for part in parts:
        out.merge(part)
    return out


def parse(text: str) -> dict[str, float]:
    """Prometheus text -> speculation counters summed over engines and models; a position is `name@i`."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if not match:
            continue
        name = match[1].removesuffix("_total")
        if not name.startswith("vllm:spec_decode_"):
            continue
        if name == PER_POSITION:
            position = _POSITION.search(match[2] or "")
            if not position:
                continue
            name = f"{name}@{position[1]}"
        try:
            found[name] = found.get(name, 0.0) + float(match[3])
        except ValueError:
            continue
    return found


def from_metrics(before: Mapping[str, float], after: Mapping[str, float]) -> SpecDecodeStats | None:
    """What happened between two scrapes; None where the server has no such counters."""
    if DRAFTS not in after:
        return None

    def grown(name: str) -> int:
        return round(max(0.0, after.get(name, 0.0) - before.get(name, 0.0)))

    positions = sorted(int(name.rpartition("@")[2]) for name in after if name.startswith(PER_POSITION + "@"))
    survivors = [grown(f"{PER_POSITION}@{i}") for i in positions]
    return from_survivors(grown(DRAFTS), grown(DRAFT_TOKENS), survivors)


def from_survivors(drafts: int, draft_tokens: int, survivors: Sequence[int]) -> SpecDecodeStats:
    """From the number of drafts accepted up to and including each position."""
    alive = [drafts]
    for count in survivors:
        alive.append(min(count, alive[-1]))  # a scrape between two counters may be off by one
    alive.append(0)
    return from_histogram([a - b for a, b in pairwise(alive)], draft_tokens)


def from_histogram(histogram: Sequence[int], draft_tokens: int) -> SpecDecodeStats:
    """From the number of drafts of which 0, 1, ... tokens were accepted. All drafts are taken to be as long as their
    mean, rounded up: the counters tell no more."""
    counts = [max(0, int(n)) for n in histogram]
    drafts = sum(counts)
    length = -(-draft_tokens // drafts) if drafts else 0
    counts += [0] * (length + 1 - len(counts))
    return SpecDecodeStats(
        accepted_histogram=counts if drafts else [],
        num_draft_tokens=draft_tokens,
        num_fully_accepted=sum(counts[length:]) if drafts else 0,
    )


def from_response(figures: Mapping[str, Any], tokens: int) -> SpecDecodeStats | None:
    """Per request, from whichever fields a response carries; None when it carries none."""
    stats = _vllm(figures.get("metrics")) or _sglang(figures.get("meta_info")) or _llama_cpp(figures.get("timings"))
    if stats is not None:
        stats.num_delivered_tokens = tokens
    return stats


def _vllm(metrics: Any) -> SpecDecodeStats | None:
    found = metrics.get("speculative_decoding") if isinstance(metrics, dict) else None
    if not isinstance(found, dict) or "acceptance_histogram" not in found:
        return None
    return from_histogram(found["acceptance_histogram"], int(found.get("num_draft_tokens") or 0))


def _sglang(info: Any) -> SpecDecodeStats | None:
    if not isinstance(info, dict) or "spec_correct_drafts_histogram" not in info:
        return None
    return from_histogram(info["spec_correct_drafts_histogram"], int(info.get("spec_num_proposed_drafts") or 0))


def _llama_cpp(timings: Any) -> SpecDecodeStats | None:
    if not isinstance(timings, dict) or not timings.get("draft_n"):
        return None
    stats = TokenCounts(num_draft_tokens=int(timings["draft_n"]))
    stats.accepted = int(timings.get("draft_n_accepted") or 0)
    return stats
