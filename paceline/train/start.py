"""Weights and shape that a new drafter starts with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .loading import EMBED, load_tensor
from .model import Drafter, DrafterConfig
from .target import TargetConfig

if TYPE_CHECKING:
    from paceline.weights.checkpoint import Checkpoint

ADDED = ("markov_head.", "confidence_head.", "candidate_selector.", "_conv.")  # tensors that DFlash lacks
NORM_START = 0.25  # the target's final norm, scaled down so that the first logits are almost flat


def new_drafter_config(
    target: TargetConfig, taps: Sequence[int], *, layers: int, block_size: int, mask_token: int
) -> DrafterConfig:
    """A drafter with the target's own layer shape, which keeps every kernel and cache layout that the target uses."""
    return DrafterConfig(
        hidden_size=target.hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=target.num_heads,
        num_key_value_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        intermediate_size=target.intermediate_size,
        vocab_size=target.vocab_size,
        num_target_layers=target.num_layers,
        target_layer_ids=tuple(taps),
        mask_token_id=mask_token,
        block_size=block_size,
        rms_norm_eps=target.rms_norm_eps,
        rope_theta=target.rope_theta,
        max_position_embeddings=target.max_positions,
    )


def fresh_drafter(checkpoint: Checkpoint, shape: DrafterConfig, seed: int, *, from_target: bool) -> Drafter:
    """Random weights drawn from ``seed``, with the target's final norm; ``from_target`` copies its last layers, too."""

    def load(name: str) -> Tensor:
        return load_tensor(checkpoint, name, torch.float32)

    torch.manual_seed(seed)
    drafter = Drafter(shape)
    with torch.no_grad():
        final = load("model.norm.weight")
        drafter.norm.weight.copy_(final if from_target else final * NORM_START)
        if from_target:
            _copy_last_layers(drafter, shape, load, checkpoint)
    _start_heads(checkpoint, drafter)
    return drafter


def with_heads(checkpoint: Checkpoint, drafter: Drafter, shape: DrafterConfig, seed: int) -> Drafter:
    """``drafter`` in ``shape``, which may add heads of DSpark or the parts of DFlash 2; new ones change no draft
    yet."""
    if drafter.config == shape:
        return drafter
    torch.manual_seed(seed)
    out = Drafter(shape)
    missing, unexpected = out.load_state_dict(drafter.state_dict(), strict=False)
    assert not unexpected and all(any(part in name for part in ADDED) for name in missing)
    _start_heads(checkpoint, out, beside=drafter)
    return out


def _start_heads(checkpoint: Checkpoint, drafter: Drafter, beside: Drafter | None = None) -> None:
    """Give the tables of heads that ``beside`` lacks the target's main directions."""

    def directions(rank: int) -> Tensor:
        return principal_rows(load_tensor(checkpoint, EMBED, torch.float32), rank)

    shape = drafter.config
    with torch.no_grad():
        if drafter.markov_head is not None and (beside is None or beside.markov_head is None):
            drafter.markov_head.markov_w1.weight.copy_(directions(shape.markov_rank))
        if drafter.candidate_selector is not None and (beside is None or beside.candidate_selector is None):
            # the other table at zero: what a token before makes likely then holds for all tokens that are alike
            drafter.candidate_selector.successor_codebook.copy_(directions(shape.selector_rank))


def principal_rows(table: Tensor, rank: int) -> Tensor:
    """``[V, rank]``: the rows of ``table [V, H]`` along their ``rank`` principal axes, with a mean square of 1.

    A head that starts so knows which tokens are alike, also those that its training never shows it. Beyond H
    columns there is nothing to project on: they are drawn at random.
    """
    centred = table - table.mean(0)
    _, axes = torch.linalg.eigh(centred.T @ centred)
    kept = centred @ axes.flip(1)[:, :rank]
    kept = kept / kept.square().mean().sqrt()
    return torch.cat((kept, torch.randn(len(table), rank - kept.shape[1])), 1) if kept.shape[1] < rank else kept


def _copy_last_layers(drafter: Drafter, shape: DrafterConfig, load: object, checkpoint: Checkpoint) -> None:
    """Layer i becomes the target's layer N - L + i; the context is the last tap, normed as these layers expect it, so
    that the drafter's first keys and values are nearly the target's own."""
    assert callable(load)
    first = shape.num_target_layers - shape.num_hidden_layers
    for i, layer in enumerate(drafter.layers):
        for name, parameter in layer.named_parameters():
            source = f"model.layers.{first + i}.{name}"
            if source in checkpoint:  # a Llama target has no head norms: those stay at one
                parameter.copy_(load(source))
    drafter.hidden_norm.weight.copy_(load(f"model.layers.{first}.input_layernorm.weight"))
    drafter.fc.weight.zero_()
    drafter.fc.weight[:, -shape.hidden_size :] = torch.eye(shape.hidden_size)
