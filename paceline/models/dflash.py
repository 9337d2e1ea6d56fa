"""The DFlash drafter (arXiv 2602.06036): a small block-diffusion decoder that reads the target's hidden features.

A block is [anchor, mask, mask, ...]; slot k predicts the token at its own position ("fill-in") or, in relatives, the
one behind it ("anchor first"). Keys and values of context tokens come from `hidden_norm(fc(taps))` of committed target
rows and are kept; those of the block are thrown away after each draft. `layouts` and `drafter_config` read the
packagings of the family; `dspark` and `dflash2` are this network with more heads.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline import _native
from paceline.models.decoder import LayerWeights, add_layer, declare_buffers, load_layer
from paceline.models.drafter_config import HEAD_ROWS_FILE, DFlashConfig, check_pairing, read_drafter_config
from paceline.models.drafter_weights import DraftHeads, FiniteLoader, all_finite
from paceline.models.network import Network, WeightLoader, packed_bytes
from paceline.models.target import TargetModel
from paceline.models.views import assistant_view
from paceline.weights.checkpoint import Checkpoint, open_checkpoint
from paceline.weights.quantise import Quantization, check_quantization

__all__ = ["HEAD_ROWS_FILE", "DFlashConfig", "DFlashDrafter", "all_finite", "load_drafter", "read_drafter_config"]


Ints = list[int] | np.ndarray  # of a pass; arrays are int32


@dataclass(slots=True)
class DrafterWeights:
    fc: Any  # [H, taps * H]
    fc_bias: np.ndarray | None
    hidden_norm: np.ndarray  # [H]
    layers: list[LayerWeights]
    context_kv: list[Any]  # per layer [2 kv, H]: the k and v rows of qkv
    norm: np.ndarray  # [H]
    embed: Any  # the target's, or the drafter's own table
    head: Any  # [rows, H] of the target's head, or the drafter's own


class DFlashDrafter:
    """A drafter in memory beside its target: `add_context` and `draft_logits` are one pass each.

    Relatives override the methods marked as hooks.
    """

    features_width = 0  # what a block row yields besides logits; see `draft_logits`

    def __init__(
        self,
        checkpoint: Checkpoint,
        target: TargetModel,
        config: DFlashConfig,
        *,
        max_rows: int | None = None,
        quantization: str | None = None,
    ) -> None:
        """quantization: of the drafter's matrices; None = int8, beside a target in fp32 none."""
        self.path = checkpoint.path
        self.target = target
        self.config = config
        check_pairing(self.config, target, str(checkpoint.path))
        self.max_rows = max_rows or target.max_rows
        self.quantization = choose_quantization(target, quantization)
        heads = DraftHeads(checkpoint, config, target, self.quantization)
        self.head_rows = heads.rows
        self.head_order = heads.order
        self.draft_vocab = heads.columns  # columns of the draft logits
        self.weights = self._load(checkpoint, heads)
        self._context_plan = self._build_context()
        self._block_plan = self._build_block()

    # ---- hooks

    def _extra_bytes(self) -> int:
        """Packed bytes of what `_load_extra` reads."""
        return 0

    def _load_extra(self, loader: WeightLoader) -> None:
        """Read what a relative has besides the DFlash tensors."""

    def _add_layer(self, net: Network, index: int) -> None:
        d = self.config.decoder
        layer = self.weights.layers[index]
        add_layer(net, d, layer, index, causal=self.config.causal[index], window=d.windows[index])

    def _add_features(self, net: Network) -> None:
        """Fill the buffer "features" [rows, features_width] from the residual stream "x" behind the last layer."""

    # ---- loading

    def _load(self, checkpoint: Checkpoint, heads: DraftHeads) -> DrafterWeights:
        d, target = self.config.decoder, self.target
        f32, hidden, width = target.f32, d.hidden_size, len(self.config.target_layer_ids) * d.hidden_size
        size = functools.partial(packed_bytes, f32=f32, quantised=self.quantization != "none")
        q, kv = d.num_heads * d.head_dim, d.num_kv_heads * d.head_dim
        shared = q % 32 == 0  # k and v rows start a panel: the context plan reads them in place
        capacity = size(hidden, width) + (1 << 20)
        capacity += d.num_layers * (
            size(q + 2 * kv, hidden)
            + size(hidden, q)
            + size(d.intermediate_size, hidden, gated=True)
            + size(hidden, d.intermediate_size)
            + (0 if shared else size(2 * kv, hidden))
        )
        capacity += heads.capacity() + self._extra_bytes()
        loader = FiniteLoader(
            checkpoint, f32=f32, capacity=capacity, workers=target.threads, quantization=self.quantization
        )
        try:
            layers = [load_layer(loader, d, f"layers.{i}") for i in range(d.num_layers)]
            context = []
            for i, layer in enumerate(layers):
                if shared:
                    context.append(layer.qkv.view(q, 2 * kv))
                else:
                    names = [f"layers.{i}.self_attn.{n}_proj.weight" for n in "kv"]
                    context.append(loader.packed([(name, kv) for name in names], hidden))
            weights = DrafterWeights(
                fc=loader.packed([("fc.weight", hidden)], width),
                fc_bias=loader.vector("fc.bias", hidden) if "fc.bias" in checkpoint else None,
                hidden_norm=loader.vector("hidden_norm.weight", hidden),
                layers=layers,
                context_kv=context,
                norm=loader.vector("norm.weight", hidden),
                embed=heads.embed(loader),
                head=heads.head(loader),
            )
            self._load_extra(loader)
            loader.refuse_unused(heads.unused())
            return weights
        finally:
            loader.finish()

    @property
    def window(self) -> int:
        """Context rows that drafts read: the widest window if every layer slides, 0 for all of them."""
        windows = self.config.decoder.windows
        return max(windows) if all(windows) else 0

    def _build_context(self) -> Any:
        """taps [c, T * H] -> keys and values of c context rows in every layer."""
        c, d, w = self.config, self.config.decoder, self.weights
        kv = d.num_kv_heads * d.head_dim
        net = Network(self.target.pool, self.target.isa, f32=self.target.f32, max_rows=self.max_rows)
        net.buffer("taps", len(c.target_layer_ids) * d.hidden_size, "INPUT")
        net.buffer("ctx", d.hidden_size)
        net.buffer("kv", 2 * kv)
        net.rope(d.rope)
        net.linear("taps", "ctx", w.fc, convert=True, bias=w.fc_bias)
        q = d.num_heads * d.head_dim
        for i, layer in enumerate(w.layers):
            bias = None if layer.qkv_bias is None else layer.qkv_bias[q:]
            net.linear("ctx", "kv", w.context_kv[i], norm=w.hidden_norm, eps=d.rms_norm_eps, bias=bias)
            net.qkv_post(
                "kv",
                "kv",
                layer=i,
                heads=0,
                kv_heads=d.num_kv_heads,
                head_dim=d.head_dim,
                rotary_dim=d.rope.rotary_dim,
                interleaved=d.rope.interleaved,
                k_norm=layer.k_norm,
                eps=d.rms_norm_eps,
            )
        return net.plan

    def _build_block(self) -> Any:
        """[anchor, mask, ...] -> logits of selected slots."""
        c, d, w = self.config, self.config.decoder, self.weights
        net = Network(self.target.pool, self.target.isa, f32=self.target.f32, max_rows=self.max_rows)
        declare_buffers(net, d)
        net.buffer("logits", self.draft_vocab, "LOGITS")
        net.embed("x", w.embed, c.input_embedding_scale)
        net.rope(d.rope)
        for i in range(d.num_layers):
            self._add_layer(net, i)
        if self.features_width:
            net.buffer("features", self.features_width, "TAPS")
            self._add_features(net)
        net.linear("x", "logits", w.head, norm=w.norm, eps=d.rms_norm_eps, selected=True)
        return net.plan

    def new_cache(self, blocks: int) -> _native.KVCache:
        """Context keys and values, `blocks` blocks of 16 tokens."""
        d = self.config.decoder
        return _native.KVCache(d.num_layers, d.num_kv_heads, d.head_dim, blocks, self.target.f32)

    def add_context(
        self,
        cache: _native.KVCache,
        taps: np.ndarray,
        positions: Ints,
        row_starts: Ints,
        block_tables: np.ndarray,
    ) -> None:
        """Write keys and values of committed rows; taps fp32 [rows, T * H], rows of a sequence contiguous."""
        self._context_plan.forward(cache, positions, row_starts, block_tables=block_tables, input=taps)

    def draft_logits(
        self,
        cache: _native.KVCache,
        tokens: Ints,
        positions: Ints,
        row_starts: Ints,
        block_tables: np.ndarray,
        select: Ints,
        features: np.ndarray | None = None,
    ) -> np.ndarray:
        """Logits fp32 [len(select), draft_vocab] of block slots, after multiplier and soft cap.

        features: fp32 [rows, features_width] to be filled, for drafters that have any.
        """
        c = self.config
        logits = np.empty((len(select), self.draft_vocab), np.float32)
        self._block_plan.forward(
            cache,
            positions,
            row_starts,
            tokens=tokens,
            block_tables=block_tables,
            select=select,
            logits=logits,
            taps=features,
        )
        if c.output_multiplier != 1.0:
            logits *= np.float32(c.output_multiplier)
        if c.final_logit_softcapping > 0:
            cap = np.float32(c.final_logit_softcapping)
            logits = cap * np.tanh(logits / cap)
        return logits


