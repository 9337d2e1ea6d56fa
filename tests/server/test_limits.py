"""Clients that leave, wait, stall, shout or come too late: what they held is free, and others notice nothing."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from contextlib import contextmanager

import httpx
import pytest
from engine.harness import Scripted, assert_idle, nothing, open_llm, scripted

from paceline import LLM, SamplingParams
from paceline.server.middleware import matches

from .harness import Live, joined, live, until

PLAIN = "/v1/completions"
LONG = {"prompt": "ab", "max_tokens": 150, "ignore_eos": True, "temperature": 1.0, "seed": 1}


@pytest.fixture
def llm(folder) -> LLM:
    return open_llm(folder, Scripted(), max_num_seqs=4)


@contextmanager
def slow_steps(llm: LLM, seconds: float = 0.01):
    """Steps that take as long as a real model's, so that there is something to interrupt."""
    step = llm.engine.step

    def slower():
        time.sleep(seconds)
        return step()

    llm.engine.step = slower  # type: ignore[method-assign]
    try:
        yield
    finally:
        llm.engine.step = step  # type: ignore[method-assign]


def raw_post(port: int, body: bytes, path: str = PLAIN, length: int | None = None) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port))
    size = len(body) if length is None else length
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {size}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def body_of(**fields) -> bytes:
    return httpx.Request("POST", "http://x", json={**LONG, **fields}).read()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_everything(llm, stream):
    """Failure case 24 over HTTP: cut the connection in the middle, send the same again: nothing leaked, same text."""
    with live(llm) as server:
        want = server.ok(PLAIN, **LONG)["choices"]
        with slow_steps(llm):
            for pause in (0.0, 0.02, 0.1):
                connection = raw_post(server.port, body_of(stream=stream))
                until(lambda: server.engine.in_flight == 1)
                time.sleep(pause)
                connection.close()
                server.idle()
        assert server.engine.stats().finished["abort"] == 3
        assert server.ok(PLAIN, **LONG)["choices"] == want
        assert 'finished_reason="abort"' in server.client.get("/metrics").text


def test_a_client_that_leaves_before_its_body_is_there(llm):
    with live(llm) as server:
        raw_post(server.port, b'{"prompt":', length=500).close()
        server.ok(PLAIN, prompt="a", max_tokens=1)
        server.idle()


def test_a_slow_reader_stalls_nobody(llm):
    """It reads nothing; its request ends all the same, and others are served meanwhile. Then it finds all of it."""
    with live(llm) as server:
        connection = raw_post(server.port, body_of(stream=True, logprobs=20))
        answers = [server.ok(PLAIN, **LONG)["choices"][0]["text"] for _ in range(3)]
        until(lambda: not server.engine.in_flight)
        assert_idle(llm)
        connection.settimeout(30)
        data = b""
        while b"[DONE]" not in data:
            data += connection.recv(1 << 16)
        connection.close()
        assert len(set(answers)) == 1


def test_readers_that_never_read_are_let_go_when_they_leave(llm):
    with live(llm) as server:
        stuck = [raw_post(server.port, body_of(stream=True, logprobs=20, n=4)) for _ in range(6)]
        assert server.ok(PLAIN, **LONG)
        for connection in stuck:
            connection.close()
        server.idle()


def test_the_queue_is_bounded_and_says_when_to_come_back(llm):
    with live(llm, max_waiting=1) as server, slow_steps(llm, 0.02):
        held = [raw_post(server.port, body_of(stream=True)) for _ in range(5)]
        until(lambda: server.engine.in_flight == 5)
        answer = server.post(PLAIN, **LONG)
        assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["code"] == "queue_full"
        assert answer.json()["error"]["type"] == "rate_limit_error"
        assert server.client.get("/health").status_code == 200
        for connection in held:
            connection.close()
        server.idle()
        assert server.post(PLAIN, prompt="a", max_tokens=1).status_code == 200


def test_bodies_are_bounded(llm):
    with live(llm, max_body_bytes=2000) as server:
        answer = server.post(PLAIN, prompt="a" * 3000)
        assert answer.status_code == 413 and answer.json()["error"]["code"] == "body_too_large"
        chunks = (b"x" * 500 for _ in range(10))  # no length is announced
        answer = server.client.post(PLAIN, content=chunks, headers={"content-type": "application/json"})
        assert answer.status_code == 413
        assert server.ok(PLAIN, prompt="a", max_tokens=1)


def test_bodies_have_to_arrive(llm):
    with live(llm, body_timeout=0.2) as server:
        connection = raw_post(server.port, b'{"prompt"', length=100)
        connection.settimeout(30)
        assert b"408" in connection.recv(4096).splitlines()[0]
        connection.close()


