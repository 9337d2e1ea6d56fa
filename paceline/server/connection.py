"""A client's connection: uvicorn's, with the bounds that it lacks, and with errors in the shape of all others."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from paceline.server.errors import ApiError, body_of
from paceline.server.transport import JsonResponse, dumps

# What the parser may swallow without handing anything on: the line and headers of a request, or what stands behind the
# last piece of a body. It copies a header that comes in pieces once per piece, so an endless one stalls the loop.
MAX_HEAD: Final = 64 << 10  # bytes
HEAD_SECONDS: Final = 30.0  # for a connection's first byte to its first request, and for the head of each later one
PROBES: Final = frozenset({"/health", "/ping", "/metrics"})  # answered even where there are too many connections


class Connection(HttpToolsProtocol):
    """head_seconds: as HEAD_SECONDS; tests shorten it."""

    head_seconds = HEAD_SECONDS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._most, self.limit_concurrency = self.limit_concurrency, None  # counted here, for an answer in JSON
        self._swallowed = 0
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_there()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._late is None and (self.cycle is None or self.cycle.response_complete):
            self._wait_for_head()
        self._swallowed += len(data)
        super().data_received(data)
        if self._swallowed > MAX_HEAD:
            self._refuse(ApiError(431, f"the request's headers are larger than {MAX_HEAD} bytes"))

    def on_headers_complete(self) -> None:
        self._swallowed = 0
        self._head_is_there()
        crowded = self._most is not None and max(len(self.connections), len(self.tasks)) >= self._most
        self.app = _crowded if crowded and self.url.partition(b"?")[0].decode("latin-1") not in PROBES else self._served
        super().on_headers_complete()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.scope.get("method") is None:  # behind a body they would be added to those of a running request
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._swallowed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._swallowed = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, msg))

    # ---- heads

    @property
    def _served(self) -> Any:
        return self.config.loaded_app

    def _wait_for_head(self) -> None:
        self._late = self.loop.call_later(self.head_seconds, self._is_late)

    def _head_is_there(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _is_late(self) -> None:
        self._late = None
        if self._swallowed:
            self._refuse(ApiError(408, "the request's headers did not arrive in time", code="headers_timeout"))
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """The last answer of a connection, unless one has begun."""
        self._head_is_there()
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body = dumps(body_of(error))
            head = STATUS_LINE[error.status] + b"content-type: application/json\r\nconnection: close\r\n"
            self.transport.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        self.transport.close()


async def _crowded(scope: Scope, receive: Receive, send: Send) -> None:
    """The application of a connection too many."""
    error = ApiError(503, "there are too many connections (--max-connections)", code="too_many_connections")
    anthropic = str(scope["path"]).startswith("/v1/messages")
    headers = {**error.headers(), "connection": "close"}
    await JsonResponse(body_of(error, anthropic=anthropic), error.status, headers)(scope, receive, send)
