"""Clients of the soak: each method is one visit. They raise SoakError for what a server must not answer."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx

from benchmarks.soak_process import BODY_MIB, ServerProcess

# Client -> how often it comes, relative to the others.
KINDS = {
    "known_answer": 20,
    "sampled": 12,
    "streamed": 12,
    "other_interfaces": 8,
    "structured": 6,
    "tools": 4,
    "playground": 4,
    "small_endpoints": 6,
    "abort": 14,
    "abort_unread": 4,
    "slow_reader": 3,
    "nonsense": 14,
    "wrong_shape": 8,
    "huge_body": 3,
    "deep_json": 4,
    "half_open": 5,
    "burst": 2,
}
FINE = frozenset({200, 429})  # the queue is bounded, and says so
REFUSED = frozenset({400, 401, 404, 405, 408, 411, 413, 415, 422, 429})
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
POSTS = (CHAT, COMPLETIONS, "/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/tokenize", "/detokenize")
TOPICS = ("a bicycle", "the sea", "prime numbers", "a bakery", "Python lists", "the moon", "bees", "an old clock")
MOST_TOKENS = 48
SLOW_SECONDS = 6.0


class SoakError(Exception):
    """An answer that no client should get."""


class Clients:
    """All kinds of visits. statuses: counts of what came back."""

    def __init__(self, server: ServerProcess, http: httpx.AsyncClient, statuses: Counter[str]) -> None:
        self.server, self.http, self.statuses = server, http, statuses
        self.known: list[tuple[dict[str, Any], str]] = []
        self.longest = 0  # topics in a prompt

    def prompt(self, rng: random.Random) -> str:
        """Some share their beginning, so that the prefix cache has work; some are long."""
        text = f"Write {rng.randint(2, 9)} sentences about {rng.choice(TOPICS)}."
        if rng.random() < 0.15:
            text = "Mind " + " ".join(rng.choice(TOPICS) for _ in range(rng.randint(0, self.longest))) + ". " + text
        return text

    def chat(self, rng: random.Random, **fields: Any) -> dict[str, Any]:
        return {
            "messages": [{"role": "user", "content": self.prompt(rng)}],
            "max_tokens": rng.randint(1, MOST_TOKENS),
            "temperature": 0,
            **fields,
        }

    async def learn(self) -> None:
        """Answers that prompts get when nothing else runs, without drafts: what they must get at any time."""
        rng = random.Random(0)
        room = (await self.http.get("/server_info")).json()["engine"]["max_model_len"] - MOST_TOKENS - 150
        self.longest = max(0, min(400, room // max(map(len, TOPICS))))  # a token per character, at the worst
        for i in range(8):
            body = self.chat(rng, max_tokens=MOST_TOKENS, seed=i, temperature=0 if i % 2 else 0.9)
            answer = await self.http.post(CHAT, json={**body, "num_speculative_tokens": 0})
            answer.raise_for_status()
            self.known.append((body, answer.json()["choices"][0]["message"]["content"]))

    # ---- those who ask properly

    async def known_answer(self, rng: random.Random) -> None:
        body, want = rng.choice(self.known)
        body = {**body, **({} if rng.random() < 0.7 else {"num_speculative_tokens": rng.randint(0, 4)})}
        if rng.random() < 0.5:
            answer = await self.post(CHAT, body, FINE)
            if answer.status_code == 200 and answer.json()["choices"][0]["message"]["content"] != want:
                raise SoakError("the text is not the one that the same prompt got alone")
            return
        text = "".join([c["delta"].get("content") or "" async for e in self.events(CHAT, body) for c in e["choices"]])
        if text and text != want:
            raise SoakError("the streamed text is not the one that the same prompt got alone")

    async def sampled(self, rng: random.Random) -> None:
        n = rng.choice([1, 1, 2, 3])
        fields: dict[str, Any] = {"temperature": rng.uniform(0.1, 1.5), "seed": rng.getrandbits(32), "n": n}
        for name, value in (
            ("top_p", rng.uniform(0.3, 1)),
            ("top_k", rng.randint(1, 50)),
            ("min_p", rng.uniform(0, 0.3)),
            ("repetition_penalty", rng.uniform(0.8, 1.5)),
            ("stop", [rng.choice([". ", "\n", "the", "ing"])]),
            ("min_tokens", 1),
            ("logit_bias", {str(rng.randint(0, 100)): rng.uniform(-50, 5)}),
        ):
            if rng.random() < 0.25:
                fields[name] = value
        answer = await self.post(CHAT, self.chat(rng, **fields, logprobs=rng.random() < 0.2 or None), FINE)
        if answer.status_code == 200:
            found = answer.json()
            if [c["index"] for c in found["choices"]] != list(range(n)):
                raise SoakError("choices are missing")
            if found["usage"]["completion_tokens"] > n * MOST_TOKENS:
                raise SoakError("more tokens came than were allowed")

    async def streamed(self, rng: random.Random) -> None:
        options = {"include_usage": True, "continuous_usage_stats": rng.random() < 0.3}
        if rng.random() < 0.5:
            body = self.chat(rng, stream_options=options)
        else:
            texts = [self.prompt(rng) for _ in range(rng.choice([1, 1, 2]))]
            body = {"prompt": texts, "max_tokens": rng.randint(1, MOST_TOKENS), "temperature": 0, "logprobs": 2}
            body["stream_options"] = options
        last = None
        async for event in self.events(CHAT if "messages" in body else COMPLETIONS, body):
            last = event
        if last is not None and "usage" not in last:
            raise SoakError("the stream did not end with its usage")

    async def other_interfaces(self, rng: random.Random) -> None:
        tokens = rng.randint(1, MOST_TOKENS)
        visits: list[tuple[str, dict[str, Any]]] = [
            ("/v1/responses", {"input": self.prompt(rng), "max_output_tokens": tokens}),
            (
                "/v1/messages",
                {"messages": [{"role": "user", "content": self.prompt(rng)}], "max_tokens": tokens},
            ),
            ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": self.prompt(rng)}]}),
        ]
        path, body = rng.choice(visits)
        await self.post(path, body, FINE)

    async def structured(self, rng: random.Random) -> None:
        """An answer that ends by itself is valid, whatever the temperature."""
        schema = {
            "type": "object",
            "properties": {
                "kind": {"enum": ["a", "b", None]},
                "size": {"type": "integer", "minimum": 0, "maximum": 99},
            },
            "required": ["kind", "size"],
            "additionalProperties": False,
        }
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        body = self.chat(rng, max_tokens=MOST_TOKENS, temperature=rng.choice([0, 1.0]), response_format=form)
        answer = await self.post(CHAT, body, FINE)
        if answer.status_code != 200:
            return
        [choice] = answer.json()["choices"]
        if choice["finish_reason"] == "stop":
            found = json.loads(choice["message"]["content"])
            if found.keys() != {"kind", "size"} or not 0 <= found["size"] <= 99:
                raise SoakError("an answer breaks its schema")

    async def tools(self, rng: random.Random) -> None:
        """A call that was asked for comes, streamed or not, with arguments of its schema."""
        parameters = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
        declared = [{"type": "function", "function": {"name": "count", "parameters": parameters}}]
        body = self.chat(rng, max_tokens=MOST_TOKENS, tools=declared, tool_choice="required")
        if rng.random() < 0.5:
            async for _ in self.events(CHAT, body):
                pass
            return
        answer = await self.post(CHAT, body, FINE)
        if answer.status_code == 200 and answer.json()["choices"][0]["finish_reason"] == "tool_calls":
            call = answer.json()["choices"][0]["message"]["tool_calls"][0]["function"]
            if call["name"] != "count" or not isinstance(json.loads(call["arguments"])["n"], int):
                raise SoakError("a call breaks its schema")

    async def playground(self, rng: random.Random) -> None:
        last = None
        async for event in self.events("/playground/stream", self.chat(rng), stream=None):
            last = event
        if last is not None and last.get("type") != "end":
            raise SoakError("the stream did not end with its end")

    async def small_endpoints(self, rng: random.Random) -> None:
        path = rng.choice(["/v1/models", "/", "/version", "/load", "/server_info", "/openapi.json", "/tokenize"])
        if path == "/tokenize":
            text = self.prompt(rng)
            answer = await self.post(path, {"prompt": text}, FINE)
            back = await self.post("/detokenize", {"tokens": answer.json()["tokens"]}, FINE)
            if back.json()["prompt"] != text:
                raise SoakError("the text did not come back from its tokens")
            return
        if rng.random() < 0.05:
            self.note(await self.http.post("/reset_prefix_cache"), FINE)
        self.note(await self.http.get(path), FINE)

    async def burst(self, rng: random.Random) -> None:
        """More at once than may wait."""
        bodies = [self.chat(rng, max_tokens=4) for _ in range(rng.randint(10, 60))]
        await asyncio.gather(*(self.post(CHAT, body, FINE) for body in bodies))

    # ---- those who leave or stall

    async def abort(self, rng: random.Random) -> None:
        """Read a little, then go: in order, or by a reset."""
        body = self.chat(rng, max_tokens=400, ignore_eos=True, stream=rng.random() < 0.8, n=rng.choice([1, 1, 2]))
        async with self.raw(CHAT, body) as (reader, writer):
            wanted = rng.choice([1, 200, 1000, 4000])
            try:
                async with asyncio.timeout(rng.uniform(0.01, 3)):
                    while wanted > 0 and (data := await reader.read(wanted)):
                        wanted -= len(data)
            except TimeoutError:
                pass
            if rng.random() < 0.5:
                reset(writer)

    async def abort_unread(self, rng: random.Random) -> None:
        """Sends a request, reads nothing of a long answer for a while, and goes."""
        body = self.chat(rng, max_tokens=600, ignore_eos=True, stream=True, logprobs=True, top_logprobs=20, n=2)
        async with self.raw(CHAT, body, buffer=2048):
            await asyncio.sleep(rng.uniform(0.1, SLOW_SECONDS))

    async def slow_reader(self, rng: random.Random) -> None:
        """Takes its answer in crumbs, then the rest, which must be whole."""
        body = self.chat(rng, max_tokens=MOST_TOKENS, stream=True)
        async with self.raw(CHAT, body, buffer=2048) as (reader, _):
            end = asyncio.get_running_loop().time() + SLOW_SECONDS
            data = b""
            while asyncio.get_running_loop().time() < end:
                data += await reader.read(64)
                await asyncio.sleep(0.1)
            data += await reader.read()
        status = int(data.split(None, 2)[1])
        self.statuses[str(status)] += 1
        if status not in FINE or (status == 200 and b"data: [DONE]" not in data):
            raise SoakError(f"a slow reader got {status} and {data[-60:]!r}")

    async def half_open(self, rng: random.Random) -> None:
        """A connection that says nothing, or half a request, and then stays silent or goes."""
        _, writer = await asyncio.open_connection(self.server.host, self.server.port)
        try:
            head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 500\r\n\r\n"
            writer.write(
                rng.choice([b"", b"POST", head[:40].encode(), head.encode(), head.encode() + b'{"messages": ['])
            )
            await writer.drain()
            await asyncio.sleep(rng.uniform(0, SLOW_SECONDS))
            if rng.random() < 0.5:
                reset(writer)
        finally:
            await close(writer)

    # ---- those who talk nonsense

    async def nonsense(self, rng: random.Random) -> None:
        """A request that would be right but for one field."""
        fields = ["max_tokens", "temperature", "top_p", "top_k", "seed", "n", "stop", "messages", "model", "stream"]
        fields += ["logit_bias", "num_speculative_tokens", "response_format", "tools", "xyz", "stream_options", "min_p"]
        values: list[Any] = [
            None,
            -1,
            0,
            1e308,
            2**70,
            "",
            "x" * 5000,
            [],
            {},
            [[]],
            {"a": 1},
            True,
            "\ud800",
            -0.5,
            [None] * 100,
        ]
        body = self.chat(rng, max_tokens=4)
        body[rng.choice(fields)] = rng.choice(values)
        if rng.random() < 0.3:
            body["stream"] = True
        await self.post(rng.choice(POSTS), body, FINE | REFUSED)

    async def wrong_shape(self, rng: random.Random) -> None:
        """Wrong content types, methods, paths, encodings."""
        content = rng.choice(
            [b"", b"{", b"\xff\xfe\x00", b"null", b"[1]", b'{"messages": 5}', b"a=b", b"NaN", b"{} {}"]
        )
        kind = rng.choice(["application/json", "text/plain", "application/xml", "multipart/form-data", "", "x" * 500])
        method = rng.choice(["POST", "POST", "POST", "GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"])
        path = rng.choice(
            [
                *POSTS,
                "/playground/stream",
                "/v1/nothing",
                "/../../etc/passwd",
                "/v1/models/%ff%00",
                "/playground/app.py",
            ]
        )
        headers = {"content-type": kind, "content-encoding": rng.choice(["identity", "gzip"])}
        self.note(await self.http.request(method, path, content=content, headers=headers), FINE | REFUSED)

    async def huge_body(self, rng: random.Random) -> None:
        """More than is allowed, announced or in chunks. The server may close before it has read all of it."""
        size = int(BODY_MIB * (1 << 20) * rng.uniform(1.1, 4))

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(size >> 14):
                yield b"x" * (1 << 14)

        content: Any = chunks() if rng.random() < 0.5 else b'{"prompt": "' + b"y" * size + b'"}'
        try:
            answer = await self.http.post(COMPLETIONS, content=content, headers={"content-type": "application/json"})
        except (httpx.WriteError, httpx.ReadError, httpx.RemoteProtocolError):
            self.statuses["closed on a huge body"] += 1
            return
        self.note(answer, frozenset({413}))

    async def deep_json(self, rng: random.Random) -> None:
        depth = rng.choice([50, 500, 5000, 100_000])
        left, right = rng.choice([("[", "]"), ('{"a":', "}")])
        inner = left * depth + ("1" if left != "[" else "") + right * depth
        field = rng.choice(["messages", "chat_template_kwargs", "logit_bias", "response_format", "metadata", "stop"])
        content = f'{{"messages": [{{"role": "user", "content": "a"}}], "max_tokens": 1, "{field}": {inner}}}'
        headers = {"content-type": "application/json"}
        answer = await self.http.post(rng.choice(POSTS), content=content.encode(), headers=headers)
        self.note(answer, FINE | REFUSED)

    # ---- means

    async def post(self, path: str, body: dict[str, Any], allowed: frozenset[int]) -> httpx.Response:
        content = json.dumps(body).encode()
        answer = await self.http.post(path, content=content, headers={"content-type": "application/json"})
        self.note(answer, allowed)
        return answer

    def note(self, answer: httpx.Response, allowed: frozenset[int]) -> None:
        self.statuses[str(answer.status_code)] += 1
        if answer.status_code not in allowed:
            request = answer.request
            raise SoakError(f"{request.method} {request.url.path} got {answer.status_code}: {answer.text[:200]}")

    async def events(
        self, path: str, body: dict[str, Any], stream: bool | None = True
    ) -> AsyncIterator[dict[str, Any]]:
        """Events of a stream, whose end is checked; none when the queue is full."""
        asked = body if stream is None else {**body, "stream": stream}
        async with self.http.stream("POST", path, json=asked) as answer:
            if answer.status_code != 200:
                await answer.aread()
                self.note(answer, FINE)
                return
            self.statuses["200"] += 1
            data = ""
            async for line in answer.aiter_lines():
                if not line.startswith("data: "):
                    continue
                data = line.removeprefix("data: ")
                if data != "[DONE]":
                    event = json.loads(data)
                    if event.get("error"):
                        raise SoakError(f"a stream ended with an error: {event['error']}")
                    yield event
            if data != "[DONE]":
                raise SoakError("a stream ended before its end")

    @asynccontextmanager
    async def raw(
        self, path: str, body: dict[str, Any], buffer: int | None = None
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """A connection over which a request was sent. buffer: bytes that this end takes in unread."""
        connection = socket.socket()
        if buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        connection.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(connection, (self.server.host, self.server.port))
        except BaseException:
            connection.close()
            raise
        reader, writer = await asyncio.open_connection(sock=connection, limit=buffer or 1 << 16)
        try:
            data = json.dumps(body).encode()
            head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
            writer.write(head.encode() + f"content-length: {len(data)}\r\n\r\n".encode() + data)
            await writer.drain()
            yield reader, writer
        finally:
            await close(writer)


def reset(writer: asyncio.StreamWriter) -> None:
    """Let the connection end by a reset instead of in order."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


async def close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
