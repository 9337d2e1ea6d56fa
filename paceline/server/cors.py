"""Pages of other origins in a browser: which of them may use this server, answered before anything else is."""

from __future__ import annotations

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from paceline.server.settings import ServerSettings

EVERYWHERE = "*"
# Pages that this machine serves itself. With no key nothing else stands between a page that somebody visits and the
# server on his machine.
LOCAL = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"


def with_origins(app: ASGIApp, settings: ServerSettings) -> ASGIApp:
    """The application with the headers that browsers ask for, on errors too."""
    origins, local = settings.allowed_origins, None
    if origins is None:
        origins, local = ((EVERYWHERE,), None) if settings.api_keys else ((), LOCAL)
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_origin_regex=local,
        allow_methods=settings.allowed_methods,
        allow_headers=settings.allowed_headers,
        allow_credentials=settings.allow_credentials,
        expose_headers=("retry-after",),
    )
