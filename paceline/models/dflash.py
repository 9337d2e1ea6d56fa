"""The DFlash drafter (arXiv 2602.06036): a small block-diffusion decoder that reads the target's hidden features.

Checkpoints in z-lab layout, as published: config.json is a Qwen3 config plus the fields below, the tensors are listed
in `load_drafter`. A block is [anchor, mask, mask, ...]; slot k predicts the token at its own position ("fill-in").
Keys and values of context tokens come from `hidden_norm(fc(taps))` of committed target rows and are kept; those of the
block are thrown away after each draft.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline import _native
from paceline.errors import CheckpointError, ConfigError
from paceline.models.config import ConfigReader, DecoderConfig, Rope, read_decoder
from paceline.models.decoder import LayerWeights, add_layer, declare_buffers, load_layer
from paceline.models.network import Network, WeightLoader, packed_bytes
from paceline.models.target import TargetModel
from paceline.values import shown
from paceline.weights.checkpoint import Checkpoint, open_checkpoint
from paceline.weights.quantise import check_quantization, choose_format

HEAD_ROWS_FILE = "head_rows.safetensors"

# What relatives of DFlash add to its config, and the values that mean "not used". Anything else is another network,
# which would load, run and be wrong in silence.
RELATIVES: dict[str, tuple[Any, ...]] = {
    "projector_type": (None, "dflash"),
    "sample_from_anchor": (None, False),
    "shift_label": (None, False),
    "causal_head": (None, False),
    "dflash_query_causal": (None, False),
    "attention_sink_bias": (None, False),
    "has_lm_head": (None, False),
    "markov_rank": (None, 0),
    "conv_kernel_size": (None,),
    "selector_rank": (None,),
    "logit_scale": (None, 1),
}


@dataclass(frozen=True, slots=True)
class DFlashConfig:
    """`causal[i]` says whether layer i's block rows see only earlier block rows; windows are in `decoder`."""

    decoder: DecoderConfig
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    causal: tuple[bool, ...]
    num_target_layers: int | None = None
    target_hidden_size: int | None = None
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float = 0.0

    @property
    def max_drafts(self) -> int:
        return self.block_size - 1


def read_drafter_config(config: dict[str, Any], where: str) -> DFlashConfig:
    """Fields live in `dflash_config` or, in older checkpoints, at top level; the former wins.

    Raises ConfigError: `target_layer_ids`, `mask_token_id` and `block_size` are never guessed, since a wrong guess
    only costs acceptance and goes unnoticed.
    """
    top = ConfigReader(config, where)
    inner = top.mapping("dflash_config")
    merged = {**config, **{k: v for k, v in inner.items() if v is not None}}
    reader = ConfigReader(merged, where)
    architectures = config.get("architectures")
    named = isinstance(architectures, list) and all(isinstance(a, str) for a in architectures)
    if not (named and "DFlashDraftModel" in (architectures or ())):
        raise ConfigError(
            f"{where}: architectures = {shown(architectures)} is not a drafter this version loads; "
            'supported: ["DFlashDraftModel"]'
        )
    for name, unused in RELATIVES.items():
        if merged.get(name) not in unused:
            raise reader.fail(name, "is not supported: this is not a plain DFlash drafter")
    ids = merged.get("target_layer_ids")
    if not isinstance(ids, list) or not ids or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ConfigError(
            f"{where}: target_layer_ids = {shown(ids)}: must list the target layers whose outputs are tapped"
        )
    if len(set(ids)) != len(ids):
        raise ConfigError(f"{where}: target_layer_ids = {shown(ids)}: names a layer twice; list each once")
    bias = reader.flag("attention_bias", False)
    own = {**config, "tie_word_embeddings": False, "partial_rotary_factor": None}
    if isinstance(config.get("rope_parameters"), dict):
        # drafters rotate whole heads; a factor copied from a hybrid target's config means nothing here
        own["rope_parameters"] = {k: v for k, v in config["rope_parameters"].items() if k != "partial_rotary_factor"}
    decoder = read_decoder(own, where=where, qkv_bias=bias, output_bias=bias, qk_norm=True)
    if decoder.vocab_size != reader.integer("draft_vocab_size", decoder.vocab_size):
        raise reader.fail("draft_vocab_size", f"must be vocab_size = {decoder.vocab_size}; use {HEAD_ROWS_FILE}")
    if reader.flag("use_swa", False) and reader.integer("swa_window_size", 0, least=0) not in (0, *decoder.windows):
        raise reader.fail("swa_window_size", f"differs from the windows of layer_types, {list(decoder.windows)}")
    if not reader.flag("rope_is_neox_style", reader.flag("is_neox_style", True)):
        rope = Rope(decoder.rope.inv_freq, interleaved=True, scale=decoder.rope.scale)
        decoder = dataclasses.replace(decoder, rope=rope)
    return DFlashConfig(
        decoder=decoder,
        block_size=reader.integer("block_size", least=2, most=256),
        mask_token_id=reader.integer("mask_token_id", least=0, most=decoder.vocab_size - 1),
        target_layer_ids=tuple(ids),
        causal=_causality(top, ConfigReader(inner, f"{where}: dflash_config"), decoder.windows),
        num_target_layers=None if merged.get("num_target_layers") is None else reader.integer("num_target_layers"),
        target_hidden_size=None if merged.get("target_hidden_size") is None else reader.integer("target_hidden_size"),
        input_embedding_scale=reader.scale("input_embedding_scale", 1.0),
        output_multiplier=reader.scale("output_multiplier", 1.0),
        final_logit_softcapping=_softcap(reader),
    )


