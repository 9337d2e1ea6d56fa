"""Throughput of many requests at once: Paceline, vLLM's CPU backend and llama.cpp, the same weights, in turns.

    PACELINE_VLLM_PYTHON=... python -m benchmarks.compare_batch --peers vllm,llama.cpp --output result.json

`mixed`: 64 requests, prompts of three sets, outputs of 32 to 256 tokens, all given at once (Paceline, vLLM).
`uniform`: 64 requests of 128 tokens of prompt and 128 of output, which llama-batched-bench can run, too; it starts and
ends all of them together and samples nothing. Figures are output tokens per second over the whole call, the prompts
included. While one engine runs, the others are stopped.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.peers import llamacpp, vllm
from benchmarks.peers.llamacpp import PeerError
from benchmarks.workloads import Workload, mixed, uniform
from paceline import LLM, SamplingParams
from paceline.errors import PacelineError
from paceline.weights.store import resolve_model

PEERS = ("vllm", "llama.cpp")
Arms = dict[str, Callable[[], float]]


def run_ours(llm: LLM, work: Workload, speculation: bool) -> float:
    """Output tokens per second."""
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in work.max_tokens]
    begin = time.perf_counter()
    outputs = llm.generate(work.prompts, params, speculation=speculation)
    seconds = time.perf_counter() - begin
    assert [len(output.outputs[0].token_ids) for output in outputs] == work.max_tokens
    return work.output_tokens / seconds


def run_vllm(peer: vllm.Vllm, work: Workload) -> float:
    """Output tokens per second."""
    with peer.turn():
        batch = peer.generate(work.prompts, work.max_tokens)
    assert [len(ids) for ids in batch.token_ids] == work.max_tokens
    return work.output_tokens / batch.wall_s


def run_llamacpp(model: Path, threads: int, prompt: int, output: int, at_once: int) -> float:
    """Output tokens per second of one batch of `at_once` requests."""
    settings = llamacpp.Settings(threads=threads)
    return output * at_once / sum(llamacpp.batch(model, at_once, settings, prompt=prompt, output=output))


def main(arguments: Sequence[str] | None = None) -> int:
    summary = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare_batch", description=summary)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--peers", default="vllm,llama.cpp", help="comma-separated; none: an empty text")
    parser.add_argument("--workloads", default="mixed,uniform")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--max-num-seqs", default="64", help="of Paceline; several with commas")
    parser.add_argument("--max-num-batched-tokens", type=int, default=512, help="of Paceline")
    parser.add_argument("--prompt-len", type=int, default=128, help="of uniform")
    parser.add_argument("--output-len", type=int, default=128, help="of uniform")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output", type=Path)
    vllm.add_arguments(parser)
    options = parser.parse_args(arguments)
    vllm.end_on_sigterm()
    peers = [name for name in options.peers.split(",") if name]
    if set(peers) - set(PEERS):
        parser.error(f"--peers: {options.peers!r}: known are {', '.join(PEERS)}")
    results: dict[str, dict[str, list[float]]] = {}
    facts: dict[str, Any] = {"requests": options.requests, "threads": options.threads}
    try:
        model = resolve_model(options.model)
        with ExitStack() as stack:
            peer = None
            if "vllm" in peers:
                settings = vllm.Settings(threads=options.threads, preload=tuple(options.preload))
                peer = stack.enter_context(vllm.Vllm(model, vllm.peer_python(options.vllm_python), settings))
                facts["vllm"] = peer.facts
            llms = {
                int(seqs): LLM(
                    model,
                    dtype="bfloat16",
                    quantization="none",  # as the others'
                    threads=options.threads,
                    max_model_len=2048,
                    max_num_seqs=int(seqs),
                    enable_prefix_caching=False,  # rounds repeat their prompts; vLLM's is off, too
                    max_num_batched_tokens=options.max_num_batched_tokens,
                )
                for seqs in options.max_num_seqs.split(",")
            }
            tokenizer = next(iter(llms.values())).tokenizer
            shape = (options.requests, options.prompt_len, options.output_len)
            works = {"mixed": mixed(tokenizer, options.requests), "uniform": uniform(tokenizer, *shape)}
            few = Workload(works["mixed"].prompts[:2], [8, 8])
            for llm in llms.values():
                run_ours(llm, few, True)  # everybody warms up
            if peer is not None:
                run_vllm(peer, few)  # and is stopped from here on, but for its turns
            bf16 = None
            if "llama.cpp" in peers:
                llamacpp.build()
                bf16 = llamacpp.model_file(model, "bf16")
            for name in options.workloads.split(","):
                work = works[name]
                facts[name] = {"prompt_tokens": work.prompt_tokens, "output_tokens": work.output_tokens}
                arms: Arms = {}
                for seqs, llm in llms.items():
                    arms[f"paceline, plain, {seqs} at once"] = partial(run_ours, llm, work, False)
                    arms[f"paceline, auto, {seqs} at once"] = partial(run_ours, llm, work, True)
                if peer is not None:
                    arms["vllm"] = partial(run_vllm, peer, work)
                if bf16 is not None and name == "uniform":
                    for at_once in sorted({options.requests // 2, options.requests}):
                        run = partial(run_llamacpp, bf16, options.threads, options.prompt_len, options.output_len)
                        arms[f"llama.cpp, {at_once} at once"] = partial(run, at_once)
                results[name] = measure(arms, options.rounds)
    except (PeerError, PacelineError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for name, samples in results.items():
        for arm, values in samples.items():
            print(f"{name:8} {arm:28} {statistics.median(values):8.1f} tok/s")
    if options.output:
        options.output.write_text(json.dumps({**facts, "tok_s": results}, indent=2) + "\n")
    return 0


def measure(arms: Arms, rounds: int) -> dict[str, list[float]]:
    """Each arm once a round, every other round in the opposite order."""
    samples: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(rounds):
        for name in arms if turn % 2 == 0 else reversed(arms):
            samples[name].append(arms[name]())
            print(f"round {turn + 1}: {name}: {samples[name][-1]:.1f} tok/s", file=sys.stderr)
    return samples


if __name__ == "__main__":
    sys.exit(main())
