"""Killed at random moments, a real `paceline train fit` goes on to the losses of an uninterrupted one."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("paceline._native")

from paceline.train import journal  # noqa: E402

STEPS = 40

# the command line with a line of the log for every step, so that each step's loss can be compared
LOG_EVERY_STEP = """
import sys
import torch
import paceline.train.fit as fit
from paceline.train.cli import app

torch.set_num_threads(1)
plain = fit.FitConfig.__init__
fit.FitConfig.__init__ = lambda self, *a, **k: plain(self, *a, **{**k, "log_every": 1})
app(sys.argv[1:])
"""


def command(target: Path, features: Path, out: Path) -> list[str]:
    fit = ["fit", "--model", str(target), "--features", str(features), "--out", str(out), "--steps", str(STEPS)]
    fit += ["--layers", "1", "--block-size", "4", "--batch-size", "6", "--anchors", "4", "--head-rows", "60"]
    fit += ["--checkpoint-every", "3", "--dtype", "float32", "--block-sizes", "3,4", "--seed", "5"]
    return [sys.executable, "-c", LOG_EVERY_STEP, *fit]


def losses(out: Path) -> dict[int, float]:
    """Loss by step; a step that was made twice, before and after a kill, must have had the same loss both times."""
    found: dict[int, float] = {}
    for entry in journal.read(out / "log.jsonl"):  # without lines that a kill cut off
        assert found.get(entry["step"], entry["loss"]) == pytest.approx(entry["loss"], abs=1e-6)
        found[entry["step"]] = entry["loss"]
    return found


@pytest.mark.slow
def test_kills_at_random_moments_change_nothing(target_folder: Path, features: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    subprocess.run(command(target_folder, features, whole), env=environment, check=True, stdout=subprocess.DEVNULL)
    rng = random.Random()
    kills = 0
    for _ in range(200):
        process = subprocess.Popen(
            command(target_folder, features, parts), env=environment, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        first = process.stdout.readline()  # "new run" or "going on": training is about to begin
        assert first, "the run ended before it said anything"
        wait = rng.uniform(0, 0.25)
        time.sleep(wait)  # any moment is right: nothing is expected of what happens meanwhile
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.wait()
        if process.returncode == 0:
            break
        if kills == 6:
            subprocess.run(
                command(target_folder, features, parts), env=environment, check=True, stdout=subprocess.DEVNULL
            )
            break
    expected, found = losses(whole), losses(parts)
    assert set(expected) == set(found) == set(range(1, STEPS + 1))
    for step, loss in expected.items():
        assert found[step] == pytest.approx(loss, abs=1e-6)
    a = torch.load(whole / "checkpoint.pt", weights_only=True)["model"]
    b = torch.load(parts / "checkpoint.pt", weights_only=True)["model"]
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_checkpoint_that_was_being_written_is_passed_over(
    target_folder: Path, features: Path, tmp_path: Path
) -> None:
    """What a kill leaves while a file is written: half a `.partial` beside the last whole checkpoint."""
    from typer.testing import CliRunner

    from paceline.train.cli import app

    arguments = command(target_folder, features, tmp_path)[3:]
    assert CliRunner().invoke(app, [*arguments, "--until", "3"]).exit_code == 0
    whole = (tmp_path / "checkpoint.pt").read_bytes()
    (tmp_path / "checkpoint.partial").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "run.partial").write_text('{"model": ')
    said = CliRunner().invoke(app, [*arguments, "--until", "6"]).output
    assert "going on at step 3" in said
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"] == 6


def test_a_line_that_was_cut_off_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    journal.append(path, {"step": 1})
    with path.open("a") as file:
        file.write('{"step": 2, "lo')
    journal.append(path, {"step": 2})
    journal.append(path, {"step": 3})
    assert journal.read(path) == [{"step": 1}, {"step": 2}, {"step": 3}]
