"""The dense pre-norm decoder that Llama, Qwen2 and Qwen3 share: weights and plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.models.config import DecoderConfig
from paceline.models.network import Network, WeightLoader, packed_bytes


@dataclass(slots=True)
class LayerWeights:
    """One decoder layer; H hidden, q = heads * head_dim, kv = kv_heads * head_dim, I intermediate."""

    input_norm: np.ndarray  # [H]
    qkv: Any  # [q + 2 kv, H]
    qkv_bias: np.ndarray | None
    q_norm: np.ndarray | None  # [head_dim]
    k_norm: np.ndarray | None
    output: Any  # [H, q]
    output_bias: np.ndarray | None
    post_norm: np.ndarray  # [H]
    gate_up: Any  # gated [I, H]
    gate_up_bias: np.ndarray | None
    down: Any  # [H, I]
    down_bias: np.ndarray | None


@dataclass(slots=True)
class DecoderWeights:
    embed: Any  # table [V, H], or the packed head when tied
    layers: list[LayerWeights]
    final_norm: np.ndarray  # [H]
    head: Any  # [V, H]


def weight_bytes(c: DecoderConfig, *, f32: bool, quantised: bool = False) -> int:
    """Bytes of all packed matrices of a decoder; quantised: at most, whichever formats they get."""
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    layer = (
        packed_bytes(q + 2 * kv, c.hidden_size, f32=f32, quantised=quantised)
        + packed_bytes(c.hidden_size, q, f32=f32, quantised=quantised)
        + packed_bytes(c.intermediate_size, c.hidden_size, f32=f32, gated=True, quantised=quantised)
        + packed_bytes(c.hidden_size, c.intermediate_size, f32=f32, quantised=quantised)
    )
    embeddings = 1 if c.tie_word_embeddings or not quantised else 2  # an untied table may stay quantised
    return c.num_layers * layer + embeddings * packed_bytes(c.vocab_size, c.hidden_size, f32=f32, quantised=quantised)


def load_layer(loader: WeightLoader, c: DecoderConfig, prefix: str) -> LayerWeights:
    """Read one layer's tensors (Hugging Face names under `prefix`, e.g. "model.layers.0")."""
    q, kv, hidden, inner = (
        c.num_heads * c.head_dim,
        c.num_kv_heads * c.head_dim,
        c.hidden_size,
        c.intermediate_size,
    )
    attn, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"

    def biases(present: bool, *parts: tuple[str, int]) -> np.ndarray | None:
        if not present:
            return None
        return np.concatenate([loader.vector(f"{name}.bias", size) for name, size in parts])

    qkv = [(f"{attn}.q_proj", q), (f"{attn}.k_proj", kv), (f"{attn}.v_proj", kv)]
    gate_up = [(f"{mlp}.gate_proj", inner), (f"{mlp}.up_proj", inner)]
    return LayerWeights(
        input_norm=loader.vector(f"{prefix}.input_layernorm.weight", hidden),
        qkv=loader.packed([(f"{name}.weight", rows) for name, rows in qkv], hidden),
        qkv_bias=biases(c.qkv_bias, *qkv),
        q_norm=loader.vector(f"{attn}.q_norm.weight", c.head_dim) if c.qk_norm else None,
        k_norm=loader.vector(f"{attn}.k_norm.weight", c.head_dim) if c.qk_norm else None,
        output=loader.packed([(f"{attn}.o_proj.weight", hidden)], q),
        output_bias=biases(c.output_bias, (f"{attn}.o_proj", hidden)),
        post_norm=loader.vector(f"{prefix}.post_attention_layernorm.weight", hidden),
        gate_up=loader.packed([(f"{name}.weight", rows) for name, rows in gate_up], hidden, gated=True),
        gate_up_bias=biases(c.mlp_bias, *gate_up),
        down=loader.packed([(f"{mlp}.down_proj.weight", hidden)], inner),
        down_bias=biases(c.mlp_bias, (f"{mlp}.down_proj", hidden)),
    )