def _softcap(reader: ConfigReader) -> float:
    """0 or null: none."""
    value = reader.number("final_logit_softcapping", 0.0)
    return reader.scale("final_logit_softcapping", 0.0) if value else 0.0


def _causality(top: ConfigReader, inner: ConfigReader, windows: tuple[int, ...]) -> tuple[bool, ...]:
    """Top-level `is_causal`, else `dflash_config.causal`, else sliding layers are causal and full ones are not."""
    for reader, name in ((top, "is_causal"), (inner, "causal")):
        if reader.config.get(name) is not None:
            return (reader.flag(name, False),) * len(windows)
    return tuple(w > 0 for w in windows)


def check_pairing(c: DFlashConfig, target: TargetModel, where: str) -> None:
    """Refuse a drafter that was made for another target. Raises ConfigError naming the field."""
    t = target.config

    def refuse(name: str, value: Any, expected: Any) -> ConfigError:
        return ConfigError(
            f"{where}: {name} = {shown(value)} does not fit the target {target.path}, which has {expected!r}; "
            "this drafter was trained for another model"
        )

    if c.decoder.hidden_size != t.hidden_size:
        raise refuse("hidden_size", c.decoder.hidden_size, t.hidden_size)
    if c.target_hidden_size not in (None, t.hidden_size):
        raise refuse("target_hidden_size", c.target_hidden_size, t.hidden_size)
    if c.decoder.vocab_size != t.vocab_size:
        raise refuse("vocab_size", c.decoder.vocab_size, t.vocab_size)
    if c.num_target_layers is not None and c.num_target_layers != t.num_layers:
        raise refuse("num_target_layers", c.num_target_layers, t.num_layers)
    for layer in c.target_layer_ids:
        if not -1 <= layer < t.num_layers:
            raise refuse("target_layer_ids", layer, f"layers 0..{t.num_layers - 1}")


def read_head_rows(folder: Path, vocab_size: int) -> np.ndarray | None:
    """Ascending target ids the drafter may propose, from the sidecar file; None: the whole vocabulary."""
    path = folder / HEAD_ROWS_FILE
    if not os.path.lexists(path):
        return None
    if not path.is_file():
        raise CheckpointError(
            f"{path}: the list of head_rows is not a file (a link to nothing, or a folder); put the file there, "
            "or remove it to draft from the whole vocabulary"
        )
    from paceline.weights.safetensors_file import SafetensorsFile

    file = SafetensorsFile(path)
    if "head_rows" not in file.entries:
        raise CheckpointError(f"{path}: there is no tensor head_rows; found {sorted(file.entries)[:5]}")
    rows = np.array(file.load("head_rows"))
    if rows.dtype.kind not in "iu":
        raise CheckpointError(f"{path}: head_rows are of type {rows.dtype}; token ids are whole numbers")
    rows = rows.astype(np.int64)
    if rows.ndim != 1 or not len(rows) or rows[0] < 0 or rows[-1] >= vocab_size or (np.diff(rows) <= 0).any():
        raise CheckpointError(f"{path}: head_rows must be ascending token ids below {vocab_size}")
    return rows.astype(np.int32)


