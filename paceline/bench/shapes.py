"""Shapes of known models and their DFlash drafters, and checkpoints of random weights in these shapes.

Target shapes are those of the published config.json files, drafter shapes those of the z-lab checkpoints. Where a
drafter's shape is not published in full, `assumed` says so.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from paceline.bench.hybrid_shapes import is_hybrid, layer_shapes, neutral
from paceline.errors import CheckpointError, ConfigError
from paceline.weights.checkpoint import Checkpoint, LoadDtype

POOL = 1 << 22  # random values, from which every tensor is cut: making billions of them would take minutes
DEVIATION = 0.02  # of the weights, as initialisers have it


@dataclass(frozen=True, slots=True)
class Shape:
    """A target's config.json and its drafter's. assumed: what of the drafter is not published."""

    target: dict[str, Any]
    drafter: dict[str, Any] | None = None
    assumed: str = ""


def _decoder(
    kind: str, layers: int, hidden: int, inner: int, heads: int, kv: int, dim: int, vocab: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": kind,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": dim,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960,
        **more,
    }


def _drafter(target: dict[str, Any], layers: int, inner: int, taps: list[int], block: int, mask: int) -> dict[str, Any]:
    return {
        **target,
        "model_type": "qwen3",
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": layers,
        "intermediate_size": inner,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_target_layers": target["num_hidden_layers"],
        "block_size": block,
        "dflash_config": {"mask_token_id": mask, "target_layer_ids": taps},
    }


def _qwen3(layers: int, hidden: int, inner: int, heads: int, tied: bool, drafter: bool, assumed: str = "") -> Shape:
    target = _decoder("qwen3", layers, hidden, inner, heads, 8, 128, 151936, rope_theta=1e6, tie_word_embeddings=tied)
    made = _drafter(target, 5, inner, [1, 9, 17, 25, 33], 16, 151669) if drafter else None
    return Shape(target, made, assumed)


_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3["original_max_position_embeddings"] = 8192
_LLAMA_8B = _decoder(
    "llama", 32, 4096, 14336, 32, 8, 128, 128256, rope_theta=5e5, rope_scaling=_LLAMA3, max_position_embeddings=131072
)


def _qwen35(layers: int, hidden: int, inner: int, heads: int, kv: int, tied: bool) -> dict[str, Any]:
    return _decoder(
        "qwen3_5_text",
        layers,
        hidden,
        inner,
        heads,
        kv,
        256,
        248320,
        rope_theta=1e7,
        partial_rotary_factor=0.25,
        tie_word_embeddings=tied,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        max_position_embeddings=262144,
    )


_QWEN35_9B = _qwen35(32, 4096, 12288, 16, 4, False)
_QWEN35_9B_DRAFTER = {
    **_drafter(_QWEN35_9B, 6, 12288, [1, 8, 15, 22, 29], 16, 248070),
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "sliding_window": 2048,
    "use_sliding_window": True,
}

SHAPES: dict[str, Shape] = {
    "Qwen3.5-9B": Shape(
        _QWEN35_9B,
        _QWEN35_9B_DRAFTER,
        "of the published drafter, depth, kinds of layers, block and mask are known; its width, heads, taps and window "
        "are taken to be those of its relatives",
    ),
    "Qwen3-0.6B": _qwen3(28, 1024, 3072, 16, True, False),
    "Qwen3-1.7B": _qwen3(28, 2048, 6144, 16, True, False),
    "Qwen3-4B": _qwen3(36, 2560, 9728, 32, True, True),
    "Qwen3-8B": _qwen3(36, 4096, 12288, 32, False, True),
    "Llama-3.1-8B": Shape(
        _LLAMA_8B,
        _drafter(_LLAMA_8B, 5, 14336, [1, 8, 15, 22, 29], 10, 128002),
        "the published Llama drafter has blocks of 10; its depth, width and taps are taken to be those of the others",
    ),
}


def find_shape(name: str) -> Shape:
    """A known shape, or a config.json (without a drafter). Raises ConfigError."""
    by_name = {known.lower(): known for known in SHAPES}
    if name.lower() in by_name:
        return SHAPES[by_name[name.lower()]]
    if os.path.isfile(name):
        try:
            config = json.loads(Path(name).read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"--random-weights {name}: {error}") from None
        if not isinstance(config, dict):
            raise ConfigError(f"--random-weights {name}: a config.json holds an object")
        return Shape(config)
    raise ConfigError(f"--random-weights {name}: unknown; use {', '.join(SHAPES)}, or the path of a config.json")


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Hugging Face names and shapes of a target, or of a drafter in z-lab layout."""
    hidden, inner, vocab = (config[k] for k in ("hidden_size", "intermediate_size", "vocab_size"))
    heads = config["num_attention_heads"]
    dim = config.get("head_dim") or hidden // heads
    q, kv = heads * dim, config.get("num_key_value_heads", heads) * dim
    drafter = "dflash_config" in config
    prefix = "layers" if drafter else "model.layers"
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(config["num_hidden_layers"]):
        at = f"{prefix}.{i}"
        shapes |= {f"{at}.input_layernorm.weight": (hidden,), f"{at}.post_attention_layernorm.weight": (hidden,)}
        shapes |= {f"{at}.mlp.{n}_proj.weight": (inner, hidden) for n in ("gate", "up")}
        shapes[f"{at}.mlp.down_proj.weight"] = (hidden, inner)
        if is_hybrid(config):
            shapes |= layer_shapes(config, i)
            continue
        for name, rows in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
            shapes[f"{at}.self_attn.{name}.weight"] = (rows, hidden)
            if config["model_type"] == "qwen2":
                shapes[f"{at}.self_attn.{name}.bias"] = (rows,)
        shapes[f"{at}.self_attn.o_proj.weight"] = (hidden, q)
        if config["model_type"] == "qwen3":
            shapes |= {f"{at}.self_attn.{n}_norm.weight": (dim,) for n in "qk"}
    if drafter:
        taps = len(config["dflash_config"]["target_layer_ids"])
        return {
            **shapes,
            "fc.weight": (hidden, taps * hidden),
            "hidden_norm.weight": (hidden,),
            "norm.weight": (hidden,),
        }
    shapes |= {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    return shapes if config.get("tie_word_embeddings") else {**shapes, "lm_head.weight": (vocab, hidden)}


class RandomCheckpoint(Checkpoint):
    """Random weights in a given shape: matrices from a normal distribution, norms of 1, biases of 0."""

    def __init__(self, name: str, config: dict[str, Any], seed: int = 0) -> None:
        self.path = Path(f"random weights of {name}")
        self.config = config
        self._shapes = tensor_shapes(config)
        values = np.random.default_rng(seed).standard_normal(POOL, np.float32) * np.float32(DEVIATION)
        self._pool = values.astype(ml_dtypes.bfloat16)

    def names(self) -> list[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._shapes:
            raise CheckpointError(f"{self.path}: there is no tensor {name}")
        return self._shapes[name]

    def stored_dtype(self, name: str) -> str:
        self.shape(name)
        return "BF16"

    def load(self, name: str, dtype: LoadDtype | None = None) -> np.ndarray:
        shape = self.shape(name)
        if len(shape) == 1:
            one = neutral(name) if is_hybrid(self.config) else 0.0 if name.endswith("bias") else 1.0
            values = np.full(shape, one, ml_dtypes.bfloat16)
        else:
            values = self._cut(hash_of(name) % (POOL // 4), shape)  # no two tensors alike
        return values.astype(np.float32) if dtype == "float32" else values

    def _cut(self, start: int, shape: tuple[int, ...]) -> np.ndarray:
        """Values of the pool from `start` on. Rows overlap, so that the matrix takes no memory of its own; their starts
        are far apart where there are few."""
        n, k = shape[0], int(np.prod(shape[1:]))
        step = (POOL - start - k) // n
        if step < 1:
            return np.resize(self._pool[start:], shape)
        size = self._pool.itemsize
        rows = np.lib.stride_tricks.as_strided(self._pool[start:], (n, k), (step * size, size), writeable=False)
        return rows if len(shape) == 2 else rows.reshape(shape)

    def close(self) -> None:
        """Nothing is open."""


def hash_of(name: str) -> int:
    """The same number for a name in every process."""
    import zlib

    return zlib.crc32(name.encode())
