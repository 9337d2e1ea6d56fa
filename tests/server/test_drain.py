"""A server that leaves: what began ends, and everything new hears of it, on old connections and new ones."""

from __future__ import annotations

import threading

import httpx
import pytest
from engine.harness import Scripted, assert_idle, open_llm

from paceline import SamplingParams

from .harness import Live, joined, until
from .test_limits import LONG, PLAIN, slow_steps


@pytest.fixture
def llm(folder):
    return open_llm(folder, Scripted(), max_num_seqs=4)


def test_everything_new_gets_503_until_the_last_request_has_ended(llm):
    want = llm.generate("ab", SamplingParams(max_tokens=150, ignore_eos=True, temperature=1.0, seed=1))[0]
    server = Live(llm)
    gate = threading.Event()
    step = llm.engine.step
    found: list[str] = []
    old = httpx.Client(base_url=server.url, timeout=600)
    assert old.get("/health").status_code == 200
    llm.engine.step = lambda: gate.wait(600) and step()  # type: ignore[method-assign]
    client = threading.Thread(target=lambda: found.append(joined(server.events(PLAIN, **LONG))["text"]))
    client.start()
    until(lambda: bool(server.engine.in_flight))
    server.server.should_exit = True
    until(lambda: server.server.server_state.draining)
    for ask in (lambda path: old.get(path), lambda path: httpx.get(server.url + path, timeout=600)):
        for path in ("/health", "/ping", "/v1/models"):
            answer = ask(path)
            assert answer.status_code == 503 and answer.headers["retry-after"] == "5"
            assert answer.json()["error"]["code"] == "shutting_down" and answer.headers["connection"] == "close"
        assert ask("/metrics").status_code == 200
    refused = httpx.post(f"{server.url}/v1/messages", json={"messages": []}, headers={"origin": "http://localhost"})
    assert refused.status_code == 503 and refused.json()["type"] == "error"
    assert refused.headers["access-control-allow-origin"] == "http://localhost"
    assert server.thread.is_alive() and not found
    gate.set()
    client.join()
    server.thread.join(600)
    llm.engine.step = step  # type: ignore[method-assign]
    assert found == [want.outputs[0].text]
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{server.url}/health")
    old.close()
    server.close()
    assert_idle(llm)


def test_a_request_behind_another_on_its_connection_is_served(llm):
    """It came before the server was told to leave."""
    import socket

    server = Live(llm)
    body = httpx.Request("POST", "http://x", json={**LONG, "max_tokens": 20}).read()
    head = f"POST {PLAIN} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    with slow_steps(llm, 0.02), socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall((head.encode() + body) * 2)
        until(lambda: bool(server.engine.in_flight))
        server.server.should_exit = True
        got = b""
        while piece := connection.recv(65536):
            got += piece
    server.close()
    assert got.count(b"HTTP/1.1 200") == 2 and b"HTTP/1.1 503" not in got
    assert_idle(llm)


def test_a_server_with_nothing_to_do_leaves_at_once(llm):
    server = Live(llm)
    assert server.client.get("/health").status_code == 200  # and its connection stays open
    server.server.should_exit = True
    server.thread.join(600)
    assert not server.thread.is_alive()
    server.close()
