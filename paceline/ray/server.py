"""The server's application for a replica: what `paceline serve` runs, without a port of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.async_llm import AsyncLLM
from paceline.errors import ConfigError
from paceline.llm import LLM
from paceline.sampling_params import SamplingParams
from paceline.server.app import build_app
from paceline.server.settings import ServerSettings


def create_app(model: str, *, engine: Mapping[str, Any], server: Mapping[str, Any]) -> Any:
    """The ASGI application over a newly loaded engine.

    engine: options of `LLM`, and `max_waiting` of `AsyncLLM`. server: fields of `ServerSettings`; `model_names` is the
    model's name unless given. Raises PacelineError, ConfigError for an option that is none.
    """
    options = dict(engine)
    waiting = {"max_waiting": options.pop("max_waiting")} if "max_waiting" in options else {}
    try:
        settings = ServerSettings(**{"model_names": (model,), **_tuples(server)})
        llm = LLM(model, **options)
    except TypeError as error:
        raise ConfigError(f"engine or server: {error}; see DeployOptions") from None
    # plans are made and memory is touched before the first client comes
    llm.generate([[0, 0]], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    return build_app(AsyncLLM(llm, **waiting), settings)


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """YAML and JSON know lists only."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
