"""Plain decoding, prefill and verify passes against llama.cpp: the same weights and threads, runs taken in turns.

    python -m benchmarks.compare_llamacpp --output result.json
    python -m benchmarks.compare_llamacpp --type q4_1,q4_0,q8_0 --output quantised.json

`--type`: what the weights are stored as. Quantised types are one and the same GGUF file for both sides, made of the
model by llama-quantize, whose blocks both use as they are (good for measuring speed, not quality).
`tg128`: 128 tokens decoded one by one, without speculation. `pp512`: a prompt of 512 tokens until its first token.
`rowsN`: one pass of N rows behind 128 tokens with the logits of every row, which is what verifying N - 1 drafts costs.
Paceline's tg128 and pp512 include sampling and its Python API; llama-bench's are of its passes alone.

A virtual machine's memory bandwidth can double or halve within an hour: only figures of one run compare.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.peers import llamacpp
from paceline import LLM, SamplingParams
from paceline.errors import PacelineError
from paceline.weights.store import resolve_model

SPEEDS = ("tg128", "pp512")  # tokens per second
ROWS = (1, 2, 4, 8, 12, 16)  # milliseconds per pass
CONTEXT = 128
REPETITIONS = 2
PASSES = 16

Samples = dict[str, list[float]]


class Paceline:
    """Paceline's side: one loaded model, driven through the public API."""

    def __init__(self, model: Path, threads: int, quantization: Literal["none", "auto"] = "none") -> None:
        self.llm = LLM(
            model,
            dtype="bfloat16",
            quantization=quantization,
            threads=threads,
            max_model_len=1024,
            speculative_config=None,
        )
        self.random = np.random.default_rng(0)
        self.measure()  # warms everything up

    def measure(self) -> Samples:
        samples = {
            "tg128": [self._decode(128) for _ in range(REPETITIONS)],
            "pp512": [self._prefill(512) for _ in range(REPETITIONS)],
        }
        for rows in ROWS:
            times = [self.llm.time_forward(rows, CONTEXT) for _ in range(PASSES)]
            samples[f"rows{rows}"] = [1e3 * statistics.mean(times)]
        return samples

    def _decode(self, count: int) -> float:
        return count / self._run(prompt=1, tokens=count + 1).generation_time_s

    def _prefill(self, count: int) -> float:
        return count / self._run(prompt=count, tokens=1).time_to_first_token_s

    def _run(self, prompt: int, tokens: int) -> Any:
        # A prompt of its own each time, as in llama-bench: no run may profit from another's cached prefix.
        ids = self.random.integers(1, self.llm.model.vocab_size, prompt).tolist()
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        (output,) = self.llm.generate([ids], params, speculation=False)
        return output.metrics


class LlamaCpp:
    """llama.cpp's side: its own benchmark programs on a file of the same weights."""

    def __init__(self, model: Path, threads: int, kind: str) -> None:
        llamacpp.build()
        self.settings = llamacpp.Settings(threads=threads)
        self.model = llamacpp.model_file(model, kind)

    def measure(self) -> Samples:
        samples = llamacpp.bench(self.model, SPEEDS, self.settings, repetitions=REPETITIONS)
        times = llamacpp.passes(self.model, ROWS, self.settings, context=CONTEXT, steps=PASSES)
        return {**samples, **{f"rows{rows}": [value] for rows, value in times.items()}}


def take_turns(
    first: Callable[[], Samples], second: Callable[[], Samples], rounds: int, *, first_turn: int = 0
) -> Iterator[tuple[Samples, ...]]:
    """(samples of first, samples of second) of each round; every other round the second one starts."""
    for turn in range(first_turn, first_turn + rounds):
        if turn % 2:
            late = second()
            yield first(), late
        else:
            yield first(), second()


def summarise(samples: Samples, peer_samples: Samples) -> dict[str, dict[str, Any]]:
    """Per test the medians of both, and how many times faster Paceline is."""
    summary = {}
    for test in samples:
        ours, theirs = statistics.median(samples[test]), statistics.median(peer_samples[test])
        speed = test in SPEEDS
        summary[test] = {
            "unit": "tok/s" if speed else "ms per pass",
            "paceline": round(ours, 2),
            "llama.cpp": round(theirs, 2),
            "ratio": round(ours / theirs if speed else theirs / ours, 2),
            "samples": {"paceline": samples[test], "llama.cpp": peer_samples[test]},
        }
    return summary


def main(arguments: Sequence[str] | None = None) -> int:
    summary = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare_llamacpp", description=summary)
    parser.add_argument("--model", default="smollm2-135m", help="GGUF file or a name that `paceline pull` knows")
    parser.add_argument("--type", default="bf16", help=f"comma-separated: {', '.join(llamacpp.TYPES)}")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, help="write the result as JSON, with every sample")
    options = parser.parse_args(arguments)
    kinds = options.type.split(",")
    results = []
    try:
        model = resolve_model(options.model)
        pairs = {kind: _pair(model, kind, options.threads) for kind in kinds}
        collected: dict[str, tuple[Samples, Samples]] = {kind: ({}, {}) for kind in kinds}
        for turn in range(options.rounds):
            for kind, (ours, peer) in pairs.items():
                (measured,) = take_turns(ours.measure, peer.measure, 1, first_turn=turn)
                for samples, result in zip(collected[kind], measured, strict=True):
                    for test, values in result.items():
                        samples.setdefault(test, []).extend(values)
            print(f"round {turn + 1} of {options.rounds}", file=sys.stderr)
    except (llamacpp.PeerError, PacelineError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for kind, (ours, peer) in pairs.items():
        tests = summarise(*collected[kind])
        for test, row in tests.items():
            print(
                f"{kind:5} {test:7} Paceline {row['paceline']:8} llama.cpp {row['llama.cpp']:8} {row['unit']:12} "
                f"{row['ratio']}x"
            )
        peer_facts = {"version": llamacpp.VERSION, **asdict(peer.settings)}
        facts = {"model": model.name, "type": kind, "isa": ours.llm.info()["isa"], "llama.cpp": peer_facts}
        results.append({**facts, "tests": tests})
    if options.output:
        options.output.write_text(json.dumps(results if len(results) > 1 else results[0], indent=2) + "\n")
    return 0


def _pair(model: Path, kind: str, threads: int) -> tuple[Paceline, LlamaCpp]:
    """Both sides for one type of weights."""
    peer = LlamaCpp(model, threads, kind)
    quantised = kind.startswith("q")
    return Paceline(peer.model if quantised else model, threads, "auto" if quantised else "none"), peer


if __name__ == "__main__":
    sys.exit(main())
