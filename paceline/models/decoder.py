"""The decoder that all families share: weights and plan. `traits.py` says what it has beyond Llama's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from paceline.models.config import DecoderConfig
from paceline.models.experts import ExpertWeights, add_experts, expert_bytes, load_experts
from paceline.models.network import Network, WeightLoader, packed_bytes


@dataclass(slots=True)
class LayerWeights:
    """One decoder layer; H hidden, q = heads * head_dim, kv = kv_heads * head_dim, I intermediate."""

    input_norm: np.ndarray  # [H]
    qkv: Any  # [q + 2 kv, H], and q rows more for an attention gate
    qkv_bias: np.ndarray | None
    q_norm: np.ndarray | None  # [head_dim]
    k_norm: np.ndarray | None
    output: Any  # [H, q]
    output_bias: np.ndarray | None
    post_norm: np.ndarray  # [H], before the MLP
    gate_up: Any  # gated [I, H]; None in a sparse layer, as `down`
    gate_up_bias: np.ndarray | None
    down: Any  # [H, I]
    down_bias: np.ndarray | None
    attention_out_norm: np.ndarray | None = None  # [H]: traits.branch_norm_eps
    mlp_out_norm: np.ndarray | None = None  # [H]
    experts: ExpertWeights | None = None


@dataclass(slots=True)
class DecoderWeights:
    embed: Any  # table [V, H], or the packed head when tied
    layers: list[LayerWeights]
    final_norm: np.ndarray  # [H]
    head: Any  # [V, H]


def weight_bytes(c: DecoderConfig, *, f32: bool, quantised: bool = False) -> int:
    """Bytes of all packed matrices of a decoder; quantised: at most, whichever formats they get."""
    q, kv, t = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.traits
    size = functools.partial(packed_bytes, f32=f32, quantised=quantised)
    attention = size(q + 2 * kv + (q if t.attention_gate else 0), c.hidden_size) + size(c.hidden_size, q)
    dense = size(c.intermediate_size, c.hidden_size, gated=True) + size(c.hidden_size, c.intermediate_size)
    sparse = expert_bytes(t.experts, c.hidden_size, f32=f32, quantised=quantised) if t.experts else 0
    mlps = sum(sparse if t.is_sparse(i) else dense for i in range(c.num_layers))
    embeddings = 1 if c.tie_word_embeddings or not quantised else 2  # an untied table may stay quantised
    return c.num_layers * attention + mlps + embeddings * size(c.vocab_size, c.hidden_size)


def load_layer(loader: WeightLoader, c: DecoderConfig, prefix: str, index: int | None = None) -> LayerWeights:
    """Read one layer's tensors (Hugging Face names under `prefix`, e.g. "model.layers.0").

    index: of a target's layer, since sparse and dense ones may take turns.
    """
    q, kv, hidden, inner, t = (
        c.num_heads * c.head_dim,
        c.num_kv_heads * c.head_dim,
        c.hidden_size,
        c.intermediate_size,
        c.traits,
    )
    attn, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"

    def biases(present: bool, *parts: tuple[str, int]) -> np.ndarray | None:
        if not present:
            return None
        return np.concatenate([loader.vector(f"{name}.bias", size) for name, size in parts])

    def norm(name: str, size: int = hidden) -> np.ndarray:
        return loader.vector(f"{name}.weight", size) + np.float32(t.norm_offset)

    def head_norm(which: str) -> np.ndarray | None:
        if t.head_norm_scale is not None:
            return np.full(c.head_dim, t.head_norm_scale if which == "q" else 1.0, np.float32)
        return norm(f"{attn}.{which}_norm", c.head_dim) if c.qk_norm else None

    branches = t.branch_norm_eps is not None
    after = f"{prefix}.post_attention_layernorm"  # of attention's output where branches have norms, else before the MLP
    before = f"{prefix}.pre_feedforward_layernorm" if branches else after
    qkv = [(f"{attn}.q_proj", q), (f"{attn}.k_proj", kv), (f"{attn}.v_proj", kv)]
    stacked = qkv + ([(f"{attn}.gate_proj", q)] if t.attention_gate else [])
    gate_up = [(f"{mlp}.gate_proj", inner), (f"{mlp}.up_proj", inner)]
    sparse = t.is_sparse(index)
    return LayerWeights(
        input_norm=norm(f"{prefix}.input_layernorm"),
        qkv=loader.packed([(f"{name}.weight", rows) for name, rows in stacked], hidden),
        qkv_bias=biases(c.qkv_bias, *qkv),
        q_norm=head_norm("q"),
        k_norm=head_norm("k"),
        output=loader.packed([(f"{attn}.o_proj.weight", hidden)], q),
        output_bias=biases(c.output_bias, (f"{attn}.o_proj", hidden)),
        post_norm=norm(before),
        gate_up=None if sparse else loader.packed([(f"{n}.weight", rows) for n, rows in gate_up], hidden, gated=True),
        gate_up_bias=biases(c.mlp_bias, *gate_up),
        down=None if sparse else loader.packed([(f"{mlp}.down_proj.weight", hidden)], inner),
        down_bias=biases(c.mlp_bias, (f"{mlp}.down_proj", hidden)),
        attention_out_norm=norm(after) if branches else None,
        mlp_out_norm=norm(f"{prefix}.post_feedforward_layernorm") if branches else None,
        experts=load_experts(loader, t.experts, mlp, hidden) if sparse and t.experts else None,
    )


def load_decoder(
    loader: WeightLoader, c: DecoderConfig, layer: Callable[[WeightLoader, Any, str, int], Any] = load_layer
) -> DecoderWeights:
    """Read a whole decoder, its layers by `layer`. Raises CheckpointError naming a tensor that is missing or of another
    shape."""
    layers = [layer(loader, c, f"model.layers.{i}", i) for i in range(c.num_layers)]
    embed_name, vocab, hidden = "model.embed_tokens.weight", c.vocab_size, c.hidden_size
    tied = c.tie_word_embeddings
    head = loader.packed([(embed_name if tied else "lm_head.weight", vocab)], hidden)
    embed = head if tied else loader.table(embed_name, vocab, hidden)
    final_norm = np.ones(hidden, np.float32)
    if c.traits.final_norm_weight:
        final_norm = loader.vector("model.norm.weight", hidden) + np.float32(c.traits.norm_offset)
    return DecoderWeights(embed=embed, layers=layers, final_norm=final_norm, head=head)


def declare_buffers(net: Network, c: DecoderConfig) -> None:
    """Row buffers of a decoder: x residual, qkv projections, q and mix attention in and out, act MLP, branch what an
    attention or MLP adds where that has a norm of its own, router the experts' logits."""
    q, kv, t = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.traits
    net.buffer("x", c.hidden_size)
    net.buffer("qkv", q + 2 * kv + (q if t.attention_gate else 0))
    if t.branch_norm_eps is not None:
        net.buffer("branch", c.hidden_size)
    if t.experts is not None:
        net.buffer("router", t.experts.count)
    net.buffer("q", q, "ACT")
    net.buffer("mix", q, "ACT")
    net.buffer("act", c.intermediate_size, "ACT")


