"""Paceline: text generation with large language models on CPUs, several times faster, not one token changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineArgs",
    "PacelineError",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StreamDelta",
    "StructuredOutputsParams",
    "__version__",
]

if TYPE_CHECKING:
    from paceline.async_llm import AsyncLLM
    from paceline.beam_search import BeamSearchParams
    from paceline.engine_args import AsyncEngineArgs, EngineArgs
    from paceline.errors import PacelineError
    from paceline.llm import LLM
    from paceline.outputs import CompletionOutput, RequestOutput, StreamDelta
    from paceline.sampling_params import RequestOutputKind, SamplingParams
    from paceline.structured.params import StructuredOutputsParams

_HOMES = {
    "AsyncEngineArgs": "paceline.engine_args",
    "AsyncLLM": "paceline.async_llm",
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
}


def __getattr__(name: str) -> Any:
    """Names are imported when first used, so that the command line starts quickly."""
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Names that are not imported yet, too: an interactive session completes them."""
    return sorted({*globals(), *__all__})
