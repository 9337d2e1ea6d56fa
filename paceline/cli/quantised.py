"""`paceline quantize` and `paceline eval`: writing quantised models, and what quantising does to their answers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from paceline.cli import options as opt


def quantize(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A model: folder, .gguf file or known name.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="Folder to write; new or empty.")],
    quantization: Annotated[
        Literal["auto", "int8", "int8_channel", "int4"],
        typer.Option("--quantization", help="What to write the matrices as; auto keeps those of a quantised file."),
    ] = "int8",
) -> None:
    """Write a model as a folder with quantised weights.

    Loading it with --quantization auto converts nothing: the weights are packed from the map of the file.
    """
    from paceline.cli.progress import download_progress
    from paceline.weights.quantised_writer import quantise_model
    from paceline.weights.store import resolve_model

    with download_progress() as progress:
        path = resolve_model(source, progress=progress)
    with download_progress() as progress:
        conversions = quantise_model(path, destination, quantization, progress=progress)
    for line in conversions.describe():
        print(line, file=sys.stderr)
    print(destination)


def evaluate(
    model: opt.ModelArgument,
    texts: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILES",
            help='A text file, or .jsonl(.gz) rows {"text"}, {"prompt", "response"} or {"prompt", "tokens"}; '
            'prompts and answers in two files are joined by their "id".',
        ),
    ],
    quantization: opt.QuantizationOption = opt.DEFAULT_QUANTIZATION,
    kv_cache_dtype: opt.KVCacheDtypeOption = opt.DEFAULT_KV_CACHE_DTYPE,
    reference: Annotated[
        opt.Quantization, typer.Option("--reference", help="What to compare with; none is bf16.")
    ] = "none",
    num_texts: Annotated[int, typer.Option("--num-texts", min=1, metavar="N", help="The first N texts.")] = 50,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=2, metavar="N", help="Of each text, the first N tokens.")
    ] = 512,
    dtype: opt.DtypeOption = "auto",
    threads: opt.ThreadsOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.", rich_help_panel=opt.OUTPUT_PANEL)] = False,
) -> None:
    """Compare a quantised model with bf16 on texts: perplexity, and how often both would choose the same token."""
    from paceline.bench import accuracy
    from paceline.cli.engine import note
    from paceline.cli.progress import download_progress, step_progress
    from paceline.models.target import TargetModel
    from paceline.tokenizer import load_tokenizer
    from paceline.weights.checkpoint import open_checkpoint
    from paceline.weights.store import resolve_model

    with download_progress() as progress:
        path = resolve_model(model, progress=progress)
    with open_checkpoint(path) as checkpoint:
        tokenizer = load_tokenizer(checkpoint)
        rows = accuracy.read_texts(texts, tokenizer, count=num_texts, length=max_tokens)
        scores = []
        with step_progress("Scoring", 2 * len(rows)) as advance:
            for wanted, kv in ((quantization, kv_cache_dtype), (reference, opt.DEFAULT_KV_CACHE_DTYPE)):
                with note(f"Loading {model} ..."):
                    target = TargetModel(
                        checkpoint, dtype=dtype, quantization=wanted, kv_cache_dtype=kv, threads=threads
                    )
                scores.append(accuracy.score(target, rows, on_text=lambda kind=wanted: advance(kind)))  # type: ignore[misc]
                weights = target.weight_bytes
                if len(scores) == 1:
                    facts: dict[str, Any] = {
                        "model": model, "quantization": quantization, "weight_type": target.weight_type,
                        "weights_bytes": weights, "kv_cache_dtype": target.kv_cache_dtype, "reference": reference,
                        "texts": len(rows),
                    }  # fmt: skip
    facts |= {"reference_weights_bytes": weights, **accuracy.compare(*scores)}
    print(json.dumps(facts, indent=2) if as_json else eval_text(facts))


def eval_text(facts: dict[str, Any]) -> str:
    """The facts of `eval` for people."""
    rows = [
        ("texts", f"{facts['texts']:,}, {facts['tokens']:,} tokens scored"),
        (
            "weights",
            f"{facts['weights_bytes'] / 2**20:,.0f} MiB {facts['weight_type']}, reference "
            f"{facts['reference_weights_bytes'] / 2**20:,.0f} MiB",
        ),
        ("keys and values", facts["kv_cache_dtype"]),
        (
            "perplexity",
            f"{facts['perplexity']:.4f}, reference {facts['reference_perplexity']:.4f} "
            f"({facts['perplexity_ratio'] - 1:+.2%})",
        ),
        ("same greedy token", f"{facts['greedy_agreement']:.2%}"),
        ("log-probability", f"{facts['mean_abs_logprob_difference']:.4f} away on average"),
    ]
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"{label:<{width}}  {value}" for label, value in rows)
