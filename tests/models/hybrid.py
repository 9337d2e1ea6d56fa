"""Tiny Qwen3.5 models with awkward sizes, and the network in plain numpy, fp64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .reference import Output, Reference, Tensors, attention, rms_norm, rotate, silu, visible
from .tiny import write, write_tokenizer


@dataclass(frozen=True, slots=True)
class HybridShape:
    """`full`: layers with attention; the others are delta nets."""

    vocab: int = 120
    hidden: int = 40
    inner: int = 56
    layers: int = 3
    full: tuple[int, ...] = (1,)
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    key_heads: int = 2
    value_heads: int = 4
    key_dim: int = 18
    value_dim: int = 20
    kernel: int = 4
    rotated: float = 0.25
    bias: bool = False
    tied: bool = False
    context: int = 512
    sharp: float = 1.5
    seed: int = 0

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


def config_of(s: HybridShape) -> dict[str, Any]:
    """config.json as transformers 5.24 writes it for a text-only checkpoint."""
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "vocab_size": s.vocab,
        "hidden_size": s.hidden,
        "intermediate_size": s.inner,
        "num_hidden_layers": s.layers,
        "layer_types": ["full_attention" if i in s.full else "linear_attention" for i in range(s.layers)],
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "linear_num_key_heads": s.key_heads,
        "linear_num_value_heads": s.value_heads,
        "linear_key_head_dim": s.key_dim,
        "linear_value_head_dim": s.value_dim,
        "linear_conv_kernel_dim": s.kernel,
        "hidden_act": "silu",
        "attention_bias": s.bias,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": s.context,
        "tie_word_embeddings": s.tied,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": s.rotated,
            "mrope_section": [1, 1, 0],
            "mrope_interleaved": True,
        },
        "eos_token_id": s.vocab - 1,
        "dtype": "float32",
    }


def tensors_of(s: HybridShape) -> Tensors:
    """Every tensor, Hugging Face names, fp32; gates such that some heads forget fast and others hardly."""
    rng = np.random.default_rng(s.seed)

    def matrix(n: int, k: int, scale: float = 1.0) -> np.ndarray:
        return rng.normal(0, scale / np.sqrt(k), (n, k)).astype(np.float32)

    def vector(n: int, low: float, high: float) -> np.ndarray:
        return rng.uniform(low, high, n).astype(np.float32)

    q, kv, values = s.heads * s.head_dim, s.kv_heads * s.head_dim, s.value_heads * s.value_dim
    out: Tensors = {"model.embed_tokens.weight": rng.normal(0, 0.5, (s.vocab, s.hidden)).astype(np.float32)}
    for i in range(s.layers):
        at = f"model.layers.{i}"
        out[f"{at}.input_layernorm.weight"] = vector(s.hidden, -0.4, 0.4)
        out[f"{at}.post_attention_layernorm.weight"] = vector(s.hidden, -0.4, 0.4)
        out |= {f"{at}.mlp.{n}_proj.weight": matrix(s.inner, s.hidden) for n in ("gate", "up")}
        out[f"{at}.mlp.down_proj.weight"] = matrix(s.hidden, s.inner, 1.5)
        if i in s.full:
            attn = f"{at}.self_attn"
            out |= {f"{attn}.{n}_norm.weight": vector(s.head_dim, -0.4, 0.4) for n in "qk"}
            for name, rows, columns in (("q", 2 * q, s.hidden), ("k", kv, s.hidden), ("v", kv, s.hidden)):
                out[f"{attn}.{name}_proj.weight"] = matrix(rows, columns, 1.5)
            out[f"{attn}.o_proj.weight"] = matrix(s.hidden, q)
            if s.bias:
                for name, rows in (("q", 2 * q), ("k", kv), ("v", kv), ("o", s.hidden)):
                    out[f"{attn}.{name}_proj.bias"] = vector(rows, -0.3, 0.3)
        else:
            delta = f"{at}.linear_attn"
            for name, rows in (("qkv", s.channels), ("z", values), ("b", s.value_heads), ("a", s.value_heads)):
                out[f"{delta}.in_proj_{name}.weight"] = matrix(rows, s.hidden, 1.5)
            out[f"{delta}.conv1d.weight"] = rng.normal(0, 0.6, (s.channels, 1, s.kernel)).astype(np.float32)
            out[f"{delta}.A_log"] = np.log(vector(s.value_heads, 0.01, 3.0))
            out[f"{delta}.dt_bias"] = vector(s.value_heads, -3.0, 1.0)
            out[f"{delta}.norm.weight"] = vector(s.value_dim, 0.6, 1.4)
            out[f"{delta}.out_proj.weight"] = matrix(s.hidden, values, 1.5)
    out["model.norm.weight"] = (1 + vector(s.hidden, -0.4, 0.4)) * np.float32(s.sharp) - 1
    if not s.tied:
        out["lm_head.weight"] = matrix(s.vocab, s.hidden)
    return out


def write_hybrid(folder: Path, s: HybridShape, *, tokenizer: bool = False) -> Path:
    write(folder, config_of(s), tensors_of(s))
    if tokenizer:
        write_tokenizer(folder, s.vocab)
    return folder


class HybridReference(Reference):
    """Qwen3.5 by its equations: the delta rule as a product with (I - beta k k^T), token by token."""

    def __init__(self, config: dict[str, Any], tensors: Tensors) -> None:
        super().__init__({**config, "layer_types": []}, tensors)
        self.kinds = config["layer_types"]

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return rms_norm(x, 1 + self.w[f"{name}.weight"], self.eps)

    def mlp(self, x: np.ndarray, prefix: str) -> np.ndarray:
        h = self.norm(x, f"{prefix}.post_attention_layernorm")
        gate, up = self.linear(h, f"{prefix}.mlp.gate_proj"), self.linear(h, f"{prefix}.mlp.up_proj")
        return self.linear(silu(gate) * up, f"{prefix}.mlp.down_proj")

    def gated_attention(self, h: np.ndarray, prefix: str) -> np.ndarray:
        at, n = np.arange(len(h)), len(h)
        both = self.linear(h, f"{prefix}.q_proj").reshape(n, self.heads, 2, self.head_dim)
        k = self.linear(h, f"{prefix}.k_proj").reshape(n, -1, self.head_dim)
        v = self.linear(h, f"{prefix}.v_proj").reshape(n, -1, self.head_dim)
        q = rotate(self.norm(both[:, :, 0], f"{prefix}.q_norm"), at, self.frequencies)
        k = rotate(self.norm(k, f"{prefix}.k_norm"), at, self.frequencies)
        mix = attention(q, k, v, visible(at, at)) / (1 + np.exp(-both[:, :, 1]))
        return self.linear(mix.reshape(n, -1), f"{prefix}.o_proj")

    def delta_net(self, h: np.ndarray, prefix: str) -> np.ndarray:
        c, n = self.config, len(h)
        key_heads, heads = c["linear_num_key_heads"], c["linear_num_value_heads"]
        dk, dv, kernel = c["linear_key_head_dim"], c["linear_value_head_dim"], c["linear_conv_kernel_dim"]
        x = self.linear(h, f"{prefix}.in_proj_qkv")
        padded = np.concatenate([np.zeros((kernel - 1, x.shape[1])), x])
        weight = self.w[f"{prefix}.conv1d.weight"][:, 0]
        x = silu(np.stack([(padded[i : i + kernel].T * weight).sum(1) for i in range(n)]))
        q, k, v = np.split(x, [key_heads * dk, 2 * key_heads * dk], axis=1)
        q, k = (np.repeat(t.reshape(n, key_heads, dk), heads // key_heads, axis=1) for t in (q, k))
        q, k = (t / np.sqrt((t**2).sum(-1, keepdims=True) + 1e-6) for t in (q, k))
        v = v.reshape(n, heads, dv)
        beta = 1 / (1 + np.exp(-self.linear(h, f"{prefix}.in_proj_b")))
        step = np.log1p(np.exp(self.linear(h, f"{prefix}.in_proj_a") + self.w[f"{prefix}.dt_bias"]))
        decay = np.exp(-np.exp(self.w[f"{prefix}.A_log"]) * step)
        out = np.empty((n, heads, dv))
        for head in range(heads):
            state = np.zeros((dk, dv))
            for t in range(n):
                key, b = k[t, head], beta[t, head]
                state = decay[t, head] * (np.eye(dk) - b * np.outer(key, key)) @ state + b * np.outer(key, v[t, head])
                out[t, head] = state.T @ q[t, head] / np.sqrt(dk)
        z = self.linear(h, f"{prefix}.in_proj_z").reshape(n, heads, dv)
        out = rms_norm(out, self.w[f"{prefix}.norm.weight"], self.eps) * silu(z)
        return self.linear(out.reshape(n, -1), f"{prefix}.out_proj")

    def forward(self, tokens: Sequence[int]) -> Output:
        x = self.w["model.embed_tokens.weight"][list(tokens)]
        out = Output(np.empty(0), {-1: x}, [], [])
        for i, kind in enumerate(self.kinds):
            prefix = f"model.layers.{i}"
            h = self.norm(x, f"{prefix}.input_layernorm")
            if kind == "full_attention":
                x = x + self.gated_attention(h, f"{prefix}.self_attn")
            else:
                x = x + self.delta_net(h, f"{prefix}.linear_attn")
            x = x + self.mlp(x, prefix)
            out.taps[i] = x
        head = "lm_head" if "lm_head.weight" in self.w else "model.embed_tokens"
        out.logits = self.linear(self.norm(x, "model.norm"), head)
        return out
