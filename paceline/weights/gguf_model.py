"""A GGUF file as a Hugging Face checkpoint: metadata -> config.json keys, ggml tensor names -> Hugging Face
names.

`gguf_families` lists the architectures and what each has of its own. llama.cpp stores the query and key rows
of some permuted (its rotary embedding pairs neighbours there, Hugging Face's pairs halves); they are put back
in Hugging Face order here.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from paceline.errors import CheckpointError
from paceline.weights import gguf_qwen35
from paceline.weights.checkpoint import Checkpoint, LoadDtype
from paceline.weights.dequant import BFLOAT16, dequantize
from paceline.weights.gguf_families import (
    ARCHITECTURES,
    LONG_FACTORS,
    NORMS_WITH_ONE,
    PERMUTED,
    SHORT_FACTORS,
    WITHOUT_BIAS_FIELD,
    extra_config,
    layer_names,
    longrope_config,
    required,
)
from paceline.weights.gguf_file import GGUFFile
from paceline.weights.gguf_rope import rope_config
from paceline.weights.gguf_vocabulary import CONTROL, END_TEXTS, is_sentencepiece, token_id

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_v.bias": "self_attn.v_proj.bias",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_output.bias": "self_attn.o_proj.bias",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_gate.bias": "mlp.gate_proj.bias",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_up.bias": "mlp.up_proj.bias",
    "ffn_down.weight": "mlp.down_proj.weight",
    "ffn_down.bias": "mlp.down_proj.bias",
}
_ATTENTION_BIASES = ("attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_output.bias")
_MLP_BIASES = ("ffn_gate.bias", "ffn_up.bias", "ffn_down.bias")
# Read into the configuration or derived from it, never loaded as weights.
_IGNORED = frozenset({"rope_freqs.weight", LONG_FACTORS, SHORT_FACTORS})
_LAYER = re.compile(r"blk\.(0|[1-9][0-9]{0,8})\.(.+)")


def _values(raw: np.ndarray, stored: str, dtype: LoadDtype | None, shape: tuple[int, ...]) -> np.ndarray:
    if stored == "BF16" and dtype in (None, "bfloat16"):
        return raw.view(BFLOAT16).reshape(shape)
    if stored == "F32" and dtype in (None, "float32"):
        return raw.view(np.float32).reshape(shape)
    return dequantize(raw, stored, dtype or "float32").reshape(shape)


class GGUFCheckpoint(Checkpoint):
    """One GGUF file. `metadata` holds the file's own keys (the tokenizer is built from them)."""

    def __init__(self, path: Any) -> None:
        self._file = GGUFFile(path)
        self.path = self._file.path
        self.metadata = self._file.metadata
        self.architecture = self._required("general.architecture", str)
        if self.architecture not in ARCHITECTURES:
            raise self._error(
                f"architecture {self.architecture!r} is not among the supported {', '.join(ARCHITECTURES)}"
            )
        self._layer_names = layer_names(self.architecture, _LAYER_NAMES)
        self._stored_names = self._map_names()
        self.config = self._translate_config()
        if self.architecture == "qwen35":
            layers = self.config["num_hidden_layers"]
            self._stored_names = {gguf_qwen35.predictor_name(n, layers): s for n, s in self._stored_names.items()}
        self._check_complete()

    # -- Checkpoint
    # --------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        return list(self._stored_names)

    def shape(self, name: str) -> tuple[int, ...]:
        shape = self._info(name).shape
        return gguf_qwen35.stored_shape(name, shape) if self.architecture == "qwen35" else shape

    def stored_dtype(self, name: str) -> str:
        return self._info(name).dtype

    def load(self, name: str, dtype: LoadDtype | None = None) -> np.ndarray:
        info = self._info(name)
        raw = self._file.raw(info.name)
        if self.architecture in PERMUTED:
            raw = self._unpermute(raw, info.name, info.shape[0])
        if self.architecture in NORMS_WITH_ONE and "norm" in name and not name.endswith("linear_attn.norm.weight"):
            # before anything is rounded: bf16 has few digits near 1
            kind = BFLOAT16 if (dtype or info.dtype.lower()) in ("bfloat16", "bf16") else np.dtype(np.float32)
            return (_values(raw, info.dtype, "float32", info.shape) - np.float32(1)).astype(kind)
        values = _values(raw, info.dtype, dtype, info.shape)
        return self._restored(name, values) if self.architecture == "qwen35" else values

    def _restored(self, name: str, values: np.ndarray, *, blocks: bool = False) -> np.ndarray:
        """In Hugging Face's order, of Qwen3.5."""
        try:
            return (gguf_qwen35.restore_blocks if blocks else gguf_qwen35.restore)(self.config, name, values)
        except CheckpointError as error:
            raise self._error(str(error)) from error

    def load_rows(self, name: str, first: int, rows: int, dtype: LoadDtype | None = None) -> np.ndarray:
        info = self._info(name)
        if self.architecture in PERMUTED or self.architecture == "qwen35":
            return super().load_rows(name, first, rows, dtype)
        raw = self._file.raw(info.name).reshape(int(np.prod(info.shape[:-1])), -1)[first : first + rows]
        return _values(raw.reshape(-1), info.dtype, dtype, (rows, info.shape[-1]))

    def blocks(self, name: str) -> np.ndarray:
        info = self._info(name)
        if info.dtype not in ("Q8_0", "Q4_0", "Q4_1") or len(info.shape) not in (2, 3):
            raise self._error(f"tensor {name!r} is stored as {info.dtype} {info.shape}, not in blocks of 32")
        raw = self._file.raw(info.name)
        if self.architecture in PERMUTED:
            raw = self._unpermute(raw, info.name, info.shape[0])
        rows = raw.reshape(int(np.prod(info.shape[:-1])), -1)
        return self._restored(name, rows, blocks=True) if self.architecture == "qwen35" else rows

    def release_pages(self) -> None:
        self._file.release_pages()

    def close(self) -> None:
        self._file.close()

    # -- names
    # -------------------------------------------------------------------------------------------------------

    def _error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {message}")

    def _info(self, name: str) -> Any:
        if name not in self._stored_names:
            raise self._error(f"there is no tensor {name!r} in this file")
        return self._file.tensors[self._stored_names[name]]

    def _map_names(self) -> dict[str, str]:
        """Hugging Face name -> ggml name, in file order."""
        names: dict[str, str] = {}
        for stored in self._file.tensors:
            if stored in _IGNORED:
                continue
            match = _LAYER.fullmatch(stored)
            if match and match[2] in self._layer_names:
                names[f"model.layers.{match[1]}.{self._layer_names[match[2]]}"] = stored
            elif stored in _GLOBAL_NAMES:
                names[_GLOBAL_NAMES[stored]] = stored
            else:
                raise self._error(
                    f"tensor {stored!r} is not part of the {self.architecture} architecture as supported here"
                )
        return names

    def _check_complete(self) -> None:
        """Name what is missing now instead of in the middle of loading, and refuse layers beyond the
        configured count.
        """
        layers = self.config["num_hidden_layers"]
        per_layer = [
            n for n in _LAYER_NAMES if n.endswith(".weight") and not n.endswith(("q_norm.weight", "k_norm.weight"))
        ]
        per_layer = required(self.architecture, per_layer)
        if self.config.get("attention_bias"):
            per_layer += _ATTENTION_BIASES
        if self.config.get("mlp_bias"):
            per_layer += _MLP_BIASES
        # The count comes from the file and may be absurd: stop at the first layer that is not there.
        stored = self._file.tensors
        missing = [n for n in ("token_embd.weight", "output_norm.weight") if n not in stored]
        if self.architecture == "qwen35":
            layers += self.config["mtp_num_hidden_layers"]
        for layer in range(layers):
            if self.architecture == "qwen35":
                per_layer = list(gguf_qwen35.required(layer, self.config))
            missing += [f"blk.{layer}.{n}" for n in per_layer if f"blk.{layer}.{n}" not in stored]
            if len(missing) > 3:
                break
        if missing:
            raise self._error(f"missing tensors: {', '.join(missing[:4])}{', ...' if len(missing) > 4 else ''}")
        for name in stored:
            match = _LAYER.fullmatch(name)
            if match and int(match[1]) >= layers:
                raise self._error(f"tensor {name!r} lies beyond {self.architecture}.block_count = {layers}")

    def _unpermute(self, raw: np.ndarray, stored: str, rows: int) -> np.ndarray:
        """Rows of a head as llama.cpp stores them (0, h/2, 1, h/2 + 1, ...) -> Hugging Face order (0, 1, 2,
        ...).

        Works on the stored bytes of a row, whatever their format, so quantised blocks are moved before they
        are expanded.
        """
        part = stored.rpartition("blk.")[2].partition(".")[2].partition(".")[0]
        if part not in ("attn_q", "attn_k"):
            return raw
        key = "num_attention_heads" if part == "attn_q" else "num_key_value_heads"
        heads, row_bytes = self.config[key], raw.size // rows
        if rows % (2 * heads):
            raise self._error(f"tensor {stored!r} has {rows} rows, which do not divide into {heads} heads of even size")
        pairs = raw.reshape(heads, rows // heads // 2, 2, row_bytes)
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(-1)

    # -- metadata
    # ----------------------------------------------------------------------------------------------------

    def _get(self, key: str, kind: type, default: Any = None) -> Any:
        value = self.metadata.get(key, default)
        if value is default:
            return default
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise self._error(f"metadata {key!r} is {str(value)[:60]!r}, expected {kind.__name__}")
        return value

    def _required(self, key: str, kind: type) -> Any:
        value = self._get(key, kind)
        if value is None:
            raise self._error(f"metadata {key!r} is missing")
        return value

    def _count(self, key: str, default: int | None = None) -> int:
        """A positive size below 2^31; a per-layer array is accepted when all its entries agree."""
        value = self.metadata.get(key, default)
        if isinstance(value, np.ndarray) and value.size and np.issubdtype(value.dtype, np.integer):
            if (value != value[0]).any():
                raise self._error(f"metadata {key!r} differs from layer to layer, which is not supported")
            value = int(value[0])
        if value is None:
            raise self._error(f"metadata {key!r} is missing")
        if type(value) is not int or not 0 < value < 2**31:
            raise self._error(f"metadata {key!r} is {str(value)[:60]!r}, expected a positive integer")
        return value

    def _translate_config(self) -> dict[str, Any]:
        arch = self.architecture
        heads = self._count(f"{arch}.attention.head_count")
        hidden = self._count(f"{arch}.embedding_length")
        head_dim = self._count(f"{arch}.attention.key_length", hidden // heads)
        value_dim = self._count(f"{arch}.attention.value_length", head_dim)
        if value_dim != head_dim:
            raise self._error(f"value heads of {value_dim} beside key heads of {head_dim} are not supported")
        rotary = self._count(f"{arch}.rope.dimension_count", head_dim)
        if rotary != head_dim and arch not in ("phi3", "qwen35"):
            raise self._error(
                f"{arch}.rope.dimension_count {rotary} in heads of {head_dim}: partial rotation is unsupported"
            )
        epsilon = self._required(f"{arch}.attention.layer_norm_rms_epsilon", float)
        context = self._count(f"{arch}.context_length")
        stored = self._file.tensors
        if "token_embd.weight" not in stored:
            raise self._error("missing tensors: token_embd.weight")
        eos = self.eos_token_ids()
        config: dict[str, Any] = {
            "architectures": [ARCHITECTURES[arch][0]],
            "model_type": ARCHITECTURES[arch][1],
            "vocab_size": stored["token_embd.weight"].shape[0],
            "hidden_size": hidden,
            "intermediate_size": self._count(f"{arch}.feed_forward_length"),
            "num_hidden_layers": self._count(f"{arch}.block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._count(f"{arch}.attention.head_count_kv", heads),
            "head_dim": head_dim,
            "hidden_act": "silu",
            # float32 in the file: the shortest decimal that rounds to it is what config.json says (1e-05, not
            # 9.99...e-06).
            "rms_norm_eps": float(str(np.float32(epsilon))),
            "max_position_embeddings": context,
            "tie_word_embeddings": "output.weight" not in stored,
            "torch_dtype": self._natural_dtype(),
            "bos_token_id": self._get("tokenizer.ggml.bos_token_id", int),
            "eos_token_id": eos[0] if len(eos) == 1 else (list(eos) or None),
            "pad_token_id": self._get("tokenizer.ggml.padding_token_id", int),
        }
        if arch not in WITHOUT_BIAS_FIELD:
            config["attention_bias"] = any(n.startswith("blk.") and n.endswith(_ATTENTION_BIASES) for n in stored)
        if arch == "llama":
            config["mlp_bias"] = any(n.startswith("blk.") and n.endswith(_MLP_BIASES) for n in stored)
        factors = None
        if "rope_freqs.weight" in stored:
            info = stored["rope_freqs.weight"]
            if info.dtype != "F32" or info.shape != (head_dim // 2,):
                raise self._error(f"rope_freqs.weight is {info.dtype} {info.shape}, expected F32 ({head_dim // 2},)")
            factors = self._file.raw("rope_freqs.weight").view(np.float32)
        try:
            config |= extra_config(arch, self._file, self._count, rotary, head_dim)
            scaling = longrope_config(self._file, rotary) if arch == "phi3" else None
            kept = {
                k: v for k, v in self.metadata.items() if scaling is None or not k.startswith(f"{arch}.rope.scaling.")
            }
            config.update(rope_config(kept, arch, head_dim, factors))
            if scaling is not None:
                config["rope_scaling"] = scaling
        except CheckpointError as error:
            raise self._error(str(error)) from error
        return config

    def _natural_dtype(self) -> str:
        """float32 or float16 when every matrix is stored so, else bfloat16, which quantised files are
        expanded to.
        """
        kinds = {t.dtype for t in self._file.tensors.values() if len(t.shape) > 1}
        return {frozenset({"F32"}): "float32", frozenset({"F16"}): "float16"}.get(frozenset(kinds), "bfloat16")

    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end generation, the file's eos first: metadata (eos, eot, eom), then known control tokens
        by text.
        """
        ids = [self._get(f"tokenizer.ggml.{kind}_token_id", int) for kind in ("eos", "eot", "eom")]
        tokens, kinds = (
            self.metadata.get("tokenizer.ggml.tokens"),
            self.metadata.get("tokenizer.ggml.token_type"),
        )
        if isinstance(tokens, list) and tokens and isinstance(kinds, np.ndarray):
            kinds = kinds[: len(tokens)]
            which = kinds == CONTROL
            if is_sentencepiece(self.metadata):  # whatever their type, as in llama.cpp
                which = np.ones(len(kinds), bool)
                ids[0] = token_id(self.metadata, "eos", len(tokens), self._error)
            known = {tokens[i]: int(i) for i in np.flatnonzero(which)}
            ids += [known.get(text) for text in END_TEXTS]
        return tuple(dict.fromkeys(i for i in ids if i is not None))
