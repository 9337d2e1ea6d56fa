"""Running the application: a port taken before the model is loaded, signals that drain, an exit code that tells."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import uvicorn

from paceline.async_llm import AsyncLLM
from paceline.errors import ConfigError
from paceline.server.app import build_app
from paceline.server.connection import Connection, State
from paceline.server.settings import ServerSettings
from paceline.structured.compiler import is_compiling

log = logging.getLogger("paceline.server")

SWITCH_INTERVAL = 0.001  # seconds after which a thread that waits for the interpreter gets it; Python's own is five
# Seconds that an idle connection stays open: longer than clients keep theirs (httpx, and with it the openai client, 5;
# aiohttp 15; nginx and load balancers 60). Who closes last closes on no request: at 5, as uvicorn has it, a client that
# asks every five seconds now and then finds its connection closed just as it sends.
KEEP_ALIVE = 75
LAST_RESORT = 10  # seconds after the engine was closed; then connections that are still open are cut
FAREWELL_SECONDS = 1.0  # for a client to take leave of its connection under TLS, when the server ends


class Server(uvicorn.Server):
    """uvicorn, with signals that end in a normal exit: the first drains, the second ends requests at once."""

    def __init__(
        self, config: uvicorn.Config, engine: AsyncLLM, patience: float, on_ready: Callable[[], None] = lambda: None
    ) -> None:
        """patience: seconds that requests in flight may go on. on_ready: called once clients can connect."""
        super().__init__(config)
        self.server_state: State = State()
        self.engine = engine
        self.patience = patience
        self.on_ready = on_ready
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started:
            self.on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """First of all requests in flight may finish, while others are told that the server is leaving: a balancer that
        asks /health hears of it."""
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self.patience, self._end_requests)
        most, begin = self.config.timeout_graceful_shutdown, loop.time()
        self.server_state.draining = True
        farewell: asyncio.Task[None] | None = None
        try:
            while any(isinstance(c, Connection) and c.is_serving for c in self.server_state.connections):
                if most is not None and loop.time() - begin >= most:
                    break
                await asyncio.sleep(0.05)
            if most is not None:
                self.config.timeout_graceful_shutdown = max(1, round(most - (loop.time() - begin)))
            if self.config.is_ssl:
                farewell = asyncio.ensure_future(self._let_go())
            await super().shutdown(sockets)
        finally:
            timer.cancel()
            if farewell is not None:
                farewell.cancel()

    async def _let_go(self) -> None:
        """Under TLS a connection that is closed waits for half a minute for a client that says nothing."""
        while True:
            await asyncio.sleep(FAREWELL_SECONDS)
            for connection in list(self.server_state.connections):
                if isinstance(connection, Connection) and not connection.is_serving:
                    connection.abort_if_written()

    def _end_requests(self) -> None:
        """Every request gets an error that says why, and its connection ends in order."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self.engine.close())

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        before = {sig: signal.signal(sig, self.handle_exit) for sig in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)

    def handle_exit(self, sig: int, frame: Any) -> None:
        if self.should_exit:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._end_requests)
        else:
            log.info("%s: requests in flight may finish, new ones are refused", signal.Signals(sig).name)
        self.should_exit = True


def end_process(code: int) -> NoReturn:
    """Exit, also while a grammar is being compiled that may take for ever."""
    if is_compiling():
        log.info("a grammar is still being compiled; the process ends without it")
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
    raise SystemExit(code)


def take_port(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet: clients are refused until the model is there. Raises ConfigError."""
    if not host:  # to the system it means every address
        raise ConfigError("--host: empty; use 127.0.0.1, or 0.0.0.0 to let other machines in")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # with its protocol named, asyncio's own loop sends answers without waiting for acknowledgements
    taken = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind((host, port))
    except (OSError, OverflowError) as error:
        taken.close()
        raise ConfigError(f"--host {host} --port {port}: {getattr(error, 'strerror', error) or error}") from None
    return taken


def serve(
    engine: AsyncLLM,
    settings: ServerSettings,
    listening: socket.socket,
    *,
    shutdown_timeout: int = 30,
    keep_alive: int = KEEP_ALIVE,
    max_connections: int = 1024,
    access_log: bool = False,
    ssl_certfile: Path | None = None,
    ssl_keyfile: Path | None = None,
    on_ready: Callable[[], None] = lambda: None,
) -> int:
    """Serve until a signal comes or the engine dies; the exit code: 0, or 1 for a dead engine. on_ready: called once
    clients can connect."""
    sys.setswitchinterval(SWITCH_INTERVAL)
    server: Server | None = None

    def stop() -> None:
        assert server is not None
        server.should_exit = True

    config = uvicorn.Config(
        build_app(engine, settings, on_death=stop),
        http=Connection,
        log_config=None,
        access_log=access_log,
        ssl_certfile=ssl_certfile,
        ssl_keyfile=ssl_keyfile,
        server_header=False,
        proxy_headers=False,
        ws="none",
        timeout_keep_alive=keep_alive,
        timeout_graceful_shutdown=shutdown_timeout + LAST_RESORT,
        limit_concurrency=max_connections,
    )
    server = Server(config, engine, shutdown_timeout, on_ready)
    gc.collect()
    gc.freeze()  # what the start has made stays: later collections need not look at it
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(server.serve(sockets=[listening]))
    return 1 if engine.error is not None else 0