def choose_quantization(target: TargetModel, wanted: str | None) -> Quantization:
    """int8 unless asked otherwise, which is fastest beside any target; beside fp32, which is for comparisons, none.

    Raises ConfigError for what is no quantization.
    """
    if wanted is None:
        wanted = "none" if target.f32 else "int8"
    return check_quantization(wanted)


def load_drafter(path: str | Path, target: TargetModel, *, quantization: str | None = None) -> DFlashDrafter:
    """Open a drafter folder of any family and pair it with a target. Raises ConfigError or CheckpointError."""
    checkpoint = open_checkpoint(path)
    config = read_drafter_config(checkpoint.config, str(checkpoint.path))
    if config.packaging == "transformers":
        checkpoint = assistant_view(checkpoint)
        traits = target.config.traits  # its logits are the target's in every respect
        config = dataclasses.replace(
            config, output_multiplier=traits.logit_scale, final_logit_softcapping=traits.logit_softcap
        )
    return _class_of(config)(checkpoint, target, config, quantization=quantization)


def _class_of(config: DFlashConfig) -> type[DFlashDrafter]:
    if config.family == "dspark":
        from paceline.models.dspark import DSparkDrafter

        return DSparkDrafter
    if config.family == "dflash2":
        from paceline.models.dflash2 import DFlash2Drafter

        return DFlash2Drafter
    return DFlashDrafter
