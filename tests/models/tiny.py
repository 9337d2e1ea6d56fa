"""Tiny random models on disk: targets of every family with awkward sizes, DFlash drafters, and a tokenizer for them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

Tensors = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Shape:
    """A target. `window`: of the layers in `sliding`. `bias`: of attention, where the family has a choice.

    `sharp` scales the logits: 1 gives a flat distribution, 3 one that is worth drafting for.
    """

    family: str = "llama"
    vocab: int = 97
    hidden: int = 40
    inner: int = 56
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    tied: bool = False
    bias: bool = False
    mlp_bias: bool = False
    window: int = 0
    sliding: tuple[int, ...] = ()
    rope: dict[str, Any] = field(default_factory=dict)
    context: int = 512
    sharp: float = 1.0
    seed: int = 0

    @property
    def qkv_bias(self) -> bool:
        return self.family == "qwen2" or self.bias

    @property
    def output_bias(self) -> bool:
        return self.family != "qwen2" and self.bias

    @property
    def qk_norm(self) -> bool:
        return self.family == "qwen3"


def config_of(s: Shape) -> dict[str, Any]:
    """config.json as `transformers` writes it for the family."""
    names = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    config: dict[str, Any] = {
        "architectures": [f"{names[s.family]}ForCausalLM"],
        "model_type": s.family,
        "vocab_size": s.vocab,
        "hidden_size": s.hidden,
        "intermediate_size": s.inner,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": s.context,
        "tie_word_embeddings": s.tied,
        "rope_theta": 10000.0,
        "eos_token_id": s.vocab - 1,
        "bos_token_id": s.vocab - 2,
        "torch_dtype": "float32",
        **s.rope,
    }
    if s.family != "qwen2":
        config["attention_bias"] = s.bias
    if s.family == "llama":
        config["mlp_bias"] = s.mlp_bias
    if s.window:
        kinds = ["sliding_attention" if i in s.sliding else "full_attention" for i in range(s.layers)]
        config |= {"layer_types": kinds, "sliding_window": s.window, "use_sliding_window": True}
    return config


class _Random:
    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def matrix(self, n: int, k: int, scale: float = 1.0) -> np.ndarray:
        return self.rng.normal(0, scale / np.sqrt(k), (n, k)).astype(np.float32)

    def norm(self, n: int) -> np.ndarray:
        return self.rng.uniform(0.6, 1.4, n).astype(np.float32)

    def bias(self, n: int) -> np.ndarray:
        return self.rng.normal(0, 0.3, n).astype(np.float32)


def _layer(r: _Random, s: Shape, prefix: str) -> Tensors:
    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    attn, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    out = {
        f"{prefix}.input_layernorm.weight": r.norm(s.hidden),
        f"{attn}.q_proj.weight": r.matrix(q, s.hidden, 1.5),
        f"{attn}.k_proj.weight": r.matrix(kv, s.hidden, 1.5),
        f"{attn}.v_proj.weight": r.matrix(kv, s.hidden),
        f"{attn}.o_proj.weight": r.matrix(s.hidden, q),
        f"{prefix}.post_attention_layernorm.weight": r.norm(s.hidden),
        f"{mlp}.gate_proj.weight": r.matrix(s.inner, s.hidden),
        f"{mlp}.up_proj.weight": r.matrix(s.inner, s.hidden),
        f"{mlp}.down_proj.weight": r.matrix(s.hidden, s.inner, 1.5),
    }
    if s.qkv_bias:
        out |= {f"{attn}.{n}_proj.bias": r.bias(w) for n, w in (("q", q), ("k", kv), ("v", kv))}
    if s.output_bias:
        out[f"{attn}.o_proj.bias"] = r.bias(s.hidden)
    if s.qk_norm:
        out |= {f"{attn}.{n}_norm.weight": r.norm(s.head_dim) for n in "qk"}
    if s.mlp_bias:
        out |= {f"{mlp}.{n}_proj.bias": r.bias(w) for n, w in (("gate", s.inner), ("up", s.inner), ("down", s.hidden))}
    return out


def tensors_of(s: Shape) -> Tensors:
    """Every tensor of a target, Hugging Face names, fp32."""
    r = _Random(s.seed)
    out = {"model.embed_tokens.weight": r.rng.normal(0, 0.5, (s.vocab, s.hidden)).astype(np.float32)}
    for i in range(s.layers):
        out |= _layer(r, s, f"model.layers.{i}")
    out["model.norm.weight"] = r.norm(s.hidden) * np.float32(s.sharp)
    if not s.tied:
        out["lm_head.weight"] = r.matrix(s.vocab, s.hidden)
    return out


def write(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    """A Hugging Face folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, str(folder / "model.safetensors"))
    return folder


