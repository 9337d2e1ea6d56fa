"""Bodies as JSON: the standard's, without the numbers that Python's own parser lets through and nothing can answer."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from paceline.server.errors import ApiError

# Without one of these no number is beyond a double, so the parser's own function for numbers will do.
_MAY_OVERFLOW = re.compile(rb"[eE]\+?0*[1-9][0-9]{2}|[0-9]{300}")


def new_router() -> APIRouter:
    """A router whose endpoints read such bodies."""
    return APIRouter(route_class=_Route)


def parse(body: bytes, encoding: str = "") -> Any:
    """encoding: the header content-encoding. Raises ApiError 400 or 415."""
    if encoding.strip().lower() not in ("", "identity"):
        raise ApiError(415, f"content-encoding: {encoding[:60]!r} is not supported; send the body as it is")
    try:
        # in UTF-16 and UTF-32 each digit has zeros beside it
        careful = _MAY_OVERFLOW.search(body) is not None or b"\0" in body
        return json.loads(body, parse_constant=_no_number, parse_float=_finite if careful else None)
    except _NotFiniteError as error:
        where = _where(json.loads(body)) or "body"
        text = f"the body is not valid JSON: {where}: {error} is no number that can be answered"
        raise ApiError(400, text, param=where[:100], code="invalid_json") from None
    except json.JSONDecodeError as error:
        raise _invalid(f"{error.msg} at character {error.pos}") from None
    except UnicodeDecodeError:
        raise _invalid("it is not encoded in UTF-8") from None
    except RecursionError:
        raise _invalid("it is nested too deeply") from None
    except ValueError as error:  # an integer of more than some thousand digits
        raise _invalid(str(error).partition(";")[0]) from None


def _invalid(reason: str) -> ApiError:
    return ApiError(400, f"the body is not valid JSON: {reason}", code="invalid_json")


class _NotFiniteError(Exception):
    """A number that is none, or that no double holds."""


def _no_number(name: str) -> NoReturn:
    raise _NotFiniteError(name)


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise _NotFiniteError(text if len(text) <= 20 else f"{text[:20]}...")
    return value


def _where(value: Any) -> str:
    """The path of the first number that is not finite, "" if there is none."""
    todo: list[tuple[str, Any]] = [("", value)]
    while todo:
        path, item = todo.pop()
        if isinstance(item, dict):
            todo += reversed([(f"{path}.{key}" if path else key, inner) for key, inner in item.items()])
        elif isinstance(item, list):
            todo += reversed([(f"{path}[{i}]", inner) for i, inner in enumerate(item)])
        elif isinstance(item, float) and not math.isfinite(item):
            return path
    return ""


class _JsonRequest(Request):
    async def json(self) -> Any:
        return parse(await self.body(), self.headers.get("content-encoding", ""))


class _Route(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        handle = super().get_route_handler()

        async def with_json(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return with_json
