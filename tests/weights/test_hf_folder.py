"""Hugging Face folders: single and sharded files, tied heads, refusals."""

from __future__ import annotations

import json
import pickle
import zipfile

import numpy as np
import pytest

from paceline.errors import CheckpointError
from paceline.weights.checkpoint import open_checkpoint
from weights.builders import random_weights, tiny_gguf
from weights.test_safetensors_file import written

WEIGHTS = random_weights("llama", tied=False)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "tie_word_embeddings": False}))
    return tmp_path


def shard(folder, parts: int = 3) -> dict[str, str]:
    """Spread WEIGHTS over files with an index; return the weight map."""
    names = list(WEIGHTS)
    weight_map = {}
    for i in range(parts):
        file = f"model-{i + 1:05d}-of-{parts:05d}.safetensors"
        mine = {name: WEIGHTS[name] for name in names[i::parts]}
        (folder / file).write_bytes(written(mine))
        weight_map |= dict.fromkeys(mine, file)
    write_index(folder, weight_map)
    return weight_map


def write_index(folder, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def check_weights(folder) -> None:
    with open_checkpoint(folder) as checkpoint:
        assert sorted(checkpoint.names()) == sorted(WEIGHTS)
        for name, expected in WEIGHTS.items():
            assert checkpoint.shape(name) == expected.shape
            np.testing.assert_array_equal(checkpoint.load(name), expected)


def test_single_file(folder):
    (folder / "model.safetensors").write_bytes(written(WEIGHTS))
    check_weights(folder)


def test_sharded_with_an_index(folder):
    shard(folder)
    check_weights(folder)


def test_sharded_without_an_index(folder):
    shard(folder)
    (folder / "model.safetensors.index.json").unlink()
    check_weights(folder)


def test_a_stored_head_is_hidden_when_it_is_tied(folder):
    (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    (folder / "model.safetensors").write_bytes(written(WEIGHTS))
    assert "lm_head.weight" not in open_checkpoint(folder)


def test_pickles_are_refused(folder):
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    with pytest.raises(CheckpointError, match=r"only PyTorch pickles here \(pytorch_model\.bin\).*safetensors"):
        open_checkpoint(folder)
    with pytest.raises(CheckpointError, match="pickle"):
        open_checkpoint(folder / "pytorch_model.bin")
    with zipfile.ZipFile(folder / "weights.whatever", "w") as archive:
        archive.writestr("data.pkl", b"")
    with pytest.raises(CheckpointError, match="pickle"):
        open_checkpoint(folder / "weights.whatever")


def test_a_pickle_named_safetensors_is_refused(folder):
    with zipfile.ZipFile(folder / "model.safetensors", "w") as archive:
        archive.writestr("data.pkl", b"")
    with pytest.raises(CheckpointError, match="pickle"):
        open_checkpoint(folder)


def test_missing_shard(folder):
    shard(folder)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors is missing"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "a\\b.safetensors", "x.bin", "sub/x.safetensors"])
def test_an_index_cannot_point_elsewhere(folder, name):
    shard(folder)
    write_index(folder, {"model.norm.weight": name})
    with pytest.raises(CheckpointError, match="not the name of a safetensors file"):
        open_checkpoint(folder)


def test_index_that_lies(folder):
    weight_map = shard(folder)
    write_index(folder, {**weight_map, "model.extra": "model-00001-of-00003.safetensors"})
    with pytest.raises(CheckpointError, match=r"'model\.extra' is not in model-00001-of-00003"):
        open_checkpoint(folder)
    for broken in (None, [], {"a": 1}):
        write_index(folder, broken)
        with pytest.raises(CheckpointError, match="weight_map"):
            open_checkpoint(folder)


def test_a_tensor_in_two_files(folder):
    shard(folder)
    (folder / "model.safetensors.index.json").unlink()
    (folder / "zz.safetensors").write_bytes(written({"model.norm.weight": WEIGHTS["model.norm.weight"]}))
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' is in both"):
        open_checkpoint(folder)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'"x"', b"\xff", b"[" * 100_000])
def test_bad_config(folder, text):
    (folder / "config.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint(folder)


def test_no_weights_and_no_model(folder, tmp_path_factory):
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors"):
        open_checkpoint(folder)
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(CheckpointError, match=r"neither config\.json nor a \*\.gguf"):
        open_checkpoint(empty)
    with pytest.raises(CheckpointError, match="no such file"):
        open_checkpoint(empty / "nothing")


def test_a_folder_with_one_gguf(tmp_path):
    tiny_gguf(tmp_path / "a.gguf")
    assert open_checkpoint(tmp_path).config["model_type"] == "llama"
    tiny_gguf(tmp_path / "b.gguf")
    with pytest.raises(CheckpointError, match=r"a\.gguf, b\.gguf"):
        open_checkpoint(tmp_path)


def test_a_safetensors_file_alone(folder):
    (folder / "model.safetensors").write_bytes(written(WEIGHTS))
    with pytest.raises(CheckpointError, match="give the folder"):
        open_checkpoint(folder / "model.safetensors")
