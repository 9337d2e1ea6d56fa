"""What an operator decides about the server, the engine's own options apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """model_names: what clients call the model, the first one in answers. api_keys: any of them opens the door; none
    leaves it open. max_body_bytes: larger requests get 413. body_timeout: seconds a request may take to arrive.
    request_timeout: seconds a request may run, waiting included; None = as long as it takes. num_speculative_tokens:
    drafts per step for requests that do not say; None = as many as pay. allow_longer_drafts: requests may ask for more
    than the drafter was trained for. spec_metrics: whether answers carry `metrics.speculative_decoding`. max_logprobs:
    most alternatives per token. tool_call_parser, reasoning_parser: by name, "auto" (by the chat template) or "none".
    log_interval: seconds between the log's lines of figures. allowed_origins: origins whose pages may use the server
    from a browser, "*" for all; None = all where a key is asked for, else those of this machine alone.
    allowed_methods, allowed_headers: what such pages may send. allow_credentials: whether with cookies.
    """

    model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 10 * MIB
    body_timeout: float = 30.0
    request_timeout: float | None = None
    num_speculative_tokens: int | None = None
    allow_longer_drafts: bool = False
    spec_metrics: Literal["none", "summary"] = "summary"
    max_logprobs: int = 20
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    log_interval: float = 10.0
    allowed_origins: tuple[str, ...] | None = None
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
