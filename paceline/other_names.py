"""Names that other engines' users try first, and what stands for them here: for messages."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches
from typing import Any

_CORES = "leave it out: a model runs on the cores of one machine (threads=N); replicas: docs/distributed.md"
_KV = "use kv_cache_space=GIB, the memory for keys and values"
PROCESSOR = "leave it out: models run on the processor"
_TEXT_ALONE = "leave it out: models here read text alone"
WITH_MODEL = "leave it out: the tokenizer comes with the model"
_GENERATES = "leave it out: models here generate text, nothing else"
_NO_MODEL_DEFAULTS = "leave it out: generation_config.json is not read for sampling; SamplingParams(...) says all"
_GRAMMARS = "leave it out: llguidance compiles all grammars"
# option of another engine's LLM class -> remedy
LLM_OPTIONS: dict[str, str] = {
    "allowed_local_media_path": _TEXT_ALONE,
    "attention_backend": "leave it out: there is one; isa='...' chooses other kernels",
    "block_size": "leave it out: cache blocks hold 16 tokens",
    "chat_template": "give it with each call: llm.chat(messages, chat_template=...)",
    "compilation_config": "leave it out: there is nothing to compile",
    "config_format": "leave it out: it follows from the files",
    "convert": _GENERATES,
    "cpu_offload_gb": "leave it out: weights are in memory as it is",
    "data_parallel_size": _CORES,
    "device": PROCESSOR,
    "device_map": PROCESSOR,
    "disable_custom_all_reduce": _CORES,
    "disable_log_requests": "leave it out: requests are not logged here",
    "disable_log_stats": "leave it out: figures come with each output (RequestOutput.metrics)",
    "distributed_executor_backend": _CORES,
    "download_dir": "set the environment variable PACELINE_CACHE",
    "enable_chunked_prefill": "leave it out: prompts are always computed in chunks (max_num_batched_tokens=N)",
    "enable_lora": "leave it out: there are no adapters",
    "enable_log_requests": "leave it out: `paceline serve` logs a line per request",
    "enforce_eager": "leave it out: there is nothing to compile",
    "generation_config": _NO_MODEL_DEFAULTS,
    "gpu_memory_utilization": _KV,
    "guided_decoding_backend": _GRAMMARS,
    "hf_config_path": "leave it out: config.json comes with the model",
    "hf_overrides": "change the model's config.json instead",
    "hf_token": "set the environment variable HF_TOKEN",
    "kv_cache_memory_bytes": _KV,
    "kv_transfer_config": _CORES,
    "limit_mm_per_prompt": _TEXT_ALONE,
    "load_format": "leave it out: it follows from the files",
    "logits_processors": "leave it out: there are none; logit_bias, bad_words and structured_outputs of SamplingParams",
    "max_logprobs": "leave it out: SamplingParams(logprobs=N) has no limit in Python",
    "max_seq_len": "use max_model_len",
    "max_seq_len_to_capture": "leave it out: there is nothing to capture",
    "mm_processor_kwargs": _TEXT_ALONE,
    "model_impl": "leave it out: there is one",
    "model_path": "use model",
    "n_batch": "use max_num_batched_tokens",
    "n_ctx": "use max_model_len",
    "n_gpu_layers": PROCESSOR,
    "n_threads": "use threads",
    "num_gpu_blocks_override": _KV,
    "num_speculative_tokens": "put it into speculative_config, or give it with each call",
    "override_generation_config": _NO_MODEL_DEFAULTS,
    "pipeline_parallel_size": _CORES,
    "revision": "name a folder that holds it: model='path/to/folder'",
    "rope_scaling": "change the model's config.json instead",
    "rope_theta": "change the model's config.json instead",
    "runner": _GENERATES,
    "served_model_name": "leave it out: `paceline serve --served-model-name NAME` has it",
    "skip_tokenizer_init": "leave it out: text cannot be stopped or returned without a tokenizer",
    "speculative_model": "use speculative_config={'method': ..., 'model': ...}",
    "structured_outputs_config": _GRAMMARS,
    "swap_space": _KV,
    "task": _GENERATES,
    "tensor_parallel_size": _CORES,
    "token": "set the environment variable HF_TOKEN",
    "tokenizer": WITH_MODEL,
    "tokenizer_mode": WITH_MODEL,
    "tokenizer_revision": WITH_MODEL,
    "torch_dtype": "use dtype",
    "trust_remote_code": "leave it out: no remote code is ever run",
    "use_tqdm_on_load": "leave it out: there is no bar",
    "verbose": "leave it out: logging.getLogger('paceline') has the messages",
}

# Values of these that ask for what is the case anyway: scripts written for another engine run as they are.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "allowed_local_media_path": ("",),
    "block_size": (16,),
    "config_format": ("auto",),
    "convert": ("auto", "none"),
    "cpu_offload_gb": (0,),
    "data_parallel_size": (1,),
    "device": ("auto", "cpu"),
    "device_map": ("auto", "cpu"),
    "disable_custom_all_reduce": (True, False),
    "disable_log_requests": (True, False),
    "disable_log_stats": (True, False),
    "enable_chunked_prefill": (True,),
    "enable_log_requests": (False,),
    "enable_lora": (False,),
    "enforce_eager": (True, False),
    "generation_config": ("vllm",),
    "guided_decoding_backend": ("auto", "guidance"),
    "hf_overrides": ({},),
    "limit_mm_per_prompt": ({},),
    "load_format": ("auto",),
    "mm_processor_kwargs": ({},),
    "model_impl": ("auto",),
    "n_gpu_layers": (0,),
    "override_generation_config": ({},),
    "pipeline_parallel_size": (1,),
    "revision": ("main",),
    "runner": ("auto", "generate"),
    "skip_tokenizer_init": (False,),
    "task": ("auto", "generate"),
    "tensor_parallel_size": (1,),
    "tokenizer_mode": ("auto",),
    "trust_remote_code": (True, False),
    "use_tqdm_on_load": (True, False),
    "verbose": (True, False),
}
# fields of sampling that vLLM has, here and over HTTP -> why not, and what instead
UNSUPPORTED_SAMPLING: dict[str, str] = {
    "best_of": "is not supported; ask for n choices and choose yourself",
    "logits_processors": "is not supported",
    "truncate_prompt_tokens": "is not supported; shorten the prompt",
    "use_beam_search": "is not supported; leave it out",
}
_BEAMS = "belongs to beam search: LLM.beam_search(prompts, BeamSearchParams({0}=...))"
# field of another engine's sampling -> remedy, here and over HTTP
SAMPLING_FIELDS: dict[str, str] = UNSUPPORTED_SAMPLING | {
    "do_sample": "use temperature=0 for greedy decoding, a higher one to sample",
    "guided_decoding": "use structured_outputs",
    "max_length": "use max_tokens, which counts the output alone",
    "max_new_tokens": "use max_tokens",
    "n_predict": "use max_tokens",
    "stop_sequences": "use stop",
    "use_beam_search": "use LLM.beam_search(prompts, BeamSearchParams(beam_width=..., max_tokens=...))",
}
# field of another engine's SamplingParams -> remedy: those, and what is a field over HTTP or no matter there
PARAMS_FIELDS: dict[str, str] = SAMPLING_FIELDS | {
    "beam_width": _BEAMS.format("beam_width"),
    "detokenize": "leave it out: there is always a text, and token_ids beside it",
    "early_stopping": "leave it out: LLM.beam_search goes on to max_tokens",
    "extra_args": "is not supported",
    "flat_logprobs": "is not supported; logprobs are one mapping a token",
    "guided_choice": "use structured_outputs={'choice': ...}",
    "guided_decoding": "use structured_outputs=StructuredOutputsParams(...)",
    "guided_grammar": "use structured_outputs={'grammar': ...}",
    "guided_json": "use structured_outputs={'json': ...}",
    "guided_regex": "use structured_outputs={'regex': ...}",
    "length_penalty": _BEAMS.format("length_penalty"),
    "logits_processors": "is not supported; logit_bias, bad_words, allowed_token_ids and structured_outputs are there",
    "max_completion_tokens": "use max_tokens",
    "min_length": "use min_tokens, which counts the output alone",
    "min_new_tokens": "use min_tokens",
    "n_probs": "use logprobs",
    "no_repeat_ngram_size": "is not supported; repetition_penalty, presence_penalty and frequency_penalty are there",
    "num_beams": "use LLM.beam_search(prompts, BeamSearchParams(beam_width=..., max_tokens=...))",
    "num_predict": "use max_tokens",
    "num_return_sequences": "use n",
    "repeat_penalty": "use repetition_penalty",
    "response_format": "use structured_outputs={'json': schema}, or {'json_object': True}",
    "skip_clone": "leave it out: parameters cannot change, so that nothing is copied",
    "skip_reading_prefix_cache": "give the prompt as {'prompt': ..., 'cache_salt': ...}, with a salt of its own",
    "spaces_between_special_tokens": "leave it out: a text has the spaces that its tokens have",
    "thinking_token_budget": "is not supported; max_tokens counts reasoning too",
    "top_logprobs": "use logprobs",
}
# Values of these that ask for nothing, besides None: defaults of vLLM, which programs write out.
NEUTRAL_SAMPLING: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "detokenize": (True,),
    "early_stopping": (False,),
    "extra_args": ({},),
    "flat_logprobs": (False,),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "skip_clone": (True, False),
    "skip_reading_prefix_cache": (False,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (-1,),
    "use_beam_search": (False,),
}


def _asks_for_nothing(value: Any, neutral: Collection[Any]) -> bool:
    """True is no 1."""
    return any(type(value) is type(other) and value == other for other in neutral)


def is_neutral(name: str, value: Any) -> bool:
    """Whether this option of another engine's `LLM` may as well be left out."""
    return name in LLM_OPTIONS and (value is None or _asks_for_nothing(value, NEUTRAL.get(name, ())))


def is_neutral_sampling(name: str, value: Any) -> bool:
    """Whether this field of another engine's SamplingParams may as well be left out."""
    return name in PARAMS_FIELDS and (value is None or _asks_for_nothing(value, NEUTRAL_SAMPLING.get(name, ())))


def unknown_field(name: str, known: Collection[str]) -> str:
    """What to say of a field of `SamplingParams` that there is not."""
    if name in PARAMS_FIELDS:
        return PARAMS_FIELDS[name]
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
