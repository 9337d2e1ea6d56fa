"""Plain decoding and prefill against llama.cpp: the same weights, threads and hour, runs taken in turns.

    python -m benchmarks.compare_llamacpp --output result.json

Measured: `tg128`, 128 tokens decoded one by one without speculation, and `pp512`, a prompt of 512 tokens until
its first token. Paceline's times include sampling and its Python API; llama-bench's are of its passes alone.
A virtual machine's memory bandwidth can double or halve within an hour: only figures of one run compare.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers import llamacpp
from paceline import LLM, SamplingParams
from paceline.errors import PacelineError
from paceline.weights.store import resolve_model

TESTS = ("tg128", "pp512")
REPETITIONS = 2


class Paceline:
    """Paceline's side: one loaded model, driven through the public API."""

    def __init__(self, model: Path, threads: int) -> None:
        self.llm = LLM(model, dtype="bfloat16", threads=threads, max_model_len=1024)
        self.random = np.random.default_rng(0)
        self.vocab_size = self.llm.tokenizer.vocab_size
        self.speeds()

    def speeds(self) -> dict[str, list[float]]:
        """Tokens per second of each repetition of each test."""
        return {
            "tg128": [self._decode(128) for _ in range(REPETITIONS)],
            "pp512": [self._prefill(512) for _ in range(REPETITIONS)],
        }

    def _decode(self, count: int) -> float:
        metrics = self._run(prompt=1, tokens=count + 1)
        return count / metrics.generation_time_s

    def _prefill(self, count: int) -> float:
        return count / self._run(prompt=count, tokens=1).time_to_first_token_s

    def _run(self, prompt: int, tokens: int) -> Any:
        # A prompt of its own each time, as in llama-bench: no run may profit from another's cached prefix.
        ids = self.random.integers(1, self.vocab_size, prompt).tolist()
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        (output,) = self.llm.generate([ids], params, speculation=False)
        return output.metrics


def compare(ours: Callable[[], dict[str, list[float]]], theirs: Callable[[], dict[str, list[float]]], rounds: int):
    """Run both sides in turns, each first in every other round; yields (round, speeds of ours, of theirs)."""
    for turn in range(rounds):
        if turn % 2:
            peer = theirs()
            yield turn, ours(), peer
        else:
            own = ours()
            yield turn, own, theirs()


def main(arguments: Sequence[str] | None = None) -> int:
    summary = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare_llamacpp", description=summary)
    parser.add_argument("--model", default="smollm2-135m", help="GGUF file or a name that `paceline pull` knows")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, help="write the result as JSON")
    options = parser.parse_args(arguments)
    try:
        llamacpp.build()
        model = resolve_model(options.model)
        peer_model = llamacpp.model_file(model, "bf16")
        settings = llamacpp.Settings(threads=options.threads)
        ours = Paceline(model, options.threads)
    except (llamacpp.PeerError, PacelineError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1

    def peer() -> dict[str, list[float]]:
        return llamacpp.bench(peer_model, TESTS, settings, repetitions=REPETITIONS)

    samples: dict[str, dict[str, list[float]]] = {test: {"paceline": [], "llama.cpp": []} for test in TESTS}
    for turn, own, their in compare(ours.speeds, peer, options.rounds):
        for test in TESTS:
            samples[test]["paceline"] += own[test]
            samples[test]["llama.cpp"] += their[test]
        print(f"round {turn + 1} of {options.rounds}", file=sys.stderr)
    result = {
        "model": model.name,
        "dtype": "bfloat16",
        "llama.cpp": {"version": llamacpp.VERSION, **asdict(settings)},
    }
    result["tests"] = {test: summarise(engines) for test, engines in samples.items()}
    for test, row in result["tests"].items():
        print(f"{test}: Paceline {row['paceline']} tok/s, llama.cpp {row['llama.cpp']} tok/s: {row['ratio']}x")
    if options.output:
        options.output.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def summarise(engines: dict[str, list[float]]) -> dict[str, Any]:
    """Medians of both engines, their ratio, and the samples themselves."""
    medians = {name: statistics.median(values) for name, values in engines.items()}
    return {
        **{name: round(value, 1) for name, value in medians.items()},
        "ratio": round(medians["paceline"] / medians["llama.cpp"], 2),
        "samples": {name: [round(value, 1) for value in values] for name, values in engines.items()},
    }


if __name__ == "__main__":
    sys.exit(main())
