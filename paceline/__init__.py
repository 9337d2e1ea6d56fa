"""Paceline: text generation with large language models on CPUs, faster, not one token changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineArgs",
    "PacelineError",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StreamDelta",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]

if TYPE_CHECKING:
    from paceline.async_llm import AsyncLLM, AsyncLLMEngine
    from paceline.beam_search import BeamSearchParams
    from paceline.engine_args import AsyncEngineArgs, EngineArgs
    from paceline.errors import PacelineError
    from paceline.llm import LLM
    from paceline.outputs import CompletionOutput, RequestOutput, StreamDelta
    from paceline.prompts import TextPrompt, TokensPrompt
    from paceline.sampling_params import RequestOutputKind, SamplingParams
    from paceline.structured.params import StructuredOutputsParams

_HOMES = {
    "AsyncEngineArgs": "paceline.engine_args",
    "AsyncLLM": "paceline.async_llm",
    "AsyncLLMEngine": "paceline.async_llm",
    "BeamSearchParams": "paceline.beam_search",
    "EngineArgs": "paceline.engine_args",
    "LLM": "paceline.llm",
    "PacelineError": "paceline.errors",
    "RequestOutputKind": "paceline.sampling_params",
    "SamplingParams": "paceline.sampling_params",
    "CompletionOutput": "paceline.outputs",
    "RequestOutput": "paceline.outputs",
    "StreamDelta": "paceline.outputs",
    "StructuredOutputsParams": "paceline.structured.params",
    "TextPrompt": "paceline.prompts",
    "TokensPrompt": "paceline.prompts",
}


def __getattr__(name: str) -> Any:
    """Names are imported when first used, so that the command line starts quickly. One that vLLM has and there is not
    here gets an error that says what to use."""
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    from paceline.other_members import NAMES, absent

    said = absent("module 'paceline'", name, NAMES)
    if name in NAMES:
        import sys

        # `from paceline import X` asks here first, and would replace the words of an AttributeError by its own
        if sys._getframe(1).f_code.co_name == "_handle_fromlist":
            raise ImportError(said, name=__name__)
    raise AttributeError(said, name=name)


def __dir__() -> list[str]:
    """Names that are not imported yet, too: an interactive session completes them."""
    return sorted({*globals(), *__all__})
