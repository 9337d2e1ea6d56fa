"""`paceline info` and `paceline convert` of drafters, on small ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from models.relatives import Spark, Walk, write_spark, write_walk
from models.tiny import Draft, Shape, write_drafter, write_target

SHAPE = Shape("qwen3", vocab=40, layers=3)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_target(tmp_path / "target", SHAPE, tokenizer=True)


def test_info_says_what_a_drafter_is_and_whether_it_fits(paceline, tmp_path, target):
    drafter = write_spark(tmp_path / "spark", SHAPE, Spark(Draft(taps=(0, 2), window=9, sliding=(0,)), kind="gated"))
    facts = json.loads(paceline("info", str(drafter), "--target", str(target), "--json").out)
    assert (facts["family"], facts["packaging"], facts["method"]) == ("dspark", "DeepSpec", "dspark")
    assert facts["fits"] is True and facts["num_speculative_tokens"] == 8 and facts["target_layer_ids"] == [0, 2]
    assert facts["heads"] == ["Markov head, gated, rank 6", "confidence head that reads the token before"]
    assert facts["calibrated"] is False
    text = paceline("info", str(drafter)).out
    for words in ("dspark, as DeepSpec packages it", "architectures = 'Qwen3DSparkModel'", "window of 9", "--target"):
        assert words in text, text
    other = write_target(tmp_path / "other", Shape("qwen3", vocab=40, layers=2), tokenizer=True)
    shown = paceline("info", str(drafter), "--target", str(other))
    assert shown.code == 0 and "num_target_layers = 3, the model has 2" in shown.out


def test_info_of_other_families(paceline, tmp_path, target):
    walk = write_walk(tmp_path / "walk", SHAPE, Walk())
    facts = json.loads(paceline("info", str(walk), "--json").out)
    assert facts["family"] == "dflash2" and facts["fits"] is None and len(facts["heads"]) == 2
    assert "candidate selector, 6 of each slot" in paceline("info", str(walk)).out


def test_info_of_an_unknown_drafter_lists_what_was_seen(paceline, tmp_path):
    folder = write_drafter(tmp_path / "x", SHAPE, Draft())
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["DFlash9DraftModel"]}
    (folder / "config.json").write_text(json.dumps(config))
    ran = paceline("info", str(folder))
    assert ran.code == 1 and "DFlash9DraftModel" in ran.err and "dflash_config" in ran.err


def test_a_target_is_for_drafters(paceline, target):
    ran = paceline("info", str(target), "--target", str(target))
    assert ran.code == 1 and "--target belongs to a drafter" in ran.err


def test_convert_writes_a_drafter_in_another_packaging(paceline, tmp_path, target):
    drafter = write_drafter(tmp_path / "drafter", SHAPE, Draft(taps=(0, 2)))
    out = tmp_path / "out"
    argv = ["convert", str(drafter), str(out), "--layout", "speculators", "--target", str(target)]
    assert (paceline(*argv).code, sorted(p.name for p in out.iterdir())) == (0, ["config.json", "model.safetensors"])
    facts = json.loads(paceline("info", str(out), "--target", str(target), "--json").out)
    assert facts["packaging"] == "speculators" and facts["fits"] is True and facts["target_layer_ids"] == [0, 2]
    again = paceline(*argv)
    assert again.code == 1 and "exists already" in again.err
    ran = paceline("convert", str(drafter), str(tmp_path / "y"), "--layout", "native")
    assert ran.code == 1 and "--target" in ran.err
