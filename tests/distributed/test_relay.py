"""An ASGI application run on a relayed request: what it sends arrives, and it learns when its client leaves."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest

from paceline.ray.relay import PENDING, Lifespan, RelayedRequest, run

REQUEST = RelayedRequest("POST", "/v1/x", b"a=1", ((b"host", b"h"), (b"x", b"1"), (b"x", b"2")), b"body", None, "key")


async def collect(app: Any, request: RelayedRequest = REQUEST) -> list[dict[str, Any]]:
    return [message async for message in run(app, request)]


def test_scope_body_and_messages_pass_unchanged() -> None:
    seen: dict[str, Any] = {}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.update(scope, first=await receive())
        await send({"type": "http.response.start", "status": 201, "headers": [(b"a", b"1"), (b"a", b"2")]})
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
        await send({"type": "http.response.body", "body": b"y"})

    request = pickle.loads(pickle.dumps(REQUEST))  # as it travels
    messages = asyncio.run(collect(app, request))
    assert [m.get("body") for m in messages] == [None, b"x", b"y"]
    assert messages[0]["headers"] == [(b"a", b"1"), (b"a", b"2")]
    assert seen["first"] == {"type": "http.request", "body": b"body", "more_body": False}
    assert (seen["method"], seen["path"], seen["query_string"]) == ("POST", "/v1/x", b"a=1")
    assert seen["headers"] == [(b"host", b"h"), (b"x", b"1"), (b"x", b"2")]
    assert REQUEST.prompt == "key"


def test_what_the_application_raises_is_raised_after_what_it_sent() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ValueError("no")

    async def main() -> list[Any]:
        got = []
        with pytest.raises(ValueError, match="no"):
            async for message in run(app, REQUEST):
                got.append(message)
        return got

    assert [m["status"] for m in asyncio.run(main())] == [200]


@pytest.mark.parametrize("flood", [False, True])
def test_a_client_that_leaves_is_a_disconnect(flood: bool) -> None:
    """Also for an application that is stuck in `send` because nobody reads."""
    told = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if flood:
            for _ in range(4 * PENDING):
                await send({"type": "http.response.body", "body": b"x", "more_body": True})
        told.append((await receive())["type"])

    async def main() -> None:
        stream = run(app, REQUEST)
        await anext(stream)
        await asyncio.sleep(0.05)
        await stream.aclose()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())
    assert told == ["http.disconnect"]


def test_an_application_that_does_not_listen_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.ray.relay.FAREWELL_S", 0.05)
    ended = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            ended.append(True)
            raise

    async def main() -> None:
        stream = run(app, REQUEST)
        await anext(stream)
        await stream.aclose()

    asyncio.run(main())
    assert ended == [True]


def test_cancelling_the_reader_is_a_disconnect_too() -> None:
    told = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        told.append((await receive())["type"])

    async def main() -> None:
        task = asyncio.create_task(collect(app))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert told == ["http.disconnect"]


def test_lifespan_runs_once_and_its_state_reaches_requests() -> None:
    events = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            events.append((await receive())["type"])
            scope["state"]["engine"] = 7
            await send({"type": "lifespan.startup.complete"})
            events.append((await receive())["type"])
            await send({"type": "lifespan.shutdown.complete"})
            return
        await send({"type": "http.response.start", "status": scope["state"]["engine"], "headers": []})

    async def main() -> int:
        lifespan = Lifespan(app)
        await lifespan.start()
        messages = [m async for m in run(app, REQUEST, lifespan.state)]
        await lifespan.stop()
        await lifespan.stop()
        return messages[0]["status"]

    assert asyncio.run(main()) == 7
    assert events == ["lifespan.startup", "lifespan.shutdown"]


def test_a_failed_start_is_told() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "lifespan.startup.failed", "message": "no memory"})

    with pytest.raises(RuntimeError, match="no memory"):
        asyncio.run(Lifespan(app).start())


def test_an_application_without_lifespan() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"

    async def main() -> None:
        lifespan = Lifespan(app)
        await lifespan.start()
        await lifespan.stop()

    asyncio.run(main())
