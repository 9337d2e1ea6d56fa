"""`AsyncLLM`: an `LLM` for servers and asyncio programs. One thread runs the engine; any number of coroutines read."""

from __future__ import annotations

import asyncio
import os
import threading
import uuid
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from paceline.chat_options import ChatArguments, ChatOptions
from paceline.engine_args import EngineArgs
from paceline.engine_thread import ACCEPTED, FEW, EngineStats, EngineThread, Event, Shortcut, Ticket
from paceline.errors import CapacityError, ConfigError, EngineDeadError, QueueFullError
from paceline.llm import LLM, Prompt
from paceline.llm import _Request as Request
from paceline.other_members import ASYNC_MEMBERS, absent
from paceline.outputs import RequestOutput, StreamDelta
from paceline.prompts import one_params
from paceline.sampling_params import RequestOutputKind, SamplingParams
from paceline.structured.compiler import MAX_COMPILING
from paceline.tokenizer import Tokenizer
from paceline.values import shown

__all__ = ["AsyncLLM", "AsyncLLMEngine", "EngineStats", "RequestStream"]

T = TypeVar("T")

DEFAULT_MAX_WAITING = 256
GRAMMAR_PATIENCE = 30.0  # seconds that a request waits for a new grammar: others' turns and its own
MERGE_FROM = 32  # pieces that a slow reader has not taken; from here on they are joined


class RequestStream:
    """A running request: an asynchronous iterator over what its steps add.

    Only its own event loop may use it. A reader that falls behind gets larger pieces, never fewer tokens, and holds up
    nobody. `aclose` (or the end of `async with`) aborts what has not finished and returns once nothing is held.
    """

    def __init__(
        self, owner: AsyncLLM, request_id: str, request: Request, last_only: bool, prompt_only: bool = False
    ) -> None:
        self.request_id = request.request_id = request_id
        self.prompt_token_ids = request.ids
        self.seeds = [choice.state.seed for choice in request.choices]
        self.size = len(request.choices)
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._accepted: asyncio.Future[None] = self._loop.create_future()
        self._pieces: deque[StreamDelta] = deque()
        self._newest: dict[int, StreamDelta] = {}  # of these, the last of each choice
        self._error: BaseException | None = None
        self._ended = False  # the engine will send nothing more
        self._waiter: asyncio.Future[None] | None = None
        self._shortcut: Shortcut | None = None
        self._ticket = Ticket(request, self._loop, self._take, lambda: owner._forget(self), last_only, prompt_only)

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> StreamDelta:
        if self._waiter is not None:
            raise RuntimeError("somebody waits for this stream's next piece already; a stream has one reader")
        while not self._pieces:
            if self._error is not None:
                raise self._error
            if self._ended:
                raise StopAsyncIteration
            self._waiter = self._loop.create_future()
            if self._shortcut is not None and self._owner._places <= FEW:
                self._loop.call_soon(self._offer)  # when this turn of the loop has sent what it has
            try:
                await self._waiter
            finally:
                self._waiter = None
        piece = self._pieces.popleft()
        if self._newest.get(piece.index) is piece:
            del self._newest[piece.index]
        return piece

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def shorten(self, shortcut: Shortcut) -> None:
        """From now on, while few choices run and this stream waits to be read, the engine's thread puts what it makes
        into `shortcut`; what that does not take, and the last delta, come here. It is closed with the stream."""
        self._shortcut = shortcut

    async def aclose(self) -> None:
        """Abort what has not finished, drop what was not read, and wait until blocks and places are free."""
        if self._shortcut is not None:
            shortcut, self._shortcut = self._shortcut, None
            self._ticket.retract()
            shortcut.close()
        await self._stop()
        self._pieces.clear()
        self._newest.clear()

    def expire(self) -> None:
        """End a request that has taken too long. It holds nothing any longer, however slowly its reader comes to what
        was made before, which it still gets, and then a TimeoutError."""
        if self._ended or self._error is not None:
            return
        self._error = TimeoutError()
        if self._waiter is not None:
            _resolve(self._waiter)
        with suppress(EngineDeadError):  # its end frees everything
            self._owner._thread.abort(self._ticket)

    async def _stop(self) -> None:
        if self._ended:
            return
        freed = self._loop.create_future()
        try:
            self._owner._thread.abort(self._ticket, lambda _: _resolve(freed))
        except EngineDeadError:
            return  # the end of the engine freed it, and says so
        await freed

    def _take(self, event: Event) -> None:
        """An event from the engine's thread, on this stream's loop."""
        self._ticket.seen()
        if event is ACCEPTED:
            _resolve(self._accepted)
            return
        if isinstance(event, StreamDelta):
            if self._error is None:
                self._keep(event)
            self._ended = event.output is not None
        else:
            self._error, self._ended = event, True
            if not self._accepted.done():
                self._accepted.set_exception(event)
                self._accepted.exception()  # seen: the caller may have gone
        if self._ended:
            self._owner._forget(self)
        if self._waiter is not None:
            _resolve(self._waiter)

    def _offer(self) -> None:
        over = self._ended or self._error is not None
        if self._shortcut is not None and self._waiter is not None and not (self._pieces or over):
            self._ticket.offer(self._shortcut)

    def _keep(self, delta: StreamDelta) -> None:
        """Where so many pieces wait, what comes is added to the last one of its choice."""
        before = self._newest.get(delta.index)
        late = before is not None and len(self._pieces) >= MERGE_FROM
        # the output stays at the end, behind the pieces of other choices
        if before is not None and late and (delta.output is None or before is self._pieces[-1]):
            _add(before, delta)
            return
        self._newest[delta.index] = delta
        self._pieces.append(delta)


