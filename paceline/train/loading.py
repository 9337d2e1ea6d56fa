"""Open targets for the trainer through the engine's own checkpoint readers, so that both see the same weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from .errors import TrainError
from .heads import Heads
from .target import TargetConfig, TorchTarget

if TYPE_CHECKING:
    from paceline.tokenizer import Tokenizer
    from paceline.weights.checkpoint import Checkpoint

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def open_model(name: str) -> Checkpoint:
    """The checkpoint of a known name, a path or a hub id."""
    from paceline.weights.checkpoint import open_checkpoint
    from paceline.weights.store import resolve_model

    return open_checkpoint(resolve_model(name))


def pick_dtype(name: str) -> torch.dtype:
    """``bfloat16`` or ``float32`` by name. Raises TrainError for anything else."""
    if name not in DTYPES:
        raise TrainError(f"dtype is {name!r}: choose {' or '.join(DTYPES)}")
    return DTYPES[name]


def load_tensor(checkpoint: Checkpoint, name: str, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """One tensor of a checkpoint; quantised ones are dequantised."""
    if dtype is torch.float32:
        array = np.array(checkpoint.load(name, dtype="float32"))
        return torch.from_numpy(array).to(device)
    array = np.array(checkpoint.load(name, dtype="bfloat16")).view(np.int16)
    return torch.from_numpy(array).view(torch.bfloat16).to(device)


def load_target(checkpoint: Checkpoint, dtype: torch.dtype, device: str = "cpu") -> TorchTarget:
    """The whole target. Raises TrainError for families and rope variants that the trainer lacks."""
    config = TargetConfig.from_hf(checkpoint.config)
    return TorchTarget(config, {n: load_tensor(checkpoint, n, dtype, device) for n in checkpoint.names()})


def load_heads(
    checkpoint: Checkpoint, rows: Iterable[int] | None, mask_token_id: int, dtype: torch.dtype, device: str = "cpu"
) -> Heads:
    """Embedding and head rows alone (``rows`` None: all of them); the rest of the target is not read."""
    embed = load_tensor(checkpoint, EMBED, dtype, device)
    head = load_tensor(checkpoint, HEAD, dtype, device) if HEAD in checkpoint else embed
    return Heads(embed, head, list(range(len(head)) if rows is None else rows), mask_token_id)


def choose_mask_token(tokenizer: Tokenizer, used: Iterable[int], vocab_size: int) -> int:
    """A reserved id that never occurs: the last special token that is neither an end nor a beginning nor padding.

    Raises TrainError, asking for ``--mask-token``, when the vocabulary has none to spare.
    """
    taken = set(used) | set(tokenizer.eos_token_ids) | {tokenizer.bos_token_id}
    named = {tokenizer.backend.token_to_id(text) for text in tokenizer.special_tokens.values()}
    free = [i for i in tokenizer.special_ids if i not in taken and i not in named and i < vocab_size]
    if not free:
        raise TrainError("no special token of the vocabulary is unused: name a reserved id with --mask-token")
    return max(free)


def default_taps(num_layers: int, count: int = 5) -> tuple[int, ...]:
    """``count`` layers spread evenly from layer 1 to the third last."""
    if count > num_layers - 3:
        return tuple(range(max(0, num_layers - 1 - count), num_layers - 1))
    return tuple(round(1 + i * (num_layers - 4) / max(1, count - 1)) for i in range(count))
