"""A Hugging Face model folder: config.json beside one or several safetensors files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import CheckpointError
from paceline.weights.checkpoint import PICKLE_SUFFIXES, Checkpoint, LoadDtype
from paceline.weights.safetensors_file import SafetensorsFile

INDEX = "model.safetensors.index.json"
_MAX_JSON_BYTES = 64 << 20


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of bounded size; `CheckpointError` otherwise."""
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_JSON_BYTES + 1)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    if len(text) > _MAX_JSON_BYTES:
        raise CheckpointError(f"{path}: larger than {_MAX_JSON_BYTES >> 20} MiB, which no such file is")
    try:
        value = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a JSON {type(value).__name__}, expected an object")
    return value


class HFFolder(Checkpoint):
    """config.json as it is, tensors from model.safetensors, a sharded index, or all *.safetensors of the
    folder.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = read_json(self.path / "config.json")
        self._files: dict[str, SafetensorsFile] = {}
        self._where = self._open_index() if (self.path / INDEX).is_file() else self._open_all()
        # transformers ties the head even when the file carries one, so a stored copy is dead weight.
        if self.config.get("tie_word_embeddings") is True and "model.embed_tokens.weight" in self._where:
            self._where.pop("lm_head.weight", None)

    def names(self) -> list[str]:
        return list(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file(name).entries[name].shape

    def stored_dtype(self, name: str) -> str:
        return self._file(name).entries[name].dtype

    def load(self, name: str, dtype: LoadDtype | None = None) -> np.ndarray:
        return self._file(name).load(name, dtype)

    def release_pages(self) -> None:
        for file in self._files.values():
            file.release_pages()

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    # -- opening
    # -----------------------------------------------------------------------------------------------------

    def _file(self, name: str) -> SafetensorsFile:
        if name not in self._where:
            raise CheckpointError(f"{self.path}: there is no tensor {name!r} in this folder")
        return self._files[self._where[name]]

    def _open_all(self) -> dict[str, str]:
        """Tensor name -> file name, without an index."""
        single = self.path / "model.safetensors"
        files = [single] if single.is_file() else sorted(self.path.glob("*.safetensors"))
        if not files:
            pickles = sorted(p.name for p in self.path.iterdir() if p.suffix in PICKLE_SUFFIXES)
            if pickles:
                raise CheckpointError(
                    f"{self.path}: only PyTorch pickles here ({', '.join(pickles[:3])}); they are refused "
                    "because loading one runs the code inside it; use a safetensors version of the model"
                )
            raise CheckpointError(f"{self.path}: config.json but no *.safetensors file in this folder")
        where: dict[str, str] = {}
        for path in files:
            self._files[path.name] = SafetensorsFile(path)
            for name in self._files[path.name].entries:
                if name in where:
                    raise CheckpointError(f"{self.path}: tensor {name!r} is in both {where[name]} and {path.name}")
                where[name] = path.name
        return where

    def _open_index(self) -> dict[str, str]:
        weight_map = read_json(self.path / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
            raise CheckpointError(f"{self.path / INDEX}: weight_map is not an object of tensor name -> file name")
        for file in sorted(set(weight_map.values())):
            if "/" in file or "\\" in file or "\0" in file or not file.endswith(".safetensors"):
                raise CheckpointError(
                    f"{self.path / INDEX}: {file!r} is not the name of a safetensors file in this folder"
                )
            if not (self.path / file).is_file():
                raise CheckpointError(
                    f"{self.path}: {file} is missing; the index names it, so the download is incomplete"
                )
            self._files[file] = SafetensorsFile(self.path / file)
        for name, file in weight_map.items():
            if name not in self._files[file].entries:
                raise CheckpointError(f"{self.path}: tensor {name!r} is not in {file}, where the index puts it")
        return dict(weight_map)
