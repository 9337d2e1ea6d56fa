"""A target model in memory: packed weights and the plans that run them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from paceline import _native, runtime
from paceline.dtypes import DEFAULT_KV_CACHE_DTYPE, DEFAULT_QUANTIZATION, KV_CACHE_DTYPES, KVCacheDtype, Quantization
from paceline.errors import CapacityError, ConfigError
from paceline.models import (
    gemma2,
    gemma3,
    llama,
    mistral,
    muse_glimmer,
    phi3,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_moe,
    smollm3,
)
from paceline.models.config import DecoderConfig
from paceline.models.decoder import build_decoder, load_decoder, weight_bytes
from paceline.models.fields import check_fields
from paceline.models.network import Network, WeightLoader
from paceline.models.qwen3_5 import HybridConfig
from paceline.models.views import TEXT_PARTS, decoder_view
from paceline.weights.checkpoint import Checkpoint, open_checkpoint
from paceline.weights.quantise import check_quantization, expected_bytes

log = logging.getLogger(__name__)

Dtype = Literal["auto", "bfloat16", "float32"]
# model_type -> the module that reads its config: `read_config`, and in FIELDS the fields that it alone reads
MODULES: dict[str, Any] = {
    "gemma2": gemma2,
    "gemma3_text": gemma3,
    "llama": llama,
    "mistral": mistral,
    "muse_glimmer_text": muse_glimmer,
    "phi3": phi3,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_5_text": qwen3_5,
    "qwen3_moe": qwen3_moe,
    "smollm3": smollm3,
}
FAMILIES: dict[str, Callable[[dict[str, Any]], DecoderConfig]] = {
    name: MODULES[TEXT_PARTS.get(name, name)].read_config for name in sorted({*MODULES, *TEXT_PARTS})
}


def resolve_dtype(dtype: str) -> Literal["bfloat16", "float32"]:
    """`auto` is bfloat16 whatever the file holds: fp32 is for comparisons with references."""
    if dtype in ("auto", "bfloat16"):
        return "bfloat16"
    if dtype == "float32":
        return "float32"
    raise ConfigError(f"dtype: {dtype!r} is not supported; use auto, bfloat16 or float32")


def resolve_quantization(quantization: str, dtype: str) -> Quantization:
    """`auto` beside float32 is none: who compares with a reference wants the values that the file stands for."""
    checked = check_quantization(quantization)
    return "none" if checked == "auto" and dtype == "float32" else checked


def resolve_kv_cache_dtype(
    wanted: str, dtype: Literal["bfloat16", "float32"], head_dim: int
) -> Literal["bfloat16", "float32", "int8"]:
    """What keys and values are stored as; auto is the dtype. Raises ConfigError."""
    if wanted not in KV_CACHE_DTYPES:
        raise ConfigError(f"kv_cache_dtype: {wanted!r} is not supported; use {', '.join(KV_CACHE_DTYPES)}")
    if wanted == "int8":
        if head_dim < _native.MIN_INT8_HEAD_DIM:
            raise ConfigError(
                f"kv_cache_dtype: int8 needs heads of {_native.MIN_INT8_HEAD_DIM} values or more, this model's have "
                f"{head_dim}; use auto"
            )
        return "int8"
    if wanted == "bfloat16" and dtype != "bfloat16":
        raise ConfigError(f"kv_cache_dtype: bfloat16 does not go with dtype {dtype}; use auto or int8")
    return dtype


class TargetModel:
    """A decoder with packed weights. `forward` is one pass over a ragged batch of rows."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        dtype: str = "auto",
        quantization: Quantization = DEFAULT_QUANTIZATION,
        kv_cache_dtype: KVCacheDtype = DEFAULT_KV_CACHE_DTYPE,
        threads: int | None = None,
        isa: str = "",
        max_rows: int = 512,
        max_model_len: int | None = None,
    ) -> None:
        """max_model_len: tokens of the longest text there will be, which LongRoPE's frequencies depend on; None: the
        most that the model can."""
        checkpoint = decoder_view(checkpoint)
        self.dtype = resolve_dtype(dtype)
        self.f32 = self.dtype == "float32"
        self.quantization = resolve_quantization(quantization, self.dtype)
        self.isa = runtime.choose_isa(isa)
        self.threads = runtime.choose_threads(threads)
        self.pool = runtime.thread_pool(self.threads)
        self.max_rows = max_rows
        self.path = checkpoint.path
        self.checkpoint = checkpoint
        config = read_config(checkpoint)
        self.max_model_len = max_model_len
        self.config = config.within(max_model_len or config.max_position_embeddings)
        self.kv_cache_dtype = resolve_kv_cache_dtype(kv_cache_dtype, self.dtype, self.config.head_dim)
        quantised = self.quantization != "none"
        capacity = _size(self.config, f32=self.f32, quantised=quantised)
        self.weight_bytes = expected_bytes(checkpoint, self.quantization) if quantised else capacity
        available = runtime.available_memory()
        needed = self.weight_bytes
        if not quantised and not self.config.tie_word_embeddings:  # the embedding's table is not packed
            needed += self.config.vocab_size * self.config.hidden_size * (4 if self.f32 else 2)
        if needed > available:
            raise CapacityError(
                f"{checkpoint.path}: needs {needed / 2**30:.1f} GiB for its weights, "
                f"{available / 2**30:.1f} GiB of memory are free; use a smaller model or a machine with more memory"
            )
        loader = WeightLoader(
            checkpoint,
            f32=self.f32,
            capacity=capacity + (1 << 20),
            workers=self.threads,
            quantization=self.quantization,
        )
        try:
            if isinstance(self.config, HybridConfig):
                self.weights = qwen3_5.load(loader, self.config)
            else:
                self.weights = load_decoder(loader, self.config)
            loader.refuse_unused()
        finally:
            loader.finish()
        if quantised:
            self.weight_bytes = sum(loader.formats.values())
        self.formats, self.matrix_elements = loader.formats, loader.elements
        self.conversions = loader.conversions
        for line in loader.conversions.describe():
            log.warning("%s: %s; quantization none keeps bf16", checkpoint.path, line)
        self._loader = loader
        self._plans: dict[tuple[int, ...], _native.Plan] = {}

    @property
    def weight_type(self) -> str:
        """What most bytes of the matrices are stored as: bfloat16, float32, int8, int8_channel or int4."""
        return max(self.formats, key=lambda kind: self.formats[kind])

    @property
    def quantised(self) -> bool:
        """Whether most bytes of the matrices are quantised."""
        return self.weight_type.startswith("int")

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    def plan(self, taps: Sequence[int] = ()) -> _native.Plan:
        """The native plan that also returns the residual stream behind these layers; built once per choice."""
        key = tuple(taps)
        if key not in self._plans:
            for layer in key:
                if not -1 <= layer < self.config.num_layers:
                    raise ConfigError(
                        f"target_layer_ids: {layer} is outside -1..{self.config.num_layers - 1} of this target"
                    )
            net = Network(self.pool, self.isa, f32=self.f32, max_rows=self.max_rows)
            if isinstance(self.config, HybridConfig):
                qwen3_5.build(net, self.config, self.weights, key)
            else:
                build_decoder(net, self.config, self.weights, key)
            self._plans[key] = net.plan
        return self._plans[key]

    def new_cache(self, blocks: int) -> _native.KVCache:
        """A key/value cache of `blocks` blocks of 16 tokens; memory is taken as blocks are first written."""
        c = self.config
        int8 = self.kv_cache_dtype == "int8"
        return _native.KVCache(self.num_attention_layers, c.num_kv_heads, c.head_dim, blocks, self.f32, int8)

    @property
    def num_attention_layers(self) -> int:
        """Layers with keys and values."""
        return self.config.num_attention if isinstance(self.config, HybridConfig) else self.config.num_layers

    @property
    def recurrent(self) -> bool:
        """Whether sequences have a state besides their keys and values, so that passes need `new_states`."""
        return isinstance(self.config, HybridConfig)

    def new_states(self, slots: int) -> _native.StateCache | None:
        """Recurrent states of `slots` sequences and a journal for a pass's rows; None for a model without."""
        if not isinstance(self.config, HybridConfig):
            return None
        return qwen3_5.new_states(self.config, self.pool, slots, self.max_rows)

    def logits(self, tokens: Sequence[int], *, taps: Sequence[int] = ()) -> tuple[np.ndarray, np.ndarray]:
        """Logits [n, vocab] of every row of one text from an empty cache, and its taps [n, len(taps) * H].

        For checks and scoring; generation goes through the engine.
        """
        n = len(tokens)
        blocks = max(1, -(-n // _native.KEYS_PER_BLOCK))
        cache = self.new_cache(blocks)
        table = np.arange(blocks, dtype=np.int32)[None]
        logits = np.empty((n, self.vocab_size), np.float32)
        tapped = np.empty((n, max(1, len(taps)) * self.config.hidden_size), np.float32)
        plan, states = self.plan(taps), self.new_states(1)
        for start in range(0, n, self.max_rows):
            end = min(n, start + self.max_rows)
            rows = end - start
            plan.forward(
                cache,
                np.arange(start, end, dtype=np.int32),
                np.array([0, rows], np.int32),
                tokens=np.asarray(tokens[start:end], np.int32),
                block_tables=table,
                select=np.arange(rows, dtype=np.int32),
                logits=logits[start:end],
                taps=tapped[start:end] if taps else None,
                **state_arguments(states, [0]),
            )
        return logits, tapped


def state_arguments(
    states: _native.StateCache | None,
    slots: Sequence[int],
    journal: Sequence[int] | None = None,
    snapshots: Sequence[tuple[int, int, int]] = (),
) -> dict[str, Any]:
    """What `Plan.forward` takes for the recurrent states of its sequences.

    journal: first journal row of each sequence, -1 where all of its rows are committed as they come (default).
    snapshots: (sequence, rows, slot), ascending: the state behind so many of its rows also goes to another slot.
    """
    if states is None:
        return {}
    return {
        "state": states,
        "slots": np.array(slots, np.int32),
        "journal": np.array([-1] * len(slots) if journal is None else journal, np.int32),
        "snapshots": np.array(snapshots, np.int32).reshape(-1, 3) if snapshots else None,
    }


def read_config(checkpoint: Checkpoint) -> DecoderConfig:
    """The checkpoint's configuration. Raises ConfigError for a family that is not supported."""
    kind = checkpoint.config.get("model_type")
    if kind in TEXT_PARTS and not isinstance(checkpoint.config.get("text_config"), dict):
        raise ConfigError(
            f"{checkpoint.path}: text_config is missing; a {kind} checkpoint has its text model's config there"
        )
    config = decoder_view(checkpoint).config
    module = MODULES.get(str(config.get("model_type")))
    if module is None:
        raise ConfigError(
            f"{checkpoint.path}: model_type = {kind!r} is not supported; supported: {', '.join(FAMILIES)}"
        )
    check_fields(config, getattr(module, "FIELDS", ()), str(checkpoint.path))
    return module.read_config(config)


def _size(config: DecoderConfig, *, f32: bool, quantised: bool = False) -> int:
    if isinstance(config, HybridConfig):
        return qwen3_5.weight_bytes(config, f32=f32, quantised=quantised)
    return weight_bytes(config, f32=f32, quantised=quantised)


def planned_bytes(checkpoint: Checkpoint, dtype: str, quantization: str) -> int:
    """Bytes of all packed matrices, before any is read. Raises ConfigError."""
    checkpoint = decoder_view(checkpoint)
    stored = resolve_dtype(dtype)
    resolved = resolve_quantization(quantization, stored)
    if resolved != "none":
        return expected_bytes(checkpoint, resolved)
    return _size(read_config(checkpoint), f32=stored == "float32")


def load_model(path: str | Path, **options: Any) -> TargetModel:
    """Open a Hugging Face folder or GGUF file and pack its weights; options as for `TargetModel`."""
    return TargetModel(open_checkpoint(path), **options)
