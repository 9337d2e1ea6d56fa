"""DFlash drafters: what is refused by name, where fields may stand, and the network against its definition."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from paceline.errors import CheckpointError, ConfigError
from paceline.models import TargetModel, load_model
from paceline.models.dflash import DFlashDrafter, all_finite, load_drafter, read_drafter_config

from .reference import DrafterReference, Reference
from .tiny import (
    Draft,
    Shape,
    config_of,
    drafter_config,
    drafter_tensors,
    tensors_of,
    write,
    write_drafter,
    write_target,
)

SHAPE, DRAFT = Shape(layers=3), Draft(taps=(0, 2))
V = SHAPE.vocab


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    folder = write_target(tmp_path_factory.mktemp("target"), SHAPE)
    return load_model(folder, dtype="float32", threads=1, max_rows=40)


def changed(**fields: Any) -> dict[str, Any]:
    """A config with other fields in dflash_config."""
    config = copy.deepcopy(drafter_config(SHAPE, DRAFT))
    config["dflash_config"].update(fields)
    return config


WRONG: list[tuple[str, dict[str, Any]]] = [
    # made for another target
    ("hidden_size", {**changed(), "hidden_size": 48}),
    ("vocab_size", {**changed(), "vocab_size": V + 1}),
    *(("num_target_layers", {**changed(), "num_target_layers": n}) for n in (0, 2, 4, "3")),
    ("target_hidden_size", {**changed(), "target_hidden_size": 48}),
    *(("target_layer_ids", changed(target_layer_ids=ids)) for ids in ([0, 3], [-2, 1])),
    # never guessed
    *(
        ("target_layer_ids", changed(target_layer_ids=ids))
        for ids in (None, [], ["0", 1], [True, 1], 3, [1, 1], [0, 2, 0])
    ),
    *(("mask_token_id", changed(mask_token_id=m)) for m in (None, V, -1, "3", True)),
    *(("block_size", changed(block_size=b)) for b in (None, 0, 1, 10_000, 8.0)),
    # other kinds of drafters
    *(
        ("architectures", {**changed(), "architectures": a})
        for a in (
            ["Qwen3ForCausalLM"],
            ["DFlash3DraftModel"],
            ["DFlashDraftModel", "DFlash2DraftModel"],
            None,
            [],
            5,
            True,
            "xDFlashDraftModel",
            "DFlashDraftModel",
        )
    ),
    ("projector_type", changed(projector_type="domino")),
    ("projector_type", {**changed(), "projector_type": "dspark"}),
    ("sample_from_anchor", changed(sample_from_anchor=1)),
    ("sample_from_anchor", {**changed(), "sample_from_anchor": "no"}),
    ("conv_group_size", {**changed(), "architectures": ["DFlash2DraftModel"]}),
    ("markov_rank", {**changed(), "architectures": ["DSparkDraftModel"]}),
    ("shift_label", changed(shift_label=True)),
    ("causal_head", changed(causal_head=True)),
    ("attention_sink_bias", changed(attention_sink_bias=True)),
    ("markov_rank", {**changed(), "markov_rank": 256}),
    ("conv_kernel_size", changed(conv_kernel_size=2)),
    ("selector_rank", changed(selector_rank=256)),
    ("logit_scale", {**changed(), "logit_scale": 0.5}),
    ("draft_vocab_size", {**changed(), "draft_vocab_size": 32}),
    ("swa_window_size", changed(use_swa=True, swa_window_size=8)),
    ("original_max_position", {**changed(), "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}),
    ("rope_type", {**changed(), "rope_scaling": {"rope_type": "longrope", "factor": 2.0}}),
    # values of the wrong type
    ("dflash_config", {**changed(), "dflash_config": [1]}),
    ("is_causal", {**changed(), "is_causal": "no"}),
    ("causal", changed(causal=0)),
    ("rope_is_neox_style", {**changed(), "rope_is_neox_style": "false"}),
    ("attention_bias", {**changed(), "attention_bias": "false"}),
    *(
        (name, changed(**{name: v}))
        for name in ("output_multiplier", "input_embedding_scale")
        for v in ("x", float("nan"), float("inf"), 0, -1.0, 1e6, 1e308, 1e-300, 10**400, True)
    ),
    *(
        ("final_logit_softcapping", changed(final_logit_softcapping=v))
        for v in (-3.0, 1e-300, 1e39, float("nan"), 10**400)
    ),
    ("architectures", {**changed(), "architectures": ["DFlashDraftModel", 5]}),
    ("use_swa", changed(use_swa="no")),
    ("quantization_config", {**changed(), "quantization_config": {"quant_method": "fp8"}}),
]


@pytest.mark.parametrize("index", range(len(WRONG)), ids=[f"{name}-{i}" for i, (name, _) in enumerate(WRONG)])
def test_a_wrong_pairing_is_refused_by_field(tmp_path, target, index):
    field, config = WRONG[index]
    with pytest.raises(ConfigError, match=field):
        load_drafter(write(tmp_path, config, drafter_tensors(SHAPE, DRAFT)), target)


@pytest.mark.parametrize("name", ["mask_token_id", "target_layer_ids", "block_size"])
def test_fields_stand_in_dflash_config_or_at_top_level(tmp_path, target, name):
    """dflash_config wins; a field that is in neither place is refused by name."""
    config = changed()
    value = config["dflash_config"].pop(name)
    with pytest.raises(ConfigError, match=name):
        read_drafter_config(config, "x")
    other = {"mask_token_id": 5, "target_layer_ids": [2, 1], "block_size": 3}[name]

    def read(config: dict[str, Any]) -> Any:
        value = getattr(read_drafter_config(config, "x"), name)
        return list(value) if isinstance(value, tuple) else value

    assert read({**config, name: value}) == value
    assert read({**changed(), name: other}) == value
    assert read({**changed(**{name: None}), name: other}) == other
    assert read({**config, name: other}) == other


def test_other_spellings_are_accepted(tmp_path, target):
    tensors = drafter_tensors(SHAPE, DRAFT)
    for i, config in enumerate(
        (
            {k: v for k, v in changed().items() if k != "num_target_layers"},
            changed(projector_type="dflash", sample_from_anchor=False, causal_head=None),
            {**changed(), "markov_rank": 0, "draft_vocab_size": V, "target_hidden_size": SHAPE.hidden},
            {**changed(), "tie_word_embeddings": True},
            drafter_config(SHAPE, Draft(taps=(0, 2), nested=False)),
        )
    ):
        load_drafter(write(tmp_path / str(i), config, tensors), target)
    with_buffer = {**tensors, "layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    load_drafter(write(tmp_path / "buffer", changed(), with_buffer), target)


def test_who_sees_whom_in_a_block():
    """Top-level is_causal, else dflash_config.causal, else causal where a layer slides."""
    mixed = Draft(taps=(0, 2), window=8, sliding=(0,))

    def causal(top: Any = None, inner: Any = None) -> tuple[bool, ...]:
        config = drafter_config(SHAPE, mixed)
        config["dflash_config"]["causal"] = inner
        return read_drafter_config({**config, "is_causal": top}, "x").causal

    assert causal() == (True, False)
    assert causal(inner=False) == (False, False) and causal(inner=True) == (True, True)
    assert causal(top=False) == (False, False) and causal(top=True) == (True, True)
    assert causal(top=False, inner=True) == (False, False) and causal(top=True, inner=False) == (True, True)


def test_missing_misshapen_and_foreign_tensors_are_named(tmp_path, target):
    tensors = drafter_tensors(SHAPE, DRAFT)
    config = changed()
    for i, name in enumerate(n for n in tensors if "layers.1" not in n):
        pattern = name.replace(".", r"\.")
        without = {n: t for n, t in tensors.items() if n != name}
        with pytest.raises(CheckpointError, match=f"{pattern}.*missing"):
            load_drafter(write(tmp_path / f"a{i}", config, without), target)
        grown = np.zeros(np.array(tensors[name].shape) + 1, np.float32)
        with pytest.raises(CheckpointError, match=f"{pattern}.*shape"):
            load_drafter(write(tmp_path / f"b{i}", config, {**tensors, name: grown}), target)
    for i, name in enumerate(
        (
            "layers.0.attention_conv.base_kernel",
            "layers.2.input_layernorm.weight",
            "layers.0.self_attn.q_proj.bias",
            "markov_head.markov_w1.weight",
            "lm_head.weight",
        )
    ):
        with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
            load_drafter(write(tmp_path / f"c{i}", config, {**tensors, name: tensors["norm.weight"]}), target)
    # the number of taps decides the width of fc
    with pytest.raises(CheckpointError, match=r"fc\.weight"):
        load_drafter(write(tmp_path / "d", changed(target_layer_ids=[0, 1, 2]), tensors), target)


HEADS: dict[str, Any] = {
    "fractions": np.array([0.0, 1.5], np.float32),
    "doubles": np.array([1.0, 2.0]),
    "booleans": np.array([False, True]),
    "two dimensions": np.array([[0, 1]], np.int32),
    "none": np.array([], np.int32),
    "negative": np.array([-1, 2], np.int32),
    "past the vocabulary": np.array([0, V], np.int32),
    "descending": np.array([3, 1], np.int32),
    "twice": np.array([1, 1, 2], np.int32),
    "wraps around in 32 bits": np.array([1, (1 << 32) + 2], np.int64),
    "scalar": np.array(3, np.int32),
}


@pytest.mark.parametrize("kind", HEADS)
def test_bad_head_rows_are_refused(tmp_path, target, kind):
    folder = write_drafter(tmp_path, SHAPE, DRAFT)
    save_file({"head_rows": HEADS[kind]}, str(folder / "head_rows.safetensors"))
    with pytest.raises(CheckpointError, match="head_rows"):
        load_drafter(folder, target)


@pytest.mark.parametrize("content", [b"", b"\x10\x00", b"hello world, no such file", b"\x80\x04pickled", None])
def test_damaged_head_rows_files_are_refused(tmp_path, target, content):
    folder = write_drafter(tmp_path, SHAPE, DRAFT)
    path = folder / "head_rows.safetensors"
    if content is None:
        save_file({"rows": np.array([1], np.int32)}, str(path))
    else:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match="head_rows"):
        load_drafter(folder, target)


@pytest.mark.parametrize("kind", ["link to nothing", "folder"])
def test_head_rows_that_are_no_file_are_refused(tmp_path, target, kind):
    """Taken as absent, the drafter would draft from the whole vocabulary: another drafter, and nobody the wiser."""
    folder = write_drafter(tmp_path, SHAPE, DRAFT)
    path = folder / "head_rows.safetensors"
    if kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "gone")
    with pytest.raises(CheckpointError, match="head_rows"):
        load_drafter(folder, target)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_weights_that_are_not_finite_are_refused_by_tensor(tmp_path, target, dtype, value):
    tensors = {n: t.astype(dtype) for n, t in drafter_tensors(SHAPE, DRAFT).items()}
    for i, name in enumerate(n for n in tensors if "layers.1" not in n):
        bad = tensors[name].copy()
        bad.reshape(-1)[-1] = value
        with pytest.raises(CheckpointError, match=name.replace(".", r"\.") + ".*not numbers"):
            load_drafter(write(tmp_path / str(i), changed(), {**tensors, name: bad}), target)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("size", [1, 65536, 65537, 200_000])
def test_finite_arrays(dtype, size):
    values = np.full(size, -float(ml_dtypes.finfo(ml_dtypes.bfloat16).max), np.float32).astype(dtype)
    assert all_finite(values) and all_finite(np.zeros(size, dtype)) and all_finite(np.full(size, -0.0, dtype))
    for at in {0, size // 2, size - 1}:
        for wrong in (np.nan, -np.nan, np.inf, -np.inf):
            changed = values.copy()
            changed[at] = wrong
            assert not all_finite(changed)


def draft_once(drafter: DFlashDrafter, taps: np.ndarray, anchor: int, drafts: int) -> np.ndarray:
    """Context from `taps` in chunks of 7, then one block."""
    n = len(taps)
    blocks = (n + drafts) // 16 + 1
    cache, table = drafter.new_cache(blocks), np.random.default_rng(0).permutation(blocks).astype(np.int32)[None]
    for first in range(0, n, 7):
        part = np.ascontiguousarray(taps[first : first + 7])
        positions = np.arange(first, first + len(part), dtype=np.int32)
        drafter.add_context(cache, part, positions, np.array([0, len(part)], np.int32), table)
    mask = drafter.config.mask_token_id
    return drafter.draft_logits(
        cache,
        np.array([anchor] + [mask] * drafts, np.int32),
        np.arange(n, n + drafts + 1, dtype=np.int32),
        np.array([0, drafts + 1], np.int32),
        table,
        np.arange(1, drafts + 1, dtype=np.int32),
    )


DRAFTS = {
    "plain": Draft(taps=(0, 2)),
    "taps in list order": Draft(taps=(2, 0, -1)),
    "biases": Draft(taps=(1,), bias=True, fc_bias=True),
    "interleaved": Draft(taps=(1, 2), extra={"rope_is_neox_style": False}),
    "interleaved, old name": Draft(taps=(1, 2), extra={"is_neox_style": False}),
    "window, causal by default": Draft(taps=(0, 1), window=9, sliding=(0, 1)),
    "window, both ways": Draft(taps=(0, 1), window=9, sliding=(0, 1), causal=False),
    "window narrower than the block": Draft(taps=(0, 1), window=3, sliding=(0, 1), causal=False),
    "mixed": Draft(taps=(0, 1), layers=3, window=20, sliding=(0, 2)),
    "causal full layers": Draft(taps=(0, 1), causal=True),
    "scales and cap": Draft(
        taps=(0,),
        extra={"input_embedding_scale": 2.5, "output_multiplier": 0.3, "final_logit_softcapping": 1.5},
    ),
    "k and v inside a panel": Draft(taps=(0, 1), heads=3, kv_heads=3, head_dim=6, bias=True),
    "YaRN": Draft(
        taps=(0, 1),
        extra={"rope_scaling": {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 32}},
    ),
    "one layer, wide heads": Draft(taps=(0,), layers=1, heads=1, kv_heads=1, head_dim=256),
}


@pytest.mark.parametrize("name", DRAFTS)
def test_draft_logits_follow_the_definition(tmp_path, target, name):
    d = DRAFTS[name]
    drafter = load_drafter(write_drafter(tmp_path, SHAPE, d), target)
    reference = Reference(config_of(SHAPE), tensors_of(SHAPE))
    want_of = DrafterReference(drafter_config(SHAPE, d), drafter_tensors(SHAPE, d), reference)
    ids = np.random.default_rng(1).integers(0, V, 90).tolist()
    taps = reference.forward(ids).taps
    features = np.concatenate([taps[i] for i in d.taps], 1)
    _, tapped = target.logits(ids, taps=d.taps)
    np.testing.assert_allclose(tapped, features, atol=1e-4)
    for context in (1, 8, 63, 89):
        for drafts in (1, 4, 7, 11):  # shorter than trained, as trained, longer
            got = draft_once(drafter, tapped[:context], ids[context], drafts)
            want = want_of.draft_logits(features[:context], ids[context], drafts)
            np.testing.assert_allclose(got, want, atol=2e-4, err_msg=f"{context} tokens, {drafts} drafts")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_head_over_some_rows_is_those_columns(tmp_path, dtype):
    model = load_model(write_target(tmp_path / "t", SHAPE), dtype=dtype, threads=1)
    whole = load_drafter(write_drafter(tmp_path / "whole", SHAPE, DRAFT), model, quantization="none")
    folder: Path = write_drafter(tmp_path / "part", SHAPE, DRAFT)
    rows = np.array([0, 1, 5, 31, 32, 33, 64, 96], np.int32)
    save_file({"head_rows": rows}, str(folder / "head_rows.safetensors"))
    part = load_drafter(folder, model, quantization="none")
    assert part.draft_vocab == len(rows) and whole.draft_vocab == V
    taps = np.random.default_rng(2).normal(size=(30, 2 * SHAPE.hidden)).astype(np.float32)
    a, b = draft_once(whole, taps, 4, 7), draft_once(part, taps, 4, 7)
    assert np.array_equal(a[:, rows].view(np.uint32), b.view(np.uint32))


def test_a_rotary_factor_copied_from_a_hybrid_target_means_nothing() -> None:
    whole = read_drafter_config(changed(), "x").decoder.rope.inv_freq
    copied = {**changed(), "partial_rotary_factor": 0.25}
    assert np.array_equal(read_drafter_config(copied, "x").decoder.rope.inv_freq, whole)
    theta = changed()["rope_theta"]
    new_style = {
        **changed(),
        "rope_parameters": {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.5},
    }
    assert np.array_equal(read_drafter_config(new_style, "x").decoder.rope.inv_freq, whole)
