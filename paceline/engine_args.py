"""Options of an engine before there is one, as vLLM's scripts write them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from paceline.llm import LLM


class EngineArgs(SimpleNamespace):
    """The options of `LLM`, as attributes; nothing is opened or checked before an engine is made of them."""

    def __init__(self, model: Any = "smollm2-135m", **options: Any) -> None:
        super().__init__(model=model, **options)

    def open(self) -> LLM:
        """Raises what `LLM` raises, for unknown options too."""
        return LLM(**vars(self))


class AsyncEngineArgs(EngineArgs):
    """The same for `AsyncLLM.from_engine_args`."""
