"""One HTTP request in another process: its parts as a message, and the replica's ASGI application run on it.

The application is the server's own, so every route behaves as it does without Ray. The messages it sends come back one
by one: a stream stays a stream, and a client that leaves is seen as `http.disconnect`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
Application = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Any]

PENDING = 16  # messages that wait for a slow reader; then the application waits
FAREWELL_S = 5.0  # that an application has for tidying up after its client left


@dataclass(frozen=True, slots=True)
class RelayedRequest:
    """An HTTP request. `prompt` is what Ray's prefix-aware router reads; it looks for an argument that has it."""

    method: str
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    client: tuple[str, int] | None
    prompt: str

    def scope(self) -> Message:
        """The ASGI scope of this request."""
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "raw_path": self.path.encode(),
            "root_path": "",
            "query_string": self.query,
            "headers": list(self.headers),
            "client": self.client,
            "server": None,
            "state": {},
        }


async def run(app: Application, request: RelayedRequest, state: Message | None = None) -> AsyncGenerator[Message, None]:
    """What `app` sends in answer to `request`. Closing the generator tells the application that its client left.

    state: what the application's lifespan put there. Raises what the application raises.
    """
    sent: asyncio.Queue[Message | None] = asyncio.Queue(PENDING)
    left = asyncio.Event()
    asked = False

    async def receive() -> Message:
        nonlocal asked
        if not asked:
            asked = True
            return {"type": "http.request", "body": request.body, "more_body": False}
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if not left.is_set():
            await sent.put(message)

    async def answer() -> None:
        try:
            await app({**request.scope(), "state": dict(state or {})}, receive, send)
        finally:
            if not left.is_set():
                await sent.put(None)

    task = asyncio.create_task(answer())
    try:
        while (message := await sent.get()) is not None:
            yield message
        await task
    finally:
        left.set()
        while not sent.empty():  # free an application that waits to send
            sent.get_nowait()
        if not task.done():
            with suppress(asyncio.TimeoutError, asyncio.CancelledError, Exception):
                await asyncio.wait_for(task, FAREWELL_S)  # cancels it when the time is over


class Lifespan:
    """Start-up and shutdown of an ASGI application, as a web server does them."""

    def __init__(self, app: Application) -> None:
        self.app = app
        self.state: Message = {}
        self._inbox: asyncio.Queue[Message] = asyncio.Queue()
        self._outbox: asyncio.Queue[Message] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises RuntimeError when the application reports that it could not start."""
        self._task = asyncio.create_task(self._run())
        await self._exchange("startup")

    async def stop(self) -> None:
        """Let the application tidy up; nothing to do when it never started or is stopped already."""
        if self._task is not None:
            await self._exchange("shutdown")
            self._task = None

    async def _exchange(self, phase: str) -> None:
        assert self._task is not None
        await self._inbox.put({"type": f"lifespan.{phase}"})
        reply = asyncio.create_task(self._outbox.get())
        done, _ = await asyncio.wait({reply, self._task}, return_when=asyncio.FIRST_COMPLETED)
        if reply not in done:  # the application does not know lifespan events, which the protocol allows
            reply.cancel()
            return
        message = reply.result()
        if message["type"].endswith(".failed"):
            raise RuntimeError(f"the server's application failed at {phase}: {message.get('message', '')}")

    async def _run(self) -> None:
        scope = {"type": "lifespan", "asgi": {"version": "3.0", "spec_version": "2.0"}, "state": self.state}
        with suppress(Exception):
            await self.app(scope, self._inbox.get, self._outbox.put)
