"""Replicas of the server behind Ray Serve: one engine each, on cores of its own.

    serve run paceline.ray:app model=smollm2-135m replicas=2 cores=4

A gateway takes the HTTP requests, reads the beginning of the prompt, and hands the request to the replica that has seen
it before (Ray's prefix-aware router). The replica runs the server's own ASGI application on it.
"""

import importlib
import json
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from ray import get_runtime_context, serve
from ray.exceptions import RayError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from paceline.errors import ConfigError
from paceline.ray import cores
from paceline.ray.metrics import merge_metrics
from paceline.ray.relay import Application, Lifespan, Message, RelayedRequest, run
from paceline.ray.routing import PREFIX_ROUTER, routing_key

log = logging.getLogger("ray.serve")

METHODS = ["GET", "POST", "DELETE", "OPTIONS", "HEAD", "PUT", "PATCH"]
HOP_BY_HOP = {b"connection", b"keep-alive", b"transfer-encoding", b"te", b"upgrade", b"proxy-connection"}


class DeployOptions(BaseModel):
    """What `serve run paceline.ray:app` and a Serve config's `args` take.

    model: a known name, folder, .gguf file or hub id, readable on every node. replicas: engines. cores: physical cores
    of each. engine: options of `LLM` by name. server: fields of `ServerSettings` by name. max_ongoing_requests: of one
    replica, running and queued in its engine; beyond that, requests wait in Ray. routing: "prefix" sends a prompt to
    the replica that has the longest beginning of it, unless the busiest has `imbalance` requests more than the least
    busy; "load" takes the less busy of two replicas chosen at random. application: import path of the ASGI
    application's factory, called as factory(model, engine=engine, server=server).
    """

    model_config = ConfigDict(extra="forbid")

    model: str = Field(min_length=1)
    replicas: int = Field(default=1, ge=1, le=4096)
    cores: int = Field(default=1, ge=1, le=4096)
    engine: dict[str, Any] = Field(default_factory=dict)
    server: dict[str, Any] = Field(default_factory=dict)
    max_ongoing_requests: int = Field(default=64, ge=1, le=65536)
    routing: Literal["prefix", "load"] = "prefix"
    imbalance: int = Field(default=16, ge=0)
    max_body_bytes: int = Field(default=32 << 20, ge=1)
    application: str = "paceline.ray.server:create_app"


def load_factory(path: str) -> Callable[..., Application]:
    """The callable that `module:name` names. Raises ConfigError for anything else."""
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"application: {path!r} cannot be imported ({error}); write module:factory") from None
    if not callable(found):
        raise ConfigError(f"application: {path!r} is not callable; name a factory of an ASGI application")
    return found


class Replica:
    """An engine and its server's application in a process of its own, on cores that no other replica uses."""

    async def __init__(self, options: Mapping[str, Any]) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        chosen = DeployOptions(**options)
        self._claim = cores.claim(chosen.cores)
        cores.pin_process(self._claim.cpus)
        log.info("replica on CPUs %s", self._claim.cpus)
        self._app = load_factory(chosen.application)(chosen.model, engine=chosen.engine, server=chosen.server)
        self._lifespan = Lifespan(self._app)
        await self._lifespan.start()

    async def relay(self, request: RelayedRequest) -> AsyncGenerator[Message, None]:
        """The ASGI messages that answer a request, the start of the response first."""
        stream = run(self._app, request, self._lifespan.state)
        try:
            async for message in stream:
                yield message
        finally:
            await stream.aclose()

    async def scrape(self) -> tuple[str, str]:
        """(this replica's name, its metrics page)."""
        name = serve.get_replica_context().replica_id.unique_id
        return name, (await self._get("/metrics"))[1].decode(errors="replace")

    async def facts(self) -> dict[str, Any]:
        """Where this replica runs: its name, Ray's node, its CPUs."""
        return {
            "replica": serve.get_replica_context().replica_id.unique_id,
            "node": get_runtime_context().get_node_id(),
            "cpus": self._claim.cpus,
        }

    async def check_health(self) -> None:
        """Ray Serve replaces a replica whose application says that its engine is dead."""
        status, body = await self._get("/health")
        if status >= 500:
            raise RuntimeError(f"the server reports {status}: {body[:200]!r}")

    async def _get(self, path: str) -> tuple[int, bytes]:
        request = RelayedRequest("GET", path, b"", ((b"host", b"replica"),), b"", None, path)
        status, body = 500, b""
        async for message in run(self._app, request, self._lifespan.state):
            status = message.get("status", status)
            body += message.get("body", b"")
        return status, body

    async def __del__(self) -> None:
        await self._lifespan.stop()
        self._claim.release()


