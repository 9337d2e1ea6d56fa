"""A drafter trained here inside vLLM: the same prompts through both engines, ids and acceptance length side by side.

    PACELINE_VLLM_PYTHON=... python -m benchmarks.drafter_in_vllm --output result.json

vLLM does not know the list of head rows that lies beside a drafter of ours and drafts over the whole vocabulary. So
Paceline runs twice: as shipped, and with a copy of the drafter without that list, which is what vLLM sees. Both engines
decode greedily in fp32, where two right implementations agree but for ties in the last bits.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers import vllm
from benchmarks.peers.llamacpp import PeerError
from paceline import LLM, SamplingParams
from paceline.bench.datasets import load_dataset
from paceline.errors import PacelineError
from paceline.models.dflash import HEAD_ROWS_FILE
from paceline.speculation.stats import SpecDecodeStats
from paceline.weights.store import resolve_model

SETS = ("humaneval", "gsm8k", "mt-bench")


def load_prompts(llm: LLM, count: int) -> list[list[int]]:
    """Token ids of the first `count` prompts of each set."""
    return [prompt.encode(llm.tokenizer) for name in SETS for prompt in load_dataset(name, count)]


def ours(llm: LLM, prompts: list[list[int]], tokens: int, drafts: int) -> dict[str, Any]:
    params = SamplingParams(temperature=0.0, max_tokens=tokens)
    outputs = llm.generate(prompts, params, num_speculative_tokens=drafts)
    stats = SpecDecodeStats.total(output.metrics.spec_decode for output in outputs)
    return {
        "token_ids": [output.outputs[0].token_ids for output in outputs],
        "acceptance_length": round(stats.acceptance_length, 3),
        "num_drafts": stats.num_drafts,
    }


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token at which two answers part; None when they are equal."""
    if list(a) == list(b):
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def main(arguments: Sequence[str] | None = None) -> int:
    summary = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drafter_in_vllm", description=summary)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafter", type=Path, help="drafter folder (default: the one that ships for the model)")
    parser.add_argument("--num-prompts", type=int, default=4, help="of each of the three sets")
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--num-speculative-tokens", type=int, default=7)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--output", type=Path)
    vllm.add_arguments(parser)
    options = parser.parse_args(arguments)
    vllm.end_on_sigterm()
    tokens, drafts = options.output_len, options.num_speculative_tokens
    results: dict[str, dict[str, Any]] = {}
    try:
        python = vllm.peer_python(options.vllm_python)
        model = resolve_model(options.model)
        config: Any = {"method": "dflash"}
        if options.drafter:
            config = {"method": "dflash", "model": str(options.drafter), "num_speculative_tokens": drafts}
        engine: dict[str, Any] = {"dtype": options.dtype, "quantization": "none", "max_model_len": 2048}
        llm = LLM(model, speculative_config=config, **engine)
        if llm.speculative_config is None or llm.speculative_config.model is None:
            raise PacelineError(f"{options.model}: no DFlash drafter is known for it; name one by --drafter")
        folder = Path(llm.speculative_config.model)
        prompts = load_prompts(llm, options.num_prompts)
        results["paceline, plain"] = ours(llm, prompts, tokens, 0)
        results["paceline, as shipped"] = ours(llm, prompts, tokens, drafts)
        with tempfile.TemporaryDirectory() as scratch:
            whole = Path(shutil.copytree(folder, Path(scratch) / "dflash-whole-head"))
            (whole / HEAD_ROWS_FILE).unlink(missing_ok=True)
            config = {"method": "dflash", "model": str(whole), "num_speculative_tokens": drafts}
            llm = LLM(model, speculative_config=config, **engine)
            results["paceline, whole head"] = ours(llm, prompts, tokens, drafts)
        config = {"method": "dflash", "model": str(folder.resolve()), "num_speculative_tokens": drafts}
        settings = vllm.Settings(
            dtype=options.dtype, max_num_seqs=16, speculative_config=config, preload=tuple(options.preload)
        )
        with vllm.Vllm(model, python, settings) as peer:
            batch = peer.generate(prompts, [tokens] * len(prompts), ignore_eos=False)
            results["vllm, dflash"] = {
                "token_ids": batch.token_ids,
                "acceptance_length": round(batch.acceptance_length, 3),
                "num_drafts": batch.spec_decode["num_drafts"],
            }
            facts = peer.facts
    except (PeerError, PacelineError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    reference = results["paceline, plain"]["token_ids"]
    for name, result in results.items():
        parted = [first_difference(a, b) for a, b in zip(reference, result["token_ids"], strict=True)]
        result["equal"] = sum(place is None for place in parted)
        result["parted_at"] = [place for place in parted if place is not None]
        print(
            f"{name:22} acceptance length {result['acceptance_length']:5.2f} ({result['num_drafts']} drafts), "
            f"{result['equal']} of {len(parted)} answers as Paceline's plain ones"
            + (f", others part at tokens {result['parted_at']}" if result["parted_at"] else "")
        )
    if options.output:
        summary_of = {"drafts": drafts, "dtype": options.dtype, "tokens": tokens, "vllm": facts, "results": results}
        options.output.write_text(json.dumps(summary_of, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
