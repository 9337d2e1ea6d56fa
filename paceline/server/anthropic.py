"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's interface."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from paceline.outputs import RequestOutput
from paceline.sampling_params import SamplingParams
from paceline.server import render, tool_fields
from paceline.server.anthropic_blocks import Blocks
from paceline.server.anthropic_input import TOOL_NAMES, choice_of, messages_of, tools_of
from paceline.server.body import new_router
from paceline.server.errors import bad
from paceline.server.features import ModelFeatures
from paceline.server.fields import check_nested
from paceline.server.protocol import MAX_STOPS, Objects, Texts, ToolRequest
from paceline.server.reader import Reader
from paceline.server.service import Job, Service, new_id
from paceline.server.thinking import effort_variables, thinking_variables
from paceline.server.transport import EventStream, JsonResponse, anthropic_error_event, named_event, unless_gone
from paceline.server.turn import Asked, prepare
from paceline.server.wanted import Wanted, from_format, from_structured

_STOP_REASONS = {"length": "max_tokens", "abort": "pause_turn"}


class CountRequest(ToolRequest):
    messages: Objects
    system: str | Objects | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None

    def check(self) -> None:
        super().check()
        tool_fields.check_anthropic(self.tools, self.tool_choice)

    def wanted(self) -> Wanted | None:
        """Raises ApiError."""
        config = self.output_config or {}
        check_nested("output_config", config, ("format", "effort"))
        answer = from_format("output_config.format", config.get("format"))
        if answer is None:
            answer = from_format("output_format", self.output_format)
        return from_structured(self.structured_outputs, besides=answer)

    def asked(self, model: ModelFeatures) -> Asked:
        """A last message of the assistant is a beginning to go on from. Raises ApiError."""
        messages = messages_of(self.messages)
        if self.system:
            messages = [{"role": "system", "content": self.system}, *messages]
        prefilled = bool(self.messages) and self.messages[-1].get("role") == "assistant"
        reasons = model.reasoning is not None
        effort = (self.output_config or {}).get("effort")
        choice, parallel = choice_of(self.tool_choice)
        return Asked(
            messages,
            self.chat_template_kwargs,
            {
                **thinking_variables(self.thinking, model.variables, reasons=reasons),
                **effort_variables("output_config.effort", effort, model.variables, reasons=reasons),
            },
            tools_of(self.tools),
            choice,
            parallel,
            self.wanted(),
            add_generation_prompt=not prefilled,
            continue_final_message=prefilled,
            names=TOOL_NAMES,
        )


class MessagesRequest(CountRequest):
    max_tokens: int
    stop_sequences: Texts | None = None

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
    routes = new_router()

    @routes.post("/v1/messages", response_model=None)
    async def messages(request: MessagesRequest, raw: Request) -> Response | None:
        return await Answer(service, request).respond(raw)

    @routes.post("/v1/messages/count_tokens", response_model=None)
    async def count_tokens(request: CountRequest) -> Response:
        request.check()
        service.check_model(request.model)
        asked = request.asked(service.features)
        turn = await prepare(service.engine, service.features, asked, SamplingParams())
        return JsonResponse({"input_tokens": len(turn.ids)})

    return routes


class Answer:
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
        self.turn = await prepare(service.engine, service.features, r.asked(service.features), params)
        run = service.run(
            [self.turn.ids],
            self.turn.params,
            job_id=self.id,
            num_speculative_tokens=r.num_speculative_tokens,
            cache_salt=r.cache_salt,
            last_only=not r.stream,
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
        return EventStream(self.stream(stack, job), anthropic_error_event, stack)

    def message(self, job: Job, content: list[dict[str, Any]], made: int, cached: int = 0) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.request.model or self.service.model_name,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(job, made, cached),
        }

    def whole(self, job: Job, output: RequestOutput) -> dict[str, Any]:
        choice, blocks, reader = output.outputs[0], Blocks(), self.turn.reader()
        for part in reader.whole(choice.text):
            blocks.add(part)
        blocks.end()
        body = self.message(job, blocks.blocks, len(choice.token_ids), output.num_cached_tokens)
        metrics = self.service.settings.spec_metrics != "none"
        extras = render.extras(output, metrics=metrics, meta=bool(self.request.return_meta_info))
        return body | _ending(output, reader) | extras

    async def stream(self, stack: AsyncExitStack, job: Job) -> AsyncGenerator[bytes, None]:
        blocks, reader = Blocks(), self.turn.reader()
        async with stack:
            yield named_event({"type": "message_start", "message": self.message(job, [], 0)})
            async for _, delta in self.service.deltas(job):
                events = b"".join(map(blocks.add, reader.read(delta)))
                if events:
                    yield events
            [output] = job.finished()
            usage = _usage(job, len(output.outputs[0].token_ids), output.num_cached_tokens)
            ending = {"type": "message_delta", "delta": _ending(output, reader), "usage": usage}
            yield blocks.end() + named_event(ending) + named_event({"type": "message_stop"})


def _usage(job: Job, made: int, cached: int) -> dict[str, Any]:
    """The prompt's tokens are those of `input_tokens` and of `cache_read_input_tokens` together."""
    return {
        "input_tokens": job.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": made,
    }


def _ending(output: RequestOutput, reader: Reader) -> dict[str, Any]:
    """stop_reason and stop_sequence."""
    choice = output.outputs[0]
    if choice.finish_reason != "stop":
        return {"stop_reason": _STOP_REASONS[str(choice.finish_reason)], "stop_sequence": None}
    if isinstance(choice.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_reason}
    return {"stop_reason": "tool_use" if reader.num_calls else "end_turn", "stop_sequence": None}
