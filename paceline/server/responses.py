"""`/v1/responses`: OpenAI's Responses interface, for text. Nothing is stored: each request carries its conversation."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from paceline.outputs import RequestOutput
from paceline.server import render
from paceline.server.errors import as_api_error, bad
from paceline.server.fields import is_neutral
from paceline.server.messages import chat_prompt
from paceline.server.protocol import GenerationRequest
from paceline.server.service import Job, Service, new_id
from paceline.server.transport import EventStream, JsonResponse, named_event, unless_gone

# Fields of this interface that this server cannot serve, with the values that ask for nothing.
_UNSERVED: dict[str, tuple[Any, ...]] = {
    "text": ({"format": {"type": "text"}},),
    "truncation": ("disabled",),
    "include": (),
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "background": (),
    "max_tool_calls": (),
    "context_management": (),
}


class ResponsesRequest(GenerationRequest):
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    truncation: str | None = None
    include: list[str] | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    background: bool | None = None
    max_tool_calls: int | None = None
    context_management: list[Any] | None = None
    top_logprobs: int | None = None

    def check(self) -> None:
        super().check()
        for name, neutral in _UNSERVED.items():
            value = getattr(self, name)
            if not is_neutral(name, value, {name: neutral}):
                raise bad(name, value, "is not supported by this server", code="unsupported_field")
        for name, value in (("n", self.n), ("top_logprobs", self.top_logprobs)):
            if value not in (None, 1 if name == "n" else 0):
                raise bad(name, value, "is not part of the Responses interface here; use chat completions")

    def messages(self) -> list[dict[str, Any]]:
        """The conversation as chat messages. Raises ApiError for items that are none."""
        out: list[dict[str, Any]] = []
        if self.instructions:
            out.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*out, {"role": "user", "content": self.input}]
        for i, item in enumerate(self.input):
            if item.get("type", "message") != "message":
                raise bad(f"input[{i}].type", item.get("type"), "only messages are supported")
            out.append({"role": item.get("role"), "content": item.get("content")})
        return out


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/responses", response_model=None)
    async def responses(request: ResponsesRequest, raw: Request) -> Response | None:
        return await Answer(service, request).respond(raw)

    return routes


class Answer:
    """One Responses request."""

    def __init__(self, service: Service, request: ResponsesRequest) -> None:
        self.service = service
        self.request = request
        self.id = request.request_id or new_id("resp")
        self.item_id = new_id("msg")
        self.sequence = 0

    async def respond(self, raw: Request) -> Response | None:
        r, service = self.request, self.service
        r.check()
        service.check_model(r.model)
        limit = r.max_tokens if r.max_output_tokens is None else r.max_output_tokens
        params = r.sampling(max_tokens=limit, logprobs=None)
        _, ids = await chat_prompt(
            service.engine,
            r.messages(),
            r.chat_template_kwargs,
            add_generation_prompt=True,
            continue_final_message=False,
            add_special_tokens=False,
        )
        run = service.run(
            [ids],
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
                    return JsonResponse(self.body(job, output))

            return await unless_gone(raw, work())
        stack = AsyncExitStack()
        job = await stack.enter_async_context(run)
        return EventStream(self.stream(stack, job), self.error_event)

    # ---- objects

    def body(self, job: Job, output: RequestOutput | None) -> dict[str, Any]:
        """The response object; without an output, as it is in progress."""
        r = self.request
        status = "in_progress" if output is None else _status(output)
        cut = status == "incomplete"
        body: dict[str, Any] = {
            "id": self.id,
            "object": "response",
            "created_at": job.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": r.instructions,
            "max_output_tokens": r.max_output_tokens,
            "model": r.model or self.service.model_name,
            "output": []
            if output is None
            else [self.item(output.outputs[0].text, "incomplete" if cut else "completed")],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": 1.0 if r.temperature is None else r.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_p": 1.0 if r.top_p is None else r.top_p,
            "truncation": "disabled",
            "metadata": (r.model_extra or {}).get("metadata") or {},
            "usage": None,
        }
        if output is None:
            return body
        usage = render.usage_of([output])
        body["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }
        metrics = self.service.settings.spec_metrics != "none"
        return body | render.extras(output, metrics=metrics, meta=bool(r.return_meta_info))

    def item(self, text: str | None, status: str) -> dict[str, Any]:
        """The message; without a text, as it begins."""
        content = [] if text is None else [_part(text)]
        return {"id": self.item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    # ---- streams

    async def stream(self, stack: AsyncExitStack, job: Job) -> AsyncGenerator[bytes, None]:
        place = {"item_id": self.item_id, "output_index": 0, "content_index": 0}
        async with stack:
            start = self.body(job, None)
            yield (
                self.event("response.created", response=start)
                + self.event("response.in_progress", response=start)
                + self.event("response.output_item.added", output_index=0, item=self.item(None, "in_progress"))
                + self.event("response.content_part.added", **place, part=_part(""))
            )
            async for _, delta in self.service.deltas(job):
                if delta.text:
                    yield self.event("response.output_text.delta", **place, delta=delta.text, logprobs=[])
            [output] = job.finished()
            text, final = output.outputs[0].text, self.body(job, output)
            yield (
                self.event("response.output_text.done", **place, text=text, logprobs=[])
                + self.event("response.content_part.done", **place, part=_part(text))
                + self.event("response.output_item.done", output_index=0, item=final["output"][0])
                + self.event(f"response.{final['status']}", response=final)
            )

    def event(self, kind: str, **fields: Any) -> bytes:
        made = named_event({"type": kind, "sequence_number": self.sequence, **fields})
        self.sequence += 1
        return made

    def error_event(self, error: Exception) -> bytes:
        found = as_api_error(error)
        return self.event("error", code=found.code, message=found.message, param=found.param)


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _status(output: RequestOutput) -> str:
    return "completed" if output.outputs[0].finish_reason == "stop" else "incomplete"
