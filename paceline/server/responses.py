"""`/v1/responses`: OpenAI's Responses interface. Nothing is stored: each request carries its conversation."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from paceline.outputs import RequestOutput
from paceline.server import render, tool_fields
from paceline.server.body import new_router
from paceline.server.errors import as_api_error, bad
from paceline.server.features import ModelFeatures
from paceline.server.fields import check_nested, is_neutral
from paceline.server.protocol import Objects, Texts, ToolRequest
from paceline.server.response_input import TOOL_NAMES, choice_of, messages_of, tools_of
from paceline.server.response_items import Items
from paceline.server.service import Job, Service, new_id
from paceline.server.thinking import effort_variables
from paceline.server.transport import EventStream, JsonResponse, named_event, unless_gone
from paceline.server.turn import Asked, prepare
from paceline.server.wanted import Wanted, from_format, from_structured

# Fields of this interface that this server cannot serve, with the values that ask for nothing.
_UNSERVED: dict[str, tuple[Any, ...]] = {
    "truncation": ("disabled",),
    "include": (["reasoning.encrypted_content"],),  # reasoning is in the answer in any case
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "background": (),
    "max_tool_calls": (),
    "context_management": (),
}


class ResponsesRequest(ToolRequest):
    input: str | Objects
    instructions: str | None = None
    max_output_tokens: int | None = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    truncation: str | None = None
    include: Texts | None = None
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
        check_nested("text", self.text or {}, ("format", "verbosity"))
        check_nested("reasoning", self.reasoning or {}, ("effort", "summary", "generate_summary"))
        tool_fields.check_responses(self.tools, self.tool_choice)
        if (verbosity := (self.text or {}).get("verbosity")) not in (None, "medium"):
            raise bad("text.verbosity", verbosity, "is not supported", code="unsupported_field")

    def limit(self) -> tuple[str, int | None]:
        return super().limit() if self.max_output_tokens is None else ("max_output_tokens", self.max_output_tokens)

    def wanted(self) -> Wanted | None:
        """Raises ApiError."""
        answer = from_format("text.format", (self.text or {}).get("format"))
        return from_structured(self.structured_outputs, besides=answer)

    def asked(self, model: ModelFeatures) -> Asked:
        """Raises ApiError."""
        effort = (self.reasoning or {}).get("effort")
        return Asked(
            messages_of(self.input, self.instructions),
            self.chat_template_kwargs,
            effort_variables("reasoning.effort", effort, model.variables, reasons=model.reasoning is not None),
            tools_of(self.tools),
            choice_of(self.tool_choice),
            self.parallel_tool_calls is not False,
            self.wanted(),
            add_generation_prompt=True,
            names=TOOL_NAMES,
        )


def router(service: Service) -> APIRouter:
    routes = new_router()

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
        self.sequence = 0

    async def respond(self, raw: Request) -> Response | None:
        r, service = self.request, self.service
        r.check()
        service.check_model(r.model)
        params = r.sampling(max_tokens=r.limit()[1], logprobs=None)
        self.turn = await prepare(service.engine, service.features, r.asked(service.features), params)
        run = service.run(
            [self.turn.ids],
            self.turn.params,
            job_id=self.id,
            num_speculative_tokens=r.num_speculative_tokens,
            cache_salt=r.cache_salt,
            last_only=not r.stream,
            limit_field=r.limit()[0],
            grammar_field=self.turn.grammar_field,
            schemas=self.turn.schemas,
            counter=self.turn.counter,
        )
        if not r.stream:

            async def work() -> Response:
                async with run as job:
                    [output] = await service.finish(job)
                    return JsonResponse(await service.engine.work(lambda: self.whole(job, output)))

            return await unless_gone(raw, work())
        stack = AsyncExitStack()
        job = await stack.enter_async_context(run)
        return EventStream(self.stream(stack, job), self.error_event, stack)

    # ---- objects

    def whole(self, job: Job, output: RequestOutput) -> dict[str, Any]:
        items = Items()
        for part in self.turn.reader().whole(output.outputs[0].text):
            items.add(part)
        items.end(_is_cut(output), self.turn.plan.form == "calls")
        return self.body(job, output, items)

    def body(self, job: Job, output: RequestOutput | None, items: Items) -> dict[str, Any]:
        """The response object; without an output, as it is in progress."""
        r = self.request
        status = "in_progress" if output is None else _status(output)
        body: dict[str, Any] = {
            "id": self.id,
            "object": "response",
            "created_at": job.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": r.instructions,
            "max_output_tokens": r.limit()[1],
            "model": r.model or self.service.model_name,
            "output": items.items,
            "parallel_tool_calls": r.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None} | (r.reasoning or {}),
            "store": False,
            "temperature": 1.0 if r.temperature is None else r.temperature,
            "text": {"format": {"type": "text"}} | (r.text or {}),
            "tool_choice": r.tool_choice or ("auto" if r.tools else "none"),
            "tools": r.tools or [],
            "top_p": 1.0 if r.top_p is None else r.top_p,
            "truncation": "disabled",
            "metadata": (r.model_extra or {}).get("metadata") or {},
            "usage": None,
        }
        if output is None:
            return body
        if status == "failed":
            body["error"] = {"code": "server_error", "message": str(output.outputs[0].stop_reason)}
        usage = render.usage_of([output])
        body["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": job.reasoning_tokens or 0},
            "total_tokens": usage["total_tokens"],
        }
        metrics = self.service.settings.spec_metrics != "none"
        return body | render.extras(output, metrics=metrics, meta=bool(r.return_meta_info))

    # ---- streams

    async def stream(self, stack: AsyncExitStack, job: Job) -> AsyncGenerator[bytes, None]:
        items, reader = Items(self.event), self.turn.reader()
        async with stack:
            start = self.body(job, None, items)
            yield self.event("response.created", response=start) + self.event("response.in_progress", response=start)
            async for _, delta in self.service.deltas(job):
                events = b"".join(map(items.add, reader.read(delta)))
                if events:
                    yield events
            [output] = job.finished()
            end = items.end(_is_cut(output), self.turn.plan.form == "calls")
            final = self.body(job, output, items)
            yield end + self.event(f"response.{final['status']}", response=final)

    def event(self, kind: str, **fields: Any) -> bytes:
        made = named_event({"type": kind, "sequence_number": self.sequence, **fields})
        self.sequence += 1
        return made

    def error_event(self, error: Exception) -> bytes:
        found = as_api_error(error)
        return self.event("error", code=found.code, message=found.message, param=found.param)


def _is_cut(output: RequestOutput) -> bool:
    return output.outputs[0].finish_reason != "stop"


def _status(output: RequestOutput) -> str:
    """ "abort" comes from a grammar that could not go on; a client that aborts reads nothing any more."""
    return {"stop": "completed", "abort": "failed"}.get(str(output.outputs[0].finish_reason), "incomplete")
