"""Tiny Qwen3.5 models with a multi-token-prediction layer, and that layer in plain numpy, fp64."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .hybrid import HybridReference, HybridShape, config_of, tensors_of
from .reference import Tensors
from .tiny import write, write_tokenizer


def predictor_tensors(s: HybridShape, seed: int = 50) -> Tensors:
    """`mtp.*`: an attention layer like the model's, two norms before the product that joins them, one behind it."""
    one = dataclasses.replace(s, layers=1, full=(0,), seed=seed)
    layer = {n.replace("model.layers", "mtp.layers"): t for n, t in tensors_of(one).items() if "model.layers." in n}
    rng = np.random.default_rng(seed)
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    vectors = {f"mtp.{n}.weight": rng.uniform(-0.4, 0.4, s.hidden).astype(np.float32) for n in norms}
    fc = rng.normal(0, 1 / np.sqrt(s.hidden), (s.hidden, 2 * s.hidden)).astype(np.float32)
    return {**layer, **vectors, "mtp.fc.weight": fc}


def all_tensors(s: HybridShape) -> Tensors:
    return {**tensors_of(s), **predictor_tensors(s)}


def predictor_config(s: HybridShape) -> dict[str, Any]:
    return {**config_of(s), "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}


def write_predicting(folder: Path, s: HybridShape, *, nested: bool = False, tensors: Tensors | None = None) -> Path:
    """A model with its layer. nested: the text part of a model that also sees, as published checkpoints are."""
    config, stored = predictor_config(s), all_tensors(s) if tensors is None else tensors
    if nested:
        tied = config.pop("tie_word_embeddings")
        architectures = ["Qwen3_5ForConditionalGeneration"]
        config = {
            "architectures": architectures,
            "model_type": "qwen3_5",
            "text_config": config,
            "tie_word_embeddings": tied,
        }
        stored = {
            name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: value
            for name, value in stored.items()
        }
        stored["model.visual.patch_embed.proj.bias"] = np.ones(8, np.float32)
    write(folder, config, stored)
    write_tokenizer(folder, s.vocab)
    return folder


def teacher_tensors(s: HybridShape) -> Tensors:
    """A model whose next token depends on the last one alone, and a layer that knows how."""
    tensors = all_tensors(s)
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight", "out_proj.weight")):
            tensors[name] = np.zeros_like(tensors[name])
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        tensors[f"mtp.{name}.weight"] = np.zeros(s.hidden, np.float32)
    tensors["mtp.norm.weight"] = tensors["model.norm.weight"]
    tensors["mtp.fc.weight"] = np.eye(s.hidden, 2 * s.hidden, dtype=np.float32)  # the embedding's half
    return tensors


class PredictorReference:
    """The layer by its equations, over a whole text at once, as often as there are drafts."""

    def __init__(self, s: HybridShape, tensors: Tensors | None = None) -> None:
        stored = all_tensors(s) if tensors is None else tensors
        self.target = HybridReference(config_of(s), {n: t for n, t in stored.items() if not n.startswith("mtp.")})
        renamed = {n.removeprefix("mtp."): t for n, t in stored.items() if n.startswith("mtp.")}
        self.embed = self.target.w["model.embed_tokens.weight"]
        head = stored.get("lm_head.weight", stored["model.embed_tokens.weight"])
        self.layer = HybridReference(config_of(s), {**renamed, "lm_head.weight": head})
        self._known: list[tuple[list[int], np.ndarray]] = []

    def rows(self, tokens: Sequence[int]) -> np.ndarray:
        """The model's rows behind its final norm [n, H]; a beginning of a text that was asked for is known."""
        tokens = list(tokens)
        for text, rows in self._known:
            if text[: len(tokens)] == tokens:
                return rows[: len(tokens)]
        taps = self.target.forward(tokens).taps
        rows = self.target.norm(taps[len(self.target.kinds) - 1], "model.norm")
        self._known.append((tokens, rows))
        return rows

    def logits(self, text: Sequence[int], drafts: Sequence[int]) -> np.ndarray:
        """Row j [V]: what stands behind `text` and drafts[:j]."""
        layer, before = self.layer, self.rows(text[:-1])
        tokens, out = list(text[1:]), []
        for j in range(len(drafts) + 1):
            pair = [layer.norm(self.embed[tokens], "pre_fc_norm_embedding"), layer.norm(before, "pre_fc_norm_hidden")]
            x = layer.linear(np.concatenate(pair, axis=1), "fc")
            x = x + layer.gated_attention(layer.norm(x, "layers.0.input_layernorm"), "layers.0.self_attn")
            x = x + layer.mlp(x, "layers.0")
            after = layer.norm(x, "norm")
            out.append(layer.linear(after[-1:], "lm_head")[0])
            if j < len(drafts):
                tokens.append(drafts[j])
                before = np.concatenate([before, after[-1:]])
        return np.array(out)
