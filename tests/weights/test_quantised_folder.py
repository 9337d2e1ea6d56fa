"""Folders of `paceline quantize`: what is read back is what quantising at load gives, and faults are named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models.tiny import Shape, write_target
from safetensors.numpy import load_file, save_file

from paceline.errors import CheckpointError, ConfigError, PacelineError
from paceline.models import load_model
from paceline.tokenizer import load_tokenizer
from paceline.weights.checkpoint import open_checkpoint
from paceline.weights.quantised_folder import QuantisedFolder
from paceline.weights.quantised_writer import quantise_model

from .test_quantise import write_gguf

SHAPES = {
    "tied": Shape("qwen2", vocab=70, hidden=40, inner=72, tied=True),
    "untied": Shape("llama", vocab=70, hidden=48, inner=50, bias=True),
}
TOKENS = [3, 9, 27, 11, 33, 29]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {n: write_target(tmp_path_factory.mktemp(n), s, tokenizer=True) for n, s in SHAPES.items()}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("quantization", ["int8", "int8_channel", "int4"])
def test_the_folder_holds_what_quantising_at_load_gives(tmp_path, sources, name, quantization):
    calls: list[Any] = []
    conversions = quantise_model(
        sources[name], tmp_path / "out", quantization, progress=lambda *call: calls.append(call)
    )
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert calls[-1][1] == calls[-1][2]
    assert all(0 < e < 0.15 for e in conversions.relative_errors().values())
    at_load = load_model(sources[name], quantization=quantization, threads=1)
    stored = load_model(tmp_path / "out", quantization="auto", threads=1)
    assert stored.formats == at_load.formats and not stored.conversions.kinds
    assert (stored.logits(TOKENS)[0] == at_load.logits(TOKENS)[0]).all()
    # and without quantised kernels it is a model in bf16 like any other
    dequantised = load_model(tmp_path / "out", quantization="none", threads=1).logits(TOKENS)[0]
    assert np.abs(dequantised - stored.logits(TOKENS)[0]).max() < 0.1 * np.abs(dequantised).max()
    assert load_tokenizer(open_checkpoint(tmp_path / "out")).encode("abc") == load_tokenizer(
        open_checkpoint(sources[name])
    ).encode("abc")
    assert (tmp_path / "out" / "model.safetensors").stat().st_size < 0.8 * (
        sources[name] / "model.safetensors"
    ).stat().st_size


@pytest.mark.parametrize("quantization", ["auto", "int8"])
def test_from_gguf(tmp_path, quantization):
    source = write_gguf(tmp_path / "m.gguf", {"attn_v.weight": "Q6_K", ".weight": "Q4_1"}, tied=False)
    quantise_model(source, tmp_path / "out", quantization)
    at_load, stored = (load_model(p, quantization=quantization, threads=1) for p in (source, tmp_path / "out"))
    assert (stored.logits(TOKENS)[0] == at_load.logits(TOKENS)[0]).all()
    assert load_tokenizer(open_checkpoint(tmp_path / "out")).encode("abc")


def test_nothing_is_lost(tmp_path, sources):
    """What cannot be done leaves everything as it was."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("x")
    with pytest.raises(ConfigError, match="exists already"):
        quantise_model(sources["tied"], tmp_path / "full", "int8")
    with pytest.raises(ConfigError, match="none"):
        quantise_model(sources["tied"], tmp_path / "new", "none")
    with pytest.raises(CheckpointError, match="auto"):
        quantise_model(sources["tied"], tmp_path / "new", "auto")
    bad = tmp_path / "bad"
    bad.mkdir()
    for path in sources["tied"].iterdir():
        (bad / path.name).write_bytes(path.read_bytes())
    tensors = load_file(bad / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"][3, 3] = np.inf
    save_file(tensors, bad / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"down_proj\.weight: row 3"):
        quantise_model(bad, tmp_path / "new", "int8")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad", "full"]


def edit(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        change(config["quantization_config"])
        (folder / "config.json").write_text(json.dumps(config))

    return apply


def retype(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[NAME] = tensors[NAME].view(np.int8)
    save_file(tensors, folder / "model.safetensors")


def cut(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[NAME] = np.ascontiguousarray(tensors[NAME][:, :-2])
    save_file(tensors, folder / "model.safetensors")


def drop(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[NAME]
    save_file(tensors, folder / "model.safetensors")


NAME = "model.layers.1.mlp.up_proj.weight"
FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "no tensors": (edit(lambda q: q.pop("tensors")), "tensors"),
    "a list of tensors": (edit(lambda q: q.update(tensors=[NAME])), "tensors"),
    "no entry": (edit(lambda q: q["tensors"].update({NAME: None})), "up_proj"),
    "an unknown format": (edit(lambda q: q["tensors"][NAME].update(format="Q3_K")), "up_proj"),
    "no columns": (edit(lambda q: q["tensors"][NAME].pop("columns")), "up_proj"),
    "columns that are true": (edit(lambda q: q["tensors"][NAME].update(columns=True)), "up_proj"),
    "negative columns": (edit(lambda q: q["tensors"][NAME].update(columns=-32)), "up_proj"),
    "too many columns": (edit(lambda q: q["tensors"][NAME].update(columns=2**40)), "up_proj"),
    "columns of another matrix": (edit(lambda q: q["tensors"][NAME].update(columns=72)), "up_proj"),
    "columns beyond the config's": (edit(lambda q: q["tensors"][NAME].update(columns=64)), "up_proj"),
    "another format": (edit(lambda q: q["tensors"][NAME].update(format="Q4_0")), "up_proj"),
    "a tensor that is not there": (edit(lambda q: q["tensors"].update(x={"format": "Q8_0", "columns": 3})), "'x'"),
    "a tensor that went": (drop, "up_proj"),
    "int8 instead of bytes": (retype, "up_proj"),
    "rows cut short": (cut, "up_proj"),
    "an entry that went": (edit(lambda q: q["tensors"].pop(NAME)), "up_proj"),
}


@pytest.mark.parametrize("what", FAULTS)
def test_faults_are_named(tmp_path, sources, what):
    folder = tmp_path / "q"
    quantise_model(sources["tied"], folder, "int8")
    damage, message = FAULTS[what]
    damage(folder)
    with pytest.raises(PacelineError, match=message):
        load_model(folder, quantization="auto", threads=1)


def test_other_quantised_checkpoints_are_refused_still(tmp_path, sources):
    folder = tmp_path / "q"
    quantise_model(sources["tied"], folder, "int8")
    assert isinstance(open_checkpoint(folder), QuantisedFolder)
    edit(lambda q: q.update(quant_method="gptq"))(folder)
    with pytest.raises(ConfigError, match="gptq"):
        load_model(folder, quantization="auto", threads=1)


def test_blocks_of_what_is_not_in_blocks(sources):
    with open_checkpoint(sources["tied"]) as checkpoint, pytest.raises(CheckpointError, match="blocks"):
        checkpoint.blocks("model.norm.weight")
