"""`paceline quantize`: any model as a folder whose matrices are quantised (format: quantised_folder.py)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from paceline import _native
from paceline.errors import CheckpointError, ConfigError
from paceline.tokenizer import load_tokenizer
from paceline.weights.checkpoint import Checkpoint, open_checkpoint
from paceline.weights.convert import Progress, new_folder, write_beside
from paceline.weights.dequant import BFLOAT16
from paceline.weights.gguf_model import GGUFCheckpoint
from paceline.weights.quantise import (
    STORED,
    STORED_NAMES,
    Conversions,
    Quantization,
    check_quantization,
    choose_format,
    quantised_rows,
)
from paceline.weights.quantised_folder import METHOD
from paceline.weights.safetensors_file import write_safetensors

_U8 = np.dtype(np.uint8)
_ROUTER = ".mlp.gate.weight"
_EMBEDDINGS = ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight")


def quantise_model(
    source: str | Path,
    destination: str | Path,
    quantization: Quantization,
    *,
    progress: Progress | None = None,
) -> Conversions:
    """Write `destination` (a folder that does not exist yet, or is empty) and return what the conversion cost.

    Matrices get `quantization`; norms, biases, and the embedding of a model with an untied head stay bf16 or fp32. The
    folder appears complete or not at all. Raises CheckpointError for the source and ConfigError for the rest.
    """
    if check_quantization(quantization) == "none":
        raise ConfigError("quantization: 'none' leaves nothing to do; use auto, int8, int8_channel or int4")
    conversions = Conversions()
    with open_checkpoint(source) as checkpoint, new_folder(destination) as staging:
        formats = _formats(checkpoint, quantization)
        if not formats:
            raise CheckpointError(
                f"{source}: no matrix is quantised, so 'auto' changes nothing; use int8, int8_channel or int4"
            )
        rows = [(name, *_announced(checkpoint, name, formats.get(name))) for name in checkpoint.names()]
        with (staging / "model.safetensors").open("wb") as file:
            write_safetensors(file, rows, _values(checkpoint, formats, conversions, progress))
        tensors = {
            name: {"format": STORED_NAMES[quant], "columns": checkpoint.shape(name)[1]}
            for name, quant in formats.items()
        }
        _write_rest(checkpoint, staging, {"quant_method": METHOD, "tensors": tensors})
    return conversions


def _formats(checkpoint: Checkpoint, quantization: Quantization) -> dict[str, Any]:
    """Name -> format of the tensors that will be quantised."""
    tied = checkpoint.config.get("tie_word_embeddings") is True or "lm_head.weight" not in checkpoint
    out = {}
    for name in checkpoint.names():
        stored = checkpoint.stored_dtype(name)
        if len(checkpoint.shape(name)) != 2 or name.endswith(_ROUTER):  # small, and it decides
            continue
        # an embedding of its own is read by the row: it stays as it is, as at load
        own = name in _EMBEDDINGS and not tied
        quant = STORED.get(stored) if own else choose_format([stored], quantization)
        if quant is not None:
            out[name] = quant
    return out


def _float_type(checkpoint: Checkpoint, name: str) -> Any:
    """What a tensor that is not quantised is written as: vectors and short convolutions exactly, matrices as bf16."""
    if len(checkpoint.shape(name)) < 2 or name.endswith(".conv1d.weight"):
        return BFLOAT16 if checkpoint.stored_dtype(name) == "BF16" else np.dtype(np.float32)
    return BFLOAT16


def _announced(checkpoint: Checkpoint, name: str, quant: Any | None) -> tuple[Any, tuple[int, ...]]:
    shape = checkpoint.shape(name)
    if quant is None:
        return _float_type(checkpoint, name), shape
    return _U8, (shape[0], _native.quant_row_bytes(quant, shape[1]))


def _values(
    checkpoint: Checkpoint, formats: dict[str, Any], conversions: Conversions, progress: Progress | None
) -> Iterator[np.ndarray]:
    names = checkpoint.names()
    sizes = [int(np.prod(checkpoint.shape(name))) for name in names]
    done, total = 0, sum(sizes)
    for name, size in zip(names, sizes, strict=True):
        if name in formats:
            yield quantised_rows(checkpoint, name, formats[name], conversions)
        else:
            yield checkpoint.load(name, "bfloat16" if _float_type(checkpoint, name) == BFLOAT16 else "float32")
        checkpoint.release_pages()
        done += size
        if progress is not None:
            progress("quantising", done, total)


def _write_rest(checkpoint: Checkpoint, folder: Path, quantization: dict[str, Any]) -> None:
    config = {**checkpoint.config, "quantization_config": quantization}
    if isinstance(checkpoint, GGUFCheckpoint):
        write_beside(folder, config, load_tokenizer(checkpoint))
        return
    for path in sorted(checkpoint.path.iterdir()):
        beside = path.suffix in (".json", ".jinja", ".txt", ".model", ".md") or path.name.startswith("LICENSE")
        if path.is_file() and beside and path.name != "config.json" and "safetensors" not in path.name:
            shutil.copyfile(path, folder / path.name)
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
