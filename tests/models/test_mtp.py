"""The multi-token-prediction layer of Qwen3.5: against its equations and transformers' layers, and what is refused."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

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
    """The layer from transformers' own parts: its decoder layer, rotary embedding and norms, and PyTorch's products."""

    def __init__(self, folder: Path) -> None:
        import torch
        import transformers
        from safetensors.torch import load_file
        from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

        transformers.utils.logging.set_verbosity_error()
        self.torch = torch
        options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
        self.target = transformers.Qwen3_5ForCausalLM.from_pretrained(folder, **options)
        config = self.target.config
        layers = ["full_attention"]
        one = type(config)(**{**config.to_dict(), "num_hidden_layers": 1, "layer_types": layers})
        one._attn_implementation = "eager"
        stored = {n[4:]: t for n, t in load_file(folder / "model.safetensors").items() if n.startswith("mtp.")}
        self.layer = qwen.Qwen3_5DecoderLayer(one, 0)
        self.layer.load_state_dict({n[9:]: t for n, t in stored.items() if n.startswith("layers.0.")})
        self.rotary = qwen.Qwen3_5TextRotaryEmbedding(one)
        self.fc = stored["fc.weight"]
        self.norms = {}
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            self.norms[name] = qwen.Qwen3_5RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.norms[name].load_state_dict({"weight": stored[f"{name}.weight"]})

    def logits(self, text: list[int], drafts: list[int] | int) -> tuple[np.ndarray, list[int]]:
        """What stands behind `text` and each beginning of the drafts, and these; a number: so many greedy ones."""
        torch = self.torch
        with torch.no_grad():
            hidden = self.target.model(torch.tensor([text[:-1]])).last_hidden_state  # behind the final norm
            tokens, out = list(text[1:]), []
            count = drafts if isinstance(drafts, int) else len(drafts) + 1
            for j in range(count):
                embedded = self.target.get_input_embeddings()(torch.tensor([tokens]))
                pair = [self.norms["pre_fc_norm_embedding"](embedded), self.norms["pre_fc_norm_hidden"](hidden)]
                x = torch.nn.functional.linear(torch.cat(pair, -1), self.fc)
                at, n = torch.arange(1, len(tokens) + 1)[None], len(tokens)
                mask = torch.full((1, 1, n, n), torch.finfo(torch.float32).min).triu(1)
                x = self.layer(x, position_embeddings=self.rotary(x, at), attention_mask=mask, position_ids=at)
                after = self.norms["norm"](x[0] if isinstance(x, tuple) else x)[:, -1:]
                out.append(self.target.lm_head(after)[0, 0].numpy())
                tokens.append(int(out[-1].argmax()) if isinstance(drafts, int) else [*drafts, 0][j])
                hidden = torch.cat([hidden, after], 1)
        return np.array(out), tokens[len(text) - 1 :]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_draft_logits_are_those_of_transformers_layers(shape: HybridShape, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
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