def write_target(folder: Path, s: Shape, *, tokenizer: bool = False) -> Path:
    write(folder, config_of(s), tensors_of(s))
    if tokenizer:
        write_tokenizer(folder, s.vocab)
    return folder


# ---- drafters


@dataclass(frozen=True, slots=True)
class Draft:
    """A DFlash drafter for a target. `sliding`: layers with a window; `causal`: top-level is_causal, None = absent."""

    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    inner: int = 48
    block_size: int = 8
    taps: tuple[int, ...] = (0, 1)
    window: int = 0
    sliding: tuple[int, ...] = ()
    causal: bool | None = None
    bias: bool = False
    fc_bias: bool = False
    nested: bool = True  # fields in dflash_config, else at top level
    extra: dict[str, Any] = field(default_factory=dict)
    sharp: float = 1.0
    seed: int = 1


def drafter_shape(s: Shape, d: Draft) -> Shape:
    """The decoder that the drafter's layers are."""
    return replace(
        s,
        family="qwen3",
        inner=d.inner,
        layers=d.layers,
        heads=d.heads,
        kv_heads=d.kv_heads,
        head_dim=d.head_dim,
        bias=d.bias,
        mlp_bias=False,
        window=d.window,
        sliding=d.sliding,
        rope={},
        seed=d.seed,
    )


def drafter_config(s: Shape, d: Draft) -> dict[str, Any]:
    config = config_of(drafter_shape(s, d))
    config |= {"architectures": ["DFlashDraftModel"], "num_target_layers": s.layers}
    own = {"mask_token_id": s.vocab - 3, "target_layer_ids": list(d.taps), "block_size": d.block_size}
    config |= {"dflash_config": own} if d.nested else own
    if d.causal is not None:
        config["is_causal"] = d.causal
    return config | d.extra


def drafter_tensors(s: Shape, d: Draft) -> Tensors:
    r = _Random(d.seed)
    shape = drafter_shape(s, d)
    out = {
        "fc.weight": r.matrix(s.hidden, len(d.taps) * s.hidden),
        "hidden_norm.weight": r.norm(s.hidden),
        "norm.weight": r.norm(s.hidden) * np.float32(d.sharp),
    }
    if d.fc_bias:
        out["fc.bias"] = r.bias(s.hidden)
    for i in range(d.layers):
        out |= _layer(r, shape, f"layers.{i}")
    return out


def write_drafter(folder: Path, s: Shape, d: Draft) -> Path:
    return write(folder, drafter_config(s, d), drafter_tensors(s, d))


# ---- tokenizer

_VISIBLE = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_PIECES = ["ab", "abc", " a", " ab", "é", "€", "\n\n", "ha", " ha", "haha"]  # several bytes, some with a shared start
_FIRST = b" abcdefgh\n" + "é€😀".encode() + b"0123456789ijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,!?"
SPECIAL = ("<|mask|>", "<|start|>", "<|end|>")
TEMPLATE = "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}{% endfor %}<|start|>"


def _letters() -> dict[int, str]:
    """Byte -> the character that byte-level BPE writes for it."""
    table = {b: chr(b) for b in _VISIBLE}
    hidden = [b for b in range(256) if b not in table]
    return table | {b: chr(256 + i) for i, b in enumerate(hidden)}


def write_tokenizer(folder: Path, vocab: int) -> None:
    """A byte-level BPE of exactly `vocab` ids, the last three special; its text splits UTF-8 sequences over tokens."""
    letters, room = _letters(), vocab - len(SPECIAL)
    order = [*dict.fromkeys([*_FIRST, *range(256)])]
    pieces = ["".join(letters[b] for b in piece.encode()) for piece in _PIECES] if room > 80 else []
    known: dict[str, int] = {}
    for byte in order[: max(1, room - 2 * len(pieces))]:
        known[letters[byte]] = len(known)
    merges: list[tuple[str, str]] = []
    for piece in pieces:
        for end in range(2, len(piece) + 1):
            if piece[:end] not in known and piece[end - 1] in known and len(known) < room:
                known[piece[:end]] = len(known)
                merges.append((piece[: end - 1], piece[end - 1]))
    for byte in order:
        if len(known) < room and letters[byte] not in known:
            known[letters[byte]] = len(known)
    while len(known) < room:
        known[f"<{len(known)}>"] = len(known)
    known |= {text: room + i for i, text in enumerate(SPECIAL)}
    tokenizer = Tokenizer(BPE(known, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|end|>", "bos_token": "<|start|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
