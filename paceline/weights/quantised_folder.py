"""Folders that `paceline quantize` writes: a Hugging Face folder whose matrices are stored in blocks.

config.json carries

    "quantization_config": {"quant_method": "paceline", "tensors": {NAME: {"format": "Q8_0", "columns": 576}}}

and each of these tensors is U8 [n, bytes of a row]: ggml's blocks Q8_0, Q4_0 or Q4_1 (32 values each, the last one of a
row padded with zeros), or I8_CHANNEL, an fp32 scale and then one int8 per column. Loading packs them from the map of
the file, nothing is converted.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline import _native
from paceline.errors import CheckpointError
from paceline.values import shown
from paceline.weights.checkpoint import Checkpoint, LoadDtype
from paceline.weights.dequant import to_bfloat16
from paceline.weights.hf_folder import HFFolder
from paceline.weights.quantise import STORED, dequantise_rows

METHOD = "paceline"


def is_quantised(config: dict[str, Any]) -> bool:
    """Whether a config.json is of a folder that `paceline quantize` wrote."""
    quantization = config.get("quantization_config")
    return isinstance(quantization, dict) and quantization.get("quant_method") == METHOD


class QuantisedFolder(Checkpoint):
    """The tensors of `folder` with their logical shapes and the formats they are stored in."""

    def __init__(self, folder: HFFolder) -> None:
        self.path = folder.path
        self._folder = folder
        self.config = {key: value for key, value in folder.config.items() if key != "quantization_config"}
        self._formats = self._read_formats(folder.config["quantization_config"])

    def _read_formats(self, quantization: dict[str, Any]) -> dict[str, tuple[str, int]]:
        """Tensor name -> (format, columns)."""
        tensors = quantization.get("tensors")
        where = f"{self.path / 'config.json'}: quantization_config: tensors"
        if not isinstance(tensors, dict):
            raise CheckpointError(f"{where} is {shown(tensors)}, not an object of tensor name -> format and columns")
        formats = {}
        known = set(self._folder.names())
        for name, entry in tensors.items():
            kind, columns = (entry.get("format"), entry.get("columns")) if isinstance(entry, dict) else (None, None)
            if kind not in STORED or type(columns) is not int or not 0 < columns < 2**31:
                raise CheckpointError(
                    f"{where}: {name} is {shown(entry)}; expected a format of {', '.join(STORED)} and its columns"
                )
            if name not in known:
                if name == "lm_head.weight":  # a tied head that the folder leaves out
                    continue
                raise CheckpointError(f"{self.path}: tensor {name!r} is missing; config.json says how it is quantised")
            dtype, shape = self._folder.stored_dtype(name), self._folder.shape(name)
            width = _native.quant_row_bytes(STORED[kind], columns)
            if dtype != "U8" or len(shape) != 2 or shape[1] != width:
                raise CheckpointError(
                    f"{self.path}: tensor {name!r} is {dtype} {list(shape)}; {columns} columns of {kind} take U8 "
                    f"[rows, {width}]"
                )
            formats[name] = (kind, columns)
        return formats

    def names(self) -> list[str]:
        return self._folder.names()

    def shape(self, name: str) -> tuple[int, ...]:
        shape = self._folder.shape(name)
        return (shape[0], self._formats[name][1]) if name in self._formats else shape

    def stored_dtype(self, name: str) -> str:
        return self._formats[name][0] if name in self._formats else self._folder.stored_dtype(name)

    def load(self, name: str, dtype: LoadDtype | None = None) -> np.ndarray:
        if name not in self._formats:
            return self._folder.load(name, dtype)
        kind, columns = self._formats[name]
        values = np.ascontiguousarray(dequantise_rows(self._folder.load(name), STORED[kind], columns))
        return to_bfloat16(values) if dtype == "bfloat16" else values

    def blocks(self, name: str) -> np.ndarray:
        if name not in self._formats:
            return super().blocks(name)
        return self._folder.load(name)

    def release_pages(self) -> None:
        self._folder.release_pages()

    def close(self) -> None:
        self._folder.close()
