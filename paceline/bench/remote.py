"""Any OpenAI-compatible server as something to measure: vLLM, llama.cpp, SGLang, or `paceline serve`.

Streams chat completions. Times come from token events: a chunk that carries text (of the answer or of its reasoning)
or token ids. Tokens are counted from the ids where the server returns them (`return_token_ids`), else from `usage`.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import httpx

from paceline.bench import counters
from paceline.bench.backend import Completion, Conversation, DraftLength, Run, in_order
from paceline.errors import PacelineError
from paceline.sampling_params import SamplingParams
from paceline.values import shown

EXTENSIONS = ("return_token_ids", "cache_salt")  # fields beyond OpenAI's that are left out where a server refuses them
ALREADY_CACHED = (
    "the server had {n:,} prompt tokens of first turns in its cache already: time to first token is too good"
)


class ServerError(PacelineError):
    """A server cannot be reached, is not OpenAI-compatible, or refused a request."""


@dataclass(slots=True)
class _Answer:
    """What the chunks of one stream add up to."""

    sent: float
    first: float = 0.0
    last: float = 0.0
    text: str = ""
    ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)

    def take(self, chunk: dict[str, Any], now: float) -> None:
        """Add one chunk that arrived at `now`."""
        self.usage = chunk.get("usage") or self.usage
        for name in counters.PLACES:
            self.figures |= {name: chunk[name]} if chunk.get(name) else {}
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            text = delta.get("content") or ""
            thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
            ids = choice.get("token_ids") or []
            if text or thought or ids:
                self.first = self.first or now
                self.last = now
            self.text += text
            self.ids += ids
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            self.figures |= {"meta_info": choice["meta_info"]} if choice.get("meta_info") else {}


class RemoteBackend:
    """A server at a URL; clients are concurrent streams. Closing it closes the connections."""

    local = False

    def __init__(
        self,
        base_url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        extra_body: dict[str, Any] | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        """base_url: with or without /v1. model: None = the first that the server lists. Raises ServerError."""
        if not base_url.startswith(("http://", "https://")):
            raise ServerError(
                f"{base_url!r} is no address of a server; write it as http://{base_url.rpartition('//')[2]}"
            )
        self.url = base_url.rstrip("/").removesuffix("/v1")
        self.extra_body = dict(extra_body or {})
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._runner = asyncio.Runner()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(headers=headers, timeout=timeout_s, limits=limits)
        self._left_out: set[str] = set()
        self._salt = 0
        self._has_metrics = True
        self._can_reset = True
        listed = self._runner.run(self._models())
        if model is not None and listed and model not in listed:
            raise ServerError(f"--model {model}: {self.url} serves {', '.join(listed)}")
        if model is None and not listed:
            raise ServerError(f"{self.url} lists no models; name one with --model")
        self.model = model or listed[0]

    def close(self) -> None:
        """Close the connections."""
        self._runner.run(self._http.aclose())
        self._runner.close()

    def run(
        self,
        conversations: Sequence[Conversation],
        length: DraftLength,
        params: SamplingParams,
        concurrency: int,
        on_done: Callable[[Completion], None] = lambda _completion: None,
    ) -> Run:
        """See `Backend.run`. A draft length is sent as `num_speculative_tokens`, which Paceline's server reads; None
        and "auto" leave the choice to the server. A request that the server refuses is a failed completion."""
        return self._runner.run(self._run(conversations, length, params, concurrency, on_done))

    async def _run(
        self,
        conversations: Sequence[Conversation],
        length: DraftLength,
        params: SamplingParams,
        concurrency: int,
        on_done: Callable[[Completion], None],
    ) -> Run:
        self._salt += 1
        await self._reset()
        before = await self._scrape()
        waiting = deque(conversations)
        done: list[Completion] = []

        async def client() -> None:
            while waiting:
                conversation = waiting.popleft()
                going = True
                while going:
                    completion = await self._request(conversation, length, params)
                    done.append(completion)
                    on_done(completion)
                    if completion.error is not None:
                        done.extend(_failed_turns(conversation, completion, on_done))
                    going = completion.error is None and conversation.advance(completion.text)

        begin = perf_counter()
        async with asyncio.TaskGroup() as clients:
            for _ in range(concurrency):
                clients.create_task(client())
        wall = perf_counter() - begin
        stats = counters.from_metrics(before, await self._scrape())
        if stats is not None:
            stats.num_delivered_tokens = sum(c.tokens for c in done)
        per_request = all(c.stats is not None for c in done if c.error is None)
        run = Run(in_order(done), wall, stats=None if per_request else stats)
        known = sum(c.cached_tokens for c in done if c.turn == 0)
        if known > 0.02 * sum(c.prompt_tokens for c in done if c.turn == 0):
            run.notes.append(ALREADY_CACHED.format(n=known))
        return run

    # ---- one request

    async def _request(self, conversation: Conversation, length: DraftLength, params: SamplingParams) -> Completion:
        body = self._body(conversation, length, params)
        answer = _Answer(perf_counter())
        try:
            async for chunk in self._chunks(body):
                answer.take(chunk, perf_counter())
            if not answer.first:
                raise ServerError("the stream ended without a token")
            if not answer.ids and not answer.usage:
                raise ServerError("the server told neither token ids nor usage, so tokens cannot be counted")
        except (ServerError, httpx.HTTPError) as error:
            return _completion(conversation, length, answer, f"{error}" or type(error).__name__)
        return _completion(conversation, length, answer)

    def _body(self, conversation: Conversation, length: DraftLength, params: SamplingParams) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": conversation.messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "return_token_ids": True,
            "cache_salt": f"bench {self._salt}.{conversation.copy}",
        }
        optional = {
            "top_p": params.top_p if params.top_p != 1.0 else None,
            "top_k": params.top_k if params.top_k > 0 else None,
            "seed": params.seed,
            "ignore_eos": params.ignore_eos or None,
            "min_tokens": params.min_tokens or None,
            "num_speculative_tokens": length if isinstance(length, int) else None,
        }
        body |= {key: value for key, value in optional.items() if value is not None}
        return {key: value for key, value in body.items() if key not in self._left_out} | self.extra_body

    async def _chunks(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        async with self._http.stream("POST", f"{self.url}/v1/chat/completions", json=body) as response:
            if response.status_code == 200:
                async for chunk in _events(response):
                    yield chunk
                return
            text = (await response.aread()).decode(errors="replace")
        refused = {name for name in EXTENSIONS if name in body and name in text}
        if response.status_code not in (400, 422) or not refused:
            raise ServerError(f"HTTP {response.status_code}: {shown(text)}")
        self._left_out |= refused
        async for chunk in self._chunks({key: value for key, value in body.items() if key not in refused}):
            yield chunk

    # ---- around the requests

    async def _models(self) -> list[str]:
        try:
            response = await self._http.get(f"{self.url}/v1/models", timeout=30.0)
            response.raise_for_status()
            return [entry["id"] for entry in response.json()["data"]]
        except httpx.HTTPStatusError as error:
            raise ServerError(
                f"{self.url}/v1/models: HTTP {error.response.status_code}; is this the right URL?"
            ) from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServerError(f"{self.url} cannot be reached ({error}); is the server running?") from None
        except (ValueError, KeyError, TypeError):
            raise ServerError(f"{self.url}/v1/models: this is no OpenAI-compatible answer") from None

    async def _reset(self) -> None:
        """Empty the prefix cache where the server lets clients do that; the salt keeps runs apart elsewhere."""
        if self._can_reset:
            try:
                response = await self._http.post(f"{self.url}/reset_prefix_cache", timeout=30.0)
                self._can_reset = response.status_code == 200
            except httpx.HTTPError:
                self._can_reset = False

    async def _scrape(self) -> dict[str, float]:
        if not self._has_metrics:
            return {}
        try:
            response = await self._http.get(f"{self.url}/metrics", timeout=30.0)
            self._has_metrics = response.status_code == 200
            return counters.parse(response.text) if self._has_metrics else {}
        except httpx.HTTPError:
            self._has_metrics = False
            return {}


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a server-sent event stream. Raises ServerError for an error event or what is no JSON."""
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        try:
            chunk = json.loads(data)
        except ValueError:
            raise ServerError(f"a chunk of the stream is not JSON: {shown(data)}") from None
        if not isinstance(chunk, dict) or chunk.get("error"):
            raise ServerError(f"the stream reports {shown(chunk['error'] if isinstance(chunk, dict) else chunk)}")
        yield chunk


