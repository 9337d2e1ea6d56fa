"""``paceline train adapt``: continue a drafter on a user's own prompts, and say what it is worth on some it never saw.

Answers by the engine, features, fit, export, each of which goes on where it stopped when the same command runs again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from .corpus import answer_prompts, say
from .data import split_members
from .errors import TrainError
from .evaluate import Acceptance, evaluate, mean_length
from .export import load_drafter
from .feature_store import FeatureStore
from .fit import FitConfig
from .loading import load_heads, open_model, pick_dtype
from .loss import LossConfig
from .prompts import read_prompts
from .runs import Start, fit_drafter
from .schedule import Schedule
from .workflow import acceptance_table, export_run, extract_features

LEAST_PROMPTS = 20
BATCH = 8


@dataclass(frozen=True, slots=True)
class Adaptation:
    """Acceptance by domain on the held-out prompts, before and after."""

    before: dict[str, Acceptance]
    after: dict[str, Acceptance]

    @property
    def gain(self) -> float:
        """Relative gain of the mean acceptance length: 0.1 is ten per cent."""
        return mean_length(self.after) / mean_length(self.before) - 1


def adapt(
    model: str,
    prompts: Path,
    out: Path,
    *,
    drafter: Path | None = None,
    max_tokens: int = 192,
    steps: int = 400,
    muon_lr: float = 0.008,
    hold_every: int = 10,
    dtype: str = "bfloat16",
    device: str = "cpu",
    workers: int = 1,
    batch: int = 64,
    seed: int = 0,
) -> Adaptation:
    """Fit ``drafter`` (default: the one that ships for the model) to the prompts and export it to ``out/drafter``.

    Every ``hold_every``-th prompt is kept for measuring. Raises TrainError for too few prompts and for a model without
    a drafter.
    """
    wanted = read_prompts(prompts)
    if len(wanted) < max(LEAST_PROMPTS, 2 * hold_every):
        raise TrainError(
            f"{prompts}: {len(wanted)} prompts; at least {max(LEAST_PROMPTS, 2 * hold_every)} are needed to train on "
            f"some and measure on others (every {hold_every}th), a few hundred to gain much"
        )
    origin = drafter or _shipped(model)
    taps = load_drafter(origin)[0].config.target_layer_ids
    answers, features, run = out / "answers.jsonl", out / "features", out / "run"
    out.mkdir(parents=True, exist_ok=True)
    say(f"1/4 answers of {model}")
    answer_prompts(
        model, prompts, answers, dtype=dtype, max_tokens=max_tokens, temperature=0.0, limit=None, batch=batch, seed=seed
    )
    say("2/4 features")
    extract_features(
        model,
        answers,
        features,
        prompts=None,
        taps=",".join(map(str, taps)),
        max_prompt=2048,
        max_answer=max_tokens,
        trim_loops=False,
        dtype=dtype,
        device=device,
        batch_tokens=2048,
        threads=None,
    )
    say(f"3/4 training, from {origin}")
    before = _measure(model, origin, features, hold_every, dtype, device)
    config = FitConfig(
        schedule=Schedule(steps, warmup=20, decay=0.5),
        batch_size=BATCH,
        lr=muon_lr / 10,
        muon_lr=muon_lr,
        seed=seed,
        compute_dtype=dtype,
        workers=workers,
        checkpoint_every=50,
        loss=LossConfig(ce=0.5, kl=0.5),
    )
    fit_drafter(model, features, run, config, Start(init_from=origin), device=device, hold_every=hold_every)
    say("4/4 measuring on the prompts that were kept out")
    export_run(run, out / "drafter", dtype="bfloat16")
    result = Adaptation(before, _measure(model, out / "drafter", features, hold_every, dtype, device))
    for name, figures in (("before", result.before), ("after", result.after)):
        say(f"{name}:")
        for line in acceptance_table(figures):
            say(f"  {line}")
    say(f"acceptance length {100 * result.gain:+.1f} %")
    if result.gain <= 0:
        say(f"{out / 'drafter'} is no better than {origin}: keep that one, or give more prompts")
    summary = {"before": mean_length(result.before), "after": mean_length(result.after), "gain": result.gain}
    (out / "result.json").write_text(json.dumps(summary, indent=1) + "\n")
    return result


def _shipped(model: str) -> Path:
    """The drafter in this package that fits the model. Raises TrainError where there is none."""
    from paceline.models.target import read_config
    from paceline.speculation.factory import shipped_for

    with open_model(model) as checkpoint:
        found = shipped_for(read_config(checkpoint))
    if found is None:
        raise TrainError(f"no drafter ships for {model}: name the one to go on from with --drafter")
    return found


def _measure(
    model: str, drafter: Path, features: Path, hold_every: int, dtype: str, device: str
) -> dict[str, Acceptance]:
    store = FeatureStore(features)
    trained, rows = load_drafter(drafter)
    with open_model(model) as checkpoint:
        heads = load_heads(checkpoint, rows, trained.config.mask_token_id, pick_dtype(dtype), device)
    _, held = split_members(store, hold_every)
    return evaluate(trained.to(device), heads, store, held, dtype=pick_dtype(dtype))
