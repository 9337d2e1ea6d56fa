"""Qwen3.5 and Qwen3.6 text models: gated delta nets (arXiv 2412.06464) with every fourth layer gated full attention.

A delta net layer keeps one matrix [key_dim, value_dim] per value head and the last rows of a short convolution instead
of keys and values (native/delta_net.h). Attention layers rotate a part of each head and gate their output. Norms store
their weight less 1, except the one inside the delta net. Shapes are those of transformers 5.24, `Qwen3_5TextConfig`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline import _native
from paceline.models.config import ConfigReader, DecoderConfig, read_decoder
from paceline.models.decoder import DecoderWeights, LayerWeights, add_layer, build_decoder, load_decoder
from paceline.models.network import Network, WeightLoader, packed_bytes

MAX_DELTA_DIM = 256


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """Shape of the delta net layers. Queries and keys have `key_heads` heads, each of which serves the same number of
    consecutive value heads."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys, values."""
        return 2 * self.keys + self.values

    @property
    def mixed(self) -> int:
        """Columns of a layer's input projections: channels, output gate z, and b and a of each value head."""
        return self.channels + self.values + 2 * self.value_heads


@dataclass(frozen=True, slots=True)
class HybridConfig(DecoderConfig):
    """`linear[i]`: layer i is a delta net."""

    delta: DeltaNet = DeltaNet(1, 1, 1, 1, 2)
    linear: tuple[bool, ...] = ()

    @property
    def cache_layers(self) -> tuple[int, ...]:
        """Of each layer: its number in the key/value cache, or in the state cache."""
        seen = [0, 0]
        numbers = []
        for linear in self.linear:
            numbers.append(seen[linear])
            seen[linear] += 1
        return tuple(numbers)

    @property
    def num_linear(self) -> int:
        return sum(self.linear)

    @property
    def num_attention(self) -> int:
        return self.num_layers - self.num_linear


@dataclass(slots=True)
class DeltaWeights:
    """A delta net layer; H hidden, I intermediate, C channels, h value heads."""

    input_norm: np.ndarray  # [H]
    mixed: Any  # [mixed, H]
    conv: np.ndarray  # [kernel, C], oldest row first
    rate: np.ndarray  # [h], -exp(A_log)
    dt_bias: np.ndarray  # [h]
    norm: np.ndarray  # [value_dim]
    output: Any  # [H, values]
    post_norm: np.ndarray  # [H]
    gate_up: Any  # gated [I, H]
    down: Any  # [H, I]


# ---- configuration

FIELDS = (
    "attn_output_gate",
    "full_attention_interval",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_value_head_dim",
    "mtp_num_hidden_layers",
    "mtp_use_dedicated_embeddings",
    "partial_rotary_factor",
)


def read_config(config: dict[str, Any]) -> HybridConfig:
    """Raises ConfigError naming the field, its value and what would do."""
    reader = ConfigReader(config)
    for name, only in (("attn_output_gate", True), ("use_sliding_window", False)):
        if reader.flag(name, only) is not only:
            raise reader.fail(name, f"only {str(only).lower()} is supported for this family")
    plain = {key: value for key, value in config.items() if key not in ("layer_types", "sliding_window")}
    plain.setdefault("head_dim", 256)
    rope = plain.get("rope_parameters") or plain.get("rope_scaling") or {}
    if plain.get("partial_rotary_factor") is None and "partial_rotary_factor" not in rope:
        plain["partial_rotary_factor"] = 0.25
    bias = reader.flag("attention_bias", False)
    base = read_decoder(plain, qkv_bias=bias, output_bias=bias, qk_norm=True)
    delta = DeltaNet(
        key_heads=reader.integer("linear_num_key_heads", 16, most=4096),
        value_heads=reader.integer("linear_num_value_heads", 32, most=4096),
        key_dim=reader.integer("linear_key_head_dim", 128, most=MAX_DELTA_DIM),
        value_dim=reader.integer("linear_value_head_dim", 128, most=MAX_DELTA_DIM),
        kernel=reader.integer("linear_conv_kernel_dim", 4, least=2, most=64),
    )
    if delta.value_heads % delta.key_heads:
        raise reader.fail("linear_num_value_heads", f"must be a multiple of linear_num_key_heads = {delta.key_heads}")
    fields = {f.name: getattr(base, f.name) for f in dataclasses.fields(DecoderConfig)}
    fields["traits"] = dataclasses.replace(base.traits, attention_gate=True, norm_offset=1.0)
    return HybridConfig(**fields, delta=delta, linear=_layer_types(reader, base.num_layers))


