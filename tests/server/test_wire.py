"""Pieces that the engine's thread sends itself: the same bytes in the same order, whoever sends which of them."""

from __future__ import annotations

import json
import os
import random
import socket
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from engine.harness import Scripted, open_llm

from paceline import LLM, engine_thread
from paceline.engine_thread import Ticket
from paceline.outputs import StreamDelta
from paceline.server.transport import TextEvents, event, only_text
from paceline.server.wire import DirectBody

from .harness import Live, live, parse_events, until
from .test_limits import raw_post, slow_steps

PLAIN, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = {"max_tokens": 60, "ignore_eos": True, "temperature": 1.0, "seed": 5, "logit_bias": {"0": -100}}
SAID = {"messages": [{"role": "user", "content": "ab"}]}
REQUESTS = [
    (PLAIN, {"prompt": "ab", "echo": True}),
    (PLAIN, {"prompt": "ab", "n": 3, "stream_options": {"include_usage": True}}),
    (CHAT, {**SAID, "stream_options": {"include_usage": True}}),
    (CHAT, {**SAID, "n": 2}),
    (CHAT, {**SAID, "min_tokens": 30, "stop": ["a", "e", "i", "o", "t"]}),
]
MORE_THAN_TEXT = [
    (PLAIN, {"prompt": "ab", "logprobs": 2}),
    (PLAIN, {"prompt": ["ab", "cd"]}),
    (PLAIN, {"prompt": "ab", "return_token_ids": True}),
    (PLAIN, {"prompt": "ab", "stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
    (CHAT, {**SAID, "logprobs": True}),
    (CHAT, {**SAID, "return_token_ids": True}),
    (CHAT, {**SAID, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
]


@pytest.fixture
def llm(folder) -> Iterator[LLM]:
    """Its steps take a while, as a real model's do: an answer must not end before the loop has sent its first piece."""
    llm = open_llm(folder, Scripted(), max_num_seqs=8)
    with slow_steps(llm, 0.003):
        yield llm


@pytest.fixture(autouse=True)
def never_joined(monkeypatch) -> None:
    """On a busy machine the loop falls behind, and pieces that it has not sent would be joined."""
    monkeypatch.setattr("paceline.async_llm.MERGE_FROM", 1 << 30)


@pytest.fixture
def by(monkeypatch) -> dict[str, int]:
    """How many pieces the engine's thread sent, and how many it left to the loop."""
    counts = {"engine": 0, "loop": 0}
    put = DirectBody.put

    def counted(self: DirectBody, delta: StreamDelta) -> bool:
        taken = put(self, delta)
        counts["engine" if taken else "loop"] += 1
        return taken

    monkeypatch.setattr(DirectBody, "put", counted)
    return counts


def chunks(server: Live, path: str, fields: dict[str, Any]) -> list[dict[str, Any]]:
    """Of a stream, without what belongs to the run."""
    found = server.events(path, **LONG, **fields)
    for chunk in found:
        for name in ("id", "created", "metrics", "timings"):
            chunk.pop(name, None)
        if "usage" in chunk:
            chunk["usage"].pop("prompt_tokens_details")
    return found


def by_choice(found: list[dict[str, Any]]) -> dict[int | None, list[dict[str, Any]]]:
    """How choices stand among each other depends on the passes; the chunks of each do not."""
    out: dict[int | None, list[dict[str, Any]]] = {}
    for chunk in found:
        out.setdefault(chunk["choices"][0]["index"] if chunk["choices"] else None, []).append(chunk)
    return out


@pytest.mark.parametrize(("path", "fields"), REQUESTS)
def test_the_same_chunks_whoever_sends_them(llm, by, monkeypatch, path, fields):
    with live(llm) as server:
        direct = [by_choice(chunks(server, path, fields)) for _ in range(2)]
        assert by["engine"] > 20
        monkeypatch.setattr(engine_thread, "FEW", -1)
        count = dict(by)
        assert by_choice(chunks(server, path, fields)) == direct[0] == direct[1]
        assert by == count


@pytest.mark.parametrize(("path", "fields"), MORE_THAN_TEXT)
def test_pieces_with_more_than_text_are_left_to_the_loop(llm, by, path, fields):
    with live(llm) as server:
        assert chunks(server, path, fields)
        assert by == {"engine": 0, "loop": 0}


def test_reasoning_and_calls_are_left_to_the_loop(thinker, by):
    assert chunks(thinker, CHAT, SAID)
    assert by == {"engine": 0, "loop": 0}


def test_many_choices_are_left_to_the_loop(llm, by):
    with live(llm) as server:
        assert chunks(server, PLAIN, {"prompt": "ab", "n": engine_thread.FEW + 1})
        assert by["engine"] == 0


def fits(rng: random.Random) -> Callable[[socket.socket, bytes], int]:
    """A socket whose buffer takes all, a part, or nothing."""

    def send(connection: socket.socket, data: bytes) -> int:
        size = rng.choice([0, 1, len(data) // 2, len(data) - 1, len(data), len(data), len(data)])
        if not size:
            raise BlockingIOError
        return connection.send(data[:size])

    return send


@pytest.mark.parametrize("seed", range(6))
def test_a_full_buffer_tears_no_piece(llm, by, monkeypatch, seed):
    send = fits(random.Random(seed))
    with live(llm) as server:
        for path, fields in REQUESTS:
            with monkeypatch.context() as patch:
                patch.setattr(DirectBody, "_send", lambda self, data: send(self._socket, data))
                torn = chunks(server, path, fields)
            assert by_choice(torn) == by_choice(chunks(server, path, fields))
        assert min(by.values()) > 0


def test_the_way_stays_shut_when_the_loop_was_quick_to_take_the_rest() -> None:
    """What the loop took may lie in its buffer still: the next piece must not pass it."""
    mine, other = socket.socketpair()
    written: list[bytes] = []
    idle = [False]
    wire: Any = SimpleNamespace(
        open=lambda: mine,
        is_idle=lambda: idle[0],
        loop=SimpleNamespace(call_soon_threadsafe=lambda call: call()),  # before `put` returns
        transport=SimpleNamespace(write=written.append),
    )
    body = DirectBody(wire, lambda _delta: b"data")
    body._send = lambda data: mine.send(data[:3])  # type: ignore[method-assign]
    nothing: Any = None
    ticket = Ticket(nothing, nothing, nothing, nothing, shortcut=body)
    with mine, other:
        assert ticket.put(nothing)
        assert other.recv(100) + b"".join(written) == b"4\r\ndata\r\n"
        assert ticket.shortcut is None
        ticket.offer(body)
        assert ticket.shortcut is None
        idle[0] = True
        ticket.offer(body)
        assert ticket.shortcut is body


def test_an_error_leaves_the_piece_to_the_loop(llm, by, monkeypatch, caplog):
    def broken(self: DirectBody, data: bytes) -> int:
        raise ValueError("broken")

    with live(llm) as server:
        want = chunks(server, *REQUESTS[2])
        monkeypatch.setattr(DirectBody, "_send", broken)
        assert chunks(server, *REQUESTS[2]) == want
        assert "the loop sends it" in caplog.text
        assert server.engine.alive


def test_a_client_that_reads_nothing_gets_everything_later(llm, by):
    """Its request goes on; the system's buffer and then the loop keep what it does not read."""
    body = json.dumps({**LONG, **SAID, "model": "tiny", "max_tokens": 180, "stream": True}).encode()
    with live(llm, model_names=("tiny",)) as server:
        want = "".join(c["choices"][0]["delta"].get("content", "") for c in server.events(CHAT, **json.loads(body)))
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            client.connect(("127.0.0.1", server.port))
            head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
            client.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            until(lambda: not server.engine.in_flight)
            data = b""
            while piece := client.recv(512):
                data += piece
        got = parse_events(iter(unchunked(data.partition(b"\r\n\r\n")[2]).decode().splitlines()))
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in got) == want


def unchunked(body: bytes) -> bytes:
    out = b""
    while True:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        if not length:
            return out
        out += body[:length]
        assert body[length : length + 2] == b"\r\n"
        body = body[length + 2 :]


def test_clients_that_leave_leave_nothing_open(llm, by):
    body = httpx.Request("POST", "http://x", json={**LONG, "max_tokens": 180, "prompt": "ab", "stream": True}).read()
    with live(llm) as server:
        server.events(PLAIN, prompt="ab", **LONG)
        until(lambda: len(server.server.server_state.connections) <= 1)
        before = len(os.listdir("/proc/self/fd"))
        with slow_steps(llm, 0.005):
            for _ in range(8):
                sent = by["engine"]
                connection = raw_post(server.port, body)
                until(lambda sent=sent: by["engine"] > sent + 2)
                connection.close()
                server.idle()
        until(lambda: len(server.server.server_state.connections) <= 1)
        until(lambda: len(os.listdir("/proc/self/fd")) <= before)
        assert server.engine.stats().finished["abort"] == 8


def test_a_connection_serves_on_behind_a_direct_stream(llm, by):
    """Streams and whole answers in turns over one connection, the next request being sent before the last answer."""
    with live(llm) as server, slow_steps(llm, 0.01):
        one = httpx.Request("POST", "http://x", json={**LONG, "prompt": "ab", "stream": True}).read()
        two = httpx.Request("POST", "http://x", json={"prompt": "ab", "max_tokens": 2, "temperature": 0}).read()
        head = "POST {} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            for body in (one, two, one, two):
                client.sendall(head.format(PLAIN, len(body)).encode() + body)
            data = b""
            while data.count(b"HTTP/1.1 200") < 4 or not data.endswith(b"}"):
                piece = client.recv(1 << 16)
                assert piece
                data += piece
        first, second, third, fourth = (part.partition(b"\r\n\r\n")[2] for part in data.split(b"HTTP/1.1 200")[1:])
        assert unchunked(first).endswith(b"data: [DONE]\n\n") and unchunked(third).endswith(b"data: [DONE]\n\n")
        assert json.loads(second)["choices"] == json.loads(fourth)["choices"]
        assert by["engine"] > 40


@pytest.mark.parametrize("text", ["", "a", '"\\\n\u2028é\U0001f600', "\ud800", "x" * 5000])
def test_text_events_are_what_encoding_them_whole_makes(text):
    value = {"id": '"text"', "choices": [{"index": 0, "text": text, "n": None}]}
    forms = TextEvents(lambda text: {**value, "choices": [{"index": 0, "text": text, "n": None}]})
    assert forms.of(text) == event(value)
    of = only_text([forms])
    assert of(StreamDelta(0, text, [1], [False], None)) == (event(value) if text else b"")
    assert of(StreamDelta(0, text, [1], [False], "stop")) is None
