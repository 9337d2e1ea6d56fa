"""The text model inside a checkpoint that has more parts: its config is nested, its tensors have a longer prefix."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from paceline.weights.checkpoint import Checkpoint, LoadDtype

log = logging.getLogger(__name__)

TEXT_PARTS = {"qwen3_5": "qwen3_5_text"}  # model_type of the whole -> that of its text model
PREFIX = "model.language_model."
LEFT_OUT = {"model.visual.": "vision", "visual.": "vision", "mtp.": "multi-token prediction"}


class TextPart(Checkpoint):
    """`whole` under the names and with the config of a text model alone. Closing it closes the whole."""

    def __init__(self, whole: Checkpoint) -> None:
        self.whole, self.path, self.config = whole, whole.path, text_config(whole.config)
        self._stored: dict[str, str] = {}
        left: dict[str, int] = {}
        for name in whole.names():
            kind = next((kind for prefix, kind in LEFT_OUT.items() if name.startswith(prefix)), None)
            if kind is None:
                new = "model." + name.removeprefix(PREFIX) if name.startswith(PREFIX) else name
                self._stored[new] = name
            else:
                left[kind] = left.get(kind, 0) + 1
        if self.config.get("tie_word_embeddings") is True and "model.embed_tokens.weight" in self._stored:
            self._stored.pop("lm_head.weight", None)
        for kind, count in left.items():
            log.info("%s: %d tensors of the %s part are not used", whole.path, count, kind)

    def names(self) -> list[str]:
        return list(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.whole.shape(self._stored.get(name, name))

    def stored_dtype(self, name: str) -> str:
        return self.whole.stored_dtype(self._stored.get(name, name))

    def load(self, name: str, dtype: LoadDtype | None = None) -> np.ndarray:
        return self.whole.load(self._stored.get(name, name), dtype)

    def blocks(self, name: str) -> np.ndarray:
        return self.whole.blocks(self._stored.get(name, name))

    def release_pages(self) -> None:
        self.whole.release_pages()

    def close(self) -> None:
        self.whole.close()


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The config of the text model; the same object where there is nothing else."""
    kind, inner = config.get("model_type"), config.get("text_config")
    if kind not in TEXT_PARTS or not isinstance(inner, dict):
        return config
    outer = {key: config[key] for key in ("tie_word_embeddings", "eos_token_id", "bos_token_id") if key in config}
    return {**outer, **inner, "model_type": TEXT_PARTS[str(kind)]}


def text_part(checkpoint: Checkpoint) -> Checkpoint:
    """A checkpoint as a text model; the same object where it is nothing else."""
    kinds = {*TEXT_PARTS, *TEXT_PARTS.values()}
    if isinstance(checkpoint, TextPart) or checkpoint.config.get("model_type") not in kinds:
        return checkpoint
    return TextPart(checkpoint)
