"""Instruction-set paths against each other, in turns in one process: passes, a prompt, many requests, answers.

    python -m benchmarks.compare_paths --quantization none --paths avx512_bf16,amx

Each line has the least and the median time of every path, and the last path's share of the first one's. On a busy
machine the least is the better guide. The answers must be the same with and without speculation.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from paceline import LLM, SamplingParams
from paceline.dtypes import QUANTIZATIONS

CONTEXT = 128
QUESTION = "Write a Python function that returns the n-th Fibonacci number, with a docstring."


def in_turns(name: str, rounds: int, runs: dict[str, Callable[[], float]]) -> None:
    """`runs`: path -> milliseconds of one run."""
    seen: dict[str, list[float]] = {path: [] for path in runs}
    for turn in range(rounds):
        for path in list(runs)[:: 1 if turn % 2 else -1]:
            seen[path].append(runs[path]())
    least = [min(times) for times in seen.values()]
    median = [statistics.median(times) for times in seen.values()]
    times = ", ".join(f"{path} {a:.2f} {b:.2f}" for path, a, b in zip(runs, least, median, strict=True))
    print(f"{name}: {times}, {least[-1] / least[0]:.2f} {median[-1] / median[0]:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare_paths",
        description=(__doc__ or "").partition("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, default="auto")
    parser.add_argument("--paths", default="avx512_bf16,amx", help="with commas between")
    parser.add_argument("--rows", default="1,2,4,8,12,16,64", help="of the passes, with commas between")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument(
        "--rounds", type=int, default=3, help="of prompt, requests and answers; passes: eight times more"
    )
    arguments = parser.parse_args()
    options: dict[str, Any] = {"quantization": arguments.quantization, "enable_prefix_caching": False}
    llms = {path: LLM(arguments.model, isa=path, **options) for path in arguments.paths.split(",")}

    def pass_ms(llm: LLM, rows: int) -> float:
        llm.time_forward(rows, CONTEXT)  # untimed: its own weights back into the caches
        return 1e3 * llm.time_forward(rows, CONTEXT)

    runs: dict[str, Callable[[], float]]
    for rows in map(int, arguments.rows.split(",")):
        runs = {path: partial(pass_ms, llm, rows) for path, llm in llms.items()}
        in_turns(f"{rows} rows, ms", 8 * arguments.rounds, runs)

    chance = random.Random(5)

    def prompt(length: int) -> dict[str, Any]:
        return {"prompt_token_ids": [chance.randrange(300, 40000) for _ in range(length)]}

    def generate_ms(llm: LLM, prompts: list[dict[str, Any]], tokens: int) -> float:
        begin = time.perf_counter()
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        llm.generate(prompts, params, speculation=False)
        return 1e3 * (time.perf_counter() - begin)

    one, many = [prompt(512)], [prompt(chance.randrange(20, 120)) for _ in range(arguments.requests)]
    for name, prompts, tokens in (("a prompt of 512", one, 1), (f"{arguments.requests} requests", many, 24)):
        runs = {path: partial(generate_ms, llm, prompts, tokens) for path, llm in llms.items()}
        in_turns(f"{name}, ms", arguments.rounds, runs)

    texts: dict[str, set[str]] = {path: set() for path in llms}

    def answer_ms(path: str, speculation: bool) -> float:
        begin = time.perf_counter()
        params = SamplingParams(max_tokens=64, temperature=0)
        output = llms[path].chat([{"role": "user", "content": QUESTION}], params, speculation=speculation)[0]
        texts[path].add(output.outputs[0].text)
        return 1e3 * (time.perf_counter() - begin)

    for speculation in (False, True):
        runs = {path: partial(answer_ms, path, speculation) for path in llms}
        in_turns(f"an answer, {'speculative' if speculation else 'plain'}, ms", arguments.rounds, runs)
    assert all(len(found) == 1 for found in texts.values()), "an answer changed"


if __name__ == "__main__":
    main()
