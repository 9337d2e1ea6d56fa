"""`paceline pull`, `convert` and `info`: fetching models, writing them as folders, and looking at them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from paceline.cli import options as opt

if TYPE_CHECKING:
    from paceline.weights.checkpoint import Checkpoint


def pull(model: opt.ModelArgument) -> None:
    """Fetch a model into the cache and print where it lies.

    A second pull finds it there. An interrupted one goes on where it stopped.
    """
    from paceline.cli.progress import download_progress
    from paceline.weights.store import resolve_model

    with download_progress() as progress:
        path = resolve_model(model, progress=progress)
    print(path)


def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A .gguf file or a known model name.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="Folder to write; new or empty.")],
    dtype: Annotated[
        Literal["bfloat16", "float32"], typer.Option("--dtype", help="What to write the weights as.")
    ] = "bfloat16",
) -> None:
    """Write a GGUF model as a Hugging Face folder: config.json, model.safetensors, tokenizer.

    Other tools can then use the same weights.
    """
    from paceline.cli.progress import download_progress
    from paceline.weights.convert import convert as convert_model
    from paceline.weights.store import resolve_model

    with download_progress() as progress:
        path = resolve_model(source, progress=progress)
    with download_progress() as progress:
        convert_model(path, destination, dtype=dtype, progress=progress)
    print(destination)


def info(
    model: opt.ModelArgument,
    dtype: opt.DtypeOption = "auto",
    threads: opt.ThreadsOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.", rich_help_panel=opt.OUTPUT_PANEL)] = False,
) -> None:
    """Show a model's architecture and sizes, and how this machine would run it.

    That is: the memory plan, the instruction set path, the threads.
    """
    from paceline.cli.engine import open_llm
    from paceline.weights.checkpoint import open_checkpoint
    from paceline.weights.store import resolve_model

    llm = open_llm(opt.EngineOptions(model, dtype, threads))
    checkpoint = open_checkpoint(resolve_model(model))
    try:
        facts = {"model": model, **describe(checkpoint), "engine": llm.info()}
    finally:
        checkpoint.close()
    if as_json:
        print(json.dumps(facts, indent=2, default=str))
    else:
        _print_facts(facts)


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """What the files say: architecture, sizes, parameters and the dtypes they are stored in."""
    config = checkpoint.config
    names = checkpoint.names()
    stored: dict[str, int] = {}
    for name in names:
        dtype = checkpoint.stored_dtype(name)
        stored[dtype] = stored.get(dtype, 0) + math.prod(checkpoint.shape(name))
    heads = config["num_attention_heads"]
    return {
        "path": str(checkpoint.path),
        "architecture": config["model_type"],
        "parameters": sum(stored.values()),
        "stored_parameters_by_dtype": stored,
        "layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["intermediate_size"],
        "attention_heads": heads,
        "kv_heads": config.get("num_key_value_heads", heads),
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "vocab_size": config["vocab_size"],
        "tied_head": bool(config.get("tie_word_embeddings", False)),
        "context_length": config.get("max_position_embeddings"),
    }


def _print_facts(facts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, value in _flat(facts):
        table.add_row(name, value)
    Console(highlight=False).print(table)


def _flat(facts: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name, value in facts.items():
        label = f"{prefix}{name}".replace("_", " ")
        if isinstance(value, dict):
            rows += _flat(value, f"{label}: ")
        elif name.endswith("_bytes") and isinstance(value, int):
            rows.append((label.removesuffix(" bytes"), f"{value / 2**20:,.1f} MiB"))
        elif isinstance(value, int) and not isinstance(value, bool):
            rows.append((label, f"{value:,}"))
        elif isinstance(value, float):
            rows.append((label, f"{value:,.4g}"))
        else:
            rows.append((label, "yes" if value is True else "no" if value is False else str(value)))
    return rows
