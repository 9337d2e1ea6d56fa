"""The steps of ``paceline train`` that need PyTorch: files in, files out, plain errors, progress on standard output.

A run folder of ``fit`` holds ``run.json`` (drafter's shape, head rows, target), ``checkpoint.pt`` and ``log.jsonl``.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from paceline.tokenizer import Tokenizer, load_tokenizer

from .corpus import say
from .data import frequent_rows, split_members
from .errors import TrainError
from .evaluate import Acceptance, evaluate
from .export import export_drafter, load_drafter
from .features import FeatureStore, extract
from .fit import FitConfig, Trainer
from .loading import choose_mask_token, default_taps, load_heads, load_target, open_model, pick_dtype
from .model import Drafter, DrafterConfig
from .prompts import read_prompts
from .regenerate import Answer, read_answers, usable
from .target import TargetConfig

NORM_START = 0.25  # the target's final norm, scaled down so that the first logits are almost flat


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


def extract_features(
    model: str,
    answers: Path,
    out: Path,
    *,
    prompts: Path | None,
    taps: str,
    max_prompt: int,
    max_answer: int,
    dtype: str,
    device: str,
    batch_tokens: int,
    compile: bool,
) -> None:
    """`train features`."""
    with open_model(model) as checkpoint:
        config = TargetConfig.from_hf(checkpoint.config)
        layers = parse_taps(taps, config.num_layers)
        found = _answers(answers, prompts, load_tokenizer(checkpoint))
        kept = list(usable(found, max_prompt=max_prompt, max_answer=max_answer))
        if not kept:
            raise TrainError(f"{answers}: no answer with at most {max_prompt} prompt tokens; raise --max-prompt")
        target = load_target(checkpoint, pick_dtype(dtype), device)
    tokens = sum(len(a.prompt) + len(a.answer) for a in kept)
    size = tokens * (len(layers) + 1) * config.hidden_size * 2
    say(f"{len(kept)} of {len(found)} sequences, {tokens} tokens, {size / 2**30:.2f} GiB, taps {list(layers)}")
    if compile:
        target.compile()
    extract(target, kept, layers, out, batch_tokens=batch_tokens, meta={"model": model}, report=say)


def new_drafter_config(
    target: TargetConfig, taps: Sequence[int], *, layers: int, block_size: int, mask_token: int
) -> DrafterConfig:
    """A drafter with the target's own layer shape, which keeps every kernel and cache layout that the target uses."""
    return DrafterConfig(
        hidden_size=target.hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=target.num_heads,
        num_key_value_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        intermediate_size=target.intermediate_size,
        vocab_size=target.vocab_size,
        num_target_layers=target.num_layers,
        target_layer_ids=tuple(taps),
        mask_token_id=mask_token,
        block_size=block_size,
        rms_norm_eps=target.rms_norm_eps,
        rope_theta=target.rope_theta,
        max_position_embeddings=target.max_positions,
    )


def fit_drafter(
    model: str,
    features: Path,
    out: Path,
    config: FitConfig,
    *,
    layers: int,
    block_size: int,
    head_rows: int,
    mask_token: int | None,
    init_from: Path | None,
    device: str,
    until: int | None,
) -> None:
    """`train fit`: start a run, or go on with the one in ``out``."""
    if not (features / "meta.json").exists():
        raise TrainError(f"{features}: no meta.json; make the folder with `paceline train features`")
    if config.workers > 1:
        torch.set_num_threads(1)
    store = FeatureStore(features)
    members, _ = split_members(store)
    if not members:
        raise TrainError(f"{features}: no complete shard yet; let `paceline train features` finish one")
    run_file = out / "run.json"
    with open_model(model) as checkpoint:
        if run_file.exists():
            run = json.loads(run_file.read_text())
        else:
            run = _new_run(checkpoint, model, store, init_from, layers, block_size, head_rows, mask_token)
            out.mkdir(parents=True, exist_ok=True)
            run_file.write_text(json.dumps(run))
        shape = DrafterConfig.from_hf(run["drafter"])
        if list(shape.target_layer_ids) != store.meta["target_layer_ids"]:
            raise TrainError(
                f"target_layer_ids are {list(shape.target_layer_ids)} in {run_file} and "
                f"{store.meta['target_layer_ids']} in {features}: they must be the same"
            )
        heads = load_heads(checkpoint, run["head_rows"], shape.mask_token_id, pick_dtype(config.compute_dtype), device)
        drafter = _start(checkpoint, shape, init_from, config.seed).to(device)
    trainer = Trainer(drafter, heads, store, members, config, out)
    where = f"going on at step {trainer.step}" if trainer.resume() else "new run"
    say(f"{where}: {len(members)} sequences, {sum(p.numel() for p in trainer.params) / 1e6:.1f} M parameters")
    trainer.run(until=until, report=say)


def _new_run(
    checkpoint: Any,
    model: str,
    store: FeatureStore,
    init_from: Path | None,
    layers: int,
    block_size: int,
    head_rows: int,
    mask_token: int | None,
) -> dict[str, Any]:
    target = TargetConfig.from_hf(checkpoint.config)
    if store.meta["hidden_size"] != target.hidden_size or store.meta["num_target_layers"] != target.num_layers:
        raise TrainError(f"{store.folder}: made by a target of another shape than {model}; pass that one by --model")
    answers = [s["tokens"][s["prompt_len"] :] for s in store.sequences]
    rows: list[int] | None = None
    if init_from is not None:
        started, rows = load_drafter(init_from)
        shape = started.config
    else:
        if mask_token is None:
            used = {t for s in store.sequences for t in s["tokens"]}
            mask_token = choose_mask_token(load_tokenizer(checkpoint), used, target.vocab_size)
        shape = new_drafter_config(
            target, store.meta["target_layer_ids"], layers=layers, block_size=block_size, mask_token=mask_token
        )
    if rows is None and head_rows:
        rows = frequent_rows(answers, head_rows, target.eos_token_ids, target.vocab_size)
    pair = {"model_type": target.model_type, "name": model}
    return {"model": model, "drafter": shape.to_hf(), "head_rows": rows, "target": pair}


def _start(checkpoint: Any, shape: DrafterConfig, init_from: Path | None, seed: int) -> Drafter:
    if init_from is not None:
        return load_drafter(init_from)[0]
    torch.manual_seed(seed)
    drafter = Drafter(shape)
    with torch.no_grad():
        final = torch.from_numpy(checkpoint.load("model.norm.weight", dtype="float32").copy())
        drafter.norm.weight.copy_(final * NORM_START)
    return drafter


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
        target = load_target(checkpoint, precision)
        extract(target, found, trained.config.target_layer_ids, Path(folder), report=lambda _: None)
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
    mean = sum(result[k].length for k in domains) / max(1, len(domains))
    lines.append(f"{'mean':12s} {mean:5.2f}")
    return lines