def load_decoder(loader: WeightLoader, c: DecoderConfig) -> DecoderWeights:
    """Read a whole decoder. Raises CheckpointError naming a tensor that is missing or misshapen."""
    layers = [load_layer(loader, c, f"model.layers.{i}") for i in range(c.num_layers)]
    embed_name, vocab, hidden = "model.embed_tokens.weight", c.vocab_size, c.hidden_size
    tied = c.tie_word_embeddings
    head = loader.packed([(embed_name if tied else "lm_head.weight", vocab)], hidden)
    embed = head if tied else loader.table(embed_name, vocab, hidden)
    final_norm = loader.vector("model.norm.weight", hidden)
    return DecoderWeights(embed=embed, layers=layers, final_norm=final_norm, head=head)


def declare_buffers(net: Network, c: DecoderConfig) -> None:
    """Row buffers of a decoder: x residual, qkv projections, q and mix attention in and out, act MLP."""
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    net.buffer("x", c.hidden_size)
    net.buffer("qkv", q + 2 * kv)
    net.buffer("q", q, "ACT")
    net.buffer("mix", q, "ACT")
    net.buffer("act", c.intermediate_size, "ACT")


def add_layer(
    net: Network, c: DecoderConfig, w: LayerWeights, index: int, *, causal: bool = True, window: int = 0
) -> None:
    """x += attention(norm(x)); x += mlp(norm(x)). Keys and values go to cache layer `index`."""
    net.linear("x", "qkv", w.qkv, norm=w.input_norm, eps=c.rms_norm_eps, bias=w.qkv_bias)
    add_heads(net, c, w, index, causal=causal, window=window)
    net.linear("mix", "x", w.output, epilogue="ADD", bias=w.output_bias)
    net.linear("x", "act", w.gate_up, epilogue="SWIGLU", norm=w.post_norm, eps=c.rms_norm_eps, bias=w.gate_up_bias)
    net.linear("act", "x", w.down, epilogue="ADD", bias=w.down_bias)


def add_heads(
    net: Network, c: DecoderConfig, w: LayerWeights, index: int, *, causal: bool = True, window: int = 0
) -> None:
    """mix = attention of the projections in "qkv": head norms, rotation, cache write, attention."""
    heads = {"layer": index, "heads": c.num_heads, "kv_heads": c.num_kv_heads, "head_dim": c.head_dim}
    net.qkv_post(
        "qkv",
        "q",
        **heads,
        rotary_dim=c.rope.rotary_dim,
        interleaved=c.rope.interleaved,
        q_norm=w.q_norm,
        k_norm=w.k_norm,
        eps=c.rms_norm_eps,
    )
    net.attention("q", "mix", **heads, scale=c.head_dim**-0.5, causal=causal, window=window)


def build_decoder(net: Network, c: DecoderConfig, w: DecoderWeights, taps: Sequence[int] = ()) -> None:
    """The whole network: tokens -> logits of selected rows, and the residual stream behind the layers in `taps`.

    Taps are columns [i * H, (i + 1) * H) in the order given; -1 is the embedding output.
    """
    hidden = c.hidden_size
    declare_buffers(net, c)
    net.buffer("logits", c.vocab_size, "LOGITS")
    if taps:
        net.buffer("taps", len(taps) * hidden, "TAPS")

    def tap(layer: int) -> None:
        for i, wanted in enumerate(taps):
            if wanted == layer:
                net.copy("x", "taps", hidden, i * hidden)

    net.embed("x", w.embed)
    net.rope(c.rope)
    tap(-1)
    for i, layer in enumerate(w.layers):
        add_layer(net, c, layer, i, window=c.windows[i])
        tap(i)
    net.linear("x", "logits", w.head, norm=w.final_norm, eps=c.rms_norm_eps, selected=True)