class AsyncLLM:
    """Generation for event loops: requests of all loops and threads share the passes of one engine thread.

    llm: belongs to this object from now on. max_waiting: choices that may wait besides the `max_num_seqs` that run;
    beyond them requests get a QueueFullError at once. Close it with `await close()`.

    Errors of a request (ConfigError, CapacityError, QueueFullError) are raised before its first piece. When a step
    fails, every request in flight and every later one gets an EngineDeadError, and `error` says why.
    """

    def __init__(self, llm: LLM, *, max_waiting: int = DEFAULT_MAX_WAITING) -> None:
        if isinstance(llm, str | os.PathLike):
            raise ConfigError(f"llm: {os.fspath(llm)!r} is not open yet; pass LLM({os.fspath(llm)!r})")
        if isinstance(max_waiting, bool) or not isinstance(max_waiting, int) or max_waiting < 0:
            raise ConfigError(f"max_waiting: {max_waiting!r} must be a whole number of 0 or more")
        self.llm = llm
        self._owns = False  # the model ends with this object
        self.capacity = llm.engine.max_num_seqs + max_waiting
        self._thread = EngineThread(llm)
        # Encoding, templates and the checks of a request: beside the steps, and beside the event loop.
        self._workers = ThreadPoolExecutor(2, thread_name_prefix="paceline-prepare")
        # Compiling a grammar may take seconds: it holds up neither these nor other grammars' users for long.
        self._grammars = ThreadPoolExecutor(MAX_COMPILING, thread_name_prefix="paceline-grammars")
        self._lock = threading.Lock()  # loops of several threads may share this object
        # while it is prepared, what will be its stream, or None where there will be none
        self._live: dict[str, RequestStream | Future[RequestStream | None]] = {}
        self._unwanted: set[str] = set()  # aborted while they were prepared
        self._places = 0
        self._draining = False
        self._idle: list[asyncio.Future[None]] = []
        self._finalizer = weakref.finalize(self, EngineThread.stop, self._thread)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, *, max_waiting: int = DEFAULT_MAX_WAITING) -> AsyncLLM:
        """Open the model that `EngineArgs(model=..., ...)` names, and make an engine of it, whose end
        closes the model too. Raises what `LLM` does."""
        if not isinstance(engine_args, EngineArgs):
            what = type(engine_args).__name__
            raise ConfigError(f"engine_args: {what} given; use AsyncEngineArgs(model=..., ...)")
        llm = engine_args.open()
        try:
            engine = cls(llm, max_waiting=max_waiting)
        except BaseException:
            llm.close()
            raise
        engine._owns = True
        return engine

    # ---- requests

    async def submit(
        self,
        prompt: Prompt | Mapping[str, Any],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        num_speculative_tokens: int | None = None,
        last_only: bool = False,
        prompt_only: bool = False,
        **chat: Unpack[ChatArguments],
    ) -> RequestStream:
        """Start a request (text, token ids, vLLM's mapping of either, or messages) and return its stream once the
        engine has taken it in. Cancelling this call leaves nothing behind.

        request_id: text that no other request in flight has; None makes one.
        last_only: the stream has one delta, the last, with the output, as with RequestOutputKind.FINAL_ONLY.
        prompt_only: with max_tokens=1, for what is to be known of the prompt alone (prompt_logprobs): the token behind
        it is neither delivered nor counted. chat: for messages, as for `LLM.chat`.
        Raises ConfigError, CapacityError, ChatTemplateError, QueueFullError, EngineDeadError.
        """
        params, options = one_params(sampling_params), ChatOptions.read(self.submit, chat)
        name = f"request-{uuid.uuid4().hex}" if request_id is None else request_id
        if not isinstance(name, str):
            raise ConfigError(f"request_id={shown(name)}: use a string, or None for a new one")
        if last_only:
            params = params.clone(output_kind=RequestOutputKind.FINAL_ONLY)
        coming = self._reserve(name, params.n)
        loop, stream = asyncio.get_running_loop(), None
        try:
            arguments = (prompt, params, num_speculative_tokens, options, chat)
            if await self._must_compile(params):
                request = await self._compiled(*arguments)
            else:
                request = await loop.run_in_executor(self._workers, self._prepare, *arguments)
            final_only = params.output_kind is RequestOutputKind.FINAL_ONLY
            stream = RequestStream(self, name, request, final_only, prompt_only)
            with self._lock:
                self._live[name] = stream
            self._thread.add(stream._ticket)
            if name in self._unwanted:  # now: whoever aborted it comes to it only when it may have ended
                self._thread.abort(stream._ticket)
        except BaseException:
            self._release(name, params.n)
            coming.set_result(None)
            raise
        coming.set_result(stream)
        try:
            await stream._accepted
        except BaseException:
            await stream._stop()
            raise
        return stream

    async def generate(
        self,
        prompt: Prompt | Mapping[str, Any],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        num_speculative_tokens: int | None = None,
        **chat: Unpack[ChatArguments],
    ) -> AsyncGenerator[StreamDelta, None]:
        """Yield what each step adds to a request; the last delta carries the output. Leaving the loop early, closing
        or cancelling it aborts the request. Arguments and errors as for `submit`.

        `delta.text` and `token_ids` are what was added, `delta.outputs[0].text` and `.token_ids` all so far, as vLLM
        has them; `output_kind` of the parameters makes `outputs` the additions too, or waits for the end.
        """
        stream = await self.submit(
            prompt,
            sampling_params,
            request_id=request_id,
            num_speculative_tokens=num_speculative_tokens,
            **chat,
        )
        async with stream:
            async for delta in stream:
                yield delta

    async def complete(
        self,
        prompt: Prompt | Mapping[str, Any],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        num_speculative_tokens: int | None = None,
        **chat: Unpack[ChatArguments],
    ) -> RequestOutput:
        """The whole output of a request. Cancelling it aborts the request. Arguments and errors as for `submit`."""
        stream = await self.submit(
            prompt,
            sampling_params,
            request_id=request_id,
            num_speculative_tokens=num_speculative_tokens,
            last_only=True,
            **chat,
        )
        async with stream:
            async for delta in stream:
                if delta.output is not None:
                    return delta.output
        raise AssertionError("a stream ends with its output or an error")

    async def abort(self, request_id: str | Iterable[str]) -> bool:
        """End a request or several, whose readers get the finish reason "abort"; True when one of them was running or
        being prepared. Everything they held is free when this returns. Only from the loop that the requests run on."""
        if isinstance(request_id, str):
            return await self._abort(request_id)
        return any(await asyncio.gather(*map(self._abort, request_id)))

    async def _abort(self, name: str) -> bool:
        stream = self._live.get(name)
        if isinstance(stream, Future):
            self._unwanted.add(name)
            stream = await asyncio.shield(asyncio.wrap_future(stream))
            if stream is not None:
                await stream._stop()
            return stream is not None
        if stream is None or stream._ended:
            return False
        await stream._stop()
        return True

    # ---- text, beside the event loop

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        return await self.work(lambda: self.llm.tokenizer.encode(text, add_special_tokens=add_special_tokens))

    async def encode_chat(self, messages: list[dict[str, Any]], **chat: Unpack[ChatArguments]) -> list[int]:
        """Token ids of a conversation under the chat template; chat: as for `LLM.chat`. Raises ConfigError,
        ChatTemplateError."""
        options = ChatOptions.read(self.encode_chat, chat)
        return await self.work(lambda: options.encode(messages, self.llm.tokenizer))

    async def render_chat(self, messages: list[dict[str, Any]], **chat: Unpack[ChatArguments]) -> str:
        """The text of a conversation under the chat template; chat: as for `LLM.chat`. Raises ConfigError,
        ChatTemplateError."""
        options = ChatOptions.read(self.render_chat, chat)
        return await self.work(lambda: options.render(messages, self.llm.tokenizer))

    async def decode(self, ids: list[int]) -> str:
        """Text of token ids, special tokens included."""
        return await self.work(lambda: self.llm.tokenizer.decode(ids, skip_special_tokens=False))

    async def warm_grammars(self) -> None:
        """Build what grammars need of the vocabulary, some tenths of a second that the first one would take longer."""
        await asyncio.get_running_loop().run_in_executor(self._grammars, lambda: self.llm.grammars.vocabulary)

    async def work(self, call: Callable[[], T]) -> T:
        """What a short function returns, which a thread beside the event loop and the engine calls."""
        return await asyncio.get_running_loop().run_in_executor(self._workers, call)

    # ---- the whole

    @property
    def error(self) -> BaseException | None:
        """What killed the engine, or None."""
        return self._thread.error

    @property
    def alive(self) -> bool:
        """Whether new requests have a chance: neither dead, closed nor draining."""
        return not (self._thread.closed or self._draining)

    @property
    def in_flight(self) -> int:
        """Requests that have not ended, those that are still being prepared included."""
        return len(self._live)

    @property
    def is_running(self) -> bool:
        """`alive`, as vLLM calls it."""
        return self.alive

    @property
    def errored(self) -> bool:
        """Whether a step failed, so that no request is served any more."""
        return self.error is not None

    @property
    def dead_error(self) -> EngineDeadError:
        """What requests get from now on where `errored`, or after `close`."""
        return self._thread._dead()

    async def check_health(self) -> None:
        """Raises EngineDeadError where a step failed or the engine was closed."""
        if self._thread.closed:
            raise self._thread._dead()

    async def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.llm.get_tokenizer()

    def stats(self) -> EngineStats:
        """Counters and gauges as they were after the last step; not to be changed."""
        return self._thread.stats

    async def reset_prefix_cache(self) -> None:
        """Forget the cache of earlier requests, between two steps."""
        await self.work(self.llm.reset_prefix_cache)

    async def drain(self) -> None:
        """Take no more requests, and wait until those in flight have ended."""
        self._draining = True
        with self._lock:
            if not self._live:
                return
            idle: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._idle.append(idle)
        await idle

    async def close(self) -> None:
        """Abort what is in flight and end the thread. A model that was opened before (`AsyncLLM(LLM(...))`) stays open:
        `LLM.close` frees it."""
        self._draining = True
        await asyncio.get_running_loop().run_in_executor(None, self._thread.stop)
        self.shutdown()

    def shutdown(self) -> None:
        """The same, without a loop; one that runs stands still until the step in progress is over."""
        self._draining = True
        self._thread.stop()
        for pool in (self._workers, self._grammars):
            pool.shutdown(wait=False, cancel_futures=True)
        self._finalizer.detach()
        if self._owns:
            self.llm.close()

    if not TYPE_CHECKING:  # else every name would be right

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(absent("AsyncLLM", name, ASYNC_MEMBERS), name=name, obj=self)

    # ---- bookkeeping

    async def _must_compile(self, params: SamplingParams) -> bool:
        """A grammar that is new waits for its turn to be compiled, one that is known for nobody."""
        asked, grammars = params.structured_outputs, self.llm.grammars
        return asked is not None and not await self.work(lambda: grammars.knows(asked))  # type: ignore[arg-type]

    async def _compiled(self, *arguments: Any) -> Request:
        turn = self._grammars.submit(self._prepare, *arguments)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(turn), GRAMMAR_PATIENCE)
        except TimeoutError:
            raise QueueFullError(
                "structured_outputs: other grammars are still being compiled; try again later"
            ) from None

    def _prepare(
        self,
        prompt: Any,
        params: SamplingParams,
        num_speculative_tokens: int | None,
        options: ChatOptions,
        given: Mapping[str, Any],
    ) -> Request:
        drafts = self.llm._draft_length(True, num_speculative_tokens)
        return self.llm._prepare(self.llm._ids_of_chat(prompt, options, given), params, drafts)

    def _reserve(self, name: str, choices: int) -> Future[RequestStream | None]:
        """What becomes of the name, for who wants to know."""
        if self._thread.closed:
            raise self._thread._dead()
        if self._draining:
            raise EngineDeadError("the engine takes no more requests: it is shutting down")
        if choices > self.capacity:
            raise CapacityError(f"n={choices}: at most {self.capacity} choices can run or wait here; ask for fewer")
        with self._lock:
            if name in self._live:
                raise ConfigError(f"request_id: {name!r} is in use; give each request its own")
            if self._places + choices > self.capacity:
                raise QueueFullError(
                    f"{self._places} of {self.capacity} places for running and waiting choices are taken; "
                    "try again later"
                )
            coming: Future[RequestStream | None] = Future()
            self._live[name] = coming
            self._places += choices
        return coming

    def _forget(self, stream: RequestStream) -> None:
        self._release(stream.request_id, stream.size)

    def _release(self, name: str, choices: int) -> None:
        with self._lock:
            self._places -= choices  # first: whoever sees that nothing is in flight may count on the places
            del self._live[name]
            self._unwanted.discard(name)
            idle = []
            if not self._live:
                idle, self._idle = self._idle, []
        for future in idle:
            with suppress(RuntimeError):  # that loop is closed: nobody waits there any more
                future.get_loop().call_soon_threadsafe(_resolve, future)


AsyncLLMEngine = AsyncLLM  # vLLM's older name


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _add(a: StreamDelta, b: StreamDelta) -> None:
    """Make of a piece that nobody has seen the two pieces of its choice. Lists may belong to others: they are not
    changed."""
    if a.logprobs is not None or b.logprobs is not None:  # an aborted choice ends with a delta that has none
        a.logprobs = [*(a.logprobs or ()), *(b.logprobs or ())]
    a.text += b.text
    a.token_ids = a.token_ids + b.token_ids
    a.accepted = a.accepted + b.accepted
    a.passes = a.passes + b.passes
    a.finish_reason, a.stop_reason = b.finish_reason, b.stop_reason
    a.output = b.output
    a.belongs_to(b.so_far)
