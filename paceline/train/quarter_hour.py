"""A whole training run, data to weights, on one large GPU in a quarter of an hour (``train/gpu_quarter_hour.sh``).

Answers, features and training all happen in the memory of the device; nothing but PyTorch, NumPy and this package is
needed there, not even its native core. Calls may be cut off: the next one goes on from the work folder. Weights leave
early and often, so that a run that never ends still leaves a drafter.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from . import journal
from .data import Phase, frequent_rows
from .decode import answer_all
from .distributed import Ranks
from .errors import TrainError
from .evaluate import curve_line, evaluate
from .export import export_drafter, load_drafter
from .feature_store import MemoryStore, TorchFeatures
from .fit import FitConfig, Trainer
from .heads import Heads
from .loading import DTYPES, default_taps, load_heads, load_target
from .loss import LossConfig, parse_loss
from .model import Drafter
from .options import parse_block_sizes
from .package import MIB, PackedPrompts, join_bundle, split_bundle
from .regenerate import loop_start
from .schedule import Schedule
from .start import fresh_drafter, new_drafter_config

TRY_STEPS = 30  # steps whose pace decides the length of the run
WRITE_SECONDS = 45.0  # kept for the last export and evaluation
PART = 15 * MIB
FEATURE_SHARE = 0.65  # of a GPU's free memory


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


@dataclass(slots=True)
class State:
    """What is remembered between calls: seconds spent in all of them, and the length of the run once it is known."""

    path: Path
    spent: float = 0.0
    steps: int | None = None

    @classmethod
    def load(cls, path: Path) -> State:
        return cls(path, **json.loads(path.read_text())) if path.exists() else cls(path)

    def save(self) -> None:
        temporary = self.path.with_suffix(".partial")
        temporary.write_text(json.dumps({"spent": self.spent, "steps": self.steps}))
        temporary.replace(self.path)


def fitting(lengths: Sequence[int], row_bytes: int, room: float) -> int:
    """How many of the sequences, from the first on, have features that fit ``room`` bytes."""
    total = 0
    for count, length in enumerate(lengths):
        total += length * row_bytes
        if total > room:
            return count
    return len(lengths)


class QuarterHour:
    """One call of the run. ``options`` are those of ``main``."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.o = options
        self.begin = time.monotonic()
        options.work.mkdir(parents=True, exist_ok=True)
        options.out.mkdir(parents=True, exist_ok=True)
        self.state = State.load(options.work / f"{options.name}.json")
        self.before = self.state.spent
        self.dtype = DTYPES[options.dtype]

    def left(self) -> float:
        """Seconds of the whole run that are left."""
        return self.o.minutes * 60 - self.before - (time.monotonic() - self.begin)

    def run(self) -> None:
        """From inputs to a drafter in ``out``."""
        from paceline.weights.checkpoint import open_checkpoint

        inputs = self.o.work / "inputs"
        join_bundle(self.o.inputs, inputs)
        checkpoint = open_checkpoint(inputs / "target")
        target = load_target(checkpoint, self.dtype, self.o.device)
        say(f"target on {self.o.device}: {target.config.num_layers} layers, {self.left():.0f} s left")
        source = TorchFeatures(target, self.o.batch_tokens)
        origin = load_drafter(self.o.init_from) if self.o.init_from else None
        taps = origin[0].config.target_layer_ids if origin else self._taps(target.config.num_layers)
        held = self._features(source, taps, self._answers(target, inputs, "held"), trim=False)
        store = self._features(source, taps, self._answers(target, inputs, "prompts"), trim=True)
        about = json.loads((inputs / "about.json").read_text())
        if origin:
            drafter, rows = origin
        else:
            shape = new_drafter_config(
                target.config,
                taps,
                layers=self.o.layers,
                block_size=self.o.block_size,
                mask_token=about["mask_token"],
            )
            drafter, rows = fresh_drafter(checkpoint, shape, self.o.seed, from_target=self.o.from_target), None
        if rows is None and self.o.head_rows:
            answers = (s["tokens"][s["prompt_len"] :] for s in store.sequences)
            rows = frequent_rows(answers, self.o.head_rows, target.config.eos_token_ids, target.config.vocab_size)
        heads = load_heads(checkpoint, rows, drafter.config.mask_token_id, self.dtype, self.o.device)
        del target, source
        pair = {"model_type": checkpoint.config["model_type"], "name": about["model"]}
        self._fit(drafter.to(self.o.device), heads, rows, store, held, pair)

    def _taps(self, layers: int) -> tuple[int, ...]:
        return tuple(map(int, self.o.taps.split(","))) if self.o.taps else default_taps(layers)

    def _answers(self, target: Any, inputs: Path, name: str) -> list[tuple[str, list[int], list[int]]]:
        """``(domain, prompt, answer)``; kept in the work folder, since they cost the most to make again."""
        packed = PackedPrompts.load(inputs / f"{name}.npz")
        rounds = self.o.samples if name == "prompts" else 1
        out: list[tuple[str, list[int], list[int]]] = []
        for number in range(rounds):
            file = self.o.work / f"answers-{name}-{number}.npz"
            if not file.exists():
                made = dict(
                    answer_all(
                        target,
                        packed.tokens,
                        max_tokens=self.o.max_tokens if name == "prompts" else 128,
                        batch=self.o.decode_batch,
                        temperature=self.o.temperature if number else 0.0,
                        seed=self.o.seed + number,
                        report=say,
                    )
                )
                answers = PackedPrompts(packed.domains, [made[i] for i in range(len(packed.tokens))])
                answers.save(file.with_suffix(".partial.npz"))
                file.with_suffix(".partial.npz").replace(file)
                self._remember()
            found = PackedPrompts.load(file)
            out += zip(packed.domains, packed.tokens, found.tokens, strict=True)
        return out

    def _features(
        self,
        source: TorchFeatures,
        taps: tuple[int, ...],
        answers: list[tuple[str, list[int], list[int]]],
        *,
        trim: bool,
    ) -> MemoryStore:
        """Features of all answers, one after the other, in the memory of ``--features-on``."""
        sequences: list[dict[str, Any]] = []
        for i, (domain, prompt, answer) in enumerate(answers):
            kept = answer[: loop_start(answer)] if trim else answer
            if len(kept) >= 2:
                tokens = prompt + kept
                sequences.append({"id": i, "domain": domain, "tokens": tokens, "prompt_len": len(prompt), "shard": 0})
        columns = (len(taps) + 1) * source.hidden_size
        keep = fitting([len(s["tokens"]) for s in sequences], 2 * columns, self._room())
        if keep < len(sequences):
            say(f"memory holds the features of {keep} of {len(sequences)} answers; the last ones are left out")
        sequences = sequences[:keep]
        lengths = [len(s["tokens"]) for s in sequences]
        total = sum(lengths)
        rows = torch.empty(total, columns, dtype=torch.bfloat16, device=self._where())
        starts = [0]
        for n in lengths:
            starts.append(starts[-1] + n)
        for group in source.groups(lengths):
            made = source.tensors([sequences[i]["tokens"] for i in group], taps)
            for row, i in enumerate(group):
                rows[starts[i] : starts[i + 1]] = made[row, : lengths[i]].to(rows.device)
        say(f"features of {len(sequences)} answers, {total} tokens, {rows.numel() * 2 / 2**30:.1f} GiB")
        meta = {"hidden_size": source.hidden_size, "target_layer_ids": list(taps), "columns": columns}
        return MemoryStore(meta, sequences, rows)

    def _where(self) -> str:
        return str(self.o.features_on or self.o.device)

    def _room(self) -> float:
        """Bytes that features may take: of a GPU's free memory what training does not need, of a host's a half."""
        if self._where().startswith("cuda"):
            torch.cuda.empty_cache()
            return float(torch.cuda.mem_get_info(self._where())[0]) * FEATURE_SHARE
        return 0.5 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def _fit(
        self,
        drafter: Drafter,
        heads: Heads,
        rows: list[int] | None,
        store: MemoryStore,
        held: MemoryStore,
        pair: dict[str, str],
    ) -> None:
        o = self.o
        schedule = Schedule(o.steps or self.state.steps or 1_000_000, warmup=o.warmup, decay=o.decay)
        config = FitConfig(
            schedule=schedule,
            batch_size=o.batch_size,
            anchors=o.anchors,
            lr=o.lr,
            muon_lr=o.muon_lr,
            seed=o.seed,
            compute_dtype=o.dtype,
            checkpoint_every=o.checkpoint_every,
            log_every=o.log_every,
            block_sizes=parse_block_sizes(o.block_sizes),
            loss=LossConfig(weighting=o.weighting, **parse_loss(o.loss)),
        )
        wanted = set(o.domains.split(",")) if o.domains else {s["domain"] for s in store.sequences}
        members = tuple(i for i, s in enumerate(store.sequences) if s["domain"] in wanted)
        if not members:
            raise TrainError(
                f"--domains {o.domains}: the prompts have {sorted({s['domain'] for s in store.sequences})}"
            )
        phases = [Phase(0, members)]
        trainer = Trainer(drafter, heads, store, phases, config, o.work / o.name, Ranks(device=o.device))
        trainer.resume()

        written: list[int] = []

        def leave(trainer: Trainer) -> None:
            if trainer.step not in written:
                self._write(trainer, heads, rows, held, pair)
                written.append(trainer.step)

        stop = self.begin + min(o.call_minutes * 60, o.minutes * 60 - self.before) - WRITE_SECONDS
        if o.steps is None and self.state.steps is None:
            trainer.run(until=TRY_STEPS // 3, report=say, stop_at=stop)  # the first steps are slow
            started = time.monotonic()
            trainer.run(until=TRY_STEPS, report=say, stop_at=stop)
            pace = (time.monotonic() - started) / (TRY_STEPS - TRY_STEPS // 3)
            calls = max(0.0, self.left() / 60 / o.call_minutes - 1)  # every further call loads and computes again
            again = calls * (time.monotonic() - self.begin)
            self.state.steps = TRY_STEPS + max(1, int(0.97 * (self.left() - WRITE_SECONDS - again) / pace))
            say(f"{pace:.3f} s/step: {self.state.steps} steps")
        if o.steps is None and self.state.steps is not None:
            trainer.config = replace(config, schedule=replace(schedule, steps=self.state.steps))
        self._remember()
        trainer.run(report=say, on_checkpoint=leave, stop_at=None if o.steps else stop)
        leave(trainer)
        self._remember()
        done = trainer.step >= trainer.config.schedule.steps
        say("finished" if done else f"cut at step {trainer.step}: call again to go on")

    def _write(
        self, trainer: Trainer, heads: Heads, rows: list[int] | None, held: MemoryStore, pair: dict[str, str]
    ) -> None:
        """The drafter as it is, in parts, and its acceptance, into ``out``."""
        o = self.o
        folder = o.work / "drafter"
        export_drafter(trainer.model, rows, folder, target=pair)
        files = [(f.name, f) for f in sorted(folder.iterdir())]
        for part in split_bundle(files, o.work / "outgoing", PART):
            for file in part.iterdir():
                file.replace(o.out / file.name)
        result = evaluate(trainer.model, heads, held, range(len(held)), dtype=self.dtype)
        line = curve_line(result, trainer.step, trainer.seen) | {"seconds": round(self._spent(), 1)}
        journal.append(o.work / o.name / "curve.jsonl", line)
        for name in ("curve.jsonl", "log.jsonl"):
            (o.out / name).write_bytes((o.work / o.name / name).read_bytes())
        say(f"step {trainer.step}: held-out acceptance length {line['length']}")
        self._remember()

    def _spent(self) -> float:
        return self.before + time.monotonic() - self.begin

    def _remember(self) -> None:
        self.state.spent = self._spent()
        self.state.save()


def parse(arguments: list[str]) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="paceline.train.quarter_hour", description=__doc__)
    add: Callable[..., Any] = p.add_argument
    add("--inputs", type=Path, nargs="+", required=True, help="folders of the parts that `pack` made")
    add("--work", type=Path, required=True, help="folder that the next call finds again")
    add("--out", type=Path, required=True, help="folder for the drafter and its logs")
    add("--name", default="run", help="of this run; several share the answers in the work folder")
    add("--domains", help="train on prompts of these domains only, such as code,math")
    add("--minutes", type=float, default=15.0, help="of the whole run, over all calls")
    add("--call-minutes", type=float, default=15.0, help="of this call; what it lacks is left to the next one")
    add("--steps", type=int, help="fixed length instead of what the time allows")
    add("--device", default="cuda")
    add("--features-on", help="device that keeps the features; default: --device")
    add("--dtype", choices=sorted(DTYPES), default="bfloat16")
    add("--max-tokens", type=int, default=256)
    add("--samples", type=int, default=2, help="answers to each prompt: one greedy, others at --temperature")
    add("--temperature", type=float, default=0.7)
    add("--decode-batch", type=int, default=1024)
    add("--batch-tokens", type=int, default=65536)
    add("--taps", default="", help="target layers; default: five, spread")
    add("--layers", type=int, default=2)
    add("--block-size", type=int, default=8)
    add("--head-rows", type=int, default=8192, help="0: all")
    add("--from-target", action="store_true", help="start from the target's last layers")
    add("--init-from", type=Path, help="start from this drafter")
    add("--batch-size", type=int, default=64)
    add("--anchors", type=int, default=64)
    add("--lr", type=float, default=2e-3)
    add("--muon-lr", type=float, default=0.02)
    add("--warmup", type=int, default=100)
    add("--decay", type=float, default=0.3)
    add("--loss", default="ce=0.5,kl=0.5")
    add("--weighting", choices=("dpace", "decay", "uniform"), default="dpace")
    add("--block-sizes", default="", help="draw a block length for each step, such as 6,6,8")
    add("--checkpoint-every", type=int, default=1500)
    add("--log-every", type=int, default=50)
    add("--seed", type=int, default=0)
    return p.parse_args(arguments)


def main(arguments: list[str]) -> None:
    QuarterHour(parse(arguments)).run()


if __name__ == "__main__":
    main(sys.argv[1:])
