"""Streams that the engine's thread sends, when something ends or begins in the middle: clients, connections, the
engine, other streams. On both event loops: their transports differ in what they do once they are closed."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvloop
from engine.harness import Scripted, open_llm

from paceline import LLM
from paceline.server.connection import LingeringTransport
from paceline.server.transport import EventStream
from paceline.server.wire import DirectBody, Wire

from .harness import Live, live, parse_events, until
from .test_limits import slow_steps
from .test_wire import CHAT, LONG, PLAIN, SAID, unchunked

nothing: Any = None


@pytest.fixture(params=[None, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def loop(request) -> Callable[[], asyncio.AbstractEventLoop] | None:
    return request.param


@pytest.fixture
def llm(folder) -> LLM:
    return open_llm(folder, Scripted(), max_num_seqs=8)


@pytest.fixture(autouse=True)
def nothing_is_never_joined(monkeypatch) -> None:
    monkeypatch.setattr("paceline.async_llm.MERGE_FROM", 1 << 30)


@pytest.fixture
def quiet(caplog) -> Iterator[None]:
    """Clients that leave are nothing to complain about."""
    yield
    assert [r.getMessage() for r in caplog.get_records("call") if r.levelno >= logging.WARNING] == []


class Steps:
    """Steps of an engine, one at a time."""

    def __init__(self, llm: LLM) -> None:
        self.allowed, self.step = threading.Semaphore(0), llm.engine.step
        self.free, self.asked = False, 0
        llm.engine.step = self  # type: ignore[assignment]

    def __call__(self) -> Any:
        self.asked += 1
        if not self.free:
            self.allowed.acquire()
        return self.step()

    def go(self, steps: int = 1) -> bool:
        self.allowed.release(steps)
        return True

    def run(self) -> None:
        self.free = True
        self.go()


@pytest.fixture
def steps(llm) -> Iterator[Steps]:
    steps = Steps(llm)
    yield steps
    steps.run()


def request(path: str, *headers: str, version: str = "1.1", **fields: Any) -> bytes:
    body = httpx.Request("POST", "http://x", json=fields).read()
    head = [f"POST {path} HTTP/{version}", "host: x", "content-type: application/json", f"content-length: {len(body)}"]
    return "\r\n".join([*head, *headers, "", ""]).encode() + body


def connect(server: Live) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", server.port))
    client.settimeout(600)
    return client


def read_until(client: socket.socket, end: bytes) -> bytes:
    data = b""
    while end not in data:
        piece = client.recv(1 << 16)
        assert piece, data
        data += piece
    return data


def rest_of(client: socket.socket) -> bytes:
    data = b""
    try:
        while piece := client.recv(1 << 16):
            data += piece
    except ConnectionResetError:
        pass
    return data


def reset(client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def half_close(client: socket.socket) -> None:
    client.shutdown(socket.SHUT_WR)


STREAM = {**LONG, "prompt": "ab", "stream": True, "num_speculative_tokens": 0, "max_tokens": 180}


@pytest.mark.parametrize("leave", [socket.socket.close, reset, half_close])
@pytest.mark.parametrize("behind", [0, 1, 2])
def test_who_leaves_with_requests_behind_a_stream_ends_it(llm, steps, loop, quiet, leave, behind):
    """The server does not read while requests wait, so that a failure to write is how it hears of it."""
    with live(llm, new_loop=loop) as server, connect(server) as client:
        client.sendall(request(PLAIN, **STREAM))
        steps.go()
        read_until(client, b"data: ")
        client.sendall(request(PLAIN, **STREAM) * behind)
        steps.go(3)
        read_until(client, b"data: ")
        leave(client)
        if leave is half_close and behind:
            steps.run()
            assert rest_of(client).count(b"data: [DONE]") >= 1
            return
        until(lambda: steps.go() and not server.engine.in_flight)
        assert server.engine.stats().finished == {"abort": 1}
        until(lambda: not server.server.server_state.connections)
        steps.run()
        server.idle()


def test_nonsense_behind_a_stream_cuts_it_and_says_nothing_in_it(llm, steps, loop):
    """An error in the middle of an answer would be read as a part of it."""
    with live(llm, new_loop=loop) as server, connect(server) as client:
        client.sendall(request(PLAIN, **STREAM))
        steps.go()
        begin = read_until(client, b"data: ")
        client.sendall(request(PLAIN, **STREAM) + b"nonsense\r\n\r\n")
        until(lambda: steps.go() and not server.engine.in_flight)
        data = begin + rest_of(client)
        assert data.count(b"HTTP/1.1") == 1 and b"invalid_request_error" not in data
        assert server.engine.stats().finished == {"abort": 1}


@pytest.mark.parametrize("leave", [socket.socket.close, reset])
@pytest.mark.parametrize("path", [PLAIN, CHAT, "/v1/responses", "/v1/messages"])
def test_clients_that_leave_at_any_byte(llm, loop, quiet, leave, path):
    """Nothing is logged, nothing is held, and the next answer is whole."""
    fields = {"prompt": "ab"} if path == PLAIN else {"input": "ab"} if path == "/v1/responses" else SAID
    fields = fields | {"max_tokens": 60, "ignore_eos": True, "temperature": 0, "stream": True}
    with live(llm, new_loop=loop) as server, slow_steps(llm, 0.002):
        for wanted in (0, 1, 100, 150, 300, 500, 800, 1300, 2100, 3000):
            client = connect(server)
            client.sendall(request(path, **fields))
            while wanted > 0:
                piece = client.recv(min(wanted, 4096))
                assert piece
                wanted -= len(piece)
            leave(client)
        server.idle()
        until(lambda: not server.server.server_state.connections)
        with connect(server) as client:
            client.sendall(request(path, "connection: close", **fields))
            events = unchunked(rest_of(client).partition(b"\r\n\r\n")[2])
            assert events.endswith(b"\n\n") and b'"error":{' not in events


def test_streams_that_come_and_go_around_a_lone_one(llm, loop, quiet):
    """Each is handed to the loop and back again and again; all of them are what they are alone."""
    jobs = [(path, seed, n) for path in (PLAIN, CHAT) for seed in range(2) for n in (1, 2)]

    def ask(server: Live, path: str, seed: int, n: int) -> list[str]:
        fields = {"prompt": "ab"} if path == PLAIN else SAID
        texts = [""] * n
        stop = {"stop": ["a", "e"], "min_tokens": 30} if seed else {}
        for chunk in server.events(path, **{**LONG, "seed": seed, "n": n, **fields, **stop}):
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["text"] if path == PLAIN else choice["delta"].get("content", "")
        return texts

    with live(llm, new_loop=loop) as server:
        want = {job: ask(server, *job) for job in jobs}
        with slow_steps(llm, 0.002), ThreadPoolExecutor(3) as pool:
            for job, got in [(job, pool.submit(ask, server, *job)) for job in jobs * 4]:
                assert got.result() == want[job]


def torn(size: int) -> Callable[[DirectBody, bytes], int]:
    return lambda self, data: self._socket.send(data[: min(size, len(data) - 1)])


@pytest.mark.parametrize("end", ["a failure", "a time limit", "an abort", "a second signal", "a first signal"])
def test_what_ends_a_stream_stands_behind_its_torn_pieces(llm, steps, loop, monkeypatch, end):
    monkeypatch.setattr(DirectBody, "_send", torn(5))
    limit = 0.3 if end == "a time limit" else None
    with live(llm, new_loop=loop, request_timeout=limit) as server, connect(server) as client:
        client.sendall(request(PLAIN, "connection: close", **STREAM, request_id="it"))
        steps.go()
        begin = read_until(client, b"data: ")
        steps.go(5)
        until(lambda: steps.asked == 7)  # and takes no command before it is let go on
        if end == "a failure":
            steps.step = None  # not to be called
        elif end == "an abort":
            asyncio.run_coroutine_threadsafe(server.engine.abort("it"), server.loop)
        elif end == "a second signal":
            server.server.should_exit = True
            server.loop.call_soon_threadsafe(server.server._end_requests)
        elif end == "a first signal":
            server.server.should_exit = True
        if end in ("a time limit", "an abort", "a second signal"):
            until(lambda: not server.engine._thread._commands.empty())  # the loop asks for the end of the request
        steps.run()
        data = begin + rest_of(client)
        steps.run()
    events = unchunked(data.partition(b"\r\n\r\n")[2])
    assert events.endswith(b"data: [DONE]\n\n")
    last = parse_events(iter(events.decode().splitlines()))[-1]
    if end == "an abort":
        assert last["choices"][0]["finish_reason"] == "abort"
    elif end == "a first signal":
        assert last["choices"][0]["finish_reason"] == "length"
    else:
        assert last["error"]["message"]


def test_a_client_that_did_not_read_hears_that_its_time_is_over(llm, steps, loop, quiet, monkeypatch):
    """Though the time was over while the answer waited for it. Nothing is held until it reads."""

    def full(self: DirectBody, data: bytes) -> int:
        raise BlockingIOError

    monkeypatch.setattr(DirectBody, "_send", full)
    with live(llm, new_loop=loop) as server, connect(server) as client:
        client.sendall(request(PLAIN, "connection: close", **STREAM, request_id="it"))
        steps.go()
        data = read_until(client, b"data: ")
        [connection] = server.server.server_state.connections
        drain, waits = connection.flow.drain, threading.Event()

        async def drained() -> None:
            waits.set()
            await drain()

        def stop_reading() -> None:
            connection.flow.drain = drained
            connection.pause_writing()

        server.loop.call_soon_threadsafe(stop_reading)
        until(lambda: steps.go() and waits.is_set())
        server.loop.call_soon_threadsafe(server.engine._live["it"].expire)
        until(lambda: steps.go() and not server.engine.in_flight)
        server.loop.call_soon_threadsafe(connection.resume_writing)
        data += rest_of(client)
        assert server.engine.stats().finished == {"abort": 1}
    events = unchunked(data.partition(b"\r\n\r\n")[2])
    assert events.endswith(b"data: [DONE]\n\n")
    assert parse_events(iter(events.decode().splitlines()))[-1]["error"]["code"] == "timeout"


# ---- parts of it


def direct(wire: Any) -> DirectBody:
    return DirectBody(wire, lambda _delta: b"data")


def test_a_rest_is_written_before_what_follows_the_end() -> None:
    """The loop may end a stream, because of its time for instance, before it comes to the rest of a piece."""
    mine, other = socket.socketpair()
    written: list[bytes] = []
    later: list[Callable[[], None]] = []
    wire: Any = SimpleNamespace(
        open=lambda: mine,
        loop=SimpleNamespace(call_soon_threadsafe=later.append),
        transport=SimpleNamespace(write=written.append),
    )
    body = direct(wire)
    body._send = lambda data: mine.send(data[:3])  # type: ignore[method-assign]
    with other:
        assert body.put(nothing)
        body.close()
        assert b"".join(written) == b"4\r\ndata\r\n"[3:]
        later.pop()()
        assert len(written) == 1


def test_a_rest_for_a_client_that_has_gone_is_dropped() -> None:
    def write(_: bytes) -> None:
        raise RuntimeError("the handler is closed")  # as uvloop's do

    transport: Any = SimpleNamespace(is_closing=lambda: True, write=write)
    LingeringTransport(transport, nothing).write(b"rest")


def test_a_number_that_another_connection_has_now_gets_nothing() -> None:
    def transport_of(connection: socket.socket) -> Any:
        return SimpleNamespace(transport=SimpleNamespace(get_extra_info=lambda _: connection))

    mine, other = socket.socketpair()
    news, elsewhere = socket.socketpair()
    body = direct(Wire(transport_of(mine), nothing))
    number = mine.fileno()
    mine.close()
    os.dup2(news.fileno(), number)
    try:
        with other, elsewhere, news:
            assert body.put(nothing) and other.recv(100) == b"4\r\ndata\r\n"
            elsewhere.setblocking(False)
            with pytest.raises(BlockingIOError):
                elsewhere.recv(1)
            body.close()
            assert other.recv(1) == b""
            with pytest.raises(OSError):
                direct(Wire(transport_of(mine), nothing))
    finally:
        os.close(number)


def test_a_stream_that_never_began_holds_nothing() -> None:
    """Its client has gone while an answer before it, on the same connection, was still being written."""

    async def run() -> list[str]:
        ended: list[str] = []
        held = AsyncExitStack()
        held.callback(ended.append, "ended")
        full = asyncio.Event()

        async def send(_: Any) -> None:
            full.set()
            await asyncio.Future()

        async def receive() -> dict[str, str]:
            await full.wait()
            return {"type": "http.disconnect"}

        async def events():
            async with held:
                yield b"never"

        await EventStream(events(), lambda _: b"", held)(nothing, receive, send)
        return ended

    assert asyncio.run(run()) == ["ended"]


# ---- connections


def test_a_request_that_has_arrived_is_read_though_its_connection_was_idle_for_too_long(llm, loop):
    """The clock may run out between two looks of the loop at its sockets."""
    with live(llm, new_loop=loop) as server, connect(server) as client:
        client.sendall(b"GET /health HTTP/1.1\r\n\r\n")
        assert b" 200 " in read_until(client, b"\r\n\r\n")
        [connection] = server.server.server_state.connections
        until(lambda: connection.timeout_keep_alive_task is not None)

        def late() -> None:
            client.sendall(b"GET /version HTTP/1.1\r\n\r\n")
            connection.timeout_keep_alive_handler()

        server.loop.call_soon_threadsafe(late)
        assert b" 200 " in read_until(client, b"version")
        server.loop.call_soon_threadsafe(connection.timeout_keep_alive_handler)
        assert client.recv(1) == b""


@pytest.mark.parametrize("path", [PLAIN, CHAT])
def test_clients_that_know_no_chunks(llm, loop, path):
    """HTTP/1.0: an answer without a length ends with its connection."""
    fields = {"prompt": "ab"} if path == PLAIN else SAID
    stay = "connection: keep-alive"
    ways = [(True, "1.0", stay), (False, "1.0", stay), (True, "0.9", stay), (True, "2.0", stay), (False, "2.0", "x: y")]
    with live(llm, new_loop=loop) as server, slow_steps(llm, 0.002):
        for stream, version, header in ways:
            with connect(server) as client:
                client.sendall(request(path, header, version=version, **{**LONG, **fields, "stream": stream}))
                head, _, body = rest_of(client).partition(b"\r\n\r\n")
            assert b"transfer-encoding" not in head.lower() and b"connection: close" in head.lower()
            if stream:
                assert body.startswith(b"data: {") and body.endswith(b"data: [DONE]\n\n")
                assert len(parse_events(iter(body.decode().splitlines()))) > 20
            else:
                assert json.loads(body)["usage"]["completion_tokens"] == LONG["max_tokens"]
        with connect(server) as client:
            client.sendall(b"GET /v1/nothing HTTP/1.0\r\n\r\n")
            head, _, body = rest_of(client).partition(b"\r\n\r\n")
            assert b" 404 " in head and json.loads(body)["error"]


@pytest.mark.parametrize("path", [PLAIN, CHAT])
def test_clients_that_wait_to_be_told_to_go_on(llm, loop, path):
    fields = {"prompt": "ab"} if path == PLAIN else SAID
    fields = {**LONG, **fields, "stream": True}
    sent = request(path, "expect: 100-continue", "connection: close", **fields)
    head, _, body = sent.partition(b"\r\n\r\n")
    with live(llm, new_loop=loop) as server, connect(server) as client:
        client.sendall(head + b"\r\n\r\n")
        assert read_until(client, b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(body)
        events = unchunked(rest_of(client).partition(b"\r\n\r\n")[2])
        assert events.endswith(b"data: [DONE]\n\n")
