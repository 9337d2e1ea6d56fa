"""Drafters written in another packaging draft the same bits, and come back as they were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from paceline.errors import CheckpointError, ConfigError
from paceline.models import TargetModel, load_model
from paceline.models.dflash import load_drafter
from paceline.models.drafter_export import convert_drafter, write_drafter
from paceline.weights.checkpoint import open_checkpoint

from .test_drafter import draft_once
from .tiny import Draft, Shape, config_of, drafter_config, drafter_tensors, tensors_of, write, write_target

SHAPE = Shape("qwen3", layers=3)
ROWS = np.array([0, 3, 5, 31, 32, 64, 96], np.int32)
DRAFTS = {
    "plain": Draft(taps=(0, 2)),
    "embedding tapped": Draft(taps=(-1, 2), block_size=5),
    "sliding": Draft(taps=(0, 1), window=9, sliding=(0, 1)),
    "sliding both ways": Draft(taps=(0, 1), window=9, sliding=(0, 1), causal=False),
    "mixed": Draft(taps=(0, 1), window=9, sliding=(0,)),
    "mixed both ways": Draft(taps=(0, 1), window=9, sliding=(1,), causal=False),
    "from the anchor": Draft(taps=(1,), extra={"sample_from_anchor": True}),
    "top level": Draft(taps=(1,), nested=False),
}


@pytest.fixture(scope="module", params=[False, True], ids=["head apart", "tied"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = Shape("qwen3", layers=3, tied=request.param)
    return write_target(tmp_path_factory.mktemp("target"), shape)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def model(request: pytest.FixtureRequest, target: Path) -> TargetModel:
    return load_model(target, dtype=request.param, threads=1, max_rows=40)


def converted(source: Path, target: Path, folder: Path, layout: Any) -> Path:
    folder.mkdir()
    with open_checkpoint(source) as drafter, open_checkpoint(target) as model:
        write_drafter(convert_drafter(drafter, model, layout), folder)
    return folder


def drafts(folder: Path, model: TargetModel) -> tuple[np.ndarray, list[int] | None]:
    """Draft logits behind 50 tokens of context, and the ids of their columns."""
    drafter = load_drafter(folder, model, quantization="none")
    ids = np.random.default_rng(1).integers(0, SHAPE.vocab, 50).tolist()
    _, taps = model.logits(ids, taps=drafter.config.target_layer_ids)
    rows = None if drafter.head_rows is None else drafter.head_rows.tolist()
    return draft_once(drafter, taps, ids[3], drafter.config.block_size - 1), rows


def same(left: Path, right: Path) -> None:
    """The same tensors, bit for bit, under the same names."""
    for name in ("model.safetensors", "head_rows.safetensors"):
        assert (left / name).exists() == (right / name).exists()
        if (left / name).exists():
            a, b = load_file(left / name), load_file(right / name)
            assert set(a) == set(b)
            for key in a:
                assert a[key].dtype == b[key].dtype and a[key].tobytes() == b[key].tobytes(), key


@pytest.mark.parametrize("rows", [None, ROWS], ids=["whole head", "head rows"])
@pytest.mark.parametrize("name", DRAFTS)
def test_there_and_back_is_bit_equal(tmp_path, target, model, name, rows):
    d = DRAFTS[name]
    first = write(tmp_path / "first", drafter_config(SHAPE, d), drafter_tensors(SHAPE, d))
    if rows is not None:
        save_file({"head_rows": rows}, str(first / "head_rows.safetensors"))
    there = converted(first, target, tmp_path / "there", "speculators")
    back = converted(there, target, tmp_path / "back", "native")
    again = converted(back, target, tmp_path / "again", "speculators")
    same(first, back)
    same(there, again)
    assert json.loads((there / "config.json").read_text()) == json.loads((again / "config.json").read_text())
    want, ids = drafts(first, model)
    for folder in (there, back, again):
        got, columns = drafts(folder, model)
        assert columns == ids == (None if rows is None else ROWS.tolist())
        assert (got.view(np.uint32) == want.view(np.uint32)).all()
    configs = [load_drafter(f, model).config for f in (first, there, back)]
    assert [c.packaging for c in configs] == ["z-lab", "speculators", "z-lab"]
    assert len({(c.causal, c.decoder.windows, c.anchor_first, c.target_layer_ids, c.max_drafts) for c in configs}) == 1


def test_what_is_written_is_the_format(tmp_path, target):
    """Field by field, as published checkpoints have them."""
    d = DRAFTS["mixed"]
    first = write(tmp_path / "first", drafter_config(SHAPE, d), drafter_tensors(SHAPE, d))
    save_file({"head_rows": ROWS}, str(first / "head_rows.safetensors"))
    there = converted(first, target, tmp_path / "there", "speculators")
    config = json.loads((there / "config.json").read_text())
    assert config["speculators_model_type"] == "dflash" and config["architectures"] == ["DFlashSpeculator"]
    assert config["aux_hidden_state_layer_ids"] == [1, 2] and config["mask_token_id"] == SHAPE.vocab - 3
    assert config["block_size"] == 8 and config["sample_from_anchor"] is False
    assert config["draft_vocab_size"] == len(ROWS) and config["sliding_window_non_causal"] is False
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 7
    decoder = config["transformer_layer_config"]
    assert decoder["hidden_size"] == SHAPE.hidden and decoder["layer_types"][0] == "sliding_attention"
    assert not {"architectures", "dflash_config", "block_size", "num_target_layers"} & set(decoder)
    tensors = load_file(there / "model.safetensors")
    assert tensors["t2d"].dtype == np.bool_ and tensors["d2t"].dtype == np.int64
    assert (np.arange(len(ROWS)) + tensors["d2t"]).tolist() == np.flatnonzero(tensors["t2d"]).tolist() == ROWS.tolist()
    theirs = load_file(target / "model.safetensors")
    head = theirs.get("lm_head.weight", theirs["model.embed_tokens.weight"])
    assert (tensors["lm_head.weight"] == head[ROWS]).all()


def test_half_precision_stays_as_it_is(tmp_path, target):
    d = DRAFTS["plain"]
    tensors = {k: v.astype(ml_dtypes.bfloat16) for k, v in drafter_tensors(SHAPE, d).items()}
    first = write(tmp_path / "first", drafter_config(SHAPE, d), tensors)
    there = converted(first, target, tmp_path / "there", "speculators")
    same(first, converted(there, target, tmp_path / "back", "native"))


@pytest.mark.parametrize(
    ("field", "extra"),
    [
        ("output_multiplier", {"output_multiplier": 0.5}),
        ("input_embedding_scale", {"input_embedding_scale": 2.0}),
        ("final_logit_softcapping", {"final_logit_softcapping": 3.0}),
        ("rope_is_neox_style", {"rope_is_neox_style": False}),
        ("is_causal", {"is_causal": True}),
    ],
)
def test_what_speculators_cannot_say_is_refused(tmp_path, target, field, extra):
    d = Draft(taps=(0,), extra=extra)
    first = write(tmp_path / "first", drafter_config(SHAPE, d), drafter_tensors(SHAPE, d))
    with pytest.raises(ConfigError, match=field):
        converted(first, target, tmp_path / "there", "speculators")


def speculators(tmp_path: Path, target: Path) -> Path:
    d = DRAFTS["plain"]
    first = write(tmp_path / "first", drafter_config(SHAPE, d), drafter_tensors(SHAPE, d))
    save_file({"head_rows": ROWS}, str(first / "head_rows.safetensors"))
    return converted(first, target, tmp_path / "there", "speculators")


def test_a_head_of_its_own_drafts_and_stays_in_its_format(tmp_path, target, model):
    folder = speculators(tmp_path, target)
    before, _ = drafts(folder, model)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"] * np.float32(2)
    save_file(tensors, str(folder / "model.safetensors"))
    after, ids = drafts(folder, model)
    assert ids == ROWS.tolist()
    np.testing.assert_array_equal(after, 2 * before)
    with pytest.raises(ConfigError, match=r"lm_head\.weight are not the target's"):
        converted(folder, target, tmp_path / "back", "native")


@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight"])
def test_copies_of_the_targets_matrices_are_shared_and_others_used(tmp_path, target, model, name):
    d = DRAFTS["plain"]
    theirs = load_file(target / "model.safetensors")
    source = (
        "lm_head.weight" if name == "lm_head.weight" and "lm_head.weight" in theirs else "model.embed_tokens.weight"
    )
    first = write(tmp_path / "first", drafter_config(SHAPE, d), drafter_tensors(SHAPE, d))
    there = converted(first, target, tmp_path / "there", "speculators")
    want, _ = drafts(there, model)
    tensors = load_file(there / "model.safetensors") | {name: theirs[source]}
    save_file(tensors, str(there / "model.safetensors"))
    drafter = load_drafter(there, model)
    assert drafter.weights.head is model.weights.head and drafter.weights.embed is model.weights.embed
    got, _ = drafts(there, model)
    assert (got.view(np.uint32) == want.view(np.uint32)).all()
    save_file(tensors | {name: theirs[source] * np.float32(-1)}, str(there / "model.safetensors"))
    changed, _ = drafts(there, model)
    assert np.abs(changed - want).max() > 0.1
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        converted(there, target, tmp_path / "back", "native")


def test_rows_in_any_order_are_the_same_drafter(tmp_path, target, model):
    folder = speculators(tmp_path, target)
    want, ids = drafts(folder, model)
    tensors = load_file(folder / "model.safetensors")
    order = np.array([3, 0, 6, 1, 5, 2, 4])
    tensors["lm_head.weight"] = tensors["lm_head.weight"][order]
    tensors["d2t"] = ROWS[order].astype(np.int64) - np.arange(len(ROWS))
    save_file(tensors, str(folder / "model.safetensors"))
    got, columns = drafts(folder, model)
    assert columns == ids
    np.testing.assert_array_equal(got, want)


BROKEN: dict[str, tuple[str, Any]] = {
    "missing": ("d2t", None),
    "fractions": ("d2t", np.zeros(len(ROWS), np.float32)),
    "too short": ("d2t", np.zeros(2, np.int64)),
    "an id twice": ("d2t", -np.arange(len(ROWS), dtype=np.int64)),
    "past the vocabulary": ("d2t", np.full(len(ROWS), SHAPE.vocab, np.int64)),
    "other ids are marked": ("t2d", np.eye(1, SHAPE.vocab, 2, dtype=np.bool_)[0]),
    "marks of another vocabulary": ("t2d", np.ones(SHAPE.vocab + 1, np.bool_)),
    "no head": ("lm_head.weight", None),
    "a head of other size": ("lm_head.weight", np.zeros((len(ROWS) + 1, SHAPE.hidden), np.float32)),
    "not finite": ("lm_head.weight", np.full((len(ROWS), SHAPE.hidden), np.nan, np.float32)),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_reduced_vocabulary_is_refused_by_tensor(tmp_path, target, model, kind):
    folder = speculators(tmp_path, target)
    name, value = BROKEN[kind]
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(name)
    if value is not None:
        tensors[name] = value
    save_file(tensors, str(folder / "model.safetensors"))
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        load_drafter(folder, model)


def test_two_lists_of_rows_and_pickled_masks_are_refused(tmp_path, target, model):
    folder = speculators(tmp_path, target)
    save_file({"head_rows": ROWS}, str(folder / "head_rows.safetensors"))
    with pytest.raises(CheckpointError, match="d2t"):
        load_drafter(folder, model)
    (folder / "head_rows.safetensors").unlink()
    (folder / "mask_embedding.pt").write_bytes(b"PK\x03\x04")
    with pytest.raises(CheckpointError, match=r"mask_embedding\.pt"):
        load_drafter(folder, model)


def test_a_target_that_does_not_fit_is_refused(tmp_path, target):
    d = DRAFTS["plain"]
    first = write(tmp_path / "first", drafter_config(SHAPE, d), drafter_tensors(SHAPE, d))
    other = Shape("qwen3", layers=4)
    wrong = write(tmp_path / "wrong", config_of(other), tensors_of(other))
    with pytest.raises(ConfigError, match="num_target_layers"):
        converted(first, wrong, tmp_path / "there", "speculators")
