"""Cores and memory, decided and checked before anything large is allocated."""

from __future__ import annotations

import os
from pathlib import Path

from paceline import runtime
from paceline.errors import CapacityError, ConfigError
from paceline.models.target import planned_bytes, read_config
from paceline.weights.checkpoint import open_checkpoint
from paceline.weights.quantise import Quantization
from paceline.weights.store import StoreError, resolve_model
from paceline.weights.store_wheel import find_wheel_model

GIB = 1 << 30


def parse_cpus(text: str) -> set[int]:
    """`0-15`, `0,2,4-7` as a set. Raises ConfigError."""
    out: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not (first.isdecimal() and len(first) < 6 and (not dash or (last.isdecimal() and len(last) < 6))):
            raise ConfigError(f"--cpus {text[:60]}: {part[:20]!r} is no processor or range; write 0-15 or 0,2,4")
        low, high = int(first), int(last if dash else first)
        if high < low:
            raise ConfigError(f"--cpus {text[:60]}: the range {part} runs backwards")
        out |= set(range(low, high + 1))
    return out


def bind_cpus(text: str) -> None:
    """Keep this process to these processors. Raises ConfigError for those it may not use."""
    wanted, allowed = parse_cpus(text), os.sched_getaffinity(0)
    if missing := wanted - allowed:
        raise ConfigError(
            f"--cpus {text[:60]}: processor {min(missing)} is not among those allowed here: {sorted(allowed)}"
        )
    os.sched_setaffinity(0, wanted)


def kv_cache_space(given: float | None) -> float | None:
    """GiB for the cache: the option, else VLLM_CPU_KVCACHE_SPACE, else None. Raises ConfigError."""
    text = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "")
    if given is not None and not 0 < given < 1 << 30:
        raise ConfigError(f"--kv-cache-space {given}: use a number of GiB above 0")
    if given is not None or not text:
        return given
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1 << 30:
        raise ConfigError(f"VLLM_CPU_KVCACHE_SPACE: {text[:40]!r} is no number of GiB")
    return value or None  # 0 is vLLM's "choose"


def on_disk(model: str) -> Path | None:
    """Where a model lies, None if it has to be fetched first. Raises StoreError for a name that nothing can have."""
    from paceline.weights.store_hub import parse_hub_id

    try:
        return resolve_model(model, offline=True)
    except StoreError:
        if find_wheel_model(model) is None and parse_hub_id(model) is None:
            raise
    return None


def check_context(path: str | Path, wanted: int | None) -> None:
    """Raises ConfigError for a context that the model does not have, before the weights are read."""
    if wanted is None:
        return
    with open_checkpoint(path) as checkpoint:
        most = read_config(checkpoint).max_position_embeddings
    if not 2 <= wanted <= most:
        raise ConfigError(f"--max-model-len {wanted}: this model has a context of {most}; use 2 to {most}")


def check_memory(path: str | Path, dtype: str, cache_gib: float | None, quantization: Quantization = "none") -> None:
    """Weights and the cache asked for must fit the free memory together. Raises CapacityError before they are read."""
    with open_checkpoint(path) as checkpoint:
        weights = planned_bytes(checkpoint, dtype, quantization)
    cache = int((cache_gib or 0) * GIB)
    available = runtime.available_memory()
    if weights + cache > available:
        plan = f"{weights / GIB:.2f} GiB of weights"
        remedy = "use a smaller model, or a machine with more memory"
        if cache:
            plan += f" and {cache / GIB:.2f} GiB of KV cache (--kv-cache-space)"
            remedy = f"{max(0.0, (available - weights) / GIB):.2f} GiB are left for the cache"
        raise CapacityError(f"memory: {plan} do not fit, {available / GIB:.2f} GiB are free; {remedy}")