class FiniteLoader(WeightLoader):
    """Refuses NaN and infinities by the tensor's name: a drafter with them proposes noise, and nobody notices."""

    def _load(self, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        values = super()._load(name, shape, dtype)
        if not all_finite(values):
            raise CheckpointError(
                f"{self.checkpoint.path}: tensor {name} holds values that are infinite or not numbers; "
                "the file is damaged or its training diverged: fetch it again, or use another drafter"
            )
        return values


def all_finite(values: np.ndarray) -> bool:
    """Whether a float32 or bfloat16 array has no NaN or infinity: their exponent bits are all ones.

    The largest bit pattern without its sign tells; pieces fit the cache, so that it costs one read of the tensor.
    """
    wide = values.dtype.itemsize == 4
    bits: np.ndarray[Any, np.dtype[Any]] = (
        np.ascontiguousarray(values).reshape(-1).view(np.uint32 if wide else np.uint16)
    )
    mask, limit = (0x7FFFFFFF, 0x7F800000) if wide else (0x7FFF, 0x7F80)
    step = 1 << 16
    return all(int((bits[i : i + step] & mask).max()) < limit for i in range(0, len(bits), step))


@dataclass(slots=True)
class DrafterWeights:
    fc: Any  # [H, taps * H]
    fc_bias: np.ndarray | None
    hidden_norm: np.ndarray  # [H]
    layers: list[LayerWeights]
    context_kv: list[Any]  # per layer [2 kv, H]: the k and v rows of qkv
    norm: np.ndarray  # [H]
    head: Any  # [rows, H] of the target's head


class DFlashDrafter:
    """A drafter in memory beside its target: `add_context` and `draft_logits` are one pass each."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        target: TargetModel,
        *,
        max_rows: int | None = None,
        quantization: str | None = None,
    ) -> None:
        """quantization: of the drafter's matrices; None = int8 where the target's are quantised, else none."""
        self.path = checkpoint.path
        self.target = target
        self.config = read_drafter_config(checkpoint.config, str(checkpoint.path))
        check_pairing(self.config, target, str(checkpoint.path))
        self.max_rows = max_rows or target.max_rows
        if quantization is None:
            quantization = "none" if target.quantization == "none" else "int8"
        self.quantization = check_quantization(quantization)
        folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
        self.head_rows = read_head_rows(folder, target.vocab_size)
        self.weights = self._load(checkpoint)
        self._context_plan = self._build_context()
        self._block_plan = self._build_block()

    @property
    def draft_vocab(self) -> int:
        """Columns of the draft logits."""
        return self.target.vocab_size if self.head_rows is None else len(self.head_rows)

    @property
    def window(self) -> int:
        """Context rows that must be kept: the widest window if every layer slides, 0 for all of them."""
        windows = self.config.decoder.windows
        return max(windows) if all(windows) else 0

    def _load(self, checkpoint: Checkpoint) -> DrafterWeights:
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
        if self.head_rows is not None:
            capacity += size(len(self.head_rows), hidden)
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
                head=target.weights.head if self.head_rows is None else self._head(loader),
            )
            loader.refuse_unused(["head_rows"])
            return weights
        finally:
            loader.finish()

    def _head(self, loader: WeightLoader) -> Any:
        """The chosen rows of the target's head, copied out of its packed form so that one pass streams only them."""
        source, rows, f32 = self.target.weights.head, self.head_rows, self.target.f32
        assert rows is not None
        values = np.empty((len(rows), source.k), np.float32)
        for i, row in enumerate(rows):
            source.row(int(row), values[i : i + 1])
        if self.quantization != "none":
            return loader.quantised(values, choose_format(["F32"], self.quantization))
        weight = _native.Packed(loader.arena, len(rows), source.k, f32, False)
        weight.fill(values)
        return weight

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
        net.embed("x", self.target.weights.embed, c.input_embedding_scale)
        net.rope(d.rope)
        for i, layer in enumerate(w.layers):
            add_layer(net, d, layer, i, causal=c.causal[i], window=d.windows[i])
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
        positions: np.ndarray,
        row_starts: np.ndarray,
        block_tables: np.ndarray,
    ) -> None:
        """Write keys and values of committed rows; taps fp32 [rows, T * H], rows of a sequence contiguous."""
        self._context_plan.forward(cache, positions, row_starts, block_tables=block_tables, input=taps)

    def draft_logits(
        self,
        cache: _native.KVCache,
        tokens: np.ndarray,
        positions: np.ndarray,
        row_starts: np.ndarray,
        block_tables: np.ndarray,
        select: np.ndarray,
    ) -> np.ndarray:
        """Logits fp32 [len(select), draft_vocab] of block slots, after multiplier and soft cap."""
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
        )
        if c.output_multiplier != 1.0:
            logits *= np.float32(c.output_multiplier)
        if c.final_logit_softcapping > 0:
            cap = np.float32(c.final_logit_softcapping)
            logits = cap * np.tanh(logits / cap)
        return logits


def load_drafter(path: str | Path, target: TargetModel, *, quantization: str | None = None) -> DFlashDrafter:
    """Open a drafter folder and pair it with a target. Raises ConfigError or CheckpointError."""
    return DFlashDrafter(open_checkpoint(path), target, quantization=quantization)
