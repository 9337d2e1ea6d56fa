"""`/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from paceline.outputs import CompletionOutput, RequestOutput, StreamDelta
from paceline.parsing.deltas import ChatDelta, ChatMessage, ToolCallDelta
from paceline.server import functions, render
from paceline.server.body import new_router
from paceline.server.protocol import ChatRequest
from paceline.server.reader import Reader, message_of
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
from paceline.server.turn import prepare
from paceline.server.wire import Wire, shorten, wire_of


def router(service: Service) -> APIRouter:
    routes = new_router()

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
        return EventStream(self.stream(stack, job, wire_of(raw.scope)), openai_error_event, stack)

    # ---- whole answers

    def whole(self, job: Job, output: RequestOutput) -> dict[str, Any]:
        r = self.request
        body: dict[str, Any] = {
            "id": self.id,
            "object": "chat.completion",
            "created": job.created,
            "model": r.model or self.service.model_name,
            "choices": [self.choice(choice) for choice in output.outputs],
            "usage": render.usage_of([output], job.reasoning_tokens),
        }
        if r.return_token_ids:
            body["prompt_token_ids"] = output.prompt_token_ids
        if output.prompt_logprobs is not None and r.prompt_logprobs is not None:
            body["prompt_logprobs"] = render.prompt_logprobs(output.prompt_logprobs, r.prompt_logprobs)
        return body | self.extras(output)

    def choice(self, output: CompletionOutput) -> dict[str, Any]:
        reader = self.turn.reader()
        message = message_of(reader.whole(output.text))
        found: dict[str, Any] = {
            "index": output.index,
            "message": self.message(message),
            "logprobs": None if self.top is None else self.logprobs(output.logprobs or []),
            "finish_reason": self.finish_reason(reader, output.finish_reason),
            "stop_reason": output.stop_reason,
        }
        if self.request.return_token_ids:
            found["token_ids"] = output.token_ids
        return found

    def message(self, said: ChatMessage) -> dict[str, Any]:
        """Without content it has calls, or reasoning or a call that was cut short."""
        other = said.tool_calls or said.reasoning or self.turn.plan.form == "calls"
        content = None if not said.content and other else said.content
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self.turn.style is not None and self.turn.show_reasoning:
            message |= _reasoning(said.reasoning or None)
        if said.tool_calls and self.request.functions:
            message |= functions.said(said.tool_calls)
        elif said.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in said.tool_calls
            ]
        return message

    def finish_reason(self, reader: Reader, reason: str | None) -> str | None:
        """As OpenAI has it: a named function's call is the answer that was asked for, so it ends with "stop"."""
        if reason != "stop" or not reader.num_calls or self.turn.named:
            return reason
        return "function_call" if self.request.functions else "tool_calls"

    def logprobs(self, entries: list[Any]) -> dict[str, Any]:
        return render.chat_logprobs(entries, self.service.texts, self.top or 0)

    def extras(self, output: RequestOutput) -> dict[str, Any]:
        metrics = self.service.settings.spec_metrics != "none"
        return render.extras(output, metrics=metrics, meta=bool(self.request.return_meta_info))

    # ---- streams

    async def stream(self, stack: AsyncExitStack, job: Job, wire: Wire | None) -> AsyncGenerator[bytes, None]:
        r = self.request
        last_usage, every_usage = r.usage_wanted()
        head = {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": job.created,
            "model": r.model or self.service.model_name,
        }
        readers: dict[int, Reader] = {}
        plain = None  # for deltas that add text and nothing else, behind the first of their choice
        if self.top is None and not r.return_token_ids and not every_usage and self.turn.reader().is_plain:
            plain = text_events(lambda i, text: head | {"choices": [_choice(i, {"content": text})]}, job.choices)
        async with stack:
            async for index, delta in self.service.deltas(job):
                chunks = b""
                if index in readers and plain is not None and (known := plain(delta)) is not None:
                    if known:
                        yield known
                    continue
                if index not in readers:
                    readers[index] = self.turn.reader()
                    chunks = event(self.first(head, job, index, every_usage))
                for choice in self.pieces(index, delta, readers[index]):
                    chunk = head | {"choices": [choice]}
                    if every_usage:
                        made, thoughts = sum(job.counts), job.reasoning_tokens
                        chunk["usage"] = render.usage(job.prompt_tokens, made, reasoning_tokens=thoughts)
                    if delta.output is not None and not last_usage and choice["finish_reason"] is not None:
                        chunk |= self.extras(delta.output)
                    chunks += event(chunk)
                if chunks:
                    yield chunks
                if plain is not None and len(readers) == job.choices and wire is not None:
                    shorten(job.streams[0], wire, plain)
                    wire = None
            end = b""
            if last_usage:
                [output] = job.finished()
                usage = render.usage_of([output], job.reasoning_tokens)
                end = event(head | {"choices": [], "usage": usage} | self.extras(output))
            yield end + DONE

    def first(self, head: dict[str, Any], job: Job, index: int, usage: bool) -> dict[str, Any]:
        """The chunk that comes with the first token, whether it has text yet or not."""
        chunk = head | {"choices": [_choice(index, {"role": "assistant", "content": ""})]}
        if self.request.return_token_ids:
            chunk["prompt_token_ids"] = job.streams[0].prompt_token_ids
        if usage:
            thoughts = None if self.turn.style is None else 0
            chunk["usage"] = render.usage(job.prompt_tokens, 0, reasoning_tokens=thoughts)
        return chunk

    def pieces(self, index: int, delta: StreamDelta, reader: Reader) -> list[dict[str, Any]]:
        """The choices of a step's chunks: one for each kind of thing it added, so that clients that look for one find
        it. Log-probabilities, ids and the end come with the last."""
        parts: list[dict[str, Any]] = [_delta(part, bool(self.request.functions)) for part in reader.read(delta)]
        tokens_shown = self.top is not None or self.request.return_token_ids
        if not parts and (delta.finish_reason is not None or (tokens_shown and delta.token_ids)):
            parts = [{}]
        out = [_choice(index, part) for part in parts]
        if not out:
            return out
        last = out[-1]
        if self.top is not None and delta.logprobs:
            last["logprobs"] = self.logprobs(delta.logprobs)
        if self.request.return_token_ids:
            last["token_ids"] = delta.token_ids
        if delta.finish_reason is not None:
            last["finish_reason"] = self.finish_reason(reader, delta.finish_reason)
            last["stop_reason"] = delta.stop_reason
        return out


def _choice(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _reasoning(text: str | None) -> dict[str, Any]:
    """Under the name that vLLM has for it now, and under the one that DeepSeek introduced."""
    return {"reasoning": text, "reasoning_content": text}


def _delta(part: ChatDelta, old: bool) -> dict[str, Any]:
    """old: calls in OpenAI's old form."""
    if part.reasoning:
        return _reasoning(part.reasoning)
    if part.content:
        return {"content": part.content}
    if old:
        return functions.delta(part.tool_calls[0])
    return {"tool_calls": [_call(piece) for piece in part.tool_calls]}


def _call(piece: ToolCallDelta) -> dict[str, Any]:
    found: dict[str, Any] = {"index": piece.index, "function": {"arguments": piece.arguments}}
    if piece.name is not None:
        found |= {"id": piece.id, "type": "function"}
        found["function"] = {"name": piece.name, "arguments": piece.arguments}
    return found
