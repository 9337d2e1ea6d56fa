"""Names that other engines' users try first, and what stands for them here: for messages."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches

_CORES = "leave it out: a model runs on the cores of one machine (threads=N); replicas: docs/distributed.md"
_KV = "use kv_cache_space=GIB, the memory for keys and values"
# option of another engine's LLM class -> remedy
LLM_OPTIONS: dict[str, str] = {
    "cpu_offload_gb": "leave it out: weights are in memory as it is",
    "data_parallel_size": _CORES,
    "device": "leave it out: models run on the processor",
    "disable_log_stats": "leave it out: figures come with each output (RequestOutput.metrics)",
    "distributed_executor_backend": _CORES,
    "download_dir": "set the environment variable PACELINE_CACHE",
    "enforce_eager": "leave it out: there is nothing to compile",
    "gpu_memory_utilization": _KV,
    "hf_token": "set the environment variable HF_TOKEN",
    "load_format": "leave it out: it follows from the files",
    "model_path": "use model",
    "n_ctx": "use max_model_len",
    "n_threads": "use threads",
    "num_speculative_tokens": "put it into speculative_config, or give it with each call",
    "pipeline_parallel_size": _CORES,
    "speculative_model": "use speculative_config={'method': ..., 'model': ...}",
    "swap_space": _KV,
    "tensor_parallel_size": _CORES,
    "token": "set the environment variable HF_TOKEN",
    "tokenizer": "leave it out: the tokenizer comes with the model",
    "tokenizer_mode": "leave it out: the tokenizer comes with the model",
    "torch_dtype": "use dtype",
    "trust_remote_code": "leave it out: no remote code is ever run",
}


def unknown_option(name: str, known: Collection[str]) -> str:
    """What to say of an option of `LLM` that there is not."""
    if name in LLM_OPTIONS:
        return f"{name}: there is no such option; {LLM_OPTIONS[name]}"
    close = get_close_matches(name, known, 1)
    guess = f"did you mean {close[0]!r}? " if close else ""
    return f"{name}: there is no such option; {guess}Options: {', '.join(known)}"
