"""JSON answers and server-sent events, and what a client that goes away sets in motion."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline.outputs import StreamDelta
from paceline.server.errors import as_api_error, body_of

log = logging.getLogger(__name__)
T = TypeVar("T")

_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def dumps(value: Any) -> bytes:
    """JSON in UTF-8. Lone surrogates, which a client's own strings may carry, become "?"."""
    return _ENCODER.encode(value).encode("utf-8", "replace")


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dumps(content)


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + dumps(value) + b"\n\n"


def named_event(value: Mapping[str, Any]) -> bytes:
    """One server-sent event with its type as its name, as Anthropic's and the Responses interface have it."""
    return b"event: " + str(value["type"]).encode() + b"\n" + event(value)


DONE = b"data: [DONE]\n\n"


class TextEvents:
    """Events of one form in which only a text differs, without encoding the rest of each anew."""

    def __init__(self, value: Callable[[str], Any]) -> None:
        """value: of the event with a text."""
        mark = secrets.token_hex(16)  # nothing that a client sent can be like it
        self._before, self._behind = event(value(mark)).split(dumps(mark))

    def of(self, text: str) -> bytes:
        return self._before + dumps(text) + self._behind


def only_text(forms: Sequence[TextEvents]) -> Callable[[StreamDelta], bytes | None]:
    """A function for deltas of several choices: the event of one that adds text and nothing else, b"" where there is no
    text; None for the last of a choice."""

    def events(delta: StreamDelta) -> bytes | None:
        if delta.finish_reason is not None:
            return None
        return forms[delta.index].of(delta.text) if delta.text else b""

    return events


def text_events(value: Callable[[int, str], Any], choices: int) -> Callable[[StreamDelta], bytes | None]:
    """`only_text` for choices from 0 on. value: of the event that adds a text to a choice."""
    return only_text([TextEvents(partial(value, index)) for index in range(choices)])


class EventStream(Response):
    """Sends what a generator of events yields; a client that goes away closes the generator at once.

    An error inside the generator is the stream's last event: the status line has long been sent.
    """

    def __init__(
        self, events: AsyncGenerator[bytes, None], on_error: Callable[[Exception], bytes], held: AsyncExitStack
    ) -> None:
        """held: what `events` closes at its end; closed here where it never began, as closing it then does nothing."""
        super().__init__(media_type="text/event-stream")
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self.headers["x-accel-buffering"] = "no"
        self.events = events
        self.on_error = on_error
        self.held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = asyncio.ensure_future(self._pump(send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((pump, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _end(gone)
            await _end(pump)
            await self.held.aclose()

    async def _pump(self, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                async for chunk in self.events:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            except Exception as error:
                if not isinstance(error, OSError) or isinstance(error, TimeoutError):
                    _note(error)
                    await send({"type": "http.response.body", "body": self.on_error(error), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self.events.aclose()


async def _end(task: asyncio.Future[Any]) -> None:
    """Cancel a task and wait until its clean-up is over."""
    task.cancel()
    while not task.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait((task,))
    if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, OSError):
        log.error("a stream failed", exc_info=error)


async def _disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, which is cancelled when the client goes away; then None, which nobody reads."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        return None
    finally:
        gone.cancel()
        if not task.done():
            await _end(task)


def _note(error: Exception) -> None:
    if as_api_error(error).status == 500:  # others say what they are
        log.error("a stream ended with an error", exc_info=error)


def openai_error_event(error: Exception) -> bytes:
    return event(body_of(as_api_error(error))) + DONE


def anthropic_error_event(error: Exception) -> bytes:
    return named_event(body_of(as_api_error(error), anthropic=True))
