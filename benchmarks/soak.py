"""What must not grow, and what must not be paid twice.

`python -m benchmarks.soak` times a long prompt the first and the second time, then sends many short requests of every
kind through one engine and reports resident memory on the way.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import numpy as np

from paceline import LLM, SamplingParams

PROMPT_TOKENS = 2000
REPEATS = 5


def resident_mb() -> float:
    """Resident memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("/proc/self/status: no VmRSS")


def soak(llm: LLM, requests: int, batch: int) -> list[dict[str, float]]:
    """Resident memory, blocks in use and cache figures after every tenth of the requests."""
    rng, done = np.random.default_rng(0), 0
    marks: list[dict[str, float]] = []
    vocab = llm.model.vocab_size
    roots = [rng.integers(0, vocab, 200).tolist() for _ in range(20)]
    while done < requests:
        prompts, params = [], []
        for i in range(min(batch, requests - done)):
            root = roots[int(rng.integers(0, len(roots)))][: int(rng.integers(0, 64))]
            prompts.append([*root, *rng.integers(0, vocab, int(rng.integers(1, 24))).tolist()])
            hot = i % 3 == 0
            params.append(
                SamplingParams(
                    temperature=0.8 if hot else 0.0,
                    seed=i,
                    max_tokens=int(rng.integers(1, 10)),
                    logprobs=1 if i % 5 == 0 else None,
                    stop="e" if i % 7 == 0 else None,
                )
            )
        if done % (10 * batch) == 0:  # a stream that is closed in the middle
            stream = llm.stream(prompts[0], SamplingParams(max_tokens=50, seed=1))
            next(stream)
            stream.close()
        llm.generate(prompts, params)
        before, done = done, done + len(prompts)
        if before * 10 // requests != done * 10 // requests:
            stats = llm.engine.scheduler.stats
            marks.append(
                {
                    "requests": done,
                    "resident_mb": round(resident_mb(), 1),
                    "blocks_held": llm.engine.pool.size - llm.engine.pool.free,
                    "prefix_hit_rate": round(stats.hit_rate, 3),
                    "preemptions": llm.engine.scheduler.num_preemptions,
                }
            )
    llm.engine.check()
    return marks


def first_tokens(llm: LLM) -> dict[str, float]:
    """Milliseconds to the first token of a long prompt: new, and again."""
    rng = np.random.default_rng(1)
    first: list[float] = []
    second: list[float] = []
    one = SamplingParams(temperature=0.0, max_tokens=1)
    for _ in range(REPEATS):
        prompt = rng.integers(0, llm.model.vocab_size, PROMPT_TOKENS).tolist()
        for times in (first, second):
            times.append(1e3 * llm.generate(prompt, one)[0].metrics.time_to_first_token_s)
    a, b = statistics.median(first), statistics.median(second)
    return {"first_ms": round(a, 1), "second_ms": round(b, 1), "share": round(b / a, 4)}


def main() -> None:
    """Run both and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--kv-cache-space", type=float, default=0.1, help="GiB: full well before a tenth has run")
    args = parser.parse_args()
    llm = LLM(args.model, kv_cache_space=args.kv_cache_space)
    result = {"first_token": first_tokens(llm), "soak": soak(llm, args.requests, args.batch)}
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
