"""Small model files made from scratch, byte by byte, and the real model when it is on this machine."""

from __future__ import annotations

import struct
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.tokenizer import _byte_table
from paceline.weights.store import StoreError, resolve_model

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_FORMATS = dict(zip((U8, I8, U16, I16, U32, I32, F32, BOOL, U64, I64, F64), "BbHhIifBQqd", strict=True))


def gguf_string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def gguf_value(kind: int, value: Any) -> bytes:
    """A metadata value without its type; an array is `(element kind, [values])`."""
    if kind == STRING:
        return gguf_string(value)
    if kind == ARRAY:
        element, values = value
        return struct.pack("<IQ", element, len(values)) + b"".join(gguf_value(element, v) for v in values)
    return struct.pack("<" + _FORMATS[kind], value)


def gguf_bytes(
    metadata: list[tuple[str, int, Any]],
    tensors: list[tuple[str, tuple[int, ...], int, bytes]],
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    alignment: int = 32,
    tensor_count: int | None = None,
    kv_count: int | None = None,
    offsets: list[int] | None = None,
) -> bytes:
    """A whole file. Tensors are (name, shape in numpy order, ggml type, data); the keywords plant errors."""
    head = magic + struct.pack("<IQQ", version, len(tensors) if tensor_count is None else tensor_count,
                               len(metadata) if kv_count is None else kv_count)  # fmt: skip
    for key, kind, value in metadata:
        head += gguf_string(key) + struct.pack("<I", kind) + gguf_value(kind, value)
    body = b""
    for i, (name, shape, kind, data) in enumerate(tensors):
        offset = len(body) if offsets is None else offsets[i]
        head += gguf_string(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *reversed(shape))
        head += struct.pack("<IQ", kind, offset)
        body += data + b"\0" * (-len(data) % alignment)
    return head + b"\0" * (-len(head) % alignment) + body


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k as llama.cpp's converter stores them for the llama architecture (LlamaModel.permute)."""
    rows = weight.shape[0]
    return weight.reshape(heads, 2, rows // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


GGML_NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def ggml_name(name: str) -> str:
    """Hugging Face tensor name -> ggml name."""
    fixed = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
             "lm_head.weight": "output.weight"}  # fmt: skip
    if name in fixed:
        return fixed[name]
    _, _, layer, rest = name.split(".", 3)
    part, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{GGML_NAMES[part]}.{kind}"


