"""Names that vLLM's package, `LLM` and `AsyncLLM` have and these here do not: what to do instead."""

from __future__ import annotations

from collections.abc import Mapping

_GENERATES = "models here generate text, nothing else"
_MEMORY = "close() frees the memory; open the model again when it is wanted"
_STEPS = "LLM.stream yields what each step adds, AsyncLLM takes requests at any time"
_NO_ADAPTERS = "there are no adapters"
_NO_WORKERS = "a model runs in this process, on `llm.model` and `llm.engine`"
_PROFILE = "`paceline bench kernels` measures passes, LLM.time_forward one of them"

# of the package
NAMES: Mapping[str, str] = {
    "ClassificationOutput": _GENERATES,
    "ClassificationRequestOutput": _GENERATES,
    "EmbeddingOutput": _GENERATES,
    "EmbeddingRequestOutput": _GENERATES,
    "EmbedsPrompt": "prompts are texts or token ids (TextPrompt, TokensPrompt)",
    "GuidedDecodingParams": "use StructuredOutputsParams, as SamplingParams(structured_outputs=...)",
    "LLMEngine": _STEPS,
    "LoRARequest": _NO_ADAPTERS,
    "ModelRegistry": "docs/adding-a-model.md says how to add a family",
    "PoolingOutput": _GENERATES,
    "PoolingParams": _GENERATES,
    "PoolingRequestOutput": _GENERATES,
    "PromptType": "prompts are texts, lists of token ids, TextPrompt or TokensPrompt",
    "ScoringOutput": _GENERATES,
    "ScoringRequestOutput": _GENERATES,
}
# of LLM
LLM_MEMBERS: Mapping[str, str] = {
    "apply_model": _NO_WORKERS,
    "classify": _GENERATES,
    "collective_rpc": _NO_WORKERS,
    "embed": _GENERATES,
    "encode": f"{_GENERATES}; token ids of a text: llm.get_tokenizer().encode(text)",
    "get_metrics": "figures come with each output (output.metrics); of all so far: llm.engine.stats",
    "get_world_size": _NO_WORKERS,
    "llm_engine": f"{_STEPS}; sizes and settings: llm.info(), llm.max_model_len, llm.engine",
    "model_config": "llm.info() has sizes and settings, llm.model.config the model's own",
    "preprocess_chat": "llm.get_tokenizer().encode_chat(messages) returns the ids",
    "reward": _GENERATES,
    "score": _GENERATES,
    "set_tokenizer": "the tokenizer comes with the model",
    "shutdown": "use close(), or `with LLM(...) as llm:`",
    "sleep": _MEMORY,
    "start_profile": _PROFILE,
    "stop_profile": _PROFILE,
    "wake_up": _MEMORY,
}
# of AsyncLLM
ASYNC_MEMBERS: Mapping[str, str] = {
    "add_lora": _NO_ADAPTERS,
    "beam_search": "engine.llm.beam_search, before requests run beside it",
    "chat": "give messages as the prompt: engine.generate(messages, ...), engine.complete(messages, ...)",
    "collective_rpc": "a model runs in this process, on `engine.llm`",
    "do_log_stats": "engine.stats() has the figures",
    "from_vllm_config": "use AsyncLLM.from_engine_args(AsyncEngineArgs(model=..., ...))",
    "get_model_config": "engine.llm.info() has sizes and settings, engine.llm.model.config the model's own",
    "get_vllm_config": "engine.llm.info() has sizes and settings",
    "model_config": "engine.llm.info() has sizes and settings, engine.llm.model.config the model's own",
    "pause_generation": "use drain(), and a new AsyncLLM afterwards",
    "resume_generation": "use drain(), and a new AsyncLLM afterwards",
    "sleep": _MEMORY,
    "start_profile": _PROFILE,
    "stop_profile": _PROFILE,
    "vllm_config": "engine.llm.info() has sizes and settings",
    "wake_up": _MEMORY,
}


def absent(owner: str, name: str, table: Mapping[str, str]) -> str:
    """What an AttributeError says of a name that there is not."""
    said = f"{owner} has no attribute {name!r}"
    return f"{said}: {table[name]}" if name in table else said
