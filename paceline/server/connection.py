"""A client's connection: uvicorn's, with the bounds that it lacks, and with errors in the shape of all others."""

from __future__ import annotations

import asyncio
import select
from collections import deque
from typing import Any, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from paceline.server.errors import ApiError, body_of
from paceline.server.transport import dumps
from paceline.server.wire import EXTENSION, Wire

# What the parser may swallow without handing anything on: the line and headers of a request, or what stands behind the
# last piece of a body. It copies a header that comes in pieces once per piece, so an endless one stalls the loop.
MAX_HEAD: Final = 64 << 10  # bytes
HEAD_SECONDS: Final = 30.0  # for a connection's first byte to its first request, and for the head of each later one
LINGER_SECONDS: Final = 2.0  # for a client that is still sending when it has been answered for the last time,
LINGER_BYTES: Final = 1 << 20  # and what of it is thrown away at most
PROBES: Final = frozenset({"/health", "/ping", "/metrics"})  # answered even where there are too many connections
FIGURES: Final = "/metrics"  # to the last moment
REFUSED: Final = "paceline.refused"  # of an ASGI scope: the error to answer with, whatever was asked


class State(ServerState):
    """draining: requests that began may end, and others are refused."""

    draining = False


class LingeringTransport:
    """Closes so that the last answer arrives.

    A socket that is closed over bytes which nobody read, or that more bytes come to, is reset, and the client may lose
    the answer (a refused key, a body too large) with it. So while a client is still sending, only the server's half is
    closed, and what comes is thrown away, until the client closes or there was enough of it.
    """

    def __init__(self, transport: asyncio.Transport, protocol: Connection) -> None:
        self._transport, self._protocol = transport, protocol
        self._end: asyncio.TimerHandle | None = None
        self._thrown_away = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self._end is not None or self._transport.is_closing()

    def close(self) -> None:
        if self.is_closing() or not self._protocol.is_receiving or not self._transport.can_write_eof():
            self._transport.close()
            return
        self._protocol.flow.resume_reading()
        self._transport.write_eof()
        self._end = self._protocol.loop.call_later(self._protocol.linger_seconds, self._transport.close)

    def write(self, data: bytes) -> None:
        if not self.is_closing():  # asyncio's transports complain of it, and uvloop's raise RuntimeError
            self._transport.write(data)

    def throw_away(self, data: bytes) -> None:
        self._thrown_away += len(data)
        if self._thrown_away > LINGER_BYTES:
            self._transport.close()

    def lost(self) -> None:
        """The connection is gone."""
        if self._end is not None:
            self._end.cancel()


class Connection(HttpToolsProtocol):
    """head_seconds, linger_seconds: as HEAD_SECONDS and LINGER_SECONDS; tests shorten them."""

    head_seconds = HEAD_SECONDS
    linger_seconds = LINGER_SECONDS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._most, self.limit_concurrency = self.limit_concurrency, None  # counted here, for an answer in JSON
        self._swallowed = 0
        self.is_receiving = False  # whether a request has begun to come that has not come whole
        self._cycles: deque[RequestResponseCycle] = deque()  # the one that runs, and those that wait behind it
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._lingering = LingeringTransport(transport, self)
        super().connection_made(self._lingering)  # type: ignore[arg-type]
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_there()
        self._lingering.lost()
        super().connection_lost(exc)
        self._end_all()  # uvicorn tells only the last one

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            self._lingering.throw_away(data)
            return
        if self._late is None and self._unanswered() is None:
            self._wait_for_head()
        self._swallowed += len(data)
        super().data_received(data)
        if self._swallowed > MAX_HEAD:
            self._refuse(ApiError(431, f"the request's headers are larger than {MAX_HEAD} bytes"))

    def on_message_begin(self) -> None:
        self.is_receiving = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._swallowed = 0
        self._head_is_there()
        self.app = self._served
        if self.parser.get_http_version() != "1.1":
            self.app = _until_the_end(self.app)
        super().on_headers_complete()
        self._cycles.append(self.cycle)
        extensions: dict[str, Any] = {EXTENSION: Wire(self.cycle, self.loop)}
        if (refusal := self._refusal()) is not None:
            extensions[REFUSED] = refusal
        self.scope["extensions"] = extensions

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.scope.get("method") is None:  # behind a body they would be added to those of a running request
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._swallowed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._swallowed = 0
        self.is_receiving = False
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, msg))

    def timeout_keep_alive_handler(self) -> None:
        """What came since the loop last looked at its sockets is a request, and who has sent it is not idle."""
        if not self.transport.is_closing() and self._has_arrived():
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        else:
            super().timeout_keep_alive_handler()

    def _has_arrived(self) -> bool:
        """Whether there is something to read."""
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), select.POLLIN)
        return bool(poll.poll(0))

    def _refusal(self) -> ApiError | None:
        """Why the request whose head has just come is not served."""
        path = self.url.partition(b"?")[0].decode("latin-1")
        if getattr(self.server_state, "draining", False) and path != FIGURES:
            return ApiError(503, "the server is shutting down; ask another one, or later", code="shutting_down")
        if self._most is not None and max(len(self.connections), len(self.tasks)) >= self._most and path not in PROBES:
            return ApiError(503, "there are too many connections (--max-connections)", code="too_many_connections")
        return None

    @property
    def is_serving(self) -> bool:
        """Whether a request is being answered, or waits for its answer, that was not refused."""
        return any(not c.response_complete and REFUSED not in c.scope["extensions"] for c in self._cycles)

    def abort_if_written(self) -> None:
        """End the connection at once, unless the client has not taken all of its answer yet."""
        if self.transport is not None and not self.transport.get_write_buffer_size():
            self.transport.abort()

    def _end_all(self) -> None:
        """Tell the requests of this connection that nobody hears their answers."""
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self._cycles.clear()

    def _unanswered(self) -> RequestResponseCycle | None:
        """The request that runs; `cycle` is the one that came last, and may wait behind it."""
        while self._cycles and self._cycles[0].response_complete:
            self._cycles.popleft()
        return self._cycles[0] if self._cycles else None

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
        elif not self.transport.is_closing() and self._has_arrived():
            self._wait_for_head()
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """The last answer of a connection, unless one has begun."""
        self._head_is_there()
        if self.transport.is_closing():
            return
        running = self._unanswered()
        if running is None or not running.response_started:
            body = dumps(body_of(error))
            head = STATUS_LINE[error.status] + b"content-type: application/json\r\nconnection: close\r\n"
            self.transport.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        self.transport.close()
        self._end_all()  # though the connection may linger


def _until_the_end(app: ASGIApp) -> ASGIApp:
    """For clients of HTTP/1.0, who know no chunks: a body without a length ends with the connection."""

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        cycle: RequestResponseCycle = scope["extensions"][EXTENSION].cycle
        endless = False

        async def sending(message: Message) -> None:
            nonlocal endless
            if message["type"] == "http.response.start":
                endless = all(name.lower() != b"content-length" for name, _ in message.get("headers", []))
                if endless:
                    cycle.chunked_encoding = False
                    cycle.keep_alive = False
            elif endless:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, sending)

    return served
