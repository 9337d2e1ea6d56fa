"""Checkpoints whose tensors have other names or pieces than the shared decoder asks for, shown as it wants them.

The text part of a model with more parts (`text_config`), fused matrices, experts stacked into one tensor. Nothing is
copied: a piece is read from the tensor it lies in when it is asked for.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.errors import CheckpointError, ConfigError
from paceline.values import shown
from paceline.weights.checkpoint import Checkpoint, LoadDtype

log = logging.getLogger(__name__)

# multimodal model_type -> that of its text part
TEXT_PARTS = {"gemma3": "gemma3_text", "muse_glimmer": "muse_glimmer_text", "qwen3_5": "qwen3_5_text"}
# where the text part's tensors are, in the layouts that are published
_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
# parts that see and hear or draft: not of the text model
_OTHER_PARTS = re.compile(
    r"(model\.)?(vision_tower|vision_adapter|vision_projection|multi_modal_projector|perception_emb_norm|visual|mtp)\."
)


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows [first, first + rows) of a stored tensor, a stack of matrices counting as one below the other."""

    stored: str
    shape: tuple[int, ...]
    first: int = 0


class View(Checkpoint):
    """`source` under other names. Closing it closes the source."""

    def __init__(self, source: Checkpoint, config: dict[str, Any], pieces: dict[str, Piece]) -> None:
        self.source, self.path, self.config = source, source.path, config
        self._pieces = pieces

    def names(self) -> list[str]:
        return list(self._pieces)

    def _piece(self, name: str) -> Piece:
        if name not in self._pieces:
            raise CheckpointError(f"{self.path}: there is no tensor {name!r} in this model")
        return self._pieces[name]

    def _whole(self, piece: Piece) -> bool:
        return self.source.shape(piece.stored) == piece.shape

    def shape(self, name: str) -> tuple[int, ...]:
        return self._piece(name).shape

    def stored_dtype(self, name: str) -> str:
        return self.source.stored_dtype(self._piece(name).stored)

    def load(self, name: str, dtype: LoadDtype | None = None) -> np.ndarray:
        piece = self._piece(name)
        if self._whole(piece):
            return self.source.load(piece.stored, dtype)
        return self.source.load_rows(piece.stored, piece.first, piece.shape[0], dtype)

    def blocks(self, name: str) -> np.ndarray:
        piece = self._piece(name)
        return self.source.blocks(piece.stored)[piece.first : piece.first + piece.shape[0]]

    def release_pages(self) -> None:
        self.source.release_pages()

    def close(self) -> None:
        self.source.close()


def decoder_view(checkpoint: Checkpoint) -> Checkpoint:
    """A checkpoint as the shared decoder reads it; the same object where nothing has to change."""
    if isinstance(checkpoint, View):
        return checkpoint
    config = text_config(checkpoint.config)
    pieces = {name: Piece(name, checkpoint.shape(name)) for name in checkpoint.names()}
    if config.get("model_type") in TEXT_PARTS.values():
        others = sum(bool(_OTHER_PARTS.match(name)) for name in pieces)
        if others:
            log.info("%s: %d tensors of other parts (vision, drafting) are not used", checkpoint.path, others)
        pieces = {_renamed(name): piece for name, piece in pieces.items() if not _OTHER_PARTS.match(name)}
    split = _SPLITTERS.get(str(config.get("model_type")))
    if split is not None:
        pieces = {new: piece for name, old in pieces.items() for new, piece in split(name, old, config).items()}
    if config is checkpoint.config and list(pieces) == checkpoint.names():
        return checkpoint
    if config.get("tie_word_embeddings") is True:
        pieces.pop("lm_head.weight", None)  # a copy of the embedding
    return View(checkpoint, config, pieces)


def assistant_view(checkpoint: Checkpoint) -> Checkpoint:
    """A drafter that transformers saved as a model's assistant, under the names of other DFlash drafters."""
    names = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
    pieces = {names.get(name, name): Piece(name, checkpoint.shape(name)) for name in checkpoint.names()}
    return View(checkpoint, checkpoint.config, pieces)


_PREDICTOR = re.compile(r"(?:model\.)?mtp\.")


def predictor_view(checkpoint: Checkpoint) -> Checkpoint | None:
    """The multi-token-prediction layer inside a checkpoint, its names without their prefix; None: it has none."""
    source = checkpoint.source if isinstance(checkpoint, View) else checkpoint
    pieces = {
        name[match.end() :]: Piece(name, source.shape(name))
        for name in source.names()
        if (match := _PREDICTOR.match(name))
    }
    return View(source, text_config(source.config), pieces) if pieces else None


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The config of the text part; the same object where there are no parts."""
    kind, inner = config.get("model_type"), config.get("text_config")
    if not isinstance(kind, str) or kind not in TEXT_PARTS:
        return config
    if not isinstance(inner, dict):
        raise ConfigError(
            f"config.json: text_config = {shown(inner)}: must be the config of the text model inside this {kind} model"
        )
    outer = {k: config[k] for k in ("tie_word_embeddings", "eos_token_id", "bos_token_id") if k in config}
    return {**outer, **inner, "model_type": TEXT_PARTS[kind]}


def _renamed(name: str) -> str:
    for prefix, new in _PREFIXES:
        if name.startswith(prefix):
            return new + name.removeprefix(prefix)
    return name


def _split_phi3(name: str, piece: Piece, config: dict[str, Any]) -> dict[str, Piece]:
    """qkv_proj and gate_up_proj by rows."""
    parts: list[tuple[str, int]]
    if name.endswith("self_attn.qkv_proj.weight"):
        heads = config.get("num_attention_heads")
        kv_heads = config.get("num_key_value_heads") or heads
        total = piece.shape[0]
        if not isinstance(heads, int) or not isinstance(kv_heads, int) or heads < 1 or total % (heads + 2 * kv_heads):
            return {name: piece}  # refused by name when the decoder does not find its tensors
        size = total // (heads + 2 * kv_heads)
        parts = [("q_proj", heads * size), ("k_proj", kv_heads * size), ("v_proj", kv_heads * size)]
        stem = name.removesuffix("qkv_proj.weight")
    elif name.endswith("mlp.gate_up_proj.weight"):
        half = piece.shape[0] // 2
        parts, stem = [("gate_proj", half), ("up_proj", half)], name.removesuffix("gate_up_proj.weight")
    else:
        return {name: piece}
    out, first = {}, piece.first
    for part, rows in parts:
        out[f"{stem}{part}.weight"] = Piece(piece.stored, (rows, piece.shape[1]), first)
        first += rows
    return out


_STACK = re.compile(r"(.*\.mlp\.experts)\.(gate_up|gate|up|down)_proj(?:\.weight)?")


def _split_experts(name: str, piece: Piece, config: dict[str, Any]) -> dict[str, Piece]:
    """Experts stacked as [experts, rows, columns], gate and up perhaps one below the other."""
    match = _STACK.fullmatch(name)
    if match is None or len(piece.shape) != 3:
        return {name: piece}
    experts, rows, columns = piece.shape
    which = ("gate", "up") if match[2] == "gate_up" else (match[2],)
    each = rows // len(which)
    return {
        f"{match[1]}.{e}.{part}_proj.weight": Piece(piece.stored, (each, columns), e * rows + i * each)
        for e in range(experts)
        for i, part in enumerate(which)
    }


_SPLITTERS: dict[str, Callable[[str, Piece, dict[str, Any]], dict[str, Piece]]] = {
    "phi3": _split_phi3,
    "qwen3_moe": _split_experts,
}
