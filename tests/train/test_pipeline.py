"""The command line from prompts to an evaluated drafter, on a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("paceline._native")

from typer.testing import CliRunner

from paceline.errors import PacelineError
from paceline.train.cli import app
from paceline.train.export import load_drafter
from paceline.train.loading import default_taps
from paceline.train.workflow import parse_taps

from .conftest import LAYERS, RESERVED, VOCAB


def run(*args: object) -> str:
    result = CliRunner().invoke(app, [str(a) for a in args], catch_exceptions=True)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_the_whole_way(target_folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps({"prompt": f"w{5 + i} w{9 + i} w7", "domain": "ab"[i % 2]}) + "\n" for i in range(24))
    )
    answers, features, out, drafter = (tmp_path / n for n in ("answers.jsonl", "features", "run", "drafter"))
    model = ("--model", target_folder)
    arguments = ("regenerate", *model, "--prompts", prompts, "--out", answers, "--dtype", "float32")
    said = run(*arguments, "--max-tokens", 12, "--batch", 8)
    assert "24/24" in said
    assert len(answers.read_text().splitlines()) == 24
    assert run(*arguments).startswith("0 new")

    said = run("features", *model, "--answers", answers, "--out", features, "--dtype", "float32", "--taps", "2,0")
    assert "taps [2, 0]" in said

    fit = ("fit", *model, "--features", features, "--out", out, "--steps", 6, "--layers", 1, "--block-size", 4)
    fit = (*fit, "--batch-size", 4, "--anchors", 3, "--head-rows", 40, "--checkpoint-every", 3, "--dtype", "float32")
    assert "new run" in run(*fit, "--until", 3)
    assert "going on at step 3" in run(*fit)
    assert (out / "log.jsonl").read_text().count("acceptance_length") == 2

    run("export", "--run", out, "--out", drafter, "--dtype", "float32")
    trained, rows = load_drafter(drafter)
    assert rows is not None
    assert len(rows) == 40
    assert 1 in rows  # the end token
    used = {t for line in answers.read_text().splitlines() for t in json.loads(line)["tokens"]}
    mask = trained.config.mask_token_id
    assert mask == max(i for i in range(VOCAB - RESERVED, VOCAB) if i not in used)  # a special token that nothing uses
    assert trained.config.target_layer_ids == (2, 0)
    assert trained.config.num_target_layers == LAYERS
    pair = json.loads((drafter / "config.json").read_text())["paceline_target"]
    assert pair == {"model_type": "llama", "name": str(target_folder)}

    figures = tmp_path / "figures.json"
    said = run("eval", *model, "--drafter", drafter, "--answers", answers, "--json", figures)
    assert said.splitlines()[-1].startswith("mean")
    assert set(json.loads(figures.read_text())) == {"a", "b", "all"}


def test_mistakes_are_named(target_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(PacelineError, match=r"meta\.json"):
        run("fit", "--model", target_folder, "--features", tmp_path, "--out", tmp_path / "o", "--steps", 2)
    with pytest.raises(PacelineError, match=r"run\.json"):
        run("export", "--run", tmp_path, "--out", tmp_path / "o")
    with pytest.raises(PacelineError, match="--source-file"):
        run("prompts", "--out", tmp_path / "p", "--source-file", "gsm8k")
    with pytest.raises(PacelineError, match="--without"):
        run("prompts", "--out", tmp_path / "p", "--without", "nothing")
    with pytest.raises(PacelineError, match="--taps"):
        parse_taps("1;2", 4)


def test_default_taps_are_distinct_layers_of_the_target() -> None:
    assert default_taps(30) == (1, 8, 14, 20, 27)
    for layers in range(2, 70):
        taps = default_taps(layers)
        assert list(taps) == sorted(set(taps))
        assert all(0 <= t < layers for t in taps)
        assert taps


def test_the_command_line_loads_without_torch() -> None:
    code = "import sys, paceline.train.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
