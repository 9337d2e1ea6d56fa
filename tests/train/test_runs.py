"""Runs by the command line: starts of every kind, data that arrives later, several processes, adaptation."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("paceline._native")

from paceline.errors import PacelineError  # noqa: E402
from paceline.train import journal  # noqa: E402
from paceline.train.adapt import adapt  # noqa: E402
from paceline.train.export import export_drafter, load_drafter  # noqa: E402
from paceline.train.feature_store import FeatureStore, TorchFeatures  # noqa: E402
from paceline.train.features import extract  # noqa: E402
from paceline.train.loading import open_model  # noqa: E402
from paceline.train.model import Drafter, DrafterConfig  # noqa: E402
from paceline.train.start import fresh_drafter, new_drafter_config  # noqa: E402
from paceline.train.target import TargetConfig, TorchTarget  # noqa: E402

from .conftest import CONFIG, TAPS, VOCAB, periodic_answers, target_weights  # noqa: E402
from .test_fit import ROWS, drafter  # noqa: E402
from .test_pipeline import run  # noqa: E402
from .test_resume import LOG_EVERY_STEP  # noqa: E402

SMALL = ("--layers", 1, "--block-size", 4, "--batch-size", 6, "--anchors", 4, "--head-rows", 60, "--dtype", "float32")


def read_curve(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "curve.jsonl").read_text().splitlines()]


def test_shards_that_come_later_join_a_run_when_asked(target: TorchTarget, target_folder: Path, tmp_path: Path) -> None:
    store, source, answers = tmp_path / "features", TorchFeatures(target), periodic_answers(40)
    extract(source, answers[:20], TAPS, store, shard_sequences=10, report=lambda _: None)
    fit = ("fit", "--model", target_folder, "--features", store, "--out", tmp_path / "run", *SMALL, "--steps", 30)
    fit = (*fit, "--checkpoint-every", 5, "--hold-every", 5)
    assert "16 sequences" in run(*fit, "--until", 5)
    extract(source, answers, TAPS, store, shard_sequences=10, report=lambda _: None)
    assert "16 sequences" in run(*fit, "--until", 10)  # not asked for
    assert "32 sequences" in run(*fit, "--until", 15, "--new-data")
    said = run(*fit, "--until", 20)  # from now on they belong to the run
    assert "going on at step 15: 32 sequences" in said
    phases = json.loads((tmp_path / "run" / "run.json").read_text())["phases"]
    assert [(p["first_step"], p["shards"]) for p in phases] == [(0, [0, 1]), (10, [0, 1, 2, 3])]
    (store / "features-00003.jsonl").unlink()
    with pytest.raises(PacelineError, match=r"shards \[3\]"):
        run(*fit, "--until", 25)


def test_a_learning_curve_is_kept_by_domain(target_folder: Path, features: Path, tmp_path: Path) -> None:
    fit = ("fit", "--model", target_folder, "--features", features, "--out", tmp_path, *SMALL, "--steps", 20)
    run(*fit, "--held-out", features, "--checkpoint-every", 5, "--eval-every", 10, "--lr", 0.02)
    curve = read_curve(tmp_path)
    assert [point["step"] for point in curve] == [0, 10, 20]
    assert set(curve[0]["length"]) == {"code", "math", "mean"}
    assert curve[0]["tokens"] == 0
    assert 0 < curve[1]["tokens"] < curve[2]["tokens"] <= 20 * 6 * 4 * 3
    assert curve[2]["length"]["mean"] > curve[0]["length"]["mean"]


def test_a_start_from_the_target_copies_its_last_layers(target_folder: Path) -> None:
    with open_model(str(target_folder)) as checkpoint:
        shape = new_drafter_config(TargetConfig.from_hf(CONFIG), TAPS, layers=2, block_size=4, mask_token=VOCAB - 1)
        made = fresh_drafter(checkpoint, shape, 0, from_target=True)
    weights = target_weights()
    for i in range(2):
        for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj", "post_attention_layernorm"):
            mine = made.get_parameter(f"layers.{i}.{name}.weight")
            assert torch.equal(mine, weights[f"model.layers.{2 + i}.{name}.weight"])
    taps = torch.randn(5, len(TAPS) * shape.hidden_size)
    context = made.context(taps, torch.float32)
    assert torch.equal(context, made.hidden_norm(taps[:, -shape.hidden_size :]))


@pytest.mark.parametrize("weighting", ["dpace", "decay"])
def test_options_of_loss_and_start_reach_the_run(
    target_folder: Path, features: Path, tmp_path: Path, weighting: str
) -> None:
    fit = ("fit", "--model", target_folder, "--features", features, *SMALL, "--steps", 6)
    run(*fit, "--out", tmp_path / "a", "--from-target", "--weighting", weighting, "--loss", "ce=0.1,tv=0.9")
    run(*fit, "--out", tmp_path / "b", "--weighting", weighting, "--loss", "ce=1", "--optimizer", "adamw")
    a, b = (json.loads((tmp_path / n / "log.jsonl").read_text().splitlines()[-1])["loss"] for n in "ab")
    assert a != b
    with pytest.raises(PacelineError, match="--block-sizes"):
        run(*fit, "--out", tmp_path / "c", "--block-sizes", "9")
    with pytest.raises(PacelineError, match="--block-sizes"):
        run(*fit, "--out", tmp_path / "d", "--block-sizes", "1,4")


@pytest.mark.slow
def test_two_processes_make_the_run_of_one(target_folder: Path, features: Path, tmp_path: Path) -> None:
    fit = ["fit", "--model", target_folder, "--features", features, *SMALL, "--steps", 8, "--checkpoint-every", 4]
    fit = [str(a) for a in fit]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    program = tmp_path / "every_step.py"
    program.write_text(LOG_EVERY_STEP)
    one, two = tmp_path / "one", tmp_path / "two"
    subprocess.run([sys.executable, str(program), *fit, "--out", one], env=environment, check=True)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port)]
    for until in ("4", "8"):  # and a resume in the middle
        arguments = [*torchrun, str(program), *fit, "--out", str(two), "--until", until]
        subprocess.run(arguments, env=environment, check=True)
    a = torch.load(one / "checkpoint.pt", weights_only=True)
    b = torch.load(two / "checkpoint.pt", weights_only=True)
    assert a["step"] == b["step"] == 8
    assert a["seen"] == b["seen"]
    # Muon orthogonalises in bfloat16, which magnifies the rounding of sums: compare the way that weights have gone
    start = fresh_weights(target_folder, json.loads((one / "run.json").read_text())["drafter"])
    gone = sum(float((a["model"][n] - start[n]).square().sum()) for n in start) ** 0.5
    apart = sum(float((a["model"][n] - b["model"][n]).square().sum()) for n in start) ** 0.5
    assert gone > 0
    assert apart < 0.2 * gone
    first, second = (journal.read(out / "log.jsonl") for out in (one, two))
    assert [line["step"] for line in first] == [line["step"] for line in second] == list(range(1, 9))
    assert second[0]["loss"] == pytest.approx(first[0]["loss"], rel=1e-5)  # the very same batch and weights
    for a, b in zip(first, second, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=5e-3)


def fresh_weights(target_folder: Path, shape: dict) -> dict[str, torch.Tensor]:
    with open_model(str(target_folder)) as checkpoint:
        return fresh_drafter(checkpoint, DrafterConfig.from_hf(shape), 0, from_target=False).state_dict()


def write_prompts(path: Path, count: int) -> None:
    rows = ({"prompt": f"w{5 + i % 40} w{9 + i % 30} w7", "domain": "mine"} for i in range(count))
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))


def test_adapt_goes_from_prompts_to_a_measured_drafter(target_folder: Path, tmp_path: Path) -> None:
    prompts, origin = tmp_path / "my.jsonl", tmp_path / "origin"
    write_prompts(prompts, 30)
    export_drafter(drafter(), ROWS, origin, torch.float32)
    options = {"drafter": origin, "max_tokens": 16, "dtype": "float32", "muon_lr": 0.02, "batch": 16}
    result = adapt(str(target_folder), prompts, tmp_path / "out", steps=40, **options)  # type: ignore[arg-type]
    assert set(result.before) == {"mine", "all"}
    held = FeatureStore(tmp_path / "out" / "features")
    expected = sum(1 for s in held.sequences if s["id"] % 10 == 9)
    assert expected == 3
    assert result.after["mine"].tokens == result.before["mine"].tokens
    trained, rows = load_drafter(tmp_path / "out" / "drafter")
    assert rows == ROWS
    assert trained.config == drafter().config
    assert not torch.equal(trained.fc.weight, drafter().fc.weight)
    saved = json.loads((tmp_path / "out" / "result.json").read_text())
    assert saved["gain"] == pytest.approx(result.gain)
    again = adapt(str(target_folder), prompts, tmp_path / "out", steps=40, **options)  # type: ignore[arg-type]
    assert again.after["mine"].survived == result.after["mine"].survived  # everything was there already


def test_adapt_names_what_it_lacks(target_folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "my.jsonl"
    write_prompts(prompts, 12)
    with pytest.raises(PacelineError, match="12 prompts; at least 20"):
        adapt(str(target_folder), prompts, tmp_path / "out")
    write_prompts(prompts, 25)
    with pytest.raises(PacelineError, match="--drafter"):
        adapt(str(target_folder), prompts, tmp_path / "out")


def test_adapt_is_a_command(target_folder: Path, tmp_path: Path) -> None:
    prompts, origin = tmp_path / "my.jsonl", tmp_path / "origin"
    write_prompts(prompts, 20)
    export_drafter(drafter(), ROWS, origin, torch.float32)
    said = run(
        *("adapt", "--model", target_folder, "--prompts", prompts, "--out", tmp_path / "out", "--drafter", origin),
        *("--steps", 2, "--max-tokens", 8, "--dtype", "float32", "--workers", 1),
    )
    assert "before:" in said
    assert "after:" in said
    assert "acceptance length " in said
    assert isinstance(load_drafter(tmp_path / "out" / "drafter")[0], Drafter)
