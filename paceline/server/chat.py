"""`/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from paceline.outputs import CompletionOutput, RequestOutput, StreamDelta
from paceline.server import render
from paceline.server.messages import chat_prompt
from paceline.server.protocol import ChatRequest
from paceline.server.service import Job, Service, new_id
from paceline.server.transport import DONE, EventStream, JsonResponse, event, openai_error_event, unless_gone


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/chat/completions", response_model=None)
    async def chat_completions(request: ChatRequest, raw: Request) -> Response | None:
        return await Chat(service, request).respond(raw)

    return routes


class Chat:
    """One chat request."""

    def __init__(self, service: Service, request: ChatRequest) -> None:
        self.service = service
        self.request = request
        self.id = request.request_id or new_id("chatcmpl")

    async def respond(self, raw: Request) -> Response | None:
        r, service = self.request, self.service
        r.check()
        service.check_model(r.model)
        params = r.params(service.settings.max_logprobs)
        self.top = params.logprobs
        _, ids = await chat_prompt(
            service.engine,
            r.messages,
            r.chat_template_kwargs,
            add_generation_prompt=r.add_generation_prompt,
            continue_final_message=r.continue_final_message,
            add_special_tokens=r.add_special_tokens,
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
                    return JsonResponse(self.whole(job, output))

            return await unless_gone(raw, work())
        stack = AsyncExitStack()
        job = await stack.enter_async_context(run)
        return EventStream(self.stream(stack, job), openai_error_event)

    # ---- whole answers

    def whole(self, job: Job, output: RequestOutput) -> dict[str, Any]:
        r = self.request
        body: dict[str, Any] = {
            "id": self.id,
            "object": "chat.completion",
            "created": job.created,
            "model": r.model or self.service.model_name,
            "choices": [self.choice(choice) for choice in output.outputs],
            "usage": render.usage_of([output]),
        }
        if r.return_token_ids:
            body["prompt_token_ids"] = output.prompt_token_ids
        return body | self.extras(output)

    def choice(self, output: CompletionOutput) -> dict[str, Any]:
        found: dict[str, Any] = {
            "index": output.index,
            "message": {"role": "assistant", "content": output.text, "refusal": None},
            "logprobs": None if self.top is None else self.logprobs(output.logprobs or []),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
        if self.request.return_token_ids:
            found["token_ids"] = output.token_ids
        return found

    def logprobs(self, entries: list[Any]) -> dict[str, Any]:
        return render.chat_logprobs(entries, self.service.texts, self.top or 0)

    def extras(self, output: RequestOutput) -> dict[str, Any]:
        metrics = self.service.settings.spec_metrics != "none"
        return render.extras(output, metrics=metrics, meta=bool(self.request.return_meta_info))

    # ---- streams

    async def stream(self, stack: AsyncExitStack, job: Job) -> AsyncGenerator[bytes, None]:
        r = self.request
        last_usage, every_usage = r.usage_wanted()
        head = {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": job.created,
            "model": r.model or self.service.model_name,
        }
        started: set[int] = set()
        async with stack:
            async for index, delta in self.service.deltas(job):
                chunks = b""
                if index not in started:
                    started.add(index)
                    chunks = event(self.first(head, job, index, every_usage))
                if self.says_something(delta):
                    chunk = head | {"choices": [self.piece(index, delta)]}
                    if every_usage:
                        chunk["usage"] = render.usage(job.prompt_tokens, sum(job.counts))
                    if delta.output is not None and not last_usage:
                        chunk |= self.extras(delta.output)
                    chunks += event(chunk)
                if chunks:
                    yield chunks
            end = b""
            if last_usage:
                [output] = job.finished()
                end = event(head | {"choices": [], "usage": render.usage_of([output])} | self.extras(output))
            yield end + DONE

    def first(self, head: dict[str, Any], job: Job, index: int, usage: bool) -> dict[str, Any]:
        """The chunk that comes with the first token, whether it has text yet or not."""
        choice = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
        chunk = head | {"choices": [choice | {"finish_reason": None}]}
        if self.request.return_token_ids:
            chunk["prompt_token_ids"] = job.streams[0].prompt_token_ids
        if usage:
            chunk["usage"] = render.usage(job.prompt_tokens, 0)
        return chunk

    def says_something(self, delta: StreamDelta) -> bool:
        tokens_shown = self.top is not None or self.request.return_token_ids
        return bool(delta.text) or delta.finish_reason is not None or bool(tokens_shown and delta.token_ids)

    def piece(self, index: int, delta: StreamDelta) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "delta": {"content": delta.text},
            "logprobs": None if self.top is None or not delta.logprobs else self.logprobs(delta.logprobs),
            "finish_reason": delta.finish_reason,
        }
        if self.request.return_token_ids:
            choice["token_ids"] = delta.token_ids
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        return choice
