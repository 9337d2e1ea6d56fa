"""What every model file looks like to the engine: a configuration and named tensors, loaded one at a time.

Two implementations: `hf_folder.HFFolder` (config.json + safetensors) and `gguf_model.GGUFCheckpoint` (one
GGUF file). Both speak Hugging Face: its tensor names, its [out, in] orientation, its config.json keys.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np

from paceline.errors import CheckpointError

LoadDtype = Literal["float32", "bfloat16"]
PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})


class Checkpoint(ABC):
    """A model on disk, memory-mapped: opening reads headers only, `load` touches one tensor."""

    path: Path
    config: dict[str, Any]

    @abstractmethod
    def names(self) -> list[str]:
        """Hugging Face tensor names in file order; a tied output head is absent."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Shape in Hugging Face orientation, [out, in] for a linear layer."""

    @abstractmethod
    def stored_dtype(self, name: str) -> str:
        """How the file stores it: "F32", "F16", "BF16", "Q4_1", ..."""

    @abstractmethod
    def load(self, name: str, dtype: LoadDtype | None = None) -> np.ndarray:
        """Read one tensor, C-contiguous.

        With `dtype` None a BF16 tensor comes as `ml_dtypes.bfloat16`, integers and booleans as stored,
        everything else as float32. "float32" and "bfloat16" convert on the way (rounding to nearest even),
        without a float32 detour for quantised types. The array may be a read-only view of the file. Raises
        `CheckpointError` for an unknown name or a type that cannot be converted.
        """

    def load_rows(self, name: str, first: int, rows: int, dtype: LoadDtype | None = None) -> np.ndarray:
        """Rows [first, first + rows) of a tensor as `load` would give them; a stack of matrices counts as one below the
        other."""
        values = self.load(name, dtype)
        return values.reshape(-1, values.shape[-1])[first : first + rows]

    def blocks(self, name: str) -> np.ndarray:
        """The stored bytes of a [n, k] tensor of type Q8_0, Q4_0, Q4_1 or I8_CHANNEL, uint8 [n, bytes of a row].

        A stack of matrices counts as one below the other. Raises `CheckpointError` for any other tensor.
        """
        raise CheckpointError(f"{self.path}: tensor {name!r} is not stored in blocks")

    @abstractmethod
    def close(self) -> None:
        """Forget the file. Arrays that `load` returned stay valid: the mapping lives as long as they do."""

    def release_pages(self) -> None:  # noqa: B027
        """Let the system drop what was read of the file from this process's memory; arrays stay valid.

        Loading a model calls it after every tensor, so that its peak is the packed weights and not the file besides.
        """

    def __contains__(self, name: object) -> bool:
        return name in set(self.names())

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a Hugging Face folder, a *.gguf file, or a folder that holds exactly one *.gguf file.

    Raises `CheckpointError` when there is nothing usable, naming what was found.
    """
    from paceline.weights.gguf_model import GGUFCheckpoint
    from paceline.weights.hf_folder import HFFolder

    path = Path(path)
    if path.is_dir():
        if (path / "config.json").is_file():
            folder = HFFolder(path)
            if "quantization_config" not in folder.config:
                return folder
            # needs the native core, which the trainer does without where nothing was built
            from paceline.weights.quantised_folder import QuantisedFolder, is_quantised

            return QuantisedFolder(folder) if is_quantised(folder.config) else folder
        ggufs = sorted(path.glob("*.gguf"))
        if len(ggufs) == 1:
            return GGUFCheckpoint(ggufs[0])
        if ggufs:
            names = ", ".join(p.name for p in ggufs)
            raise CheckpointError(f"{path}: several GGUF files ({names}); give the path of one of them")
        raise CheckpointError(f"{path}: neither config.json nor a *.gguf file in this folder")
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder")
    refuse_pickle(path)
    if path.suffix == ".safetensors":
        raise CheckpointError(f"{path}: give the folder that holds this file and its config.json, not the file")
    return GGUFCheckpoint(path)


def refuse_pickle(path: Path) -> None:
    """Raise `CheckpointError` if the file looks like a PyTorch pickle, whatever its name.

    Loading a pickle runs code that its author chose, so it is never opened.
    """
    try:
        with path.open("rb") as file:
            head = file.read(4)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    if head == b"GGUF":
        return
    is_pickle = head == b"PK\x03\x04" or (head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"))
    if (is_pickle and path.suffix != ".safetensors") or path.suffix in PICKLE_SUFFIXES:
        raise CheckpointError(
            f"{path}: PyTorch pickle files are refused because loading one runs the code inside it; "
            "use the model's safetensors or GGUF files"
        )
