"""What grammars cost: time per step of masks, sampling and the pass, and tokens per second with and without a grammar.

    .venv/bin/python -m benchmarks.structured_outputs

Each kind of output is generated plainly and with prompt lookup; the rounds are interleaved. "masks" is the work that a
grammar adds in Python and llguidance (trimming drafts, masks of all rows); "sampler" the whole native sampling call.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from paceline import LLM, SamplingParams
from paceline import engine as engine_module
from paceline.dtypes import DEFAULT_QUANTIZATION, QUANTIZATIONS

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "kind": {"enum": ["person", "place", None]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
            "required": ["street", "city"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "kind", "tags", "address"],
    "additionalProperties": False,
}
KINDS: dict[str, Any] = {
    "free": None,
    "json_object": {"json_object": True},
    "schema": {"json": SCHEMA},
    "schema, no whitespace": {"json": SCHEMA, "disable_any_whitespace": True},
    "regex": {"regex": r"[A-Za-z0-9 ,.\n]{300,}"},
    "choice": {"choice": [f"answer number {i}" for i in range(200)]},
}
QUESTION = "Describe Tom, a baker of 41 from Lyon, as a JSON object with name, age, kind, tags and address."


class Clock:
    """Seconds spent in functions that it wraps, per step."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)

    def wrap(self, owner: Any, function: str, label: str) -> None:
        original: Callable[..., Any] = getattr(owner, function)

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self.spent[label] += time.perf_counter() - begin

        setattr(owner, function, timed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--concurrency", type=int, default=1, help="copies of each request that run at once")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, default=DEFAULT_QUANTIZATION)
    options = parser.parse_args()
    llm = LLM(
        options.model,
        quantization=options.quantization,
        speculative_config={"method": "ngram", "num_speculative_tokens": 7},
    )
    clock = Clock()
    clock.wrap(engine_module, "trim_drafts", "masks")
    clock.wrap(engine_module, "bitmask", "masks")
    clock.wrap(engine_module, "verify", "sampler")
    clock.wrap(llm.engine, "_forward", "pass")
    clock.wrap(llm.engine, "step", "step")
    messages: Any = [[{"role": "user", "content": QUESTION}]] * options.concurrency
    steps: dict[tuple[str, int], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    rates: dict[tuple[str, int], list[float]] = defaultdict(list)
    original = llm.engine.step
    for number in range(options.rounds + 1):
        for kind, asked in KINDS.items():
            for drafts in (0, 7):
                mine = steps[kind, drafts]

                def step(mine: dict[str, list[float]] = mine, warm: bool = number > 0) -> Any:
                    clock.spent.clear()
                    results = original()
                    if warm and all(s.num_output_tokens > 1 for s in llm.engine.running):
                        for label, seconds in clock.spent.items():
                            mine[label].append(seconds)
                    return results

                llm.engine.step = step  # type: ignore[method-assign]
                params = SamplingParams(temperature=0, max_tokens=options.max_tokens, structured_outputs=asked)
                begin = time.perf_counter()
                outputs = llm.chat(messages, params, num_speculative_tokens=drafts)
                seconds = time.perf_counter() - begin
                if number:
                    rates[kind, drafts].append(sum(len(o.outputs[0].token_ids) for o in outputs) / seconds)
    print(f"{options.model}, {options.concurrency} at once, median milliseconds per step (99th percentile)\n")
    print("| output | drafts | tok/s | pass | masks | sampler | step | masks / step |")
    print("|---|---|---|---|---|---|---|---|")
    for (kind, drafts), mine in steps.items():
        cells = [f"{1e3 * statistics.median(mine[label]):.2f}" for label in ("pass", "masks", "sampler", "step")]
        cells[1] += f" ({1e3 * sorted(mine['masks'])[int(0.99 * len(mine['masks']))]:.2f})"
        share = sum(mine["masks"]) / sum(mine["step"])
        rate = statistics.median(rates[kind, drafts])
        print(f"| {kind} | {drafts} | {rate:.0f} | {' | '.join(cells)} | {100 * share:.1f} % |")


if __name__ == "__main__":
    main()