def add_layer(
    net: Network,
    c: DecoderConfig,
    w: LayerWeights,
    index: int,
    *,
    causal: bool = True,
    window: int = 0,
    first_key: int = 0,
) -> None:
    """x += attention(norm(x)); x += mlp(norm(x)). Keys and values go to cache layer `index`; those before position
    `first_key` are not looked at."""
    t = c.traits
    net.linear("x", "qkv", w.qkv, norm=w.input_norm, eps=c.rms_norm_eps, bias=w.qkv_bias)
    add_heads(net, c, w, index, causal=causal, window=window, first_key=first_key)
    if t.attention_gate:
        width = c.num_heads * c.head_dim
        net.gate("qkv", "mix", width, width + 2 * c.num_kv_heads * c.head_dim)
    _add_branch(net, c, "mix", w.output, w.output_bias, w.attention_out_norm)
    if w.experts is not None:
        assert t.experts is not None
        add_experts(net, t.experts, w.experts, norm=w.post_norm, eps=c.rms_norm_eps)
        return
    epilogue = "SWIGLU" if t.activation == "silu" else "GELU_TANH"
    net.linear("x", "act", w.gate_up, epilogue=epilogue, norm=w.post_norm, eps=c.rms_norm_eps, bias=w.gate_up_bias)
    _add_branch(net, c, "act", w.down, w.down_bias, w.mlp_out_norm)


