"""`/v1/completions`: one prompt or several, each with n choices."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from paceline.outputs import CompletionOutput, RequestOutput
from paceline.server import render
from paceline.server.body import new_router
from paceline.server.protocol import CompletionRequest
from paceline.server.service import Job, Service, new_id
from paceline.server.transport import (
    DONE,
    EventStream,
    JsonResponse,
    event,
    openai_error_event,
    text_events,
    unless_gone,
)
from paceline.server.wire import Wire, shorten, wire_of


def router(service: Service) -> APIRouter:
    routes = new_router()

    @routes.post("/v1/completions", response_model=None)
    async def completions(request: CompletionRequest, raw: Request) -> Response | None:
        return await Completion(service, request).respond(raw)

    return routes


class Completion:
    """One completion request."""

    def __init__(self, service: Service, request: CompletionRequest) -> None:
        self.service = service
        self.request = request
        self.id = request.request_id or new_id("cmpl")

    async def respond(self, raw: Request) -> Response | None:
        r, service = self.request, self.service
        r.check()
        service.check_model(r.model)
        wanted = r.wanted()
        params = r.params(service.settings.max_logprobs, wanted)
        self.top = params.logprobs
        prompts = r.prompts()
        service.check_choices(len(prompts), params.n)  # before a million of them are encoded
        self.ids = [await self.encode(p) if isinstance(p, str) else p for p in prompts]
        self.echoes = [await self.text_of(p) for p in prompts] if r.echo else [""] * len(prompts)
        run = service.run(
            self.ids,
            params,
            job_id=self.id,
            num_speculative_tokens=r.num_speculative_tokens,
            cache_salt=r.cache_salt,
            last_only=not r.stream,
            prompt_only=r.prompt_only,
            grammar_field=wanted.field if wanted is not None else "",
        )
        if not r.stream:

            async def work() -> Response:
                async with run as job:
                    outputs = await service.finish(job)
                    return JsonResponse(await service.engine.work(lambda: self.whole(job, outputs)))

            return await unless_gone(raw, work())
        stack = AsyncExitStack()
        job = await stack.enter_async_context(run)
        return EventStream(self.stream(stack, job, wire_of(raw.scope)), openai_error_event, stack)

    async def encode(self, text: str) -> list[int]:
        frame = self.request.add_special_tokens is not False
        return await self.service.engine.encode(text, add_special_tokens=frame)

    async def text_of(self, prompt: str | list[int]) -> str:
        return prompt if isinstance(prompt, str) else await self.service.engine.decode(prompt)

    # ---- whole answers

    def head(self, job: Job) -> dict[str, Any]:
        model = self.request.model or self.service.model_name
        return {"id": self.id, "object": "text_completion", "created": job.created, "model": model}

    def whole(self, job: Job, outputs: list[RequestOutput]) -> dict[str, Any]:
        choices = [self.choice(p, o, c) for p, o in enumerate(outputs) for c in o.outputs]
        return self.head(job) | {"choices": choices, "usage": render.usage_of(outputs)} | self.extras(outputs)

    def choice(self, prompt: int, output: RequestOutput, choice: CompletionOutput) -> dict[str, Any]:
        logprobs, echo = None, self.echoes[prompt]
        if self.top is not None and self.request.echo:
            logprobs = render.echoed_logprobs(output, choice.logprobs or [], self.service.texts, self.top, len(echo))
        elif self.top is not None:
            logprobs = render.completion_logprobs(
                choice.logprobs or [], self.service.texts, self.top, render.TextOffsets()
            )
        found: dict[str, Any] = {
            "index": prompt * len(output.outputs) + choice.index,
            "text": echo + choice.text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self.request.return_token_ids:
            found |= {"token_ids": choice.token_ids, "prompt_token_ids": output.prompt_token_ids}
        if output.prompt_logprobs is not None and self.request.prompt_logprobs is not None:
            found["prompt_logprobs"] = render.prompt_logprobs(output.prompt_logprobs, self.request.prompt_logprobs)
        return found

    def extras(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """They describe one request of the engine: several prompts have none."""
        if len(outputs) != 1:
            return {}
        metrics = self.service.settings.spec_metrics != "none"
        return render.extras(outputs[0], metrics=metrics, meta=bool(self.request.return_meta_info))

    # ---- streams

    async def stream(self, stack: AsyncExitStack, job: Job, wire: Wire | None) -> AsyncGenerator[bytes, None]:
        r, texts, top = self.request, self.service.texts, self.top
        last_usage, every_usage = r.usage_wanted()
        head = self.head(job)
        offsets: dict[int, render.TextOffsets] = {}
        plain = None  # for deltas that add text and nothing else, behind the first of their choice
        if top is None and not r.return_token_ids and not every_usage and len(job.streams) == 1:
            plain = text_events(lambda i, text: head | {"choices": [_choice(i, text)]}, job.choices)
        async with stack:
            async for index, delta in self.service.deltas(job):
                first = index not in offsets
                if not first and plain is not None and (known := plain(delta)) is not None:
                    if known:
                        yield known
                    continue
                at = offsets.setdefault(index, render.TextOffsets())
                text = (self.echoes[index // job.choices] if first else "") + delta.text
                logprobs = None
                if top is not None and delta.logprobs:
                    logprobs = render.completion_logprobs(delta.logprobs, texts, top, at)
                if not (text or first or delta.finish_reason or logprobs or (r.return_token_ids and delta.token_ids)):
                    continue
                choice = _choice(index, text)
                choice |= {"logprobs": logprobs, "finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
                if r.return_token_ids:
                    choice["token_ids"] = delta.token_ids
                    if first:
                        choice["prompt_token_ids"] = job.streams[index // job.choices].prompt_token_ids
                chunk = head | {"choices": [choice]}
                if every_usage:
                    chunk["usage"] = render.usage(job.prompt_tokens, sum(job.counts))
                if delta.output is not None and len(job.streams) == 1 and not last_usage:
                    chunk |= self.extras([delta.output])
                yield event(chunk)
                if plain is not None and len(offsets) == job.choices and wire is not None:
                    shorten(job.streams[0], wire, plain)
                    wire = None
            end = b""
            if last_usage:
                outputs = job.finished()
                tail = {"choices": [], "usage": render.usage_of(outputs)} | self.extras(outputs)
                end = event(head | tail)
            yield end + DONE


def _choice(index: int, text: str) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": None, "stop_reason": None}
