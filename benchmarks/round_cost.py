"""What one speculative round costs, against the floors of its verify pass and its draft pass.

    python -m benchmarks.round_cost --output round.json

A round drafts 7 tokens for one request behind about 160 tokens of context, verifies 8 rows, samples, commits. It is
timed from the end of one step to the end of the next, so that all that runs between them counts; steps of fewer drafts
(the last of an answer) do not. Prompt lookup is off. Floors follow the definition of `paceline bench kernels`:
max(bytes / read bandwidth, operations / peak rate), measured between the rounds. An untimed answer goes before the
timed ones: measuring the bandwidth drives the weights out of the caches, and they come back within some passes. Parts
of a round come from answers of their own, since the clocks take time. Medians over repeats; every repeat measures
everything once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from paceline import LLM, SamplingParams, _native
from paceline.bench.floors import draft_cost
from paceline.bench.profile import clocks
from paceline.dtypes import DEFAULT_QUANTIZATION, QUANTIZATIONS
from paceline.speculation.dflash import DFlashProposer

PROMPT = [{"role": "user", "content": "Explain step by step how to add fractions with different denominators. " * 3}]


def floor_ms(cost: tuple[float, float], bandwidth_gbs: float, peak_gflops: float) -> float:
    """The larger of what memory and arithmetic need, in milliseconds."""
    return max(cost[0] / bandwidth_gbs, cost[1] / peak_gflops) / 1e6


def decode(llm: LLM, drafts: int, params: SamplingParams) -> float:
    """Seconds of a step of `drafts` drafts, on average over one answer."""
    ends: list[tuple[float, list[int]]] = []
    engine: Any = llm.engine
    own_step = engine.step

    def step() -> Any:
        results = own_step()
        ends.append((time.perf_counter(), [result.num_drafts for result in results]))
        return results

    engine.step = step
    try:
        llm.chat(PROMPT, params, num_speculative_tokens=drafts)
    finally:
        del engine.step
    return statistics.fmean(end - before for (before, _), (end, seen) in pairwise(ends) if seen == [drafts])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, default=DEFAULT_QUANTIZATION)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    llm = LLM(arguments.model, quantization=arguments.quantization, speculative_config={"method": "dflash"})
    proposer = llm.engine.proposer
    if not isinstance(proposer, DFlashProposer):
        parser.error(f"--model {arguments.model}: no DFlash drafter ships for it")
    drafts = proposer.max_drafts
    greedy = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    sampled = SamplingParams(temperature=0.8, seed=1, max_tokens=64, ignore_eos=True)
    seen: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        seen.setdefault(name, []).append(value)

    for _ in range(arguments.repeats):
        note("read_bandwidth_gbs", _native.measure_read_bandwidth(llm.model.pool, 1 << 30))
        note("peak_gflops", _native.measure_peak(llm.model.pool, "", llm.model.f32, 500_000, llm.model.weight_type))
        decode(llm, drafts, greedy)
        for name, params in (("greedy", greedy), ("temperature 0.8", sampled)):
            note(f"round ms, {name}", decode(llm, drafts, params) * 1e3)
        with clocks(llm.engine) as times:
            llm.chat(PROMPT, greedy, num_speculative_tokens=drafts)
        for part, milliseconds in times.as_row().items():
            note(f"of it {part} ms", milliseconds)
        note("one row ms", llm.time_forward(1, 128) * 1e3)
        note(f"{drafts + 1} rows ms", llm.time_forward(drafts + 1, 128) * 1e3)
        begin = time.perf_counter()
        decode(llm, 0, greedy)
        note("plain answer s", time.perf_counter() - begin)
    medians: dict[str, Any] = {name: statistics.median(values) for name, values in seen.items()}
    bandwidth, peak = medians["read_bandwidth_gbs"], medians["peak_gflops"]
    context = 160
    medians["verify floor ms"] = floor_ms(llm.pass_cost(drafts + 1, context), bandwidth, peak)
    medians["draft floor ms"] = floor_ms(draft_cost(proposer, drafts, context), bandwidth, peak)
    floors = medians["verify floor ms"] + medians["draft floor ms"]
    medians["round / floors"] = medians["round ms, greedy"] / floors
    medians["sampling share"] = medians["round ms, temperature 0.8"] / medians["round ms, greedy"] - 1
    for name, value in medians.items():
        print(f"{name:24} {value:10.3f}")
    if arguments.output:
        arguments.output.write_text(json.dumps(medians, indent=1) + "\n")


if __name__ == "__main__":
    main()
