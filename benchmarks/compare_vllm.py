"""Plain decoding of single requests against vLLM's CPU backend: the same weights, prompts and threads, in turns.

    PACELINE_VLLM_PYTHON=... python -m benchmarks.compare_vllm --output result.json

`decode`: tokens per second from a request's first token to its last, one request at a time. `request`: tokens over the
time of the whole call, the prompt included. While one engine runs, the other's processes are stopped.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.compare_llamacpp import Samples
from benchmarks.peers import vllm
from benchmarks.peers.llamacpp import PeerError
from benchmarks.workloads import prompts
from paceline import LLM, SamplingParams
from paceline.errors import PacelineError
from paceline.weights.store import resolve_model


def measure_ours(llm: LLM, requests: Sequence[list[int]], tokens: int, speculation: bool) -> Samples:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    samples: Samples = {"decode": [], "request": []}
    for ids in requests:
        begin = time.perf_counter()
        (output,) = llm.generate([ids], params, speculation=speculation)
        samples["request"].append(tokens / (time.perf_counter() - begin))
        samples["decode"].append((tokens - 1) / output.metrics.generation_time_s)
    return samples


def measure_vllm(peer: vllm.Vllm, requests: Sequence[list[int]], tokens: int) -> Samples:
    samples: Samples = {"decode": [], "request": []}
    with peer.turn():
        for ids in requests:
            batch = peer.generate([ids], [tokens])
            samples["request"].append(tokens / batch.wall_s)
            samples["decode"].append((tokens - 1) / batch.decode_s[0])
    return samples


def main(arguments: Sequence[str] | None = None) -> int:
    summary = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare_vllm", description=summary)
    parser.add_argument("--model", default="smollm2-135m", help="GGUF file, folder, or a name `paceline pull` knows")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num-prompts", type=int, default=3, help="of a round; other prompts in each")
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--speculation", action="store_true", help="also measure Paceline with its drafter")
    parser.add_argument("--output", type=Path, help="write the result as JSON, with every sample")
    vllm.add_arguments(parser)
    options = parser.parse_args(arguments)
    vllm.end_on_sigterm()
    tokens, count = options.output_len, options.num_prompts
    try:
        python = vllm.peer_python(options.vllm_python)
        model = resolve_model(options.model)
        settings = vllm.Settings(threads=options.threads, preload=tuple(options.preload))
        with vllm.Vllm(model, python, settings) as peer:
            llm = LLM(
                model,
                dtype="bfloat16",
                quantization="none",  # as vLLM's
                threads=options.threads,
                max_model_len=settings.max_model_len,
                enable_prefix_caching=False,  # as vLLM's
            )
            requests = prompts(llm.tokenizer, count * options.rounds)
            measure_vllm(peer, requests[:1], 16)  # both engines warm up
            measure_ours(llm, requests[:1], 16, False)
            arms: dict[str, Callable[[list[list[int]]], Samples]] = {
                "paceline": lambda part: measure_ours(llm, part, tokens, False),
                "vllm": lambda part: measure_vllm(peer, part, tokens),
            }
            if options.speculation:
                arms["paceline, speculative"] = lambda part: measure_ours(llm, part, tokens, True)
            samples: dict[str, Samples] = {name: {} for name in arms}
            for turn in range(options.rounds):
                part = requests[turn * count : (turn + 1) * count]
                for name in arms if turn % 2 == 0 else reversed(arms):
                    for test, values in arms[name](part).items():
                        samples[name].setdefault(test, []).extend(values)
            facts = {"model": model.name, "isa": llm.info()["isa"], **peer.facts, "settings": asdict(settings)}
    except (PeerError, PacelineError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    table: dict[str, Any] = {}
    for test in ("decode", "request"):
        medians = {name: statistics.median(values[test]) for name, values in samples.items()}
        table[test] = {name: round(value, 1) for name, value in medians.items()}
        for name, value in medians.items():
            print(f"{test:8} {name:22} {value:8.1f} tok/s {value / medians['vllm']:6.2f}x vLLM")
    if options.output:
        options.output.write_text(json.dumps({**facts, "tok_s": table, "samples": samples}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
