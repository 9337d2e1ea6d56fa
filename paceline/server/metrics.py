"""Prometheus metrics: vLLM's names, so that its dashboards work, and this engine's own under `paceline:`.

Nothing is counted twice: engine figures are read from the engine's own counters when a scrape comes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from paceline.async_llm import AsyncLLM
from paceline.cache import BLOCK_TOKENS
from paceline.engine import RoundSeconds
from paceline.engine_thread import GAP_BUCKETS, STEP_BUCKETS
from paceline.outputs import RequestOutput

# vLLM's buckets
FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)
PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
LATENCY = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
DRAFTS = (*range(1, 17), 24, 32, 64, 128)
LABELS = ("model_name", "engine")


class Buckets:
    """A histogram that one thread fills."""

    def __init__(self, edges: Sequence[float]) -> None:
        self.edges = edges
        self.counts = [0] * (len(edges) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.edges, value)] += 1
        self.sum += value


class Metrics(Collector):
    """observe() on the event loop when a request ends; the rest at a scrape."""

    def __init__(self, engine: AsyncLLM, model_name: str, engine_index: int = 0) -> None:
        self.engine = engine
        self.labels = [model_name, str(engine_index)]
        self.requests: dict[str, tuple[str, Buckets]] = {
            "vllm:time_to_first_token_seconds": ("Time to the first token.", Buckets(FIRST_TOKEN)),
            "vllm:request_time_per_output_token_seconds": ("Time per output token of a request.", Buckets(PER_TOKEN)),
            "vllm:e2e_request_latency_seconds": ("Time of a whole request.", Buckets(LATENCY)),
            "vllm:request_queue_time_seconds": ("Time in the queue.", Buckets(LATENCY)),
            "vllm:request_prefill_time_seconds": ("Time from admission to the first token.", Buckets(LATENCY)),
            "vllm:request_decode_time_seconds": ("Time from the first token to the last.", Buckets(LATENCY)),
            "vllm:request_inference_time_seconds": ("Time from admission to the last token.", Buckets(LATENCY)),
            "vllm:request_prompt_tokens": ("Prompt tokens of a request.", Buckets(TOKENS)),
            "vllm:request_generation_tokens": ("Generated tokens of a request.", Buckets(TOKENS)),
        }
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def observe(self, output: RequestOutput, seconds: float) -> None:
        """A request has ended, `seconds` after it came. Aborted before its first token it has no times to count."""
        m, made = output.metrics, sum(len(c.token_ids) for c in output.outputs)
        self._note("vllm:e2e_request_latency_seconds", seconds)
        self._note("vllm:request_prompt_tokens", len(output.prompt_token_ids))
        self._note("vllm:request_generation_tokens", made)
        if not made:
            return
        prefill = max(0.0, m.time_to_first_token_s - m.queue_time_s)
        self._note("vllm:time_to_first_token_seconds", m.time_to_first_token_s)
        self._note("vllm:request_queue_time_seconds", m.queue_time_s)
        self._note("vllm:request_prefill_time_seconds", prefill)
        self._note("vllm:request_decode_time_seconds", m.generation_time_s)
        self._note("vllm:request_inference_time_seconds", prefill + m.generation_time_s)
        longest = max(len(c.token_ids) for c in output.outputs)
        if longest > 1:
            self._note("vllm:request_time_per_output_token_seconds", m.generation_time_s / (longest - 1))

    def _note(self, name: str, value: float) -> None:
        self.requests[name][1].observe(value)

    def exposition(self) -> tuple[bytes, str]:
        """(body, content type) for a scrape: Prometheus's text format, whatever the client would like best. In
        OpenMetrics, for which Prometheus 2 asks, the library turns the colon of `vllm:` into an underscore."""
        return generate_latest(self.registry), CONTENT_TYPE_PLAIN_0_0_4

    # ---- at a scrape

    def collect(self) -> Iterator[Metric]:
        s = self.engine.stats()
        spec = s.spec_decode
        yield self._gauge("vllm:num_requests_running", "Choices that take part in passes.", s.running)
        yield self._gauge("vllm:num_requests_waiting", "Choices that wait for a place.", s.waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of cache blocks in use; 1 is all.", s.kv_cache_usage)
        yield self._counter("vllm:prompt_tokens", "Prompt tokens processed.", s.prompt_tokens)
        yield self._counter("vllm:generation_tokens", "Tokens generated.", s.generation_tokens)
        yield self._counter("vllm:num_preemptions", "Requests preempted.", s.preemptions)
        yield self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up.", s.prefix_cache_queries)
        yield self._counter("vllm:prefix_cache_hits", "Prompt tokens found in the cache.", s.prefix_cache_hits)
        yield self._finished(s.finished)
        yield self._counter("vllm:spec_decode_num_drafts", "Verify passes with drafts.", spec.num_drafts)
        yield self._counter("vllm:spec_decode_num_draft_tokens", "Draft tokens.", spec.num_draft_tokens)
        yield self._counter("vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted.", spec.num_accepted_tokens)
        yield self._positions(spec.num_accepted_tokens_per_pos)
        gaps = "Time between two pieces of a request; a piece may hold several tokens."
        yield self._histogram("vllm:inter_token_latency_seconds", gaps, GAP_BUCKETS, s.gap_histogram, s.gap_seconds)
        for name, (text, buckets) in self.requests.items():
            yield self._histogram(name, text, buckets.edges, buckets.counts, buckets.sum)
        steps = "Time of a step: draft, pass, sampling, commit."
        yield self._histogram("paceline:round_seconds", steps, STEP_BUCKETS, s.step_histogram, s.step_seconds)
        yield self._parts(s.round_seconds)
        yield self._histogram(
            "paceline:draft_length",
            "Draft tokens per verify pass that had any: the length chosen.",
            DRAFTS,
            _regroup(spec.drafted_histogram, DRAFTS),
            spec.num_draft_tokens,
        )
        yield self._counter("paceline:cut_tokens", "Accepted draft tokens behind a stop.", spec.num_cut_tokens)
        yield self._gauge("paceline:engine_alive", "1 while the engine takes requests.", int(self.engine.alive))
        yield self._cache_config()

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=LABELS)
        family.add_metric(self.labels, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=LABELS)
        family.add_metric(self.labels, value)
        return family

    def _finished(self, finished: dict[str, int]) -> Metric:
        family = CounterMetricFamily("vllm:request_success", "Choices ended.", labels=[*LABELS, "finished_reason"])
        for reason in ("stop", "length", "abort"):
            family.add_metric([*self.labels, reason], finished.get(reason, 0))
        return family

    def _positions(self, accepted: list[int]) -> Metric:
        text = "Draft tokens accepted, by position."
        family = CounterMetricFamily("vllm:spec_decode_num_accepted_tokens_per_pos", text, labels=[*LABELS, "position"])
        for position, count in enumerate(accepted):
            family.add_metric([*self.labels, str(position)], count)
        return family

    def _parts(self, spent: RoundSeconds) -> Metric:
        text = "Time of all steps, by what they did: draft, forward (the model's pass), commit, schedule."
        family = CounterMetricFamily("paceline:round_part_seconds", text, labels=[*LABELS, "part"])
        for part, seconds in asdict(spent).items():
            family.add_metric([*self.labels, part], seconds)
        return family

    def _histogram(self, name: str, text: str, edges: Sequence[float], counts: list[int], total: float) -> Metric:
        family = HistogramMetricFamily(name, text, labels=LABELS)
        names = [*(str(float(edge)) for edge in edges), "+Inf"]
        family.add_metric(self.labels, list(zip(names, accumulate(counts), strict=True)), total)
        return family

    def _cache_config(self) -> Metric:
        blocks = self.engine.llm.engine.pool.size
        facts: dict[str, Any] = {"block_size": BLOCK_TOKENS, "num_cpu_blocks": blocks, "num_gpu_blocks": blocks}
        family = GaugeMetricFamily("vllm:cache_config_info", "The cache.", labels=["engine", *facts])
        family.add_metric([self.labels[1], *map(str, facts.values())], 1)
        return family


def _regroup(counts: Sequence[int], edges: Sequence[float]) -> list[int]:
    """Counts by value as counts by bucket."""
    out = [0] * (len(edges) + 1)
    for value, count in enumerate(counts):
        out[bisect_left(edges, value)] += count
    return out
