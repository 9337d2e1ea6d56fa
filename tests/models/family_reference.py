"""The families' forward passes in plain numpy, fp64, from their definitions: for tests without PyTorch, and for what
`transformers` leaves out (soft caps on attention scores)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .families import is_sparse, text
from .reference import attention, inverse_frequencies, rms_norm, rotate, silu, visible


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def capped(x: np.ndarray, cap: float | None) -> np.ndarray:
    return cap * np.tanh(x / cap) if cap else x


class FamilyReference:
    """Logits [n, V] of a text."""

    def __init__(self, c: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        self.c = text(c)
        self.kind = self.c["model_type"]
        self.w = {n.replace("model.language_model", "model"): v.astype(np.float64) for n, v in tensors.items()}
        self.layers, self.heads = self.c["num_hidden_layers"], self.c["num_attention_heads"]
        self.size = self.c.get("head_dim") or self.c["hidden_size"] // self.heads
        self.eps = self.c["rms_norm_eps"]
        self.gemma = self.kind in ("gemma2", "gemma3_text")
        self.centred = self.gemma or self.kind == "muse_glimmer_text"

    def norm(self, x: np.ndarray, name: str, eps: float | None = None) -> np.ndarray:
        weight = self.w[f"{name}.weight"] + (1 if self.centred else 0)
        return rms_norm(x, weight, self.eps if eps is None else eps)

    def linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", 0.0)

    def windows(self) -> list[int]:
        c, n, w = self.c, self.layers, self.c.get("sliding_window") or 0
        if self.kind in ("mistral", "phi3"):
            return [w] * n
        if self.gemma:
            every = 2 if self.kind == "gemma2" else 6
            kinds = c.get("layer_types") or [("full" if (i + 1) % every == 0 else "sliding") for i in range(n)]
            return [0 if k.startswith("full") else w for k in kinds]
        if self.kind == "muse_glimmer_text":
            return [0 if (n - 1 - i) % 4 == 0 else w for i in range(n)]
        if self.kind == "smollm3" and c.get("use_sliding_window"):
            return [0 if r else w for r in self.rotated()]
        return [0] * n

    def rotated(self) -> list[bool]:
        n = self.layers
        if self.kind == "smollm3":
            return [bool(v) for v in self.c.get("no_rope_layers") or [(i + 1) % 4 for i in range(n)]]
        return [self.kind != "muse_glimmer_text" or (n - 1 - i) % 4 != 0 for i in range(n)]

    def frequencies(self, window: int, length: int) -> tuple[np.ndarray, float]:
        c = self.c
        if self.kind == "gemma3_text":
            new = (c.get("rope_parameters") or {}).get("sliding_attention" if window else "full_attention")
            old = {"rope_theta": c.get("rope_local_base_freq", 1e4)} if window else c
            return inverse_frequencies(self.size, new or old), 1.0
        scaling = c.get("rope_scaling") or {}
        if scaling.get("type") != "longrope":
            return inverse_frequencies(self.size, c), 1.0
        original = c["original_max_position_embeddings"]
        plain = inverse_frequencies(self.size, {k: v for k, v in c.items() if k != "rope_scaling"})
        factors = np.array(scaling["long_factor" if length > original else "short_factor"])
        ratio = c["max_position_embeddings"] / original
        return plain / factors, math.sqrt(1 + math.log(ratio) / math.log(original))

    def heads_of(self, h: np.ndarray, at: str) -> list[np.ndarray]:
        if self.kind == "phi3":
            kv = self.c["num_key_value_heads"] * self.size
            rows = self.linear(h, f"{at}.qkv_proj")
            parts = np.split(rows, [self.heads * self.size, self.heads * self.size + kv], axis=1)
        else:
            parts = [self.linear(h, f"{at}.{n}_proj") for n in "qkv"]
        q, k, v = (part.reshape(len(h), -1, self.size) for part in parts)
        if self.kind in ("gemma3_text", "qwen3_moe"):
            q, k = self.norm(q, f"{at}.q_norm"), self.norm(k, f"{at}.k_norm")
        if self.kind == "muse_glimmer_text":
            q, k = rms_norm(q, 1.0, self.eps) * self.c["qk_scale_factor"], rms_norm(k, 1.0, self.eps)  # type: ignore[arg-type]
        return [q, k, v]

    def mlp(self, h: np.ndarray, at: str, layer: int) -> np.ndarray:
        if self.kind == "qwen3_moe" and is_sparse(self.c, layer):
            return self.experts(h, at)
        if self.kind == "phi3":
            gate, up = np.split(self.linear(h, f"{at}.gate_up_proj"), 2, axis=1)
        else:
            gate, up = self.linear(h, f"{at}.gate_proj"), self.linear(h, f"{at}.up_proj")
        act = gelu if self.gemma else silu
        return self.linear(act(gate) * up, f"{at}.down_proj")

    def experts(self, h: np.ndarray, at: str) -> np.ndarray:
        logits, out = self.linear(h, f"{at}.gate"), np.zeros_like(h)
        weights = np.exp(logits - logits.max(1, keepdims=True))
        weights /= weights.sum(1, keepdims=True)
        for r, row in enumerate(weights):
            chosen = np.argsort(-row, kind="stable")[: self.c["num_experts_per_tok"]]
            total = row[chosen].sum() if self.c["norm_topk_prob"] else 1.0
            for e in chosen:
                name = f"{at}.experts.{e}"
                inner = silu(self.linear(h[r], f"{name}.gate_proj")) * self.linear(h[r], f"{name}.up_proj")
                out[r] += row[e] / total * self.linear(inner, f"{name}.down_proj")
        return out

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        c, at = self.c, np.arange(len(tokens))
        x = self.w["model.embed_tokens.weight"][list(tokens)]
        if self.gemma:
            x = x * c["hidden_size"] ** 0.5
        if self.kind == "muse_glimmer_text":
            x = rms_norm(x, 1.0, self.eps)  # type: ignore[arg-type]
        scale = c["query_pre_attn_scalar"] ** -0.5 if self.gemma else self.size**-0.5
        for i, (window, rotated) in enumerate(zip(self.windows(), self.rotated(), strict=True)):
            name = f"model.layers.{i}"
            h = self.norm(x, f"{name}.input_layernorm")
            q, k, v = self.heads_of(h, f"{name}.self_attn")
            if rotated:
                frequencies, factor = self.frequencies(window, len(tokens))
                q, k = (rotate(y, at, frequencies, scale=factor) for y in (q, k))
            seen = visible(at, at, window=window)
            mix = attention(q, k, v, seen, scale=scale, softcap=c.get("attn_logit_softcapping") or 0.0)
            mix = mix.reshape(len(x), -1)
            if self.kind == "muse_glimmer_text":
                mix = mix * sigmoid(self.linear(h, f"{name}.self_attn.gate_proj"))
            branch = self.linear(mix, f"{name}.self_attn.o_proj")
            if self.centred:
                eps = c.get("post_norm_eps")
                x = x + self.norm(branch, f"{name}.post_attention_layernorm", eps)
                h = self.norm(x, f"{name}.pre_feedforward_layernorm")
                x = x + self.norm(self.mlp(h, f"{name}.mlp", i), f"{name}.post_feedforward_layernorm", eps)
            else:
                x = x + branch
                x = x + self.mlp(self.norm(x, f"{name}.post_attention_layernorm"), f"{name}.mlp", i)
        head = self.w["lm_head.weight"] if "lm_head.weight" in self.w else self.w["model.embed_tokens.weight"]
        muse = self.kind == "muse_glimmer_text"
        x = rms_norm(x, 1.0, self.eps) if muse else self.norm(x, "model.norm")  # type: ignore[arg-type]
        logits = x @ head.T
        return capped(logits * c.get("output_multiplier", 1.0), c.get("final_logit_softcapping"))