def _layer_types(reader: ConfigReader, layers: int) -> tuple[bool, ...]:
    types = reader.config.get("layer_types")
    if types is None:
        every = reader.integer("full_attention_interval", 4)
        types = ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(layers)]
    known = ["linear_attention", "full_attention"]
    if not isinstance(types, list) or len(types) != layers or any(t not in known for t in types):
        raise reader.fail("layer_types", f"must list {layers} of {known}")
    linear = tuple(t == "linear_attention" for t in types)
    if all(linear) or not any(linear):
        raise reader.fail("layer_types", "must have layers of both kinds")
    return linear


# ---- weights


def weight_bytes(c: HybridConfig, *, f32: bool, quantised: bool = False) -> int:
    """Bytes of all packed matrices; quantised: at most, whichever formats they get."""

    def size(n: int, k: int, gated: bool = False) -> int:
        return packed_bytes(n, k, f32=f32, gated=gated, quantised=quantised)

    hidden, q, kv = c.hidden_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    mlp = size(c.intermediate_size, hidden, gated=True) + size(hidden, c.intermediate_size)
    delta = size(c.delta.mixed, hidden) + size(hidden, c.delta.values)
    attention = size(2 * q + 2 * kv, hidden) + size(hidden, q)
    embeddings = 1 if c.tie_word_embeddings or not quantised else 2  # an untied table may stay quantised
    layers = c.num_layers * mlp + c.num_linear * delta + c.num_attention * attention
    return layers + embeddings * size(c.vocab_size, hidden)


def load(loader: WeightLoader, c: HybridConfig) -> DecoderWeights:
    """Read a whole model. Raises CheckpointError naming a tensor that is missing or misshapen."""
    return load_decoder(loader, c, _load_layer)


def _load_layer(loader: WeightLoader, c: HybridConfig, prefix: str, index: int) -> Any:
    return (_load_delta if c.linear[index] else load_attention)(loader, c, prefix)


def _norm(loader: WeightLoader, c: HybridConfig, name: str, size: int) -> np.ndarray:
    return loader.vector(name, size) + np.float32(c.traits.norm_offset)


def _mlp(loader: WeightLoader, c: HybridConfig, prefix: str) -> dict[str, Any]:
    hidden, inner = c.hidden_size, c.intermediate_size
    return {
        "post_norm": _norm(loader, c, f"{prefix}.post_attention_layernorm.weight", hidden),
        "gate_up": loader.packed(
            [(f"{prefix}.mlp.{n}_proj.weight", inner) for n in ("gate", "up")], hidden, gated=True
        ),
        "down": loader.packed([(f"{prefix}.mlp.down_proj.weight", hidden)], inner),
    }


def _load_delta(loader: WeightLoader, c: HybridConfig, prefix: str) -> DeltaWeights:
    d, at = c.delta, f"{prefix}.linear_attn"
    parts = [("qkv", d.channels), ("z", d.values), ("b", d.value_heads), ("a", d.value_heads)]
    conv = loader.array(f"{at}.conv1d.weight", (d.channels, 1, d.kernel))
    return DeltaWeights(
        input_norm=_norm(loader, c, f"{prefix}.input_layernorm.weight", c.hidden_size),
        mixed=loader.packed([(f"{at}.in_proj_{name}.weight", rows) for name, rows in parts], c.hidden_size),
        conv=np.ascontiguousarray(conv[:, 0].T, np.float32),
        rate=-np.exp(loader.vector(f"{at}.A_log", d.value_heads)),
        dt_bias=loader.vector(f"{at}.dt_bias", d.value_heads),
        norm=loader.vector(f"{at}.norm.weight", d.value_dim),
        output=loader.packed([(f"{at}.out_proj.weight", c.hidden_size)], d.values),
        **_mlp(loader, c, prefix),
    )


