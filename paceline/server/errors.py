"""Errors as clients see them: OpenAI's shape, and Anthropic's on its path."""

from __future__ import annotations

import re
from typing import Any

from paceline.errors import CapacityError, EngineDeadError, EngineError, PacelineError, QueueFullError
from paceline.values import shown_as_json as shown

RETRY_AFTER = {429: "1", 503: "5"}  # seconds
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}
_LIMIT = re.compile(r"\bmax_tokens\b")
_FIELD = re.compile(r"([a-z][a-z_]*(?:\[\d+\])?(?:\.[a-z_]+(?:\[\d+\])?)*)\s?[:=]")


_NAMES = {"None": "null", "True": "true", "False": "false"}
_WORDS = re.compile(r"""(?<!\w)'(?:\\.|[^'\\])*'|(?<!\w)"(?:\\.|[^"\\])*"|\b(?:None|True|False)\b""")


class ApiError(PacelineError):
    """An answer with a status other than 200. param: the field at fault. code: a word that programs can test for."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    @property
    def type(self) -> str:
        return _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    def headers(self) -> dict[str, str]:
        out = {}
        if self.status in RETRY_AFTER:
            out["retry-after"] = RETRY_AFTER[self.status]
        if self.status == 401:
            out["www-authenticate"] = "Bearer"
        return out


def in_json(message: str) -> str:
    """A message about a value in Python, with JSON's names for null, true and false. What stands in quotes stays."""
    return _WORDS.sub(lambda found: _NAMES.get(found[0], found[0]), message)


def bad(param: str, value: object, remedy: str, *, code: str | None = None) -> ApiError:
    """A field with a value that cannot be served."""
    return ApiError(400, f"{param}={shown(value)}: {remedy}", param=param, code=code)


def with_limit(message: str, field: str) -> str:
    """An error about the limit of an output, under the name of the field that the client gave."""
    return _LIMIT.sub(field, message)


def as_api_error(error: Exception) -> ApiError:
    """What became of a request, as an answer."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="queue_full")
    if isinstance(error, EngineDeadError):
        return ApiError(503, str(error), code="engine_dead")
    if isinstance(error, TimeoutError):
        return ApiError(504, "the request took longer than this server allows (--request-timeout)", code="timeout")
    if isinstance(error, EngineError) or not isinstance(error, PacelineError):
        return ApiError(500, "the server made an error; its log says more")
    message = in_json(str(error))
    field = _FIELD.match(message)
    code = "context_length_exceeded" if isinstance(error, CapacityError) and "max_model_len" in message else None
    return ApiError(400, message, param=field[1] if field else None, code=code)


def body_of(error: ApiError, *, anthropic: bool = False) -> dict[str, Any]:
    """The JSON of an error."""
    if anthropic:
        kind = "api_error" if error.type == "server_error" else error.type
        return {"type": "error", "error": {"type": kind, "message": error.message}}
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}