def random_weights(
    arch: str,
    *,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    ffn: int = 96,
    vocab: int = 300,
    tied: bool = True,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """float32 weights of a tiny model under their Hugging Face names."""
    rng = np.random.default_rng(seed)
    dim = hidden // heads

    def normal(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * 0.1).astype(np.float32)

    weights = {"model.embed_tokens.weight": normal(vocab, hidden), "model.norm.weight": 1 + normal(hidden)}
    if not tied:
        weights["lm_head.weight"] = normal(vocab, hidden)
    for layer in range(layers):
        p = f"model.layers.{layer}."
        weights[p + "input_layernorm.weight"] = 1 + normal(hidden)
        weights[p + "post_attention_layernorm.weight"] = 1 + normal(hidden)
        for part, out in (("q", heads * dim), ("k", kv_heads * dim), ("v", kv_heads * dim)):
            weights[p + f"self_attn.{part}_proj.weight"] = normal(out, hidden)
            if arch == "qwen2":
                weights[p + f"self_attn.{part}_proj.bias"] = normal(out)
        if arch == "qwen3":
            weights[p + "self_attn.q_norm.weight"] = 1 + normal(dim)
            weights[p + "self_attn.k_norm.weight"] = 1 + normal(dim)
        weights[p + "self_attn.o_proj.weight"] = normal(hidden, heads * dim)
        weights[p + "mlp.gate_proj.weight"] = normal(ffn, hidden)
        weights[p + "mlp.up_proj.weight"] = normal(ffn, hidden)
        weights[p + "mlp.down_proj.weight"] = normal(hidden, ffn)
    return weights


def model_metadata(arch: str, *, layers: int = 2, hidden: int = 64, heads: int = 4, kv_heads: int = 2, ffn: int = 96,
                   head_dim: int | None = None) -> list[tuple[str, int, Any]]:  # fmt: skip
    rows = [
        ("general.architecture", STRING, arch),
        (f"{arch}.block_count", U32, layers),
        (f"{arch}.context_length", U32, 512),
        (f"{arch}.embedding_length", U32, hidden),
        (f"{arch}.feed_forward_length", U32, ffn),
        (f"{arch}.attention.head_count", U32, heads),
        (f"{arch}.attention.head_count_kv", U32, kv_heads),
        (f"{arch}.attention.layer_norm_rms_epsilon", F32, 1e-6),
        (f"{arch}.rope.freq_base", F32, 10000.0),
    ]
    if head_dim is not None:
        rows += [(f"{arch}.attention.key_length", U32, head_dim), (f"{arch}.attention.value_length", U32, head_dim)]
    return rows


SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d", "1 2", "Ġ Ġ", "ĠĠ ĠĠ", "â Ģ", "âĢ Ļ", "ð Ł")


def tokenizer_metadata(
    pre: str = "smollm", *, size: int = 300, merges: tuple[str, ...] = MERGES
) -> list[tuple[str, int, Any]]:
    """A byte-level BPE vocabulary: three control tokens, 256 bytes, one token a merge, one user-defined, then
    unused.
    """
    tokens = [*SPECIAL_TOKENS, *sorted(_byte_table())]
    tokens += [merged for m in merges if (merged := m.replace(" ", "")) not in tokens]
    kinds = [3] * 3 + [1] * (len(tokens) - 3) + [4]
    tokens.append("<tool_call>")
    kinds += [5] * (size - len(tokens))
    tokens += [f"[PAD{i}]" for i in range(size - len(tokens))]
    return [
        ("tokenizer.ggml.model", STRING, "gpt2"),
        ("tokenizer.ggml.pre", STRING, pre),
        ("tokenizer.ggml.tokens", ARRAY, (STRING, tokens)),
        ("tokenizer.ggml.token_type", ARRAY, (I32, kinds)),
        ("tokenizer.ggml.merges", ARRAY, (STRING, list(merges))),
        ("tokenizer.ggml.bos_token_id", U32, 1),
        ("tokenizer.ggml.eos_token_id", U32, 2),
        ("tokenizer.ggml.padding_token_id", U32, 2),
        ("tokenizer.ggml.add_bos_token", BOOL, 0),
        ("tokenizer.chat_template", STRING, CHATML),
    ]


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def model_tensors(arch: str, weights: dict[str, np.ndarray], *, heads: int = 4, kv_heads: int = 2) -> list[Any]:
    """F32 rows for `gguf_bytes`, stored as llama.cpp's converter would."""
    rows = []
    for name, weight in weights.items():
        stored = ggml_name(name)
        if arch == "llama" and (".attn_q." in stored or ".attn_k." in stored):
            weight = permute(weight, heads if ".attn_q." in stored else kv_heads)
        rows.append((stored, weight.shape, 0, np.ascontiguousarray(weight, np.float32).tobytes()))
    return rows


def tiny_gguf(path: Path, arch: str = "llama", *, pre: str = "smollm", **sizes: Any) -> dict[str, np.ndarray]:
    """Write a complete tiny model; return its weights under Hugging Face names."""
    weights = random_weights(arch, **sizes)
    path.write_bytes(gguf_bytes(model_metadata(arch) + tokenizer_metadata(pre), model_tensors(arch, weights)))
    return weights


@lru_cache(maxsize=1)
def _smollm2() -> Path | None:
    try:
        return resolve_model("smollm2-135m", offline=True)
    except StoreError:
        return None


def smollm2_path() -> Path:
    """The real model's GGUF file. `make test` puts it on the machine; without it the test is skipped."""
    path = _smollm2()
    if path is None:
        pytest.skip("SmolLM2 is not in the cache: run `paceline pull smollm2-135m`")
    return path
