"""The multi-token-prediction layer inside Qwen3.5 checkpoints (tensors `mtp.*`).

For a token x and the hidden state h of the row before it, the layer sees fc([norm(embedding of x), norm(h)]), runs one
attention layer of the model's own kind, and its last norm and the model's head predict the token behind x. h is what
the model's head reads (behind the final norm); for the next draft it is what this layer's head read.

The pair (h, x) has the position of x, so that a cache block depends on the tokens up to its own end and can be shared
like the target's. Position 0 has no pair: nothing is written there, and attention does not look at it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline import _native
from paceline.errors import CheckpointError, ConfigError
from paceline.models.config import ConfigReader
from paceline.models.decoder import LayerWeights, add_layer, declare_buffers
from paceline.models.drafter_weights import EMBED, HEAD, FiniteLoader
from paceline.models.network import Network, WeightLoader, packed_bytes
from paceline.models.qwen3_5 import HybridConfig, load_attention
from paceline.models.target import TargetModel, read_config
from paceline.models.views import predictor_view
from paceline.values import shown
from paceline.weights.checkpoint import Checkpoint
from paceline.weights.quantise import Quantization, check_quantization

FIRST_KEY = 1  # position 0 has no row before it


def has_predictor(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint has a multi-token-prediction layer that can draft for it."""
    return str(checkpoint.config.get("model_type")).startswith("qwen3_5") and predictor_view(checkpoint) is not None


@dataclass(slots=True)
class PredictorWeights:
    """H hidden, kv = kv_heads * head_dim, V vocabulary."""

    embed_norm: np.ndarray  # [H]
    hidden_norm: np.ndarray  # [H]
    fc: Any  # [H, 2 H]: columns of the embedding, then of the hidden state
    layer: LayerWeights
    context_kv: Any  # [2 kv, H]: the k and v rows of the layer
    norm: np.ndarray  # [H]
    embed: Any  # the target's, or the layer's own table
    head: Any  # [V, H] the target's, or the layer's own


