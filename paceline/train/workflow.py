"""The steps of ``paceline train`` around ``fit``: files in, files out, plain errors, progress on standard output."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from paceline.tokenizer import Tokenizer, load_tokenizer

from .corpus import say
from .errors import TrainError
from .evaluate import Acceptance, evaluate, mean_length
from .export import export_drafter, load_drafter
from .feature_store import FeatureStore, TorchFeatures
from .features import EngineFeatures, FeatureSource, extract
from .loading import default_taps, load_heads, load_target, open_model, pick_dtype
from .model import Drafter, DrafterConfig
from .prompts import read_prompts
from .regenerate import Answer, read_answers, usable
from .target import TargetConfig

if TYPE_CHECKING:
    from paceline.weights.checkpoint import Checkpoint


def _answers(answers: Path, prompts: Path | None, tokenizer: Tokenizer | None) -> list[Answer]:
    return read_answers(answers, read_prompts(prompts) if prompts else None, tokenizer)


def parse_taps(text: str, num_layers: int) -> tuple[int, ...]:
    """Layer ids of ``--taps``, or the default for an empty text."""
    if not text:
        return default_taps(num_layers)
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise TrainError(f"--taps {text!r}: write layer numbers with commas, such as 1,8,15,21,27") from None


def feature_source(
    checkpoint: Checkpoint, dtype: str, device: str, batch_tokens: int, threads: int | None
) -> FeatureSource:
    """The engine on a CPU; PyTorch on other devices."""
    if device != "cpu":
        return TorchFeatures(load_target(checkpoint, pick_dtype(dtype), device), batch_tokens)
    from paceline.models.target import TargetModel

    return EngineFeatures(
        TargetModel(checkpoint, dtype=dtype, quantization="none", threads=threads, max_rows=batch_tokens)
    )


def extract_features(
    model: str,
    answers: Path,
    out: Path,
    *,
    prompts: Path | None,
    taps: str,
    max_prompt: int,
    max_answer: int,
    trim_loops: bool,
    dtype: str,
    device: str,
    batch_tokens: int,
    threads: int | None,
) -> None:
    """`train features`."""
    with open_model(model) as checkpoint:
        config = TargetConfig.from_hf(checkpoint.config)
        layers = parse_taps(taps, config.num_layers)
        found = _answers(answers, prompts, load_tokenizer(checkpoint))
        kept = list(usable(found, max_prompt=max_prompt, max_answer=max_answer, trim_loops=trim_loops))
        if not kept:
            raise TrainError(f"{answers}: no answer with at most {max_prompt} prompt tokens; raise --max-prompt")
        source = feature_source(checkpoint, dtype, device, batch_tokens, threads)
    tokens = sum(len(a.prompt) + len(a.answer) for a in kept)
    size = tokens * (len(layers) + 1) * config.hidden_size * 2
    say(f"{len(kept)} of {len(found)} sequences, {tokens} tokens, {size / 2**30:.2f} GiB, taps {list(layers)}")
    extract(source, kept, layers, out, meta={"model": model}, report=say)


def export_run(run: Path, out: Path, *, dtype: str) -> None:
    """`train export`."""
    run_file, checkpoint = run / "run.json", run / "checkpoint.pt"
    if not run_file.exists() or not checkpoint.exists():
        raise TrainError(f"{run}: needs run.json and checkpoint.pt; `paceline train fit` writes them")
    about = json.loads(run_file.read_text())
    drafter = Drafter(DrafterConfig.from_hf(about["drafter"]))
    state = torch.load(checkpoint, map_location="cpu", weights_only=True)
    drafter.load_state_dict(state["model"])
    export_drafter(drafter, about["head_rows"], out, pick_dtype(dtype), about.get("target"))
    say(f"step {state['step']} written to {out}")


def evaluate_drafter(
    model: str,
    drafter: Path,
    answers: Path,
    *,
    prompts: Path | None,
    drafts: int | None,
    max_tokens: int,
    dtype: str,
    full_head: bool,
    json_out: Path | None,
) -> dict[str, Acceptance]:
    """`train eval`: features of the answers are made in a temporary folder."""
    trained, rows = load_drafter(drafter)
    precision = pick_dtype(dtype)
    with open_model(model) as checkpoint, tempfile.TemporaryDirectory() as folder:
        target_config = TargetConfig.from_hf(checkpoint.config)
        if trained.config.hidden_size != target_config.hidden_size:
            raise TrainError(
                f"hidden_size of {drafter} is {trained.config.hidden_size}, of {model} {target_config.hidden_size}: "
                "this drafter belongs to another target"
            )
        found = list(
            usable(_answers(answers, prompts, load_tokenizer(checkpoint)), max_prompt=4096, max_answer=max_tokens)
        )
        source = feature_source(checkpoint, dtype, "cpu", 2048, None)
        extract(source, found, trained.config.target_layer_ids, Path(folder), report=lambda _: None)
        heads = load_heads(checkpoint, None if full_head else rows, trained.config.mask_token_id, precision)
        store = FeatureStore(Path(folder))
        result = evaluate(
            trained, heads, store, range(len(store)), drafts=drafts, max_tokens=max_tokens, dtype=precision
        )
    for line in acceptance_table(result):
        say(line)
    if json_out:
        json_out.write_text(json.dumps({k: asdict(v) | {"length": v.length} for k, v in result.items()}, indent=1))
    return result


def acceptance_table(result: dict[str, Acceptance]) -> list[str]:
    """One line per domain, and their unweighted mean (as benchmarks report it)."""
    lines = []
    domains = [k for k in result if k != "all"]
    for name in domains:
        a = result[name]
        survival = " ".join(f"{s:.2f}".lstrip("0") for s in a.survival)
        lines.append(f"{name:12s} {a.length:5.2f} tokens/round  survival {survival}  ({a.rounds} rounds)")
    lines.append(f"{'mean':12s} {mean_length(result):5.2f}")
    return lines