def load_attention(loader: WeightLoader, c: HybridConfig, prefix: str) -> LayerWeights:
    """An attention layer. q_proj holds query and gate of each head in turn; packed, gates come behind the values."""
    q, kv, hidden, at = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.hidden_size, f"{prefix}.self_attn"
    rows = np.arange(2 * q).reshape(c.num_heads, 2, c.head_dim)
    queries, gates = rows[:, 0].reshape(-1), rows[:, 1].reshape(-1)
    qkv_bias = output_bias = None
    if c.qkv_bias:
        both = loader.vector(f"{at}.q_proj.bias", 2 * q)
        key, value = (loader.vector(f"{at}.{n}_proj.bias", kv) for n in "kv")
        qkv_bias = np.concatenate([both[queries], key, value, both[gates]])
    if c.output_bias:
        output_bias = loader.vector(f"{at}.o_proj.bias", hidden)
    mlp = _mlp(loader, c, prefix)
    return LayerWeights(
        input_norm=_norm(loader, c, f"{prefix}.input_layernorm.weight", hidden),
        qkv=loader.packed_rows(
            [
                (f"{at}.q_proj.weight", 2 * q, queries),
                (f"{at}.k_proj.weight", kv, None),
                (f"{at}.v_proj.weight", kv, None),
                (f"{at}.q_proj.weight", 2 * q, gates),
            ],
            hidden,
        ),
        qkv_bias=qkv_bias,
        q_norm=_norm(loader, c, f"{at}.q_norm.weight", c.head_dim),
        k_norm=_norm(loader, c, f"{at}.k_norm.weight", c.head_dim),
        output=loader.packed([(f"{at}.o_proj.weight", hidden)], q),
        output_bias=output_bias,
        gate_up_bias=None,
        down_bias=None,
        **mlp,
    )


# ---- network


def build(net: Network, c: HybridConfig, w: DecoderWeights, taps: Sequence[int] = ()) -> None:
    """The whole network, as `build_decoder` describes it."""
    net.buffer("mixed", c.delta.mixed)
    net.buffer("rows", c.delta.channels)
    net.buffer("values", c.delta.values, "ACT")
    build_decoder(net, c, w, taps, _add_layer)


def _add_layer(net: Network, c: HybridConfig, w: Any, index: int, *, window: int) -> None:
    if not isinstance(w, DeltaWeights):
        add_layer(net, c, w, c.cache_layers[index], window=window)
        return
    _add_delta(net, c, w, c.cache_layers[index])
    net.linear("x", "act", w.gate_up, epilogue="SWIGLU", norm=w.post_norm, eps=c.rms_norm_eps)
    net.linear("act", "x", w.down, epilogue="ADD")


def _add_delta(net: Network, c: HybridConfig, w: DeltaWeights, index: int) -> None:
    d, eps = c.delta, c.rms_norm_eps
    net.linear("x", "mixed", w.mixed, norm=w.input_norm, eps=eps)
    net.short_conv("mixed", "rows", layer=index, weight=w.conv, heads=d.value_heads, head_dim=d.value_dim)
    net.delta_rule(
        "mixed",
        "rows",
        "values",
        layer=index,
        channels=d.channels,
        kernel=d.kernel,
        rate=w.rate,
        dt_bias=w.dt_bias,
        norm=w.norm,
        eps=eps,
    )
    net.linear("values", "x", w.output, epilogue="ADD")


def new_states(c: HybridConfig, pool: Any, slots: int, journal_rows: int) -> _native.StateCache:
    """States of `slots` sequences, and a journal of so many rows per pass; memory is taken as it is first used."""
    d = c.delta
    return _native.StateCache(
        pool, c.num_linear, d.key_heads, d.value_heads, d.key_dim, d.value_dim, d.kernel, slots, journal_rows
    )
