"""What every endpoint needs: the engine, the settings, and one way to run a request and account for it."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from paceline.async_llm import AsyncLLM, RequestStream
from paceline.errors import CapacityError
from paceline.outputs import RequestOutput, StreamDelta
from paceline.parsing.reasoning import ReasoningCounter
from paceline.sampling_params import SamplingParams
from paceline.server.errors import ApiError, bad, with_limit
from paceline.server.features import ModelFeatures
from paceline.server.messages import refuse_unknown_model
from paceline.server.metrics import Metrics
from paceline.server.render import TokenTexts
from paceline.server.settings import ServerSettings
from paceline.server.wanted import renamed
from paceline.speculation.config import MAX_SPECULATIVE_TOKENS
from paceline.structured.params import StructuredOutputsError

log = logging.getLogger(__name__)


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


@dataclass(slots=True)
class Job:
    """A request of a client: one stream per prompt. Outputs fill in as they end."""

    id: str
    created: int
    begin: float
    streams: list[RequestStream]
    choices: int
    outputs: list[RequestOutput | None] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)  # tokens so far, per choice
    counters: list[ReasoningCounter] = field(default_factory=list)  # of reasoning, per choice, where there is such
    last_only: bool = False

    def finished(self) -> list[RequestOutput]:
        return [output for output in self.outputs if output is not None]

    @property
    def reasoning_tokens(self) -> int | None:
        """So far, of all choices; None for a model without reasoning."""
        return sum(counter.count for counter in self.counters) if self.counters else None

    @property
    def prompt_tokens(self) -> int:
        return sum(len(s.prompt_token_ids) for s in self.streams)


class Service:
    """Runs requests on the engine. One per server."""

    def __init__(self, engine: AsyncLLM, settings: ServerSettings) -> None:
        self.engine = engine
        self.settings = settings
        self.started = int(time.time())
        self.texts = TokenTexts(engine.llm.tokenizer)
        self.metrics = Metrics(engine, settings.model_names[0])
        self.info = engine.llm.info()
        self.features = ModelFeatures(
            engine.llm.tokenizer, self.info["architecture"], settings.tool_call_parser, settings.reasoning_parser
        )

    @property
    def model_name(self) -> str:
        return self.settings.model_names[0]

    def check_model(self, model: str | None) -> None:
        refuse_unknown_model(model, self.settings.model_names)

    def drafts(self, wanted: int | None) -> int | None:
        """Drafts per step of a request: its own wish, within what the drafter was made for. Raises ApiError."""
        if wanted is None:
            return self.settings.num_speculative_tokens
        most = MAX_SPECULATIVE_TOKENS if self.settings.allow_longer_drafts else self.info["num_speculative_tokens"]
        if self.info["speculation"] is not None and not 0 <= wanted <= most:
            raise bad("num_speculative_tokens", wanted, f"use 0 (plain decoding) to {most}")
        if wanted < 0:
            raise bad("num_speculative_tokens", wanted, "use 0 (plain decoding) or more")
        return wanted

    def check_choices(self, prompts: int, n: int) -> None:
        """Whether so many can run or wait at all. Raises ApiError."""
        if prompts * n > self.engine.capacity:
            raise ApiError(
                400,
                f"prompt: {prompts} prompts with n={n} are more than the {self.engine.capacity} choices "
                "that can run or wait here; send fewer at a time",
                param="n" if prompts == 1 else "prompt",
            )

    @asynccontextmanager
    async def run(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        *,
        job_id: str,
        num_speculative_tokens: int | None,
        cache_salt: str | None,
        last_only: bool,
        prompt_only: bool = False,
        limit_field: str = "max_tokens",
        grammar_field: str = "structured_outputs",
        schemas: Sequence[str] = (),
        counter: Callable[[], ReasoningCounter | None] = lambda: None,
    ) -> AsyncGenerator[Job, None]:
        """Start one request per prompt, all or none; leaving the block ends what still runs.

        prompt_only: nothing is added to the prompts. limit_field: how the client calls max_tokens. grammar_field: what
        asked for the grammar in params, and schemas those of its tools. counter: a new one for each choice.
        Raises what `AsyncLLM.submit` raises, and ApiError for a grammar that does not compile.
        """
        self.check_choices(len(prompts), params.n)
        begin = time.perf_counter()
        drafts = self.drafts(num_speculative_tokens)
        async with AsyncExitStack() as stack:
            streams = []
            for i, prompt in enumerate(prompts):
                name = job_id if len(prompts) == 1 else f"{job_id}-{i}"
                salted: Any = prompt if cache_salt is None else {"prompt_token_ids": prompt, "cache_salt": cache_salt}
                try:
                    stream = await self.engine.submit(
                        salted,
                        params,
                        name,
                        num_speculative_tokens=drafts,
                        last_only=last_only,
                        prompt_only=prompt_only,
                    )
                except CapacityError as error:
                    raise CapacityError(with_limit(str(error), limit_field)) from None
                except StructuredOutputsError as error:
                    raise renamed(error, grammar_field, params.structured_outputs, schemas) from None
                streams.append(await stack.enter_async_context(stream))
            self._limit(streams, begin, stack)
            job = Job(job_id, int(time.time()), begin, streams, params.n, last_only=last_only)
            job.outputs, job.counts = [None] * len(prompts), [0] * (len(prompts) * params.n)
            job.counters = [made for _ in job.counts if (made := counter()) is not None]
            yield job

    async def deltas(self, job: Job) -> AsyncGenerator[tuple[int, StreamDelta], None]:
        """(choice among all prompts' choices, what was added), in the order in which it is made."""
        if len(job.streams) == 1:
            async for delta in job.streams[0]:
                yield self._account(job, 0, delta)
            return
        waiting = {asyncio.ensure_future(anext(s, None)): i for i, s in enumerate(job.streams)}
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=waiting.__getitem__):
                    i = waiting.pop(task)
                    if (piece := task.result()) is not None:
                        yield self._account(job, i, piece)
                        waiting[asyncio.ensure_future(anext(job.streams[i], None))] = i
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def finish(self, job: Job) -> list[RequestOutput]:
        """The outputs of all prompts, once they are there."""
        async for _ in self.deltas(job):
            pass
        return job.finished()

    def _limit(self, streams: Sequence[RequestStream], begin: float, stack: AsyncExitStack) -> None:
        """End streams when their time is over, unless the stack is left before. Not by cancelling who reads them: that
        may just be waiting for a client, who would never hear why."""
        limit = self.settings.request_timeout
        if limit is None:
            return

        def expire() -> None:
            for stream in streams:
                stream.expire()

        left = max(0.0, limit - (time.perf_counter() - begin))
        stack.callback(asyncio.get_running_loop().call_later(left, expire).cancel)

    def _account(self, job: Job, prompt: int, delta: StreamDelta) -> tuple[int, StreamDelta]:
        choice = prompt * job.choices + delta.index
        job.counts[choice] += len(delta.token_ids)
        if job.counters and not job.last_only:
            job.counters[choice].feed(delta.token_ids)
        if delta.output is not None:
            job.outputs[prompt] = delta.output
            if job.counters and job.last_only:
                for done in delta.output.outputs:
                    job.counters[prompt * job.choices + done.index].feed(done.token_ids)
            seconds = time.perf_counter() - job.begin
            self.metrics.observe(delta.output, seconds)
            _log_request(job, delta.output, seconds)
        return choice, delta


def _log_request(job: Job, output: RequestOutput, seconds: float) -> None:
    """One line per request: acceptance is where a wrong pairing or template shows."""
    if not log.isEnabledFor(logging.INFO):
        return
    stats = output.metrics.spec_decode
    drafts = "no drafts"
    if stats.num_draft_tokens:
        drafts = (
            f"draft acceptance rate = {stats.acceptance_rate:.5f} ({stats.num_accepted_tokens} accepted / "
            f"{stats.num_draft_tokens} generated), accept len: {stats.acceptance_length:.2f}"
        )
    if (thoughts := job.reasoning_tokens) is not None:
        drafts = f"{thoughts} of reasoning, {drafts}"
    reasons = ",".join(str(c.finish_reason) for c in output.outputs)
    made = sum(len(c.token_ids) for c in output.outputs)
    log.info(
        "Request %s: %d + %d tokens (%s), %.3f s, first token %.3f s, %s",
        job.id,
        len(output.prompt_token_ids),
        made,
        reasons,
        seconds,
        output.metrics.time_to_first_token_s,
        drafts,
    )
