"""The networks in plain numpy, fp64: slow, short, and written from their definitions, not from the engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

Tensors = dict[str, np.ndarray]


def bf16(x: np.ndarray) -> np.ndarray:
    """Rounded to bfloat16, as fp64."""
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def exact(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, np.float64)


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def inverse_frequencies(head_dim: int, config: dict[str, Any]) -> np.ndarray:
    """[rotary_dim / 2] of a config in either style."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = scaling.get("rope_theta", config.get("rope_theta", 10000.0))
    dim = int(head_dim * scaling.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)))
    frequencies = theta ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "linear":
        return frequencies / scaling["factor"]
    if kind == "llama3":
        return np.array([_llama3(f, scaling) for f in frequencies])
    if kind == "yarn":
        return _yarn(frequencies, theta, scaling)
    assert kind == "default", kind
    return frequencies


def rotation_scale(config: dict[str, Any]) -> float:
    """What cosines and sines are multiplied by."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if scaling.get("rope_type", scaling.get("type")) != "yarn":
        return 1.0
    return scaling.get("attention_factor", 1.0 + 0.1 * math.log(scaling["factor"]))


def _yarn(frequencies: np.ndarray, theta: float, scaling: dict[str, Any]) -> np.ndarray:
    """YaRN (arXiv 2309.00071), pair by pair: how far each is between the pairs that turn beta_fast and beta_slow times
    within the original context."""
    out, n = [], len(frequencies)

    def pair(turns: float) -> float:
        return n * math.log(scaling["original_max_position_embeddings"] / (2 * math.pi * turns), theta)

    first, last = pair(scaling.get("beta_fast", 32)), pair(scaling.get("beta_slow", 1))
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * n - 1)
    for i, frequency in enumerate(frequencies):
        slowed = min(1.0, max(0.0, (i - first) / max(last - first, 1e-3)))
        out.append(slowed * frequency / scaling["factor"] + (1 - slowed) * frequency)
    return np.array(out)


def _llama3(frequency: float, scaling: dict[str, Any]) -> float:
    """Llama 3.1: keep what turns often within the original context, slow down what does not complete a turn."""
    turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    share = min(1.0, max(0.0, (turns - low) / (high - low)))
    return (1 - share) * frequency / scaling["factor"] + share * frequency


def rotate(
    x: np.ndarray, positions: np.ndarray, frequencies: np.ndarray, *, interleaved: bool = False, scale: float = 1.0
) -> np.ndarray:
    """x [n, heads, head_dim]; the first 2 * len(frequencies) dimensions turn."""
    half = len(frequencies)
    angle = positions[:, None, None] * frequencies
    first = np.arange(half) * 2 if interleaved else np.arange(half)
    second = first + (1 if interleaved else half)
    out = x.copy()
    cos, sin = scale * np.cos(angle), scale * np.sin(angle)
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., second] * cos + x[..., first] * sin
    return out


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    allowed: np.ndarray,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
) -> np.ndarray:
    """q [n, heads, d], k and v [m, kv_heads, d], allowed [n, m] -> [n, heads, d]."""
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("nhd,mhd->hnm", q, k) * (q.shape[2] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    scores = np.where(allowed, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hnm,mhd->nhd", weights / weights.sum(-1, keepdims=True), v)


def visible(queries: np.ndarray, keys: np.ndarray, *, causal: bool = True, window: int = 0) -> np.ndarray:
    """allowed [n, m] for absolute positions; a window counts the query itself, on both sides when not causal."""
    distance = queries[:, None] - keys[None]
    seen = distance >= 0 if causal else np.ones(distance.shape, bool)
    return seen & (np.abs(distance) < window) if window else seen


@dataclass
class Output:
    """logits [n, V]; taps: residual stream, -1 = embedding; keys, values per layer [n, kv_heads, head_dim]."""

    logits: np.ndarray
    taps: dict[int, np.ndarray]
    keys: list[np.ndarray]
    values: list[np.ndarray]


class Reference:
    """A decoder from config and tensors. half: rows, weights and cache rounded to bf16 where the engine rounds them."""

    def __init__(self, config: dict[str, Any], tensors: Tensors, *, half: bool = False) -> None:
        self.config = config
        self.round = bf16 if half else exact
        matrices = {name for name in tensors if tensors[name].ndim == 2}
        self.w = {name: (self.round if name in matrices else exact)(value) for name, value in tensors.items()}
        self.eps = config["rms_norm_eps"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim = config["head_dim"]
        self.frequencies = inverse_frequencies(self.head_dim, config)
        self.rotation_scale = rotation_scale(config)
        self.interleaved = config.get("rope_is_neox_style", config.get("is_neox_style")) is False
        kinds = config.get("layer_types") or []
        self.windows = [config["sliding_window"] if k == "sliding_attention" else 0 for k in kinds]
        self.windows = self.windows or [0] * config["num_hidden_layers"]

    def linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return self.round(x) @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", 0.0)

    def project(self, x: np.ndarray, prefix: str, positions: np.ndarray, which: str) -> np.ndarray:
        """q, k or v [n, heads, head_dim] of normed rows, with head norm and rope."""
        out = self.linear(x, f"{prefix}.self_attn.{which}_proj").reshape(len(x), -1, self.head_dim)
        if which == "v":
            return self.round(out)
        norm = self.w.get(f"{prefix}.self_attn.{which}_norm.weight")
        out = out if norm is None else rms_norm(out, norm, self.eps)
        return self.round(
            rotate(out, positions, self.frequencies, interleaved=self.interleaved, scale=self.rotation_scale)
        )

    def mlp(self, x: np.ndarray, prefix: str) -> np.ndarray:
        h = rms_norm(x, self.w[f"{prefix}.post_attention_layernorm.weight"], self.eps)
        gate, up = self.linear(h, f"{prefix}.mlp.gate_proj"), self.linear(h, f"{prefix}.mlp.up_proj")
        return self.linear(silu(gate) * up, f"{prefix}.mlp.down_proj")

    def forward(self, tokens: Sequence[int]) -> Output:
        at = np.arange(len(tokens))
        x = self.w["model.embed_tokens.weight"][list(tokens)]
        out = Output(np.empty(0), {-1: x}, [], [])
        for i, window in enumerate(self.windows):
            prefix = f"model.layers.{i}"
            h = rms_norm(x, self.w[f"{prefix}.input_layernorm.weight"], self.eps)
            q, k, v = (self.project(h, prefix, at, which) for which in "qkv")
            mix = attention(q, k, v, visible(at, at, window=window)).reshape(len(x), -1)
            x = x + self.linear(mix, f"{prefix}.self_attn.o_proj")
            x = x + self.mlp(x, prefix)
            out.taps[i] = x
            out.keys.append(k)
            out.values.append(v)
        head = "lm_head" if "lm_head.weight" in self.w else "model.embed_tokens"
        out.logits = self.linear(rms_norm(x, self.w["model.norm.weight"], self.eps), head)
        return out


class DrafterReference(Reference):
    """A DFlash drafter: blocks of masks that read the target's taps (methods: arXiv 2602.06036)."""

    def __init__(self, config: dict[str, Any], tensors: Tensors, target: Reference) -> None:
        super().__init__(config, tensors)
        self.target = target
        self.settings = {**config, **(config.get("dflash_config") or {})}
        kinds = [config.get("is_causal"), (config.get("dflash_config") or {}).get("causal")]
        stated = next((c for c in kinds if c is not None), None)
        self.causal = [w > 0 if stated is None else bool(stated) for w in self.windows]

    def draft_logits(self, taps: np.ndarray, anchor: int, drafts: int) -> np.ndarray:
        """Logits [drafts, V] of the mask slots behind `anchor`, whose position is len(taps)."""
        return self.head_logits(self.block(taps, anchor, drafts + 1)[1:])

    def head_logits(self, hidden: np.ndarray) -> np.ndarray:
        """Logits of slots [n, H] behind the final norm, with multiplier and cap."""
        head = self.w.get("lm_head.weight", self.target.w.get("lm_head.weight"))
        head = self.target.w["model.embed_tokens.weight"] if head is None else head
        logits = hidden @ head.T * self.settings.get("output_multiplier", 1.0)
        cap = self.settings.get("final_logit_softcapping", 0.0)
        return cap * np.tanh(logits / cap) if cap else logits

    def mix_input(self, y: np.ndarray, name: str) -> np.ndarray:
        """What a sublayer reads of its normed rows."""
        return y

    def mix_output(self, y: np.ndarray, out: np.ndarray, name: str) -> np.ndarray:
        """What a sublayer adds, given its normed rows and its output."""
        return out

    def block(self, taps: np.ndarray, anchor: int, slots: int) -> np.ndarray:
        """Hidden states [slots, H] behind the final norm of [anchor, mask, ...]; the anchor's position is len(taps)."""
        n = len(taps)
        context_at, block_at = np.arange(n), np.arange(n, n + slots)
        context = rms_norm(self.linear(taps, "fc"), self.w["hidden_norm.weight"], self.eps)
        embedding = self.w.get("embed_tokens.weight", self.target.w["model.embed_tokens.weight"])
        x = embedding[[anchor] + [self.settings["mask_token_id"]] * (slots - 1)]
        x = x * self.settings.get("input_embedding_scale", 1.0)
        keys_at = np.concatenate([context_at, block_at])
        for i, window in enumerate(self.windows):
            prefix = f"layers.{i}"
            y = rms_norm(x, self.w[f"{prefix}.input_layernorm.weight"], self.eps)
            h = self.mix_input(y, f"{prefix}.attention_conv")
            q = self.project(h, prefix, block_at, "q")
            k, v = (
                np.concatenate([self.project(context, prefix, context_at, w), self.project(h, prefix, block_at, w)])
                for w in "kv"
            )
            seen = visible(block_at, keys_at, causal=self.causal[i], window=window)
            out = self.linear(attention(q, k, v, seen).reshape(len(x), -1), f"{prefix}.self_attn.o_proj")
            x = x + self.mix_output(y, out, f"{prefix}.attention_conv")
            y = rms_norm(x, self.w[f"{prefix}.post_attention_layernorm.weight"], self.eps)
            h = self.mix_input(y, f"{prefix}.mlp_conv")
            gate, up = self.linear(h, f"{prefix}.mlp.gate_proj"), self.linear(h, f"{prefix}.mlp.up_proj")
            x = x + self.mix_output(y, self.linear(silu(gate) * up, f"{prefix}.mlp.down_proj"), f"{prefix}.mlp_conv")
        return rms_norm(x, self.w["norm.weight"], self.eps)
