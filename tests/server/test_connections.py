"""Connections themselves: heads without end, heads that never come, and more connections than there may be."""

from __future__ import annotations

import json
import socket
import time

import httpx
import pytest
from engine.harness import Scripted, open_llm

from paceline import LLM
from paceline.server.connection import MAX_HEAD, Connection

from .harness import Live, live, until

BODY = b'{"prompt": "ab", "max_tokens": 2}'
POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


@pytest.fixture
def llm(folder) -> LLM:
    return open_llm(folder, Scripted(), max_num_seqs=4)


def connect(server: Live) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.settimeout(600)
    return connection


def answer(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the last answer of a connection."""
    data = b""
    try:
        while piece := connection.recv(1 << 16):
            data += piece
    except ConnectionResetError:  # it was closed with something unread, which is what shouting earns
        pass
    head, _, body = data.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    return int(status.split()[1]), dict(line.lower().split(": ", 1) for line in lines), body


@pytest.mark.parametrize("wait", [0.0, 0.002, 0.05])
def test_a_body_that_comes_after_its_answer_does_not_take_the_answer_away(llm, wait):
    """The key is refused without the body, which many clients send apart from the head."""
    body = BODY * 2000  # in several pieces
    with live(llm, api_keys=("key",)) as server:
        for _ in range(40):
            with connect(server) as connection:
                connection.sendall(POST + b"content-length: %d\r\n\r\n" % len(body))
                time.sleep(wait)
                connection.sendall(body)
                data = b""
                while piece := connection.recv(1 << 16):  # a reset fails here, or while sending
                    data += piece
            assert data.startswith(b"HTTP/1.1 401") and b"invalid_api_key" in data
        until(lambda: not server.server.server_state.connections)


def test_a_client_that_goes_on_sending_is_not_listened_to_for_long(llm, monkeypatch):
    monkeypatch.setattr(Connection, "linger_seconds", 0.2)
    with live(llm, api_keys=("key",)) as server, connect(server) as connection:
        connection.sendall(POST + b"content-length: 5\r\n\r\n")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 401")
        until(lambda: not server.server.server_state.connections)  # though the client sends nothing and does not close
    with live(llm, api_keys=("key",)) as server, connect(server) as connection:
        assert flood(connection, POST + b"content-length: 99999999\r\n\r\n", b"x" * 65536) < 64 << 20


def flood(connection: socket.socket, start: bytes, unit: bytes, most: int = 64 << 20) -> int:
    """Send without end, until the server does not want any more; how many bytes that took."""
    sent = 0
    try:
        connection.sendall(start)
        while sent < most:
            connection.sendall(unit)
            sent += len(unit)
    except OSError:
        pass
    return sent


@pytest.mark.parametrize(
    ("start", "unit"),
    [
        (b"GET / HTTP/1.1\r\nx: ", b"a" * 4096),
        (b"GET / HTTP/1.1\r\n", b"x: y\r\n" * 700),
        (b"GET /", b"a" * 4096),
        (b"", b"\r\n" * 2048),
        (POST + b"transfer-encoding: chunked\r\n\r\n1;", b"a" * 4096),
        (POST + b"transfer-encoding: chunked\r\n\r\n0\r\nx: ", b"a" * 4096),
        (POST + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n", b"x: y\r\n" * 700),
    ],
    ids=["header", "headers", "url", "empty lines", "chunk extension", "trailer", "trailers"],
)
def test_what_has_no_end_is_cut(server, start, unit):
    """Neither the memory nor the loop of the server is for those who never finish a request."""
    with connect(server) as connection:
        assert flood(connection, start, unit) < 32 << 20  # what fits into the buffers of both sides
    assert server.ok("/v1/completions", prompt="ab", max_tokens=1)


def test_heads_that_are_too_large_are_told_so(server):
    with connect(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nx: " + b"a" * (MAX_HEAD + 1))
        status, headers, body = answer(connection)
    assert status == 431 and headers["connection"] == "close" and headers["content-type"] == "application/json"
    assert str(MAX_HEAD) in json.loads(body)["error"]["message"]
    assert server.client.get("/health", headers={"x": "a" * 30_000}).status_code == 200


def test_what_is_no_request_gets_an_error_in_the_usual_shape(server):
    with connect(server) as connection:
        connection.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n")
        status, _, body = answer(connection)
    assert status == 400 and json.loads(body)["error"]["type"] == "invalid_request_error"


def test_trailers_are_no_headers(server):
    """They would come too late for whoever has looked at the headers, such as the key's check."""
    with connect(server) as connection:
        chunk = b"%x\r\n%s\r\n0\r\n" % (len(BODY), BODY)
        connection.sendall(POST + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n" + chunk + b"x: y\r\n\r\n")
        status, _, body = answer(connection)
    assert status == 200 and json.loads(body)["usage"]["completion_tokens"] == 2


def test_heads_have_to_arrive(llm, monkeypatch):
    monkeypatch.setattr(Connection, "head_seconds", 0.2)
    with live(llm) as server:
        with connect(server) as silent, connect(server) as slow, connect(server) as later:
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nhost")
            later.sendall(b"GET /health HTTP/1.1\r\n\r\n")
            assert later.recv(4096).startswith(b"HTTP/1.1 200")
            later.sendall(b"GET /hea")  # the second one of a connection
            assert silent.recv(1) == b""
            for connection in (slow, later):
                status, _, body = answer(connection)
                assert status == 408 and json.loads(body)["error"]["code"] == "headers_timeout"
        until(lambda: len(server.server.server_state.connections) == 0)


def test_a_long_request_is_no_late_head(llm, monkeypatch):
    """The clock of the head stands still while a request runs, and while nothing is asked."""
    monkeypatch.setattr(Connection, "head_seconds", 0.05)
    step = llm.engine.step

    def slower():
        time.sleep(0.05)
        return step()

    with live(llm) as server:
        monkeypatch.setattr(llm.engine, "step", slower)
        for _ in range(2):
            assert server.ok("/v1/completions", prompt="ab", max_tokens=4, ignore_eos=True, num_speculative_tokens=0)
            time.sleep(0.2)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
def test_more_connections_than_there_may_be(llm, path):
    """They get an answer that tells when to come back; whoever looks after the server still gets theirs."""
    with live(llm, max_connections=3) as server:
        idle = [connect(server) for _ in range(2)]
        until(lambda: len(server.server.server_state.connections) == 2)
        answer = httpx.post(server.url + path, json={})
        assert answer.status_code == 503 and answer.headers["retry-after"] == "5"
        assert "--max-connections" in answer.json()["error"]["message"]
        assert (answer.json().get("type") == "error") == (path == "/v1/messages")
        for probe in ("/health", "/ping", "/metrics"):
            assert httpx.get(server.url + probe).status_code == 200
        idle.pop().close()
        until(lambda: len(server.server.server_state.connections) == 1)
        assert httpx.post(server.url + "/v1/completions", content=BODY, headers={"content-type": "application/json"})
        idle.pop().close()