def _completion(
    conversation: Conversation, length: DraftLength, answer: _Answer, error: str | None = None
) -> Completion:
    usage = answer.usage
    tokens = int(usage.get("completion_tokens") or len(answer.ids))
    failed = error is not None
    return Completion(
        prompt=conversation.prompt,
        num_speculative_tokens=length,
        token_ids=[] if failed else answer.ids,
        logprobs=None,
        finish_reason=None if failed else answer.finish_reason,
        ttft_s=0.0 if failed else answer.first - answer.sent,
        decode_s=0.0 if failed else answer.last - answer.first,
        wall_s=0.0 if failed else answer.last - answer.sent,
        stats=None if failed else counters.from_response(answer.figures, tokens),
        error=error,
        turn=conversation.turn,
        copy=conversation.copy,
        text="" if failed else answer.text,
        prompt_tokens=int(usage.get("prompt_tokens") or 0),
        cached_tokens=int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0),
        num_tokens=None if answer.ids or failed else tokens,
    )


def _failed_turns(
    conversation: Conversation, failed: Completion, on_done: Callable[[Completion], None]
) -> list[Completion]:
    """Later turns of a conversation fail with an earlier one, so that no arm has fewer requests than another."""
    turns = range(conversation.turn + 1, len(conversation.prompt.later_turns) + 1)
    rest = [replace(failed, turn=turn) for turn in turns]
    for completion in rest:
        on_done(completion)
    return rest
