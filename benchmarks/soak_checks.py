"""What a server's figures must satisfy, at any time and once all clients have gone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.soak_process import Usage

Key = tuple[str, tuple[tuple[str, str], ...]]
FREE_FILES = 4  # connections of the one who looks, kept open


@dataclass(frozen=True)
class Scrape:
    """Samples of one answer of /metrics, and which of them may only grow."""

    samples: Mapping[Key, float]
    growing: frozenset[Key]

    @classmethod
    def parse(cls, text: str) -> Scrape:
        samples: dict[Key, float] = {}
        growing = set()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                key = (sample.name, tuple(sorted(sample.labels.items())))
                samples[key] = sample.value
                if family.type in ("counter", "histogram") and not sample.name.endswith("_created"):
                    growing.add(key)
        return cls(samples, frozenset(growing))

    def total(self, name: str) -> float:
        return sum(value for (found, _), value in self.samples.items() if found == name)

    def by(self, name: str, label: str) -> dict[str, float]:
        return {dict(labels)[label]: v for (found, labels), v in self.samples.items() if found == name}


def counters_grow(before: Scrape, after: Scrape) -> Iterator[str]:
    """Counters and buckets never run backwards, and none is lost."""
    for key in before.growing:
        if key not in after.samples:
            yield f"metrics: {key[0]} is gone"
        elif after.samples[key] < before.samples[key] - 1e-6:
            yield f"metrics: {key[0]} ran backwards"


def counters_agree(scrape: Scrape) -> Iterator[str]:
    """The identities of the counters of speculation, and histograms that add up."""
    spec = "vllm:spec_decode_num_"
    drafts, drafted = scrape.total(f"{spec}drafts_total"), scrape.total(f"{spec}draft_tokens_total")
    accepted = scrape.total(f"{spec}accepted_tokens_total")
    positions = scrape.by(f"{spec}accepted_tokens_per_pos_total", "position")
    by_position = [positions[str(i)] for i in range(len(positions))]
    if not accepted <= drafted:
        yield "metrics: more draft tokens were accepted than drafted"
    if sum(by_position) != accepted:
        yield "metrics: accepted tokens by position do not add up to the accepted tokens"
    if any(a < b for a, b in zip([drafts, *by_position], by_position, strict=False)):
        yield "metrics: survival rises with the position"
    buckets: dict[Key, list[tuple[float, float]]] = defaultdict(list)
    for (name, labels), value in scrape.samples.items():
        if name.endswith("_bucket"):
            rest = tuple(label for label in labels if label[0] != "le")
            buckets[name.removesuffix("_bucket"), rest].append((float(dict(labels)["le"]), value))
    for (name, labels), found in buckets.items():
        counts = [count for _, count in sorted(found)]
        if counts != sorted(counts):
            yield f"metrics: the buckets of {name} are not cumulative"
        if counts[-1] != scrape.samples[f"{name}_count", labels]:
            yield f"metrics: the count of {name} is not that of its last bucket"


def left_behind(load: int, scrape: Scrape, usage: Usage, first: Usage) -> list[str]:
    """What is held although nobody asks for anything."""
    out = []
    if load:
        out.append(f"left behind: {load} requests in flight")
    for name in ("running", "waiting"):
        if count := scrape.total(f"vllm:num_requests_{name}"):
            out.append(f"left behind: {count:.0f} requests {name}")
    if share := scrape.total("vllm:kv_cache_usage_perc"):
        out.append(f"left behind: {100 * share:.2f} % of the cache's blocks")
    if scrape.total("paceline:engine_alive") != 1:
        out.append("the engine is not alive")
    if usage.files > first.files + FREE_FILES:
        out.append(f"left behind: {usage.files - first.files} open files or connections")
    if usage.threads > first.threads + 1:
        out.append(f"left behind: {usage.threads - first.threads} threads")
    return out
