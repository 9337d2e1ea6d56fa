"""The multi-token-prediction layer of Qwen3.5: against its equations and transformers, and what is refused."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from paceline.errors import CheckpointError, ConfigError
from paceline.models import load_model
from paceline.models.mtp import Predictor
from paceline.models.target import TargetModel

from .hybrid import HybridShape, write_hybrid
from .predictor import (
    PredictorReference,
    all_tensors,
    predictor_config,
    teacher_tensors,
    write_predicting,
)
from .tiny import Shape, write, write_target

SHAPES = {
    "plain": HybridShape(),
    "biases, long heads": HybridShape(bias=True, head_dim=32, rotated=0.5, seed=1),
    "tied, ends with attention": HybridShape(layers=2, full=(1,), heads=1, kv_heads=1, tied=True, seed=2),
}
TEXT = np.random.default_rng(5).integers(0, 120, 75).tolist()
DRAFTS = np.random.default_rng(6).integers(0, 120, 4).tolist()


def draft_logits(model: TargetModel, predictor: Predictor, text: list[int], drafts: list[int]) -> np.ndarray:
    """Row j [V]: what the layer expects behind `text` and drafts[:j]; context in passes of several sizes."""
    layer = model.config.num_layers - 1
    hidden = model.logits(text[:-1], taps=(layer,))[1]
    cache, table = predictor.new_cache(8), np.array([[5, 0, 3, 7, 1, 2, 4, 6]], np.int32)
    anchor = len(text) - 1
    cuts = [1, 8, 9, 30, anchor]
    for start, end in itertools.pairwise(cuts):
        predictor.add_context(
            cache,
            np.array(text[start:end], np.int32),
            hidden[start - 1 : end - 1],
            np.arange(start, end, dtype=np.int32),
            np.array([0, end - start], np.int32),
            table,
        )
    before, out = hidden[-1:], []
    for j, token in enumerate([text[-1], *drafts]):
        at = np.array([anchor + j], np.int32)
        logits, before = predictor.draft_logits(cache, np.array([token], np.int32), before, at, table, first=j == 0)
        out.append(logits[0])
    return np.array(out)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_draft_logits_are_those_of_the_equations(shape: HybridShape, nested: bool, tmp_path: Path) -> None:
    model = load_model(write_predicting(tmp_path, shape, nested=nested), dtype="float32", threads=2, max_rows=80)
    got = draft_logits(model, Predictor(model.checkpoint, model), TEXT, DRAFTS)
    want = PredictorReference(shape).logits(TEXT, DRAFTS)
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_half_precision_stays_close(quantization: Any, tmp_path: Path) -> None:
    shape = SHAPES["plain"]
    model = load_model(write_predicting(tmp_path, shape), threads=1)
    got = draft_logits(model, Predictor(model.checkpoint, model, quantization=quantization), TEXT, DRAFTS)
    want = PredictorReference(shape).logits(TEXT, DRAFTS)
    cosine = (got * want).sum(1) / np.linalg.norm(got, axis=1) / np.linalg.norm(want, axis=1)
    assert cosine.min() > (0.85 if quantization == "int4" else 0.98)  # each draft carries the errors before it on


class TransformersPredictor:
    """transformers' own multi-token-prediction model. It knows other names and refuses to draft for a model with
    recurrent layers, so it is filled here, and run over a whole text at once."""

    NAMES: ClassVar[dict[str, str]] = {
        "fc": "eh_proj",
        "pre_fc_norm_embedding": "enorm",
        "pre_fc_norm_hidden": "hnorm",
        "norm": "post_norm",
    }

    def __init__(self, folder: Path) -> None:
        import torch
        import transformers
        from safetensors.torch import load_file
        from transformers.modeling_layers import MtpModel

        transformers.utils.logging.set_verbosity_error()
        self.torch = torch
        options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
        self.target = transformers.Qwen3_5ForCausalLM.from_pretrained(folder, **options)
        self.target.config.num_mtp_layers, self.target.config.mtp_layer_types = 1, ["full_attention"]
        self.model = MtpModel(self.target, 1).eval()
        state = {}
        for name, tensor in load_file(folder / "model.safetensors").items():
            if name.startswith("mtp."):
                part, _, kind = name.removeprefix("mtp.").rpartition(".")
                inner = part.replace("layers.0", "mtp_block") if part.startswith("layers.0.") else self.NAMES[part]
                state[f"layers.0.{inner}.{kind}"] = tensor
        found = self.model.load_state_dict(state, strict=False)
        assert not found.unexpected_keys
        assert set(found.missing_keys) <= {"embed_tokens.weight", "shared_head.weight"}, "those are the model's"

    def logits(self, text: list[int], drafts: list[int] | int) -> tuple[np.ndarray, list[int]]:
        """What stands behind `text` and each beginning of the drafts, and these; a number: so many greedy ones."""
        torch = self.torch
        with torch.no_grad():
            hidden = self.target(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states[-1]
            tokens, out = list(text[1:]), []
            count = drafts if isinstance(drafts, int) else len(drafts) + 1
            for j in range(count):
                at = torch.arange(1, len(tokens) + 1)[None]
                after = self.model.forward_layer(0, hidden, at, None, input_ids=torch.tensor([tokens]))[:, -1:]
                out.append(self.model.shared_head(after)[0, 0].numpy())
                tokens.append(int(out[-1].argmax()) if isinstance(drafts, int) else [*drafts, 0][j])
                hidden = torch.cat([hidden, after], 1)
        return np.array(out), tokens[len(text) - 1 :]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_draft_logits_are_those_of_transformers(shape: HybridShape, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    shape = dataclasses.replace(shape, full=(shape.layers - 1,))  # as published; it takes the last layer's norm
    folder = write_predicting(tmp_path, shape)
    model = load_model(folder, dtype="float32", threads=1, max_rows=80)
    predictor, reference = Predictor(model.checkpoint, model), TransformersPredictor(folder)
    for text in (TEXT, TEXT[:2], TEXT[:17]):
        want = reference.logits(text, DRAFTS)[0]
        if len(text) > 30:
            np.testing.assert_allclose(draft_logits(model, predictor, text, DRAFTS), want, rtol=2e-4, atol=2e-4)
        np.testing.assert_allclose(PredictorReference(shape).logits(text, DRAFTS), want, rtol=2e-4, atol=2e-4)


def test_a_layer_with_its_own_embedding_and_head(tmp_path: Path) -> None:
    shape = SHAPES["plain"]
    tensors = all_tensors(shape)
    rng = np.random.default_rng(8)
    embed = tensors["mtp.embed_tokens.weight"] = rng.normal(0, 0.5, (shape.vocab, shape.hidden)).astype(np.float32)
    head = tensors["mtp.lm_head.weight"] = rng.normal(0, 0.2, (shape.vocab, shape.hidden)).astype(np.float32)
    write(tmp_path, {**predictor_config(shape), "mtp_use_dedicated_embeddings": True}, tensors)
    model = load_model(tmp_path, dtype="float32", threads=1, max_rows=80)
    got = draft_logits(model, Predictor(model.checkpoint, model), TEXT, DRAFTS)
    reference = PredictorReference(shape)
    shared = reference.logits(TEXT, DRAFTS)
    reference.embed, reference.layer.w["lm_head.weight"] = embed.astype(np.float64), head.astype(np.float64)
    np.testing.assert_allclose(got, reference.logits(TEXT, DRAFTS), rtol=2e-4, atol=2e-4)
    assert np.abs(got - shared).max() > 0.1


def test_a_layer_of_another_folder(tmp_path: Path) -> None:
    """A model whose files lack the layer (many conversions) takes it from where it is."""
    from paceline.weights.checkpoint import open_checkpoint

    shape = SHAPES["plain"]
    whole = write_predicting(tmp_path / "whole", shape, nested=True)
    model = load_model(write_hybrid(tmp_path / "bare", shape), dtype="float32", threads=1, max_rows=80)
    got = draft_logits(model, Predictor(open_checkpoint(whole), model), TEXT, DRAFTS)
    np.testing.assert_allclose(got, PredictorReference(shape).logits(TEXT, DRAFTS), rtol=2e-4, atol=2e-4)
    with pytest.raises(CheckpointError, match=r"mtp\.fc\.weight is missing"):
        Predictor(model.checkpoint, model)


def test_the_teachers_layer_knows_its_model() -> None:
    shape = SHAPES["plain"]
    reference = PredictorReference(shape, teacher_tensors(shape))
    want = reference.target.forward([*TEXT, *DRAFTS]).logits[-5:]
    np.testing.assert_allclose(reference.logits(TEXT, DRAFTS), want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "tensors", "error", "message"),
    [
        ({"mtp_num_hidden_layers": 2}, {}, ConfigError, "mtp_num_hidden_layers = 2"),
        ({"mtp_use_dedicated_embeddings": True}, {}, CheckpointError, r"mtp\.embed_tokens\.weight"),
        ({"mtp_use_dedicated_embeddings": "yes"}, {}, ConfigError, "mtp_use_dedicated_embeddings"),
        ({}, {"mtp.norm.weight": None}, CheckpointError, "norm.weight"),
        ({}, {"mtp.fc.weight": np.ones((40, 40), np.float32)}, CheckpointError, "fc.weight"),
        ({}, {"mtp.norm.weight": np.full(40, np.nan, np.float32)}, CheckpointError, "not numbers"),
        ({}, {"mtp.layers.1.mlp.up_proj.weight": np.ones((56, 40), np.float32)}, CheckpointError, "no place"),
    ],
)
def test_what_does_not_fit_is_named(change, tensors, error, message, tmp_path):
    shape = SHAPES["plain"]
    stored = {n: t for n, t in {**all_tensors(shape), **tensors}.items() if t is not None}
    model = load_model(write(tmp_path, {**predictor_config(shape), **change}, stored), dtype="float32", threads=1)
    with pytest.raises(error, match=message):
        Predictor(model.checkpoint, model)


def test_a_layer_beside_another_model_is_refused(tmp_path: Path) -> None:
    from paceline.weights.checkpoint import open_checkpoint

    shape = SHAPES["plain"]
    layer = open_checkpoint(write_predicting(tmp_path / "layer", shape))
    wider = dataclasses.replace(shape, head_dim=32)
    with pytest.raises(ConfigError, match="head_dim = 16, the target's is 32"):
        Predictor(layer, load_model(write_hybrid(tmp_path / "wider", wider), dtype="float32", threads=1))
    other = load_model(write_target(tmp_path / "qwen3", Shape("qwen3")), dtype="float32", threads=1)
    with pytest.raises(ConfigError, match="is a qwen3 model"):
        Predictor(other.checkpoint, other)


def test_info_names_the_layer(tmp_path: Path) -> None:
    from paceline.cli.models import describe
    from paceline.weights.checkpoint import open_checkpoint

    shape = SHAPES["plain"]
    for nested in (False, True):
        with open_checkpoint(write_predicting(tmp_path / str(nested), shape, nested=nested)) as checkpoint:
            assert describe(checkpoint)["multi_token_prediction"] is True
    with open_checkpoint(write_hybrid(tmp_path / "bare", shape)) as checkpoint:
        assert describe(checkpoint)["multi_token_prediction"] is False
