"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's interface, for text."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from paceline.outputs import RequestOutput
from paceline.server import render
from paceline.server.errors import bad
from paceline.server.messages import chat_prompt
from paceline.server.protocol import MAX_STOPS, GenerationRequest
from paceline.server.service import Job, Service, new_id
from paceline.server.transport import EventStream, JsonResponse, anthropic_error_event, named_event, unless_gone

_STOP_REASONS = {"length": "max_tokens", "abort": "pause_turn"}


class CountRequest(GenerationRequest):
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    async def prompt(self, service: Service) -> list[int]:
        """Token ids. Raises ApiError; a last message of the assistant is a beginning to go on from."""
        messages = list(self.messages)
        if self.system:
            messages = [{"role": "system", "content": self.system}, *messages]
        for i, message in enumerate(self.messages):
            if message.get("role") not in ("user", "assistant", "system"):
                raise bad(f"messages[{i}].role", message.get("role"), "use 'user' or 'assistant'")
        prefilled = bool(self.messages) and self.messages[-1].get("role") == "assistant"
        _, ids = await chat_prompt(
            service.engine,
            messages,
            self.chat_template_kwargs,
            add_generation_prompt=not prefilled,
            continue_final_message=prefilled,
            add_special_tokens=False,
        )
        return ids


class MessagesRequest(CountRequest):
    max_tokens: int
    stop_sequences: list[str] | None = None

    def check(self) -> None:
        super().check()
        if self.n not in (None, 1):
            raise bad("n", self.n, "is not part of the Messages interface; use chat completions")
        if self.stop_sequences and self.stop:
            raise bad("stop_sequences", self.stop_sequences, "contradicts stop; give one of them")
        if self.stop_sequences:
            if len(self.stop_sequences) > MAX_STOPS:
                raise bad("stop_sequences", self.stop_sequences, f"at most {MAX_STOPS}")
            self.stop = self.stop_sequences


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/messages", response_model=None)
    async def messages(request: MessagesRequest, raw: Request) -> Response | None:
        return await Turn(service, request).respond(raw)

    @routes.post("/v1/messages/count_tokens", response_model=None)
    async def count_tokens(request: CountRequest) -> Response:
        request.check()
        service.check_model(request.model)
        return JsonResponse({"input_tokens": len(await request.prompt(service))})

    return routes


class Turn:
    """One Messages request."""

    def __init__(self, service: Service, request: MessagesRequest) -> None:
        self.service = service
        self.request = request
        self.id = request.request_id or new_id("msg")

    async def respond(self, raw: Request) -> Response | None:
        r, service = self.request, self.service
        r.check()
        service.check_model(r.model)
        params = r.sampling(max_tokens=r.max_tokens, logprobs=None)
        run = service.run(
            [await r.prompt(service)],
            params,
            job_id=self.id,
            num_speculative_tokens=r.num_speculative_tokens,
            cache_salt=r.cache_salt,
            last_only=not r.stream,
        )
        if not r.stream:

            async def work() -> Response:
                async with run as job:
                    [output] = await service.finish(job)
                    return JsonResponse(self.whole(job, output))

            return await unless_gone(raw, work())
        stack = AsyncExitStack()
        job = await stack.enter_async_context(run)
        return EventStream(self.stream(stack, job), anthropic_error_event)

    def message(self, job: Job, content: list[dict[str, Any]], made: int, cached: int = 0) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.request.model or self.service.model_name,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {
                "input_tokens": job.prompt_tokens,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": cached,
                "output_tokens": made,
            },
        }

    def whole(self, job: Job, output: RequestOutput) -> dict[str, Any]:
        choice = output.outputs[0]
        content = [{"type": "text", "text": choice.text}] if choice.text else []
        body = self.message(job, content, len(choice.token_ids), output.num_cached_tokens) | _ending(output)
        metrics = self.service.settings.spec_metrics != "none"
        return body | render.extras(output, metrics=metrics, meta=bool(self.request.return_meta_info))

    async def stream(self, stack: AsyncExitStack, job: Job) -> AsyncGenerator[bytes, None]:
        async with stack:
            block = {"type": "text", "text": ""}
            yield named_event({"type": "message_start", "message": self.message(job, [], 0)}) + named_event(
                {"type": "content_block_start", "index": 0, "content_block": block}
            )
            async for _, delta in self.service.deltas(job):
                if delta.text:
                    piece = {"type": "text_delta", "text": delta.text}
                    yield named_event({"type": "content_block_delta", "index": 0, "delta": piece})
            [output] = job.finished()
            usage = {"output_tokens": len(output.outputs[0].token_ids)}
            yield (
                named_event({"type": "content_block_stop", "index": 0})
                + named_event({"type": "message_delta", "delta": _ending(output), "usage": usage})
                + named_event({"type": "message_stop"})
            )


def _ending(output: RequestOutput) -> dict[str, Any]:
    """stop_reason and stop_sequence."""
    choice = output.outputs[0]
    if choice.finish_reason != "stop":
        return {"stop_reason": _STOP_REASONS[str(choice.finish_reason)], "stop_sequence": None}
    stopped = isinstance(choice.stop_reason, str)
    reason = "stop_sequence" if stopped else "end_turn"
    return {"stop_reason": reason, "stop_sequence": choice.stop_reason if stopped else None}
