"""Paceline: text generation with large language models on CPUs, several times faster, not one token changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "PacelineError", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from paceline.errors import PacelineError
    from paceline.llm import LLM
    from paceline.sampling_params import SamplingParams


def __getattr__(name: str) -> Any:
    """Names are imported when first used, so that the command line starts quickly."""
    if name == "LLM":
        from paceline.llm import LLM

        return LLM
    if name == "SamplingParams":
        from paceline.sampling_params import SamplingParams

        return SamplingParams
    if name == "PacelineError":
        from paceline.errors import PacelineError

        return PacelineError
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")
