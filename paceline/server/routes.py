"""Small endpoints: tokens, models, health, figures."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

import paceline
from paceline.prompts import check_ids
from paceline.sampling_params import SamplingParams
from paceline.server.body import new_router
from paceline.server.errors import ApiError, bad
from paceline.server.message_checks import check_messages
from paceline.server.protocol import DetokenizeRequest, TokenizeRequest
from paceline.server.service import Service
from paceline.server.transport import JsonResponse
from paceline.server.turn import Asked, prepare


def router(service: Service) -> APIRouter:
    routes = new_router()

    @routes.get("/v1/models", response_model=None)
    async def models() -> Response:
        return JsonResponse(
            {"object": "list", "data": [_model(service, name) for name in service.settings.model_names]}
        )

    @routes.get("/v1/models/{name:path}", response_model=None)
    async def model(name: str) -> Response:
        service.check_model(name)
        return JsonResponse(_model(service, name))

    @routes.post("/tokenize", response_model=None)
    async def tokenize(request: TokenizeRequest) -> Response:
        return JsonResponse(await _tokenize(service, request))

    @routes.post("/detokenize", response_model=None)
    async def detokenize(request: DetokenizeRequest) -> Response:
        request.check()
        service.check_model(request.model)
        if min(request.tokens, default=0) < 0:
            raise bad("tokens", min(request.tokens), "token ids are 0 or more")
        check_ids("tokens", request.tokens, service.info["vocab_size"])
        return JsonResponse({"prompt": await service.engine.decode(request.tokens)})

    @routes.get("/health", response_model=None)
    @routes.get("/ping", response_model=None)
    @routes.post("/ping", response_model=None)
    async def health() -> Response:
        if not service.engine.alive:
            why = "the engine is dead" if service.engine.error is not None else "the server is shutting down"
            raise ApiError(503, why, code="engine_dead")
        return Response(status_code=200)

    @routes.get("/version", response_model=None)
    async def version() -> Response:
        return JsonResponse({"version": paceline.__version__})

    @routes.get("/metrics", response_model=None)
    async def metrics() -> Response:
        body, content_type = service.metrics.exposition()
        return Response(body, headers={"content-type": content_type})

    @routes.post("/reset_prefix_cache", response_model=None)
    async def reset_prefix_cache() -> Response:
        await service.engine.reset_prefix_cache()
        return Response(status_code=200)

    @routes.get("/load", response_model=None)
    async def load() -> Response:
        return JsonResponse({"server_load": service.engine.in_flight})

    @routes.get("/server_info", response_model=None)
    async def server_info() -> Response:
        return JsonResponse(_server_info(service))

    return routes


async def _tokenize(service: Service, request: TokenizeRequest) -> dict[str, Any]:
    request.check()
    service.check_model(request.model)
    if request.content is not None and request.prompt is not None:
        raise bad("content", request.content, "is another name of prompt; give one of them")
    prompt = request.prompt if request.content is None else request.content
    if (prompt is None) == (request.messages is None):
        raise ApiError(400, "prompt: give either a prompt or messages", param="prompt")
    if request.messages is not None:
        check_messages(request.messages, service.features.templates)
        asked = Asked(
            request.messages,
            request.chat_template_kwargs,
            tools=request.tools,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            add_special_tokens=request.add_special_tokens,
        )
        ids = (await prepare(service.engine, service.features, asked, SamplingParams())).ids
    else:
        assert prompt is not None
        frame = request.add_special_tokens is not False
        ids = await service.engine.encode(prompt, add_special_tokens=frame)
    body: dict[str, Any] = {"count": len(ids), "max_model_len": service.info["max_model_len"], "tokens": ids}
    body["token_strs"] = [service.texts.text(i) for i in ids] if request.return_token_strs else None
    return body


def _model(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "type": "model",  # this, the display name and the time as text are Anthropic's
        "display_name": name,
        "created_at": datetime.fromtimestamp(service.started, UTC).isoformat().replace("+00:00", "Z"),
        "created": service.started,
        "owned_by": "paceline",
        "root": service.model_name,
        "parent": None,
        "max_model_len": service.info["max_model_len"],
    }


def _server_info(service: Service) -> dict[str, Any]:
    """How the model runs here, and figures since the start. Paths of the machine stay out of it."""
    stats = service.engine.stats()
    engine = {key: value for key, value in service.info.items() if key not in ("path", "model")}
    return {
        "version": paceline.__version__,
        "model_names": list(service.settings.model_names),
        "uptime_seconds": time.time() - service.started,
        "engine": engine,
        "limits": {
            "max_num_seqs": service.engine.llm.engine.max_num_seqs,
            "max_running_and_waiting": service.engine.capacity,
            "max_body_bytes": service.settings.max_body_bytes,
            "max_logprobs": service.settings.max_logprobs,
            "request_timeout": service.settings.request_timeout,
        },
        "running": stats.running,
        "waiting": stats.waiting,
        "kv_cache_usage": stats.kv_cache_usage,
        "generation_tokens": stats.generation_tokens,
        "spec_decode": stats.spec_decode.as_dict(),
    }
