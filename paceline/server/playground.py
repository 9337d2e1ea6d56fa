"""The page at `/`: plain against speculative decoding of one prompt, token by token; and the stream that it reads."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from importlib.resources import files
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict
from starlette.responses import Response

from paceline.detokenizer import IncrementalDetokenizer
from paceline.outputs import RequestOutput, StreamDelta
from paceline.sampling_params import SamplingParams
from paceline.server import render
from paceline.server.body import new_router
from paceline.server.message_checks import check_messages
from paceline.server.messages import normalised
from paceline.server.protocol import Objects
from paceline.server.service import Job, Service, new_id
from paceline.server.transport import DONE, EventStream, event, openai_error_event

# Paths below the server's root -> file of paceline/server/web and its type. Nothing else is served from there.
ASSETS = {
    "/": ("index.html", "text/html"),
    "/playground/style.css": ("style.css", "text/css"),
    "/playground/app.js": ("app.js", "text/javascript"),
    "/playground/race.js": ("race.js", "text/javascript"),
    "/playground/view.js": ("view.js", "text/javascript"),
    "/playground/icon.svg": ("icon.svg", "image/svg+xml"),
}
# The page runs its own files alone, talks to this server alone, and stands in no other page.
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class PlaygroundRequest(BaseModel):
    """Fields as in a chat request. The prompt is always computed anew, so that two runs of it compare."""

    model_config = ConfigDict(extra="forbid", strict=True)

    messages: Objects
    model: str | None = None
    max_tokens: int = 256
    temperature: float = 0.0
    seed: int | None = None
    num_speculative_tokens: int | None = None


def router(service: Service) -> APIRouter:
    routes = new_router()
    for path, (name, media_type) in ASSETS.items():
        routes.add_api_route(path, _asset(name, media_type), response_model=None, include_in_schema=False)

    @routes.post("/playground/stream", response_model=None)
    async def stream(request: PlaygroundRequest) -> Response:
        service.check_model(request.model)
        check_messages(request.messages, service.features.templates)
        params = SamplingParams(temperature=request.temperature, max_tokens=request.max_tokens, seed=request.seed)
        text = await service.engine.render_chat(normalised(request.messages), add_generation_prompt=True)
        ids = await service.engine.encode(text, add_special_tokens=False)
        run = service.run(
            [ids],
            params,
            job_id=new_id("playground"),
            num_speculative_tokens=request.num_speculative_tokens,
            cache_salt=uuid.uuid4().hex,
            last_only=False,
        )
        stack = AsyncExitStack()
        job = await stack.enter_async_context(run)
        return EventStream(_events(service, stack, job), openai_error_event, stack)

    return routes


def _asset(name: str, media_type: str) -> Any:
    body = (files("paceline.server") / "web" / name).read_bytes()

    async def asset() -> Response:
        return Response(body, media_type=media_type, headers=HEADERS)

    return asset


async def _events(service: Service, stack: AsyncExitStack, job: Job) -> AsyncGenerator[bytes, None]:
    """One event at the start, one per step, one at the end; docs/api.md has their fields."""
    tokens = Pieces(IncrementalDetokenizer(service.engine.llm.tokenizer))
    [stream] = job.streams
    async with stack:
        yield event(
            {"type": "start", "id": job.id, "prompt_tokens": job.prompt_tokens, "seed": stream.seeds[0]},
        )
        async for _, delta in service.deltas(job):
            piece = {
                "type": "step",
                "seconds": time.perf_counter() - job.begin,
                "tokens": len(delta.token_ids),
                "pieces": tokens.take(delta),
                "passes": delta.passes,
            }
            yield event(piece) + (b"" if delta.output is None else event(_end(delta.output)))
        yield DONE


def _end(output: RequestOutput) -> dict[str, Any]:
    [choice] = output.outputs
    spec = output.metrics.spec_decode
    return {
        "type": "end",
        "finish_reason": choice.finish_reason,
        "text": choice.text,
        "token_ids": choice.token_ids,
        "usage": render.usage_of([output]),
        "metrics": render.metrics_of(output),
        "per_position_acceptance_rates": spec.per_position_acceptance_rates,
    }


class Pieces:
    """A choice's text as (text, whether it came from an accepted draft), token by token.

    Characters that several tokens make belong to the last of them. The engine's own text is the authority: what it
    adds at the end (an incomplete character) is added here.
    """

    def __init__(self, detokenizer: IncrementalDetokenizer) -> None:
        self._detokenizer = detokenizer
        self._length = 0

    def take(self, delta: StreamDelta) -> list[tuple[str, bool]]:
        out = []
        for token, accepted in zip(delta.token_ids, delta.accepted, strict=True):
            if text := self._detokenizer.push(token):
                out.append((text, accepted))
        self._length += sum(len(text) for text, _ in out)
        if delta.output is not None and (rest := delta.output.outputs[0].text[self._length :]):
            out.append((rest, False))
        return out
