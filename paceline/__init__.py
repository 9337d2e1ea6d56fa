"""Paceline: text generation with large language models on CPUs, several times faster, not one token changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "PacelineError",
    "RequestOutput",
    "SamplingParams",
    "StreamDelta",
    "StructuredOutputsParams",
    "__version__",
]

if TYPE_CHECKING:
    from paceline.async_llm import AsyncLLM
    from paceline.errors import PacelineError
    from paceline.llm import LLM
    from paceline.outputs import CompletionOutput, RequestOutput, StreamDelta
    from paceline.sampling_params import SamplingParams
    from paceline.structured.params import StructuredOutputsParams

_HOMES = {
    "AsyncLLM": "paceline.async_llm",
    "LLM": "paceline.llm",
    "PacelineError": "paceline.errors",
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
