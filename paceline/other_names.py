"""Names that other engines' users try first, and what stands for them here: for messages."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any

from paceline.errors import ConfigError
from paceline.values import shown

_CORES = "leave it out: a model runs on the cores of one machine (threads=N); replicas: docs/distributed.md"
_KV = "use kv_cache_space=GIB, the memory for keys and values"
# option of another engine's LLM class -> remedy
LLM_OPTIONS: dict[str, str] = {
    "cpu_offload_gb": "leave it out: weights are in memory as it is",
    "data_parallel_size": _CORES,
    "device": "leave it out: models run on the processor",
    "disable_log_requests": "leave it out: requests are not logged here",
    "disable_log_stats": "leave it out: figures come with each output (RequestOutput.metrics)",
    "distributed_executor_backend": _CORES,
    "download_dir": "set the environment variable PACELINE_CACHE",
    "enable_chunked_prefill": "leave it out: prompts are always computed in chunks (max_num_batched_tokens=N)",
    "enable_lora": "leave it out: there are no adapters",
    "enable_log_requests": "leave it out: `paceline serve` logs a line per request",
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

# Values of these that ask for what is the case anyway: scripts written for another engine run as they are.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "data_parallel_size": (1,),
    "device": ("auto", "cpu"),
    "disable_log_requests": (True, False),
    "disable_log_stats": (True, False),
    "enable_chunked_prefill": (True,),
    "enable_log_requests": (False,),
    "enable_lora": (False,),
    "enforce_eager": (True, False),
    "load_format": ("auto",),
    "pipeline_parallel_size": (1,),
    "tensor_parallel_size": (1,),
    "tokenizer_mode": ("auto",),
    "trust_remote_code": (True, False),
}
# arguments of vLLM's `AsyncLLM.generate`, which are no variables of a chat template; None and 0 ask for nothing
CALL_ARGUMENTS = (
    *("data_parallel_rank", "lora_request", "priority", "prompt_text", "reasoning_ended", "tokenization_kwargs"),
    "trace_headers",
)
# fields of sampling that vLLM has, here and over HTTP -> why not, and what instead
UNSUPPORTED_SAMPLING: dict[str, str] = {
    "best_of": "is not supported; ask for n choices and choose yourself",
    "logits_processors": "is not supported",
    "truncate_prompt_tokens": "is not supported; shorten the prompt",
    "use_beam_search": "is not supported; leave it out",
}
# field of another engine's SamplingParams -> remedy
SAMPLING_FIELDS: dict[str, str] = UNSUPPORTED_SAMPLING | {
    "do_sample": "use temperature=0 for greedy decoding, a higher one to sample",
    "guided_decoding": "use structured_outputs",
    "max_length": "use max_tokens, which counts the output alone",
    "max_new_tokens": "use max_tokens",
    "n_predict": "use max_tokens",
    "stop_sequences": "use stop",
    "use_beam_search": "use LLM.beam_search(prompts, BeamSearchParams(beam_width=..., max_tokens=...))",
}


def is_neutral(name: str, value: Any) -> bool:
    """Whether this option of another engine's `LLM` may as well be left out; True is no 1, None asks for nothing."""
    if value is None and name in LLM_OPTIONS:
        return True
    return any(type(value) is type(other) and value == other for other in NEUTRAL.get(name, ()))


def template_variables(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call without those of another engine's. Raises ConfigError for one of them that
    asks for something."""
    for name in CALL_ARGUMENTS:
        if arguments.get(name):
            raise ConfigError(f"{name}={shown(arguments[name])}: is not supported; leave it out")
    return {name: value for name, value in arguments.items() if name not in CALL_ARGUMENTS}


def unknown_field(name: str, known: Collection[str]) -> str:
    """What to say of a field of `SamplingParams` that there is not."""
    if name in SAMPLING_FIELDS:
        return SAMPLING_FIELDS[name]
    close = get_close_matches(name, known, 1)
    guess = f"; did you mean {close[0]!r}?" if close else "."
    return f"there is no such field{guess} Fields: {', '.join(known)}"


def unknown_option(name: str, known: Collection[str]) -> str:
    """What to say of an option of `LLM` that there is not."""
    if name in LLM_OPTIONS:
        return f"{name}: there is no such option; {LLM_OPTIONS[name]}"
    close = get_close_matches(name, known, 1)
    guess = f"did you mean {close[0]!r}? " if close else ""
    return f"{name}: there is no such option; {guess}Options: {', '.join(known)}"
