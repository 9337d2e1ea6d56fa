"""A real server on a real port, in a thread, over a tiny model with a scripted drafter."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from engine.harness import assert_idle

from paceline import LLM, AsyncLLM
from paceline.server.app import build_app
from paceline.server.connection import Connection
from paceline.server.run import Server, take_port
from paceline.server.settings import ServerSettings

import uvicorn  # isort: skip

PATIENCE = 600.0  # a hang is a failure; a machine with other work is none


class Live:
    """A running server. `llm` and `engine` are the ones it uses."""

    def __init__(
        self,
        llm: LLM,
        *,
        max_waiting: int = 192,
        max_connections: int | None = None,
        new_loop: Callable[[], asyncio.AbstractEventLoop] | None = None,
        **settings: Any,
    ) -> None:
        """new_loop: None = asyncio's own; `paceline serve` runs uvloop, whose transports are others."""
        self.llm = llm
        self.engine = AsyncLLM(llm, max_waiting=max_waiting)
        self.settings = ServerSettings(**{"model_names": ("tiny", "other-name"), **settings})
        self.died = threading.Event()
        self.app = build_app(self.engine, self.settings, on_death=self.died.set)
        self.service = self.app.state.service
        self.socket = take_port("127.0.0.1", 0)
        # as uvloop does; asyncio leaves it off such sockets, and every answer would wait 40 ms for the client's ACK
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.port: int = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        # a machine that stops for a while must not make the client meet a connection that is just being closed
        patience = {"timeout_graceful_shutdown": 700, "timeout_keep_alive": 700}
        options = {"limit_concurrency": max_connections, **patience}
        config = uvicorn.Config(self.app, http=Connection, log_config=None, ws="none", lifespan="on", **options)
        ready = threading.Event()
        self.server = Server(config, self.engine, 600.0, ready.set)
        self.thread = threading.Thread(target=self._run, args=(new_loop,))
        self.server.capture_signals = _nothing  # type: ignore[method-assign]
        self.thread.start()
        assert ready.wait(PATIENCE)
        self.client = httpx.Client(base_url=self.url, timeout=600)

    def _run(self, new_loop: Callable[[], asyncio.AbstractEventLoop] | None) -> None:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            self.loop = runner.get_loop()
            runner.run(self.server.serve(sockets=[self.socket]))

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def ok(self, path: str, **body: Any) -> dict[str, Any]:
        answer = self.post(path, **body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def events(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The chunks of a stream, whose end is checked."""
        with self.client.stream("POST", path, json={**body, "stream": True}) as answer:
            assert answer.status_code == 200, answer.read()
            assert answer.headers["content-type"].startswith("text/event-stream")
            return parse_events(line for line in answer.iter_lines())

    def idle(self) -> None:
        """Everything that requests held is free; waits for what clients left behind."""
        until(lambda: not self.engine.in_flight)
        assert self.engine._places == 0
        assert_idle(self.llm)

    def close(self) -> None:
        self.client.close()
        self.server.should_exit = True
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def live(llm: LLM, **options: Any) -> Iterator[Live]:
    server = Live(llm, **options)
    try:
        yield server
    finally:
        server.close()


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that must come to pass."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.005)


def parse_events(lines: Iterator[str]) -> list[dict[str, Any]]:
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    if data and data[-1] == "[DONE]":
        data.pop()
    return [json.loads(item) for item in data]


def joined(chunks: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """A streamed choice as a whole one: chat or plain completion."""
    out: dict[str, Any] = {"text": "", "finish_reason": None, "stop_reason": None, "token_ids": [], "logprobs": []}
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            assert out["finish_reason"] is None, "nothing comes behind the end"
            out["text"] += choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
            out["token_ids"] += choice.get("token_ids", [])
            if choice["logprobs"]:
                out["logprobs"] += choice["logprobs"].get("content") or choice["logprobs"]["token_logprobs"]
            if choice["finish_reason"] is not None:
                out["finish_reason"], out["stop_reason"] = choice["finish_reason"], choice["stop_reason"]
    return out


# ---- what an answer says, whichever way it came

_VOLATILE = {  # of the run, or of the way, not of the answer
    *("id", "created", "created_at", "timings", "metrics", "call_id", "item_id", "prompt_tokens_details"),
    *("input_tokens_details", "cache_read_input_tokens"),
}


def comparable(value: Any) -> Any:
    """An answer without names, times and what the prefix cache had."""
    if isinstance(value, dict):
        return {key: comparable(item) for key, item in value.items() if key not in _VOLATILE}
    return [comparable(item) for item in value] if isinstance(value, list) else value


def said(choice: dict[str, Any]) -> dict[str, Any]:
    """A whole chat choice in the form of `streamed`."""
    message = choice["message"]
    calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", [])]
    return {
        "reasoning": message.get("reasoning") or "",
        "content": message["content"] or "",
        "calls": calls,
        "finish_reason": choice["finish_reason"],
        "stop_reason": choice["stop_reason"],
        "token_ids": choice.get("token_ids", []),
    }


def streamed(chunks: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """A chat choice put together as clients do it. Each chunk has one kind of thing."""
    out: dict[str, Any] = {"reasoning": "", "content": "", "calls": [], "token_ids": []}
    ids: set[str] = set()
    for choice in (c for chunk in chunks for c in chunk["choices"] if c["index"] == index):
        assert "finish_reason" not in out, "nothing comes behind the end"
        delta = choice["delta"]
        assert sum(bool(delta.get(kind)) for kind in ("reasoning", "content", "tool_calls")) <= 1
        assert delta.get("reasoning") == delta.get("reasoning_content")
        out["reasoning"] += delta.get("reasoning") or ""
        out["content"] += delta.get("content") or ""
        for piece in delta.get("tool_calls", []):
            if "id" in piece:
                assert piece["index"] == len(out["calls"]) and piece["type"] == "function" and piece["id"] not in ids
                ids.add(piece["id"])
                out["calls"].append((piece["function"]["name"], ""))
            name, arguments = out["calls"][piece["index"]]
            out["calls"][piece["index"]] = (name, arguments + piece["function"]["arguments"])
        out["token_ids"] += choice.get("token_ids", [])
        if choice["finish_reason"] is not None:
            out |= {"finish_reason": choice["finish_reason"], "stop_reason": choice["stop_reason"]}
    return out
