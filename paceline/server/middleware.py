"""What a request passes before an endpoint sees it: a key, a size, a time to arrive. Plain ASGI: no cost per chunk."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.server.connection import REFUSED
from paceline.server.errors import ApiError, body_of
from paceline.server.playground import ASSETS
from paceline.server.settings import ServerSettings
from paceline.server.transport import JsonResponse

OPEN_PATHS = frozenset({"/health", "/ping", "/version", "/metrics"}) | ASSETS.keys()  # the page itself asks for the key


class Gate:
    """Keys and bodies. The body is read here, whole, so that what is too large or too slow never gets further."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self.app = app
        self.settings = settings
        self.keys = [key.encode() for key in settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            if (refusal := scope.get("extensions", {}).get(REFUSED)) is not None:
                raise refusal
            self._check_key(scope)
            receive = await self._whole_body(scope, receive)
        except ApiError as error:
            body = body_of(error, anthropic=scope["path"].startswith("/v1/messages"))
            await JsonResponse(body, error.status, {**error.headers(), "connection": "close"})(scope, receive, send)
        except _GoneError:
            return
        else:
            await self.app(scope, receive, send)

    def _check_key(self, scope: Scope) -> None:
        if not self.keys or scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS":
            return
        headers = Headers(scope=scope)
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        if not matches(given.encode("latin-1"), self.keys):  # the bytes that came
            raise ApiError(
                401, "the API key is missing or wrong; send 'Authorization: Bearer KEY'", code="invalid_api_key"
            )

    async def _whole_body(self, scope: Scope, receive: Receive) -> Receive:
        """A receive that gives the body in one message. Raises ApiError 413 or 408."""
        limit = self.settings.max_body_bytes
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdecimal() and int(length[:19]) > limit:
            raise _too_large(limit)
        whole = bytearray()
        try:
            async with asyncio.timeout(self.settings.body_timeout):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _GoneError
                    whole += message.get("body", b"")
                    if len(whole) > limit:
                        raise _too_large(limit)
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            raise ApiError(408, "the request's body did not arrive in time", code="body_timeout") from None
        messages: list[Message] = [{"type": "http.request", "body": bytes(whole), "more_body": False}]
        del whole

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        return replay


class _GoneError(Exception):
    """The client went away before its request was complete."""


def matches(given: bytes, keys: Iterable[bytes]) -> bool:
    """Whether a key is one of these, in a time that tells nothing about how much of it was right."""
    found = False
    for key in keys:
        found |= hmac.compare_digest(given, key)
    return found


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the request's body is larger than {limit} bytes (--max-body-mib)", code="body_too_large")
