"""The ASGI application: endpoints, errors, and what runs beside them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

import paceline
from paceline.async_llm import AsyncLLM
from paceline.errors import PacelineError
from paceline.server import anthropic, chat, completions, playground, responses, routes
from paceline.server.cors import with_origins
from paceline.server.errors import ApiError, as_api_error, body_of, shown
from paceline.server.figures import log_figures
from paceline.server.middleware import Gate
from paceline.server.other_paths import remedy
from paceline.server.service import Service
from paceline.server.settings import ServerSettings
from paceline.server.transport import JsonResponse

log = logging.getLogger(__name__)


def build_app(engine: AsyncLLM, settings: ServerSettings, on_death: Callable[[], None] | None = None) -> FastAPI:
    """An application over an engine, which it closes when it shuts down. on_death: called once if the engine dies."""
    service = Service(engine, settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None, None]:
        watch = asyncio.create_task(log_figures(engine, settings.log_interval, on_death))
        warm = asyncio.create_task(_warm(engine))
        try:
            yield
        finally:
            for task in (watch, warm):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
            await engine.close()

    app = App(
        settings,
        title="Paceline",
        version=paceline.__version__,
        description="OpenAI-compatible text generation on CPUs with lossless speculative decoding.",
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
    )
    app.state.service = service
    app.state.paths = {"/openapi.json"}
    for part in (chat, completions, responses, anthropic, routes, playground):
        router = part.router(service)
        app.include_router(router)
        app.state.paths |= {route.path for route in router.routes if isinstance(route, Route | APIRoute)}
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(PacelineError, _error)
    app.add_exception_handler(TimeoutError, _error)
    app.add_exception_handler(Exception, _error)
    app.add_middleware(Gate, settings=settings)
    return app


class App(FastAPI):
    """FastAPI with what has to stand before its own handling of errors, which answers without the middleware."""

    def __init__(self, settings: ServerSettings, **options: Any) -> None:
        super().__init__(**options)
        self._settings = settings

    def build_middleware_stack(self) -> ASGIApp:
        return with_origins(super().build_middleware_stack(), self._settings)


async def _warm(engine: AsyncLLM) -> None:
    try:
        await engine.warm_grammars()
    except Exception:  # the first grammar will meet it again, and its client hears of it
        log.exception("the vocabulary could not be prepared for grammars")


def answer(error: ApiError, request: Request) -> Response:
    anthropic = request.url.path.startswith("/v1/messages")
    headers = error.headers()
    if error.status == 500:  # uvicorn cuts the connection behind one; who is told does not send the next request on it
        headers["connection"] = "close"
    return JsonResponse(body_of(error, anthropic=anthropic), error.status, headers)


async def _error(request: Request, error: Exception) -> Response:
    found = as_api_error(error)
    if found.status == 500:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return answer(found, request)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if isinstance(error.__cause__, ApiError):  # of a body that could not be read
        return answer(error.__cause__, request)
    path, method, code = request.url.path, request.method, None
    message = f"{method} {path}: {error.detail}"
    if error.status_code == 404:
        where = remedy(path, request.app.state.paths)
        message, code = f"{method} {path[:200]}: is not served; {where}", "unknown_path"
    elif error.status_code == 405:
        right = Headers(error.headers).get("allow", "another one")
        message, code = f"{method} {path[:200]}: is not served with this method; use {right}", "method_not_allowed"
    found = answer(ApiError(error.status_code, message, code=code), request)
    found.headers.update(error.headers or {})  # "allow", where the method is wrong
    return found


_WANTED = "Input should be "  # how pydantic begins to say what a value of the wrong type should have been


async def _invalid(request: Request, error: Exception) -> Response:
    """The first thing wrong with a body, by the name of its field."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return answer(
            ApiError(400, f"the body is not valid JSON: {first['ctx']['error']}", code="invalid_json"), request
        )
    field = _field(first)
    if not field and first["type"] in ("missing", "model_attributes_type", "model_type", "dict_type"):
        message = "the body must be a JSON object, sent with the header 'content-type: application/json'"
        return answer(ApiError(400, message), request)
    wrong = f"{field or 'body'}={shown(first['input'])}"
    if first["type"] == "missing":
        message = f"{field}: is missing; give it"
    elif not first["msg"].startswith(_WANTED):
        message = f"{wrong}: {first['msg']}"
    else:  # of a union, each alternative says what it wants
        same = [e["msg"] for e in error.errors()[:8] if _field(e) == field and e["input"] == first["input"]]
        message = f"{wrong}: use {', or '.join(msg.removeprefix(_WANTED) for msg in dict.fromkeys(same))}"
    return answer(ApiError(400, message[:500], param=field[:100] or None), request)


def _field(error: Any) -> str:
    """Its name; alternatives of a union come with their type's name behind the field's."""
    where = [str(part) for part in error["loc"] if part != "body"]
    return ".".join(part for part in where if "[" not in part and part not in ("str", "int"))