@pytest.mark.parametrize("stream", [True, False])
def test_requests_have_to_end(llm, stream):
    with live(llm, request_timeout=0.1) as server, slow_steps(llm):
        if stream:
            [*_, last] = server.events(PLAIN, **LONG)
            assert last["error"]["code"] == "timeout"
        else:
            answer = server.post(PLAIN, **LONG)
            assert answer.status_code == 504 and answer.json()["error"]["code"] == "timeout"
        server.idle()


def test_keys(llm):
    with live(llm, api_keys=("first", "second", "schlüssel")) as server:
        get = server.client.get
        for name in (b"authorization", b"x-api-key"):  # not ASCII: the bytes are compared, as UTF-8
            key = ("Bearer " if name == b"authorization" else "") + "schlüssel"
            assert get("/v1/models", headers={name: key.encode()}).status_code == 200
            assert get("/v1/models", headers={name: key.encode("latin-1")}).status_code == 401
        for path in ("/v1/models", "/server_info", "/load"):
            assert get(path).status_code == 401
            for headers in ({"authorization": "Bearer wrong"}, {"authorization": "first"}, {"x-api-key": "firs"}):
                assert get(path, headers=headers).status_code == 401
            for headers in ({"authorization": "bearer first"}, {"x-api-key": "second"}):
                assert get(path, headers=headers).status_code == 200
        answer = server.post(PLAIN, prompt="a")
        assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
        for path in ("/health", "/ping", "/version", "/metrics"):
            assert get(path).status_code == 200
        assert get("/v1/models", headers={b"authorization": b"Bearer \xff\xfe"}).status_code == 401


def test_every_key_is_compared_in_whole():
    """No comparison ends early: each key is looked at, whatever came before."""
    seen = []

    class Key(bytes):
        pass

    keys = (seen.append(k) or k for k in (b"right", b"other", b"third"))
    assert matches(b"right", keys) and len(seen) == 3
    assert not matches(b"", [b"right"]) and not matches(b"righ", [b"right"]) and not matches(b"x", [])


def test_a_shutdown_lets_requests_finish(llm):
    want = llm.generate("ab", SamplingParams(max_tokens=150, ignore_eos=True, temperature=1.0, seed=1))[0]
    server = Live(llm)
    found: list[str] = []
    with slow_steps(llm):
        client = threading.Thread(target=lambda: found.append(joined(server.events(PLAIN, **LONG))["text"]))
        client.start()
        until(lambda: server.engine.stats().running == 1)
        server.server.should_exit = True
        client.join()
        server.thread.join(600)
    assert found == [want.outputs[0].text]
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{server.url}/health")
    server.close()
    assert_idle(llm)


def test_draining_and_dead_engines_are_unwell(llm):
    with live(llm) as server:
        asyncio.run(server.engine.drain())
        assert server.client.get("/health").status_code == 503
        answer = server.post(PLAIN, prompt="a")
        assert answer.status_code == 503 and answer.headers["retry-after"] == "5"


@pytest.mark.parametrize("stream", [True, False])
def test_the_death_of_the_engine_reaches_everybody(llm, stream, caplog):
    def broken(sequence, limit):
        if sequence.num_output_tokens > 3:
            raise RuntimeError("the drafter broke")
        return nothing(sequence, limit)

    with live(llm) as server, scripted(llm, broken):
        if stream:
            [*_, last] = server.events(PLAIN, **LONG)
            assert last["error"]["code"] == "engine_dead" and last["error"]["type"] == "overloaded_error"
        else:
            answer = server.post(PLAIN, **LONG)
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "engine_dead"
        assert server.client.get("/health").status_code == 503
        assert server.post(PLAIN, prompt="a").status_code == 503
        assert server.died.wait(600), "whoever runs the server is told"
        assert "paceline:engine_alive" in server.client.get("/metrics").text


def test_errors_inside_the_server_are_500_without_their_text(llm, monkeypatch, caplog):
    with live(llm) as server:
        monkeypatch.setattr(server.service, "check_model", lambda _: 1 / 0)
        answer = server.post(PLAIN, prompt="a")
        assert answer.status_code == 500 and "division" not in answer.text
        assert "ZeroDivisionError" in caplog.text


def test_patience_at_a_shutdown_has_an_end(llm):
    """Requests that would go on for longer get an error, and the server ends."""
    server = Live(llm)
    server.server.patience = 0.1
    found = []
    with slow_steps(llm, 0.05):
        client = threading.Thread(target=lambda: found.extend(server.events(PLAIN, **LONG)))
        client.start()
        until(lambda: server.engine.stats().running == 1)
        server.server.should_exit = True
        client.join()
    server.close()
    assert found[-1]["error"]["code"] == "engine_dead"
    assert_idle(llm)
