"""Pieces of an answer from the engine's thread straight to the client's socket.

With one client on a small machine, a piece by way of the event loop costs two changes of threads, the interpreter's
lock and some hundred microseconds of a core that the next pass needs. Here it is one system call of the thread that has
just made it. The loop keeps everything else: the head of an answer, its first and last pieces, errors, and clients that
read slowly.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from paceline.async_llm import RequestStream
from paceline.outputs import StreamDelta

EXTENSION: Final = "paceline.wire"  # of an ASGI scope


class Wire:
    """The way to the client of one answer."""

    def __init__(self, cycle: RequestResponseCycle, loop: asyncio.AbstractEventLoop) -> None:
        self.cycle = cycle
        self.loop = loop
        self.transport = cycle.transport

    def is_idle(self) -> bool:
        """On the loop: the body has begun, and all of it is with the system."""
        cycle, transport = self.cycle, self.transport
        begun = cycle.response_started and bool(cycle.chunked_encoding) and not cycle.response_complete
        return begun and not (cycle.disconnected or transport.is_closing() or transport.get_write_buffer_size())

    def open(self) -> socket.socket:
        """The connection under a number of its own: the loop may close its own at any moment, and the system give that
        number to another client's. Raises OSError if it has been closed."""
        return socket.socket(fileno=os.dup(self.transport.get_extra_info("socket").fileno()))  # -1 once it is closed


def wire_of(scope: Mapping[str, Any]) -> Wire | None:
    """None under another server than this package's, or over TLS."""
    found: Wire | None = scope.get("extensions", {}).get(EXTENSION)
    return None if found is None or found.transport.get_extra_info("ssl_object") is not None else found


def shorten(stream: RequestStream, wire: Wire, events: Callable[[StreamDelta], bytes | None]) -> None:
    """Let the engine's thread send what `events` makes of this stream's deltas, as DirectBody has it."""
    with suppress(OSError):  # the client has gone, as the loop will see
        stream.shorten(DirectBody(wire, events))


class DirectBody:
    """A `Shortcut` that makes events of deltas and sends them as pieces of the answer's body."""

    def __init__(self, wire: Wire, events: Callable[[StreamDelta], bytes | None]) -> None:
        """events: b"" = nothing to send, None = the loop knows how; called on the engine's thread.
        Raises OSError if the client has gone."""
        self._wire = wire
        self._events = events
        self._socket = wire.open()
        self._rest = b""  # of a piece that did not fit the system's buffer
        self._clogged = False  # since then, until the loop finds everything sent

    def ready(self) -> bool:
        """On the loop."""
        if not self._rest and self._wire.is_idle():
            self._clogged = False
            return True
        return False

    def put(self, delta: StreamDelta) -> bool:
        events = self._events(delta)
        if not events:
            return events is not None
        data = b"%x\r\n%b\r\n" % (len(events), events)
        try:
            sent = self._send(data)
        except OSError:  # the buffer is full, or the client has gone: the loop knows what to do
            return False
        if sent < len(data):
            # not `bool(self._rest)`: the loop may have taken the rest into a buffer of its own before anyone looks
            self._rest, self._clogged = data[sent:], True
            self._wire.loop.call_soon_threadsafe(self._send_rest)
        return True

    @property
    def clogged(self) -> bool:
        return self._clogged

    def close(self) -> None:
        """On the loop. What it sends next, an error for instance, stands behind the rest of a torn piece."""
        self._send_rest()
        self._socket.close()

    def _send(self, data: bytes) -> int:
        return self._socket.send(data, socket.MSG_DONTWAIT)

    def _send_rest(self) -> None:
        rest, self._rest = self._rest, b""
        if rest:
            self._wire.transport.write(rest)