class Gateway:
    """Takes HTTP requests and hands each to a replica; asks all of them for their metrics. Holds no model."""

    def __init__(self, replicas: DeploymentHandle, max_body_bytes: int) -> None:
        self.replicas = replicas
        self.max_body_bytes = max_body_bytes

    def __serve_build_asgi_app__(self) -> Starlette:
        """Ray Serve calls it once, after the constructor."""
        metrics = Route("/metrics", self.metrics, methods=["GET"])
        return Starlette(routes=[metrics, Route("/{path:path}", self.relay, methods=METHODS)])

    async def relay(self, request: Request) -> Response:
        """Any request, by way of the replica that the router chooses."""
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > self.max_body_bytes:
                return _error(413, f"the body is larger than {self.max_body_bytes} bytes (max_body_bytes)")
        path = request.url.path
        relayed = RelayedRequest(
            method=request.method,
            path=path,
            query=request.scope["query_string"],
            headers=tuple((k, v) for k, v in request.headers.raw if k not in HOP_BY_HOP),
            body=bytes(body),
            client=None if request.client is None else (request.client.host, request.client.port),
            prompt=routing_key(path, bytes(body)),
        )
        messages: Any = self.replicas.options(stream=True).relay.remote(relayed)
        try:
            start = await anext(aiter(messages))
        except StopAsyncIteration:
            return _error(502, "the replica closed without an answer")
        except (RayServeException, RayError) as error:
            return _error(503, f"no replica could take the request ({type(error).__name__})", retry_after=1)
        response = StreamingResponse(_body(messages), status_code=start["status"])
        response.raw_headers = [(k, v) for k, v in start.get("headers", []) if k.lower() not in HOP_BY_HOP]
        return response

    async def metrics(self, _: Request) -> Response:
        """The metrics of all replicas on one page."""
        pages = dict(await self.replicas.broadcast("scrape").results_async(timeout_s=10))
        return Response(merge_metrics(pages), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _body(messages: Any) -> AsyncGenerator[bytes, None]:
    try:
        async for message in messages:
            if message["type"] == "http.response.body" and message.get("body"):
                yield message["body"]
    finally:
        messages.cancel()  # of a request that is over: no effect


def _error(status: int, text: str, retry_after: int | None = None) -> Response:
    kind = "invalid_request_error" if status < 500 else "service_unavailable"
    body = json.dumps({"error": {"message": text, "type": kind, "param": None, "code": status}})
    headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
    return Response(body, status, headers, "application/json")


def build(options: DeployOptions) -> serve.Application:
    """The Serve application of these options, for `serve.run`. Raises ConfigError for a router that is not there."""
    router: dict[str, Any] = {}
    if options.routing == "prefix":
        _check_router()
        limits = {"do_eviction": True, "imbalanced_threshold": options.imbalance}
        chosen = {"request_router_class": PREFIX_ROUTER, "request_router_kwargs": limits}
        router["request_router_config"] = RequestRouterConfig.model_validate(chosen)
    # Ray's annotation of `serve.deployment` is that of a decorator with arguments
    deployment: Any = serve.deployment
    replicas = (
        deployment(Replica)
        .options(
            name="Replica",
            num_replicas=options.replicas,
            ray_actor_options={"num_cpus": options.cores},
            max_ongoing_requests=options.max_ongoing_requests,
            health_check_period_s=10,
            graceful_shutdown_timeout_s=60,
            **router,
        )
        .bind(options.model_dump())
    )

    running = options.max_ongoing_requests * options.replicas
    gateway = deployment(serve.ingress()(Gateway)).options(
        name="Gateway",
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=4 * running + 64,  # those that wait for a replica wait here
    )
    application: serve.Application = gateway.bind(replicas, options.max_body_bytes)
    return application


def app(args: DeployOptions) -> serve.Application:
    """Application builder for `serve run paceline.ray:app model=... replicas=...` and Serve config files."""
    return build(args)


def _check_router() -> None:
    module, _, name = PREFIX_ROUTER.rpartition(".")
    try:
        getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"routing: this version of Ray has no prefix-aware router where Paceline looks for it ({error}); install "
            'the version that paceline[ray] names, or set routing="load"'
        ) from None
