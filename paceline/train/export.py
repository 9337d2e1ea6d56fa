"""Write a trained drafter as a z-lab or (with heads of DSpark) DeepSpec checkpoint, its list of head rows beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import save_file

from .errors import TrainError
from .loading import load_tensor
from .model import Drafter, DrafterConfig

HEAD_ROWS_FILE = "head_rows.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def export_drafter(
    model: Drafter,
    rows: Sequence[int] | None,
    folder: Path,
    dtype: torch.dtype = torch.bfloat16,
    target: dict[str, str] | None = None,
) -> None:
    """Write ``config.json``, ``model.safetensors`` and ``head_rows.safetensors`` (if ``rows``).

    Tensors have z-lab's names, those of DSpark's heads DeepSpec's. A DFlash 2 drafter that has convolutions alone, or a
    selector, gets the other without effect, since the layout has both. The last file holds one int32 tensor
    ``head_rows``: ascending ids of the target's head rows that drafts are chosen from.
    Loaders that do not know the file use the whole head, which is also right. Some, vLLM and SGLang, would take every
    ``*.safetensors`` of a folder for weights: ``model.safetensors.index.json`` tells them which file holds these.
    ``target`` (``model_type``, ``name``) becomes ``paceline_target`` of the configuration: which model this drafter
    belongs to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model = _completed(model)
    config = model.config.to_hf(str(dtype).removeprefix("torch."))
    if target:
        config["paceline_target"] = target
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {name: t.detach().to("cpu", dtype).contiguous() for name, t in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_index(tensors, folder)
    if rows is not None:
        save_arrays({"head_rows": np.asarray(sorted(rows), dtype=np.int32)}, folder / HEAD_ROWS_FILE)


def write_index(tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """``model.safetensors.index.json``: every tensor lies in ``model.safetensors``."""
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    weight_map = dict.fromkeys(sorted(tensors), "model.safetensors")
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def _completed(model: Drafter) -> Drafter:
    """With both halves of DFlash 2 if it has one; what is added has no effect."""
    shape = model.config.complete()
    if shape == model.config:
        return model
    out = Drafter(shape)
    if out.candidate_selector is not None:
        out.candidate_selector.clear()
    out.load_state_dict(model.state_dict(), strict=False)
    return out


def _reduced(model: Drafter) -> Drafter:
    """Without the half of DFlash 2 that `_completed` added."""
    if model.candidate_selector is None:
        return model
    if model.candidate_selector.cleared():
        shape = replace(model.config, selector_rank=0)
    elif all(conv.without_effect() for conv in model.convs()):
        shape = replace(model.config, conv_kernel=0)
    else:
        return model
    out = Drafter(shape)
    out.load_state_dict({name: model.state_dict()[name] for name in out.state_dict()})
    return out


def load_drafter(folder: Path) -> tuple[Drafter, list[int] | None]:
    """The drafter of a z-lab checkpoint in fp32, and its head rows (None: the whole head).

    A half of DFlash 2 without effect is left out. Raises TrainError or CheckpointError for what is none, or damaged.
    """
    from paceline.weights.checkpoint import open_checkpoint

    with open_checkpoint(folder) as checkpoint:
        model = Drafter(DrafterConfig.from_hf(checkpoint.config))
        wanted = model.state_dict()
        for name in sorted({*checkpoint.names()} ^ wanted.keys() - {"head_rows"}):
            fault = "is missing" if name in wanted else "belongs to no drafter of this config.json"
            raise TrainError(f"{folder}: tensor {name} {fault}; copy or export the checkpoint again")
        for name, own in wanted.items():
            if checkpoint.shape(name) != tuple(own.shape):
                shapes = f"{list(checkpoint.shape(name))}, config.json says {list(own.shape)}"
                raise TrainError(f"{folder}: tensor {name} has shape {shapes}; copy or export the checkpoint again")
            own.copy_(load_tensor(checkpoint, name, torch.float32))
            if not own.isfinite().all():
                raise TrainError(f"{folder}: tensor {name} has values that are infinite or not numbers; it is damaged")
    return _reduced(model), _read_rows(folder / HEAD_ROWS_FILE, model.config.vocab_size)


def _read_rows(path: Path, vocab_size: int) -> list[int] | None:
    if not path.exists():
        return None
    rows: list[int] = load_arrays(path)["head_rows"].tolist()
    if not rows or rows != sorted({*rows}) or rows[0] < 0 or rows[-1] >= vocab_size:
        raise TrainError(f"{path}: head_rows must be ascending token ids below {vocab_size}")
    return rows