class Predictor:
    """The layer in memory beside its target: `add_context` and `draft_logits` are one pass each."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        target: TargetModel,
        *,
        max_rows: int | None = None,
        quantization: str | None = None,
    ) -> None:
        """checkpoint: the target's own, or another of the same sizes that has the layer. quantization: of its matrices;
        None = int8, beside a target in fp32 none.

        Raises ConfigError or CheckpointError naming the field or tensor that is missing or does not fit.
        """
        self.path = checkpoint.path
        self.target = target
        self.max_rows = max_rows or target.max_rows
        self.config = _check(checkpoint, target)
        if quantization is None:
            quantization = "none" if target.f32 else "int8"
        self.quantization: Quantization = check_quantization(quantization)
        view = predictor_view(checkpoint)
        if view is None:
            raise CheckpointError(
                f"{checkpoint.path}: tensor mtp.fc.weight is missing; the file has no multi-token-prediction layer "
                "(conversions often leave it out): use another method, or name a folder that has it in `model`"
            )
        self.weights = self._load(view)
        self._context_plan = self._build(target.weights.final_norm, context=True)
        self._first_plan = self._build(target.weights.final_norm)
        self._next_plan = self._build(self.weights.norm)

    def _load(self, view: Checkpoint) -> PredictorWeights:
        c, target = self.config, self.target
        hidden, vocab = c.hidden_size, c.vocab_size
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        own = [name in view for name in (EMBED, HEAD)]
        if _reader(view).flag("mtp_use_dedicated_embeddings", False) and not own[0]:
            raise CheckpointError(
                f"{view.path}: tensor mtp.{EMBED} is missing; mtp_use_dedicated_embeddings = true says it is there"
            )

        def size(n: int, k: int, gated: bool = False) -> int:
            return packed_bytes(n, k, f32=target.f32, gated=gated, quantised=self.quantization != "none")

        in_place = q % 32 == 0  # k and v rows start a panel: the context plan reads them where they are
        capacity = size(hidden, 2 * hidden) + size(2 * q + 2 * kv, hidden) + size(hidden, q) + (1 << 20)
        capacity += size(c.intermediate_size, hidden, gated=True) + size(hidden, c.intermediate_size)
        capacity += (0 if in_place else size(2 * kv, hidden)) + sum(own) * size(vocab, hidden)
        loader = FiniteLoader(
            view, f32=target.f32, capacity=capacity, workers=target.threads, quantization=self.quantization
        )
        try:
            layer = load_attention(loader, c, "layers.0")
            attn = "layers.0.self_attn"
            names = [(f"{attn}.{n}_proj.weight", kv) for n in "kv"]
            weights = PredictorWeights(
                embed_norm=_norm(loader, c, "pre_fc_norm_embedding.weight"),
                hidden_norm=_norm(loader, c, "pre_fc_norm_hidden.weight"),
                fc=loader.packed([("fc.weight", hidden)], 2 * hidden),
                layer=layer,
                context_kv=layer.qkv.view(q, 2 * kv) if in_place else loader.packed(names, hidden),
                norm=_norm(loader, c, "norm.weight"),
                embed=loader.table(EMBED, vocab, hidden) if own[0] else target.weights.embed,
                head=loader.packed([(HEAD, vocab)], hidden) if own[1] else target.weights.head,
            )
            loader.refuse_unused()
            return weights
        finally:
            loader.finish()

    def _build(self, input_norm: np.ndarray, *, context: bool = False) -> Any:
        """Tokens and hidden states of the rows before them, which `input_norm` is applied to, -> logits and hidden
        state of each row; context: keys and values alone."""
        c, w = self.config, self.weights
        hidden, eps = c.hidden_size, c.rms_norm_eps
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        net = Network(self.target.pool, self.target.isa, f32=self.target.f32, max_rows=self.max_rows)
        net.buffer("before", hidden, "INPUT")
        net.buffer("row", hidden)
        net.buffer("pair", 2 * hidden)
        declare_buffers(net, c)
        net.embed("row", w.embed)
        net.norm("row", "row", w.embed_norm, eps)
        net.copy("row", "pair", hidden)
        net.norm("before", "row", input_norm, eps)
        net.norm("row", "row", w.hidden_norm, eps)
        net.copy("row", "pair", hidden, hidden)
        net.linear("pair", "x", w.fc, convert=True)
        net.rope(c.rope)
        if context:
            net.buffer("kv", 2 * kv)
            bias = None if w.layer.qkv_bias is None else np.ascontiguousarray(w.layer.qkv_bias[q : q + 2 * kv])
            net.linear("x", "kv", w.context_kv, norm=w.layer.input_norm, eps=eps, bias=bias)
            heads = {"layer": 0, "heads": 0, "kv_heads": c.num_kv_heads, "head_dim": c.head_dim}
            rotation = {"rotary_dim": c.rope.rotary_dim, "interleaved": c.rope.interleaved}
            net.qkv_post("kv", "kv", **heads, **rotation, k_norm=w.layer.k_norm, eps=eps)
            return net.plan
        net.buffer("after", hidden, "TAPS")
        net.buffer("logits", c.vocab_size, "LOGITS")
        add_layer(net, c, w.layer, 0, first_key=FIRST_KEY)
        net.copy("x", "after", hidden)
        net.linear("x", "logits", w.head, norm=w.norm, eps=eps, selected=True)
        return net.plan

    def new_cache(self, blocks: int) -> _native.KVCache:
        """Keys and values of `blocks` blocks of 16 positions."""
        c = self.config
        return _native.KVCache(1, c.num_kv_heads, c.head_dim, blocks, self.target.f32)

    def add_context(
        self,
        cache: _native.KVCache,
        tokens: np.ndarray,
        before: np.ndarray,
        positions: np.ndarray,
        row_starts: np.ndarray,
        block_tables: np.ndarray,
    ) -> None:
        """Write keys and values of committed tokens. before: fp32 [rows, H], the target's residual stream behind its
        last layer, of the rows before these tokens; positions: of the tokens, from 1 on."""
        self._context_plan.forward(
            cache, positions, row_starts, tokens=tokens, block_tables=block_tables, input=np.ascontiguousarray(before)
        )

    def draft_logits(
        self,
        cache: _native.KVCache,
        tokens: np.ndarray,
        before: np.ndarray,
        positions: np.ndarray,
        block_tables: np.ndarray,
        *,
        first: bool,
    ) -> tuple[np.ndarray, np.ndarray]:
        """One row for each sequence: logits fp32 [rows, V] of the token behind `tokens`, and the layer's residual
        stream [rows, H], which is `before` of the next draft. first: `before` is the target's, as for `add_context`."""
        rows = len(tokens)
        logits = np.empty((rows, self.config.vocab_size), np.float32)
        after = np.empty((rows, self.config.hidden_size), np.float32)
        (self._first_plan if first else self._next_plan).forward(
            cache,
            positions,
            np.arange(rows + 1, dtype=np.int32),
            tokens=tokens,
            block_tables=block_tables,
            input=np.ascontiguousarray(before),
            select=np.arange(rows, dtype=np.int32),
            logits=logits,
            taps=after,
        )
        return logits, after


def _norm(loader: WeightLoader, c: HybridConfig, name: str) -> np.ndarray:
    return loader.vector(name, c.hidden_size) + np.float32(c.traits.norm_offset)


def _reader(view: Checkpoint) -> ConfigReader:
    return ConfigReader(view.config, str(view.path))


def _check(checkpoint: Checkpoint, target: TargetModel) -> HybridConfig:
    """The layer's sizes, which are the target's. Raises ConfigError for what does not fit or is not supported."""
    c = target.config
    if not isinstance(c, HybridConfig):
        raise ConfigError(
            f"speculative config: method='mtp': {target.path} is a {c.model_type} model; multi-token-prediction layers "
            "of Qwen3.5 models are supported"
        )
    mine = read_config(checkpoint)
    for name in ("model_type", "hidden_size", "vocab_size", "num_heads", "num_kv_heads", "head_dim"):
        if getattr(mine, name) != getattr(c, name):
            raise ConfigError(
                f"{checkpoint.path}: {name} = {shown(getattr(mine, name))}, the target's is {shown(getattr(c, name))}; "
                "the layer belongs to another model"
            )
    view = predictor_view(checkpoint)
    if view is not None and (layers := _reader(view).integer("mtp_num_hidden_layers", 1, least=0)) != 1:
        raise ConfigError(f"{checkpoint.path}: mtp_num_hidden_layers = {layers}: only 1 is supported")
    return c
