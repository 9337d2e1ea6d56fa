"""The target model in PyTorch: a plain Llama/Qwen decoder whose layer outputs can be tapped.

Numerics follow the engine: residual stream, norms and softmax in fp32, rows rounded to the weights' dtype only as
inputs of matrix products. Batches are padded on the right, which causal attention makes harmless.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .errors import TrainError

SUPPORTED_TYPES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class TargetConfig:
    """The shape of a decoder-only target, from a Hugging Face ``config.json``."""

    model_type: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    rms_norm_eps: float
    rope_theta: float
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> TargetConfig:
        model_type = config.get("model_type", "")
        if model_type not in SUPPORTED_TYPES:
            raise TrainError(f"model_type is {model_type!r}: the trainer knows {', '.join(SUPPORTED_TYPES)} targets")
        rope = config.get("rope_parameters") or {}
        scaling = config.get("rope_scaling") or rope
        kind = (scaling or {}).get("rope_type", (scaling or {}).get("type", "default"))
        if kind not in ("default", None):
            raise TrainError(f"rope_scaling type is {kind!r}: the trainer knows unscaled rotary embeddings only")
        heads = config["num_attention_heads"]
        eos = config.get("eos_token_id")
        return cls(
            model_type=model_type,
            hidden_size=config["hidden_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            intermediate_size=config["intermediate_size"],
            vocab_size=config["vocab_size"],
            max_positions=config.get("max_position_embeddings", 8192),
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=float(config.get("rope_theta") or rope.get("rope_theta") or 10000.0),
            eos_token_ids=tuple(eos) if isinstance(eos, list) else (() if eos is None else (eos,)),
        )


def rope_tables(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin, fp32 ``[..., head_dim]``, half-split (neox) layout, for integer ``positions``."""
    inv = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim)
    angle = positions.to(torch.float32).unsqueeze(-1) * inv
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``x [..., head_dim]``; the tables broadcast against it."""
    half = x.shape[-1] // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + rotated * sin


class TorchTarget:
    """A frozen target. ``weights`` maps Hugging Face names to tensors of one dtype (fp32 or bf16) on one device."""

    def __init__(self, config: TargetConfig, weights: dict[str, Tensor]) -> None:
        self.config = config
        self.embed = weights["model.embed_tokens.weight"]
        self.head = weights.get("lm_head.weight", self.embed)
        self.norm = weights["model.norm.weight"].float()
        self.layers: list[dict[str, Tensor]] = []
        for i in range(config.num_layers):
            p = f"model.layers.{i}."
            q, k, v = (f"{p}self_attn.{n}_proj" for n in "qkv")
            layer = {
                "in_norm": weights[p + "input_layernorm.weight"].float(),
                "post_norm": weights[p + "post_attention_layernorm.weight"].float(),
                "qkv": torch.cat([weights[f"{n}.weight"] for n in (q, k, v)]),
                "o": weights[p + "self_attn.o_proj.weight"],
                "gate_up": torch.cat([weights[f"{p}mlp.{n}_proj.weight"] for n in ("gate", "up")]),
                "down": weights[p + "mlp.down_proj.weight"],
            }
            if f"{q}.bias" in weights:
                layer["qkv_bias"] = torch.cat([weights[f"{n}.bias"] for n in (q, k, v)])
            for n in ("q", "k"):
                if f"{p}self_attn.{n}_norm.weight" in weights:
                    layer[f"{n}_norm"] = weights[f"{p}self_attn.{n}_norm.weight"].float()
            self.layers.append(layer)

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.dtype

    @property
    def device(self) -> torch.device:
        return self.embed.device

    @torch.inference_mode()
    def forward(self, ids: Tensor, taps: Sequence[int]) -> tuple[list[Tensor], Tensor]:
        """Run ``ids [B, L]`` from position 0.

        Returns the outputs of the decoder layers ``taps`` (0-based, in list order, residual stream before the
        final norm, fp32 ``[B, L, H]``) and the final hidden state after the norm in the weights' dtype; the head
        applied to that gives logits.
        """
        positions = torch.arange(ids.shape[1], device=ids.device)
        cos, sin = rope_tables(positions, self.config.head_dim, self.config.rope_theta)
        x = F.embedding(ids, self.embed).float()
        tapped: dict[int, Tensor] = {}
        for i, weights in enumerate(self.layers):
            x = decoder_layer(x, weights, cos, sin, self.config)
            if i in taps:
                tapped[i] = x
        return [tapped[i] for i in taps], rms_norm(x, self.norm, self.config.rms_norm_eps, self.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """RMSNorm in fp32, rounded to ``dtype``."""
    return F.rms_norm(x.float(), (x.shape[-1],), weight, eps).to(dtype)


def decoder_layer(x: Tensor, w: dict[str, Tensor], cos: Tensor, sin: Tensor, c: TargetConfig) -> Tensor:
    """One decoder layer over ``x [B, L, H]`` (fp32) with causal attention inside each row of the batch."""
    batch, length, _ = x.shape
    dtype = w["o"].dtype
    q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    qkv = F.linear(rms_norm(x, w["in_norm"], c.rms_norm_eps, dtype), w["qkv"], w.get("qkv_bias"))
    q, k, v = (t.view(batch, length, -1, c.head_dim).transpose(1, 2) for t in qkv.split((q_size, kv_size, kv_size), -1))
    if "q_norm" in w:
        q = rms_norm(q, w["q_norm"], c.rms_norm_eps, dtype)
        k = rms_norm(k, w["k_norm"], c.rms_norm_eps, dtype)
    q, k = apply_rope(q.float(), cos, sin).to(dtype), apply_rope(k.float(), cos, sin).to(dtype)
    attn = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=c.num_heads != c.num_kv_heads)
    x = x + F.linear(attn.transpose(1, 2).reshape(batch, length, q_size), w["o"])
    gate, up = F.linear(rms_norm(x, w["post_norm"], c.rms_norm_eps, dtype), w["gate_up"]).chunk(2, -1)
    return x + F.linear(F.silu(gate) * up, w["down"])
