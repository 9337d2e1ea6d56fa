"""`paceline train fit`: a run folder, from its start over any number of interruptions to its end.

It holds ``run.json`` (drafter's shape, head rows, target, and which shards are drawn from which step on),
``checkpoint.pt``, ``log.jsonl`` (a line every few steps) and, with held-out features, ``curve.jsonl``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paceline.tokenizer import load_tokenizer

from . import journal
from .corpus import say
from .data import Phase, frequent_rows, split_members
from .distributed import Ranks, join, leave
from .errors import TrainError
from .evaluate import curve_line, evaluate
from .export import load_drafter
from .feature_store import Features, FeatureStore
from .fit import FitConfig, Trainer
from .loading import choose_mask_token, load_heads, open_model, pick_dtype
from .model import Drafter, DrafterConfig
from .start import fresh_drafter, new_drafter_config, with_heads
from .target import TargetConfig

if TYPE_CHECKING:
    from paceline.weights.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class Start:
    """What a new run begins with. ``init_from``: another drafter, whose shape wins; ``from_target``: weights of the
    target's last layers. ``markov_rank``, ``confidence``, ``anchor_first``: heads and slots of DSpark;
    ``conv_kernel``, ``conv_group``, ``selector_rank``, ``selector_top_k``: parts of DFlash 2. ``init_from`` gets those
    that it has not."""

    layers: int = 2
    block_size: int = 8
    head_rows: int = 8192
    mask_token: int | None = None
    init_from: Path | None = None
    from_target: bool = False
    markov_rank: int = 0
    confidence: bool = False
    anchor_first: bool | None = None
    conv_kernel: int = 0
    conv_group: int = 16
    selector_rank: int = 0
    selector_top_k: int = 16

    def shape(self, of: DrafterConfig) -> DrafterConfig:
        """``of`` with these heads, parts and slots."""
        first = of.anchor_first if self.anchor_first is None else self.anchor_first
        rank, sure = of.markov_rank or self.markov_rank, of.confidence or self.confidence
        new: dict[str, Any] = {"markov_rank": rank, "confidence": sure, "anchor_first": first}
        if self.conv_kernel and not of.conv_kernel:
            new |= {"conv_kernel": self.conv_kernel, "conv_group": self.conv_group}
        if self.selector_rank and not of.selector_rank:
            new |= {"selector_rank": self.selector_rank, "selector_top_k": self.selector_top_k}
        shape = replace(of, **new)
        # every published DFlash 2 says so; where all layers see the whole block anyway, it is no change
        bidirectional = shape.dflash2 and not any(shape.causal(i) for i in range(shape.num_hidden_layers))
        return replace(shape, is_causal=False) if bidirectional else shape


def fit_drafter(
    model: str,
    features: Path,
    out: Path,
    config: FitConfig,
    start: Start,
    *,
    device: str = "cpu",
    until: int | None = None,
    new_data: bool = False,
    held_out: Path | None = None,
    hold_every: int = 50,
    eval_every: int = 100,
) -> None:
    """`train fit`: start a run, or go on with the one in ``out``."""
    store = _open_store(features)
    ranks = join(device)
    if config.workers > 1:
        torch.set_num_threads(1)
    with open_model(model) as checkpoint:
        run = _load_run(checkpoint, model, store, out, start, ranks)
        shape = DrafterConfig.from_hf(run["drafter"])
        _check_taps(shape, store, out / "run.json")
        dtype = pick_dtype(config.compute_dtype)
        heads = load_heads(checkpoint, run["head_rows"], shape.mask_token_id, dtype, ranks.device)
        drafter = _drafter(checkpoint, shape, start, config.seed).to(ranks.device)
    if config.block_sizes and max(config.block_sizes) > shape.block_size:
        raise TrainError(f"--block-sizes has {max(config.block_sizes)}, the drafter's block has {shape.block_size}")
    trainer = Trainer(drafter, heads, store, [], config, out, ranks)
    where = f"going on at step {trainer.step}" if trainer.resume() else "new run"
    trainer.phases = _phases(run, store, out, trainer.step, new_data, hold_every, ranks)
    if ranks.first:
        size = sum(p.numel() for p in trainer.params) / 1e6
        say(f"{where}: {len(trainer.phases[-1].members)} sequences, {size:.1f} M parameters to train")
    judge = _open_store(held_out) if held_out else None

    def measure(trainer: Trainer) -> None:
        if judge is None or (trainer.step % eval_every and trainer.step != config.schedule.steps):
            return
        result = evaluate(trainer.model, heads, judge, range(len(judge)), dtype=trainer.dtype)
        line = curve_line(result, trainer.step, trainer.seen)
        journal.append(out / "curve.jsonl", line)
        lengths = ", ".join(f"{k} {v}" for k, v in line["length"].items())
        say(f"step {trainer.step}: held-out acceptance length {lengths}")

    if trainer.step == 0:
        measure(trainer)
    trainer.run(until=until, report=say, on_checkpoint=measure)
    leave()


def _open_store(folder: Path) -> FeatureStore:
    if not (folder / "meta.json").exists():
        raise TrainError(f"{folder}: no meta.json; make the folder with `paceline train features`")
    store = FeatureStore(folder)
    if not len(store):
        raise TrainError(f"{folder}: no complete shard yet; let `paceline train features` finish one")
    return store


def _check_taps(shape: DrafterConfig, store: FeatureStore, run_file: Path) -> None:
    if list(shape.target_layer_ids) != store.meta["target_layer_ids"]:
        raise TrainError(
            f"target_layer_ids are {list(shape.target_layer_ids)} in {run_file} and "
            f"{store.meta['target_layer_ids']} in {store.folder}: they must be the same"
        )


def _load_run(
    checkpoint: Checkpoint, model: str, store: FeatureStore, out: Path, start: Start, ranks: Ranks
) -> dict[str, Any]:
    run_file = out / "run.json"
    if ranks.first and not run_file.exists():
        run = _new_run(checkpoint, model, store, start)
        out.mkdir(parents=True, exist_ok=True)
        _write(run_file, run)
    ranks.wait()
    found: dict[str, Any] = json.loads(run_file.read_text())
    return found


def _write(run_file: Path, run: dict[str, Any]) -> None:
    temporary = run_file.with_suffix(".partial")
    temporary.write_text(json.dumps(run))
    temporary.replace(run_file)


def _new_run(checkpoint: Checkpoint, model: str, store: FeatureStore, start: Start) -> dict[str, Any]:
    target = TargetConfig.from_hf(checkpoint.config)
    if store.meta["hidden_size"] != target.hidden_size or store.meta["num_target_layers"] != target.num_layers:
        raise TrainError(f"{store.folder}: made by a target of another shape than {model}; pass that one by --model")
    rows: list[int] | None = None
    if start.init_from is not None:
        started, rows = load_drafter(start.init_from)
        shape = start.shape(started.config)
    else:
        mask_token = start.mask_token
        if mask_token is None:
            used = {t for s in store.sequences for t in s["tokens"]}
            mask_token = choose_mask_token(load_tokenizer(checkpoint), used, target.vocab_size)
        plain = new_drafter_config(
            target,
            store.meta["target_layer_ids"],
            layers=start.layers,
            block_size=start.block_size,
            mask_token=mask_token,
        )
        shape = start.shape(plain)
    if rows is None and start.head_rows:
        answers = (s["tokens"][s["prompt_len"] :] for s in store.sequences)
        rows = frequent_rows(answers, start.head_rows, target.eos_token_ids, target.vocab_size)
    pair = {"model_type": target.model_type, "name": model}
    return {"model": model, "drafter": shape.to_hf(), "head_rows": rows, "target": pair, "phases": []}


def _drafter(checkpoint: Checkpoint, shape: DrafterConfig, start: Start, seed: int) -> Drafter:
    if start.init_from is not None:
        return with_heads(checkpoint, load_drafter(start.init_from)[0], shape, seed)
    return fresh_drafter(checkpoint, shape, seed, from_target=start.from_target)


def _phases(
    run: dict[str, Any], store: FeatureStore, out: Path, step: int, new_data: bool, hold_every: int, ranks: Ranks
) -> list[Phase]:
    """The phases of a run; a new one from ``step`` on where shards are to be added."""
    shards = sorted({s["shard"] for s in store.sequences})
    entries: list[dict[str, Any]] = run["phases"]
    if not entries or (new_data and shards != entries[-1]["shards"]):
        entries = [e for e in entries if e["first_step"] < step]
        entries.append({"first_step": step if entries else 0, "shards": shards, "hold_every": hold_every})
        if ranks.first:
            _write(out / "run.json", {**run, "phases": entries})
    return [_phase(e, store) for e in entries]


def _phase(entry: dict[str, Any], store: Features) -> Phase:
    wanted = set(entry["shards"])
    missing = wanted - {s["shard"] for s in store.sequences}
    if missing:
        raise TrainError(f"shards {sorted(missing)} of this run are gone: restore the features or choose another --out")
    train, _ = split_members(store, entry["hold_every"])
    members = tuple(i for i in train if store.sequences[i]["shard"] in wanted)
    if not members:
        raise TrainError("no training sequence in these features; make more with `paceline train features`")
    return Phase(entry["first_step"], members)
