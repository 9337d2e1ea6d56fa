"""Where the time of a batch goes: passes by size, the share of prompts, and of everything that is not a pass.

    python -m benchmarks.profile_batch --requests 64 --speculation off

The rows of a table are kinds of step: `prompt` steps have rows of prompts (and of decoding requests beside them),
`decode` steps have none. `native` is the time inside the model's passes, `propose` that of drafting, `rest` everything
else in a step: scheduling, sampling, stops, detokenising. Below it, what passes of some sizes cost on their own.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.workloads import mixed, uniform
from paceline import LLM, SamplingParams
from paceline.dtypes import QUANTIZATIONS


@dataclass
class Steps:
    """Steps of one kind. Times in seconds."""

    rows: list[int] = field(default_factory=list)
    total: list[float] = field(default_factory=list)
    native: list[float] = field(default_factory=list)
    propose: list[float] = field(default_factory=list)


class Probe:
    """Times an engine's passes and drafts from outside, by wrapping the two methods that run them."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.steps: dict[str, Steps] = defaultdict(Steps)
        self._step, self._forward, self._propose = engine.step, engine._forward, engine._propose
        engine.step, engine._forward, engine._propose = self.step, self.forward, self.propose
        self._now = {"native": 0.0, "propose": 0.0}
        self._kind, self._rows = "idle", 0

    def _timed(self, name: str, call: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        try:
            return call()
        finally:
            self._now[name] += time.perf_counter() - begin

    def forward(self, work: list[Any]) -> Any:
        self._rows = sum(len(item.tokens) for item in work)
        self._kind = "decode" if all(item.rows_wanted == len(item.tokens) for item in work) else "prompt"
        return self._timed("native", lambda: self._forward(work))

    def propose(self, *arguments: Any) -> Any:
        return self._timed("propose", lambda: self._propose(*arguments))

    def step(self) -> Any:
        self._now = {"native": 0.0, "propose": 0.0}
        self._kind, self._rows = "idle", 0
        begin = time.perf_counter()
        results = self._step()
        kind = self.steps[self._kind]
        kind.total.append(time.perf_counter() - begin)
        kind.rows.append(self._rows)
        kind.native.append(self._now["native"])
        kind.propose.append(self._now["propose"])
        return results


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.profile_batch", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--workload", choices=("mixed", "uniform"), default="mixed")
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("--quantization", choices=QUANTIZATIONS, default="none")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--speculation", choices=("auto", "off"), default="off")
    parser.add_argument("--rows", default="1,8,16,32,48,64,128,256,512", help="sizes of the passes timed alone")
    options = parser.parse_args(arguments)
    llm = LLM(
        options.model,
        quantization=options.quantization,
        threads=options.threads,
        max_model_len=2048,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        enable_prefix_caching=False,
    )
    work = (mixed if options.workload == "mixed" else lambda t, n: uniform(t, n, 128, 128))(
        llm.tokenizer, options.requests
    )
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in work.max_tokens]
    llm.generate(work.prompts[:2], params[:2], speculation=options.speculation == "auto")
    probe = Probe(llm.engine)
    begin = time.perf_counter()
    llm.generate(work.prompts, params, speculation=options.speculation == "auto")
    wall = time.perf_counter() - begin
    print(
        f"{work.output_tokens} tokens and {work.prompt_tokens} of prompts in {wall:.2f} s: "
        f"{work.output_tokens / wall:.0f} tok/s, speculation {options.speculation}"
    )
    heads = f"{'count':>6} {'rows':>8} {'median':>7} {'s':>7} {'native':>7} {'propose':>8} {'rest':>6} {'us/row':>7}"
    print(f"{'steps':8} {heads}")
    for kind, steps in probe.steps.items():
        total, native, propose = sum(steps.total), sum(steps.native), sum(steps.propose)
        rows = max(1, sum(steps.rows))
        print(
            f"{kind:8} {len(steps.total):6} {rows:8} {statistics.median(steps.rows):7.0f} {total:7.2f} {native:7.2f} "
            f"{propose:8.2f} {total - native - propose:6.2f} {1e6 * native / rows:7.0f}"
        )
    outside = wall - sum(sum(steps.total) for steps in probe.steps.values())
    print(f"outside of steps: {outside:.2f} s")
    for rows in (int(text) for text in options.rows.split(",")):
        if rows <= llm.model.max_rows:
            alone = statistics.median(llm.time_forward(rows, 192) for _ in range(5))
            print(f"pass of {rows:4} rows behind 192 tokens: {1e3 * alone:7.2f} ms, {1e6 * alone / rows:6.0f} us/row")
    return 0


if __name__ == "__main__":
    sys.exit(main())
