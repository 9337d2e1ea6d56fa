"""An ASGI application over an `LLM`, small enough to read: what the cluster test runs in place of the server.

It has what the relay must carry: whole and streamed answers, a lifespan, errors, a request that outlasts its client.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from pathlib import Path
from typing import Any

from paceline import LLM, SamplingParams


def create_app(model: str, *, engine: dict[str, Any], server: dict[str, Any]) -> Any:
    llm = LLM(model, **engine)
    seen = {"requests": 0, "left": 0}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await receive()
            scope["state"]["started"] = True
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        body = (await receive())["body"]
        seen["requests"] += scope["path"] == "/v1/completions"
        await handle(scope, json.loads(body) if body else {}, receive, send)

    async def handle(scope: Any, request: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/health":
            await reply(send, 200 if scope["state"].get("started") else 503, {})
        elif scope["path"] == "/metrics":
            page = f"# TYPE tiny_requests counter\ntiny_requests {seen['requests']}\ntiny_left {seen['left']}\n"
            await start(send, 200, b"text/plain")
            await send({"type": "http.response.body", "body": page.encode()})
        elif scope["path"] == "/whoami":
            threads = [sorted(os.sched_getaffinity(int(t.name))) for t in Path("/proc/self/task").iterdir()]
            await reply(send, 200, {"pid": os.getpid(), "affinity": threads, "threads": llm.model.threads})
        elif scope["path"] == "/forever":
            await start(send, 200, b"text/plain")
            await send({"type": "http.response.body", "body": b"waiting", "more_body": True})
            assert (await receive())["type"] == "http.disconnect"
            seen["left"] += 1
        elif scope["path"] == "/v1/completions":
            await complete(request, send)
        else:
            await reply(send, 404, {"error": scope["path"]})

    async def complete(request: Any, send: Any) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=request["max_tokens"], ignore_eos=True)
        if not request.get("stream"):
            (output,) = await asyncio.to_thread(llm.generate, [request["prompt"]], params)
            await reply(send, 200, {"token_ids": output.outputs[0].token_ids, "pid": os.getpid()})
            return
        await start(send, 200, b"text/event-stream")
        queue: asyncio.Queue[Any] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def produce() -> None:
            for delta in llm.stream(request["prompt"], params):
                loop.call_soon_threadsafe(queue.put_nowait, delta.token_ids)
            loop.call_soon_threadsafe(queue.put_nowait, None)

        threading.Thread(target=produce).start()
        while (ids := await queue.get()) is not None:
            line = f"data: {json.dumps(ids)}\n\n".encode()
            await send({"type": "http.response.body", "body": line, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    return app


async def start(send: Any, status: int, kind: bytes) -> None:
    headers = [(b"content-type", kind), (b"x-twice", b"a"), (b"x-twice", b"b")]
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def reply(send: Any, status: int, value: Any) -> None:
    await start(send, status, b"application/json")
    await send({"type": "http.response.body", "body": json.dumps(value).encode()})