def _add_branch(
    net: Network, c: DecoderConfig, source: str, weight: Any, bias: np.ndarray | None, norm: np.ndarray | None
) -> None:
    """x += weight source, through a norm if there is one."""
    if norm is None:
        net.linear(source, "x", weight, epilogue="ADD", bias=bias)
        return
    eps = c.traits.branch_norm_eps
    assert eps is not None
    net.linear(source, "branch", weight, bias=bias)
    net.norm("branch", "x", norm, eps, add=True)


def add_heads(
    net: Network,
    c: DecoderConfig,
    w: LayerWeights,
    index: int,
    *,
    causal: bool = True,
    window: int = 0,
    first_key: int = 0,
) -> None:
    """mix = attention of the projections in "qkv": head norms, rotation, cache write, attention."""
    t = c.traits
    heads = {"layer": index, "heads": c.num_heads, "kv_heads": c.num_kv_heads, "head_dim": c.head_dim}
    local = t.local_rope is not None and window > 0
    rope = t.local_rope if local and t.local_rope is not None else c.rope
    rotated = not (t.unrotated and t.unrotated[index])
    net.qkv_post(
        "qkv",
        "q",
        rope="_local" if local else "",
        **heads,
        rotary_dim=rope.rotary_dim if rotated else 0,
        interleaved=rope.interleaved,
        q_norm=w.q_norm,
        k_norm=w.k_norm,
        eps=c.rms_norm_eps,
    )
    scale = c.head_dim**-0.5 if t.attention_scale is None else t.attention_scale
    seen: dict[str, Any] = {"causal": causal, "window": window, "first_key": first_key}
    net.attention("q", "mix", **heads, scale=scale, softcap=t.attention_softcap, **seen)


def build_decoder(
    net: Network, c: DecoderConfig, w: DecoderWeights, taps: Sequence[int] = (), add: Callable[..., None] = add_layer
) -> None:
    """The whole network: tokens -> logits of selected rows, and the residual stream behind the layers in `taps`; layers
    as `add` has them.

    Taps are columns [i * H, (i + 1) * H) in the order given; -1 is the embedding output.
    """
    hidden, t = c.hidden_size, c.traits
    declare_buffers(net, c)
    net.buffer("logits", c.vocab_size, "LOGITS")
    if taps:
        net.buffer("taps", len(taps) * hidden, "TAPS")

    def tap(layer: int) -> None:
        for i, wanted in enumerate(taps):
            if wanted == layer:
                net.copy("x", "taps", hidden, i * hidden)

    # a scale is of the weights' type, as families that have one were trained
    net.embed("x", w.embed, t.embedding_scale if net.f32 else _bfloat16(t.embedding_scale))
    if t.embedding_norm:
        net.norm("x", "x", np.ones(hidden, np.float32), c.rms_norm_eps)
    net.rope(c.rope)
    if t.local_rope is not None:
        net.rope(t.local_rope, "_local")
    tap(-1)
    for i, layer in enumerate(w.layers):
        add(net, c, layer, i, window=c.windows[i])
        tap(i)
    net.linear("x", "logits", w.head, norm=w.final_norm, eps=c.rms_norm_eps, selected=True)
    if t.logit_scale != 1.0 or t.logit_softcap:
        net.softcap("logits", c.vocab_size, t.logit_scale, t.logit_softcap)


def _bfloat16(value: float) -> float:
    return float(np.float32(value).astype(ml_dtypes.bfloat16))
