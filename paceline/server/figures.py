"""The log's lines of figures, every so many seconds in which something happened; and a look at whether all is well."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from paceline.async_llm import AsyncLLM
from paceline.engine_thread import EngineStats

log = logging.getLogger(__name__)

LOOK = 0.5  # seconds between two looks at the engine's health


async def log_figures(engine: AsyncLLM, interval: float, on_death: Callable[[], None] | None) -> None:
    """Runs until cancelled, or until the engine is dead, which `on_death` is told."""
    last, then = engine.stats(), time.perf_counter()
    idle = True
    while True:
        await asyncio.sleep(min(LOOK, interval))
        if engine.error is not None:
            log.critical("the engine is dead, the server ends: %r", engine.error)
            if on_death is not None:
                on_death()
            return
        now = time.perf_counter()
        if now - then < interval:
            continue
        stats = engine.stats()
        still = stats.steps == last.steps and not stats.running and not stats.waiting
        if not (still and idle):  # one more line after the last request, with zeros
            for line in lines(stats, last, now - then):
                log.info("%s", line)
        last, then, idle = stats, now, still


def lines(stats: EngineStats, last: EngineStats, seconds: float) -> list[str]:
    """What vLLM logs for an interval: one line on the engine, one on speculation if there was any."""
    queries = stats.prefix_cache_queries - last.prefix_cache_queries
    hits = stats.prefix_cache_hits - last.prefix_cache_hits
    out = [
        f"Engine 000: Avg prompt throughput: {(stats.prompt_tokens - last.prompt_tokens) / seconds:.1f} tokens/s, "
        f"Avg generation throughput: {(stats.generation_tokens - last.generation_tokens) / seconds:.1f} tokens/s, "
        f"Running: {stats.running} reqs, Waiting: {stats.waiting} reqs, "
        f"GPU KV cache usage: {100 * stats.kv_cache_usage:.1f}%, "
        f"Prefix cache hit rate: {100 * hits / queries if queries else 0.0:.1f}%"
    ]
    spec = stats.spec_decode.since(last.spec_decode)
    if spec.num_drafts:
        out.append(spec.log_line(seconds))
    return out
