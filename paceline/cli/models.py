"""`paceline pull`, `convert` and `info`: fetching models, writing them as folders, and looking at them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from paceline.cli import options as opt
from paceline.cli.drafter_info import describe_drafter, drafter_text
from paceline.cli.engine import kernels_text
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.weights.checkpoint import Checkpoint

ENGINE_KEYS = (
    "dtype",
    "weight_type",
    "kv_cache_dtype",
    "isa",
    "threads",
    "max_model_len",
    "weights_bytes",
    "kv_cache_bytes",
    "kv_cache_tokens",
    "kv_bytes_per_token",
    "speculation",
    "num_speculative_tokens",
)


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
    source: Annotated[str, typer.Argument(metavar="SRC", help="A .gguf file, a drafter folder, or a known name.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="Folder to write; new or empty.")],
    dtype: Annotated[
        Literal["bfloat16", "float32"], typer.Option("--dtype", help="What to write a model's weights as.")
    ] = "bfloat16",
    layout: Annotated[
        Literal["speculators", "native"] | None,
        typer.Option("--layout", help="Write a drafter in this packaging; native: z-lab's, or DeepSpec's for DSpark."),
    ] = None,
    target: Annotated[
        str | None, typer.Option("--target", metavar="MODEL", help="The model that the drafter belongs to.")
    ] = None,
) -> None:
    """Write a GGUF model as a Hugging Face folder, or a drafter in another packaging.

    Other tools can then use the same weights.
    """
    from paceline.cli.progress import download_progress
    from paceline.weights.convert import convert as convert_model
    from paceline.weights.store import resolve_model

    if (layout is None) != (target is None):
        raise PacelineError("a drafter is converted with --layout and --target MODEL, both of them")
    with download_progress() as progress:
        path = resolve_model(source, progress=progress)
        target_path = None if target is None else resolve_model(target, progress=progress)
    if layout is not None and target_path is not None:
        _convert_drafter(path, target_path, destination, layout)
    else:
        with download_progress() as progress:
            convert_model(path, destination, dtype=dtype, progress=progress)
    print(destination)


def _convert_drafter(path: Path, target: Path, destination: Path, layout: Literal["speculators", "native"]) -> None:
    from paceline.models.drafter_export import convert_drafter, write_drafter
    from paceline.weights.checkpoint import open_checkpoint
    from paceline.weights.convert import new_folder

    with open_checkpoint(path) as drafter, open_checkpoint(target) as model, new_folder(destination) as staging:
        write_drafter(convert_drafter(drafter, model, layout), staging)


def info(
    model: opt.ModelArgument,
    dtype: opt.DtypeOption = "auto",
    quantization: opt.QuantizationOption = opt.DEFAULT_QUANTIZATION,
    kv_cache_dtype: opt.KVCacheDtypeOption = opt.DEFAULT_KV_CACHE_DTYPE,
    threads: opt.ThreadsOption = None,
    target: Annotated[
        str | None, typer.Option("--target", metavar="MODEL", help="Of a drafter: say whether it fits this model.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.", rich_help_panel=opt.OUTPUT_PANEL)] = False,
) -> None:
    """Show a model's architecture and sizes, and how this machine would run it; or what a drafter is.

    Of a model: the memory plan, the instruction set path, the threads. Of a drafter: its family and packaging, the
    fields they were recognised by, and with --target whether it fits.
    """
    from paceline.cli.engine import open_llm
    from paceline.cli.progress import download_progress
    from paceline.models.layouts import is_drafter
    from paceline.weights.checkpoint import open_checkpoint
    from paceline.weights.store import resolve_model

    with download_progress() as progress:
        checkpoint = open_checkpoint(resolve_model(model, progress=progress))
    try:
        if is_drafter(checkpoint.config):
            facts = _drafter_facts(checkpoint, target)
            print(json.dumps(facts, indent=2) if as_json else drafter_text(facts))
            return
        if target is not None:
            raise PacelineError(f"--target belongs to a drafter; {model} is a model of its own")
        llm = open_llm(
            opt.EngineOptions(model, dtype, threads, quantization=quantization, kv_cache_dtype=kv_cache_dtype)
        )
        facts = {"model": model, **describe(checkpoint), "engine": {k: llm.info()[k] for k in ENGINE_KEYS}}
    finally:
        checkpoint.close()
    print(json.dumps(facts, indent=2) if as_json else facts_text(facts))


def _drafter_facts(checkpoint: Checkpoint, target: str | None) -> dict[str, Any]:
    from paceline.cli.progress import download_progress
    from paceline.weights.checkpoint import open_checkpoint
    from paceline.weights.store import resolve_model

    if target is None:
        return describe_drafter(checkpoint, None)
    with download_progress() as progress, open_checkpoint(resolve_model(target, progress=progress)) as model:
        return describe_drafter(checkpoint, model)


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """What the files say: architecture, sizes, parameters and the dtypes they are stored in."""
    from paceline.models.mtp import has_predictor
    from paceline.models.target import read_config
    from paceline.models.views import text_config

    config, decoder = text_config(checkpoint.config), read_config(checkpoint)
    experts, windows = decoder.traits.experts, sorted({w for w in decoder.windows if w})
    stored: dict[str, int] = {}
    for name in checkpoint.names():
        dtype = checkpoint.stored_dtype(name)
        stored[dtype] = stored.get(dtype, 0) + math.prod(checkpoint.shape(name))
    heads = config["num_attention_heads"]
    return {
        "path": str(checkpoint.path),
        "architecture": checkpoint.config["model_type"],
        "parameters": sum(stored.values()),
        "stored_parameters": stored,
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["intermediate_size"],
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_key_value_heads", heads),
        "head_dim": decoder.head_dim,
        "windows": windows,
        "windowed_layers": sum(w > 0 for w in decoder.windows),
        "experts": experts and experts.count,
        "experts_per_token": experts and experts.per_token,
        "sparse_layers": sum(experts.layers) if experts else 0,
        "vocab_size": config["vocab_size"],
        "tied_head": decoder.tie_word_embeddings,
        "context_length": config.get("max_position_embeddings"),
        "multi_token_prediction": has_predictor(checkpoint),
    }


def facts_text(facts: dict[str, Any]) -> str:
    """The facts of `info` for people."""
    engine = facts["engine"]
    stored = ", ".join(f"{_short(count)} as {dtype}" for dtype, count in facts["stored_parameters"].items())
    drafts = engine["speculation"]
    tokens = f"up to {opt.count(engine['num_speculative_tokens'], 'token')}"
    rows = [
        ("model", facts["model"]),
        ("path", facts["path"]),
        (
            "architecture",
            f"{facts['architecture']}, {facts['num_layers']} layers, width {facts['hidden_size']:,}, "
            f"feed-forward {facts['intermediate_size']:,}",
        ),
        (
            "attention",
            f"{facts['num_attention_heads']} heads of {facts['head_dim']}, "
            f"{facts['num_key_value_heads']} for keys and values{_windows(facts)}",
        ),
        *(_experts(facts)),
        (
            "vocabulary",
            f"{facts['vocab_size']:,}, head {'tied to' if facts['tied_head'] else 'apart from'} the embedding",
        ),
        ("parameters", f"{_short(facts['parameters'])} ({stored})"),
        ("context", f"{facts['context_length']:,} tokens, {engine['max_model_len']:,} used"),
        ("kernels", kernels_text(engine)),
        ("weights", f"{engine['weights_bytes'] / 2**20:,.0f} MiB as {engine['weight_type']}"),
        (
            "KV cache",
            f"up to {engine['kv_cache_bytes'] / 2**20:,.0f} MiB for {engine['kv_cache_tokens']:,} tokens "
            f"({engine['kv_bytes_per_token'] / 1024:,.1f} KiB each, {engine['kv_cache_dtype']}), taken as it fills",
        ),
        ("speculation", f"{drafts}, {tokens} a draft" if drafts else "none"),
        *_predictor(facts),
    ]
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"{label:<{width}}  {value}" for label, value in rows)


def _windows(facts: dict[str, Any]) -> str:
    if not facts["windowed_layers"]:
        return ""
    widths = " or ".join(f"{w:,}" for w in facts["windows"])
    return f"; a window of {widths} in {opt.count(facts['windowed_layers'], 'layer')}"


def _experts(facts: dict[str, Any]) -> list[tuple[str, str]]:
    if not facts["experts"]:
        return []
    layers = opt.count(facts["sparse_layers"], "layer")
    return [("experts", f"{facts['experts_per_token']} of {facts['experts']} for each token, in {layers}")]


def _predictor(facts: dict[str, Any]) -> list[tuple[str, str]]:
    if not facts["multi_token_prediction"]:
        return []
    return [("own drafter", """a multi-token-prediction layer: --speculative-config '{"method": "mtp"}'""")]


def _short(count: int) -> str:
    """134515008 -> "134.5 M"."""
    for size, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return str(count)
