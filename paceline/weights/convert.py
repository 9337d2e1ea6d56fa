"""GGUF file -> Hugging Face folder: the same weights, dequantised, with a tokenizer that gives the same ids.

So other tools (transformers, a trainer) can use the model that the engine runs. For model_type qwen2 transformers'
AutoTokenizer insists on its own class, which composes Unicode characters (NFC) first, as llama.cpp and this package
do not; PreTrainedTokenizerFast takes tokenizer.json as it is.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np

from paceline.errors import CheckpointError, ConfigError
from paceline.tokenizer import Tokenizer, load_tokenizer
from paceline.weights.checkpoint import Checkpoint, open_checkpoint
from paceline.weights.dequant import BFLOAT16
from paceline.weights.gguf_model import GGUFCheckpoint
from paceline.weights.safetensors_file import write_safetensors

# (what is being done, bytes done, bytes in all or None)
Progress = Callable[[str, int, int | None], None]


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    progress: Progress | None = None,
) -> Path:
    """Write `destination` (a folder that does not exist yet, or is empty) from the GGUF file `source`; return
    it.

    config.json, model.safetensors, tokenizer.json, tokenizer_config.json with the chat template,
    generation_config.json. The folder appears complete or not at all. Raises `CheckpointError` for the source
    and `ConfigError` for the rest.
    """
    if dtype not in ("bfloat16", "float32"):
        raise ConfigError(f"dtype {dtype!r}: convert writes 'bfloat16' or 'float32'")
    with open_checkpoint(source) as checkpoint, new_folder(destination) as staging:
        if not isinstance(checkpoint, GGUFCheckpoint):
            raise CheckpointError(f"{source}: convert reads GGUF files; this is a Hugging Face folder already")
        tokenizer = load_tokenizer(checkpoint)
        if checkpoint.architecture == "qwen3moe":  # its experts are stacked, Hugging Face's are not
            from paceline.models.views import decoder_view

            _write(decoder_view(checkpoint), tokenizer, staging, dtype, progress)
        else:
            _write(checkpoint, tokenizer, staging, dtype, progress)
    return Path(destination)


@contextmanager
def new_folder(destination: str | Path) -> Iterator[Path]:
    """A hidden folder that becomes `destination` if the block ends well, and is gone if it does not.

    Raises ConfigError if `destination` holds anything already, or cannot be written.
    """
    destination = Path(destination)
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ConfigError(f"{destination}: exists already; give a new folder or an empty one")
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", dir=destination.parent))
    except OSError as error:
        raise ConfigError(f"{destination}: cannot be created: {error.strerror}") from error
    try:
        yield staging
        staging.chmod(0o755)
        os.replace(staging, destination)
    except OSError as error:
        raise ConfigError(f"{destination}: cannot be written: {error.strerror}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _write(
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    folder: Path,
    dtype: Literal["bfloat16", "float32"],
    progress: Progress | None,
) -> None:
    kind = BFLOAT16 if dtype == "bfloat16" else np.dtype(np.float32)
    rows = [(name, kind, checkpoint.shape(name)) for name in checkpoint.names()]
    with (folder / "model.safetensors").open("wb") as file:
        write_safetensors(file, rows, _tensors(checkpoint, dtype, progress))
    write_beside(folder, {**checkpoint.config, "torch_dtype": dtype}, tokenizer)


def write_beside(folder: Path, config: dict[str, Any], tokenizer: Tokenizer) -> None:
    """What lies beside the weights of a GGUF file's model: config.json, tokenizer, generation_config.json."""
    write_json(folder / "config.json", config)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if config[key] is not None}
    write_json(folder / "generation_config.json", ids)
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        # Takes tokenizer.json as it is; the model's own class would rebuild the pre-tokenizer.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
        **tokenizer.special_tokens,
    }
    templates = tokenizer.templates
    if list(templates) == ["default"]:
        settings["chat_template"] = templates["default"]
    elif templates:
        settings["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    write_json(folder / "tokenizer_config.json", settings)


def _tensors(
    checkpoint: Checkpoint, dtype: Literal["bfloat16", "float32"], progress: Progress | None
) -> Iterator[np.ndarray]:
    names = checkpoint.names()
    sizes = [int(np.prod(checkpoint.shape(name))) * (2 if dtype == "bfloat16" else 4) for name in names]
    done, total = 0, sum(sizes)
    for name, size in zip(names, sizes, strict=True):
        yield checkpoint.load(name, dtype)
        done += size
        if progress is not None:
            progress("writing model.safetensors", done, total)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """A JSON object as a file that people can read."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
