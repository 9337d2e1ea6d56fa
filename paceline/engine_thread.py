"""The thread that owns an engine: it takes requests in, runs steps while there is work, and sleeps otherwise.

Events travel to event loops in batches, one `call_soon_threadsafe` per loop and step, whatever the number of requests.
While few requests run, pieces may pass by the loop (`Shortcut`): waking its thread takes a core from the pass that has
begun meanwhile, and all threads of a pass wait for the one that lost its core.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
import weakref
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from paceline.engine import RoundSeconds
from paceline.errors import EngineDeadError, PacelineError
from paceline.llm import LLM
from paceline.llm import _Request as Request
from paceline.outputs import StreamDelta, prompt_alone
from paceline.so_far import SoFar
from paceline.speculation.stats import SpecDecodeStats

log = logging.getLogger(__name__)

# Seconds of a step, upper edges of the histogram; the last bucket is open.
STEP_BUCKETS = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)

GAP_BUCKETS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0)

FEW = 4  # choices that run: up to here shortcuts are used; more are served by the loop, beside the pass

ACCEPTED = object()  # the event that says: the engine has taken the request in

Event = Any  # ACCEPTED, a StreamDelta, or the exception that ended the request
Mail = list[tuple[Callable[[Any], None], Any]]


class Shortcut(Protocol):
    """Where pieces of a request go without its event loop. Never the last one, which has the output."""

    def ready(self) -> bool:
        """On the loop: everything from there is out, so that a piece may follow."""

    def put(self, delta: StreamDelta) -> bool:
        """On the engine's thread, which it must not hold up. False: nothing of it was taken, the loop gets it."""

    @property
    def clogged(self) -> bool:
        """Behind `put`: what comes next has to wait for the loop."""

    def close(self) -> None:
        """Nothing is put there any more."""


@dataclass(slots=True, eq=False)
class Ticket:
    """A request on its way through the engine. `notify` is called on `loop` with each event, in order; the last is a
    delta with an output, or an exception. last_only: no other delta is wanted. prompt_only: nor the token behind the
    prompt, which is the only one; it is not counted either.

    shortcut: where deltas go instead. It is open only while the loop has nothing of the request left to handle, so
    that no piece overtakes another; what does not take it shuts it, until the loop offers it again."""

    request: Request
    loop: asyncio.AbstractEventLoop
    notify: Callable[[Event], None]
    lost: Callable[[], None]  # called on the engine's thread instead, when the loop is closed
    last_only: bool = False
    prompt_only: bool = False
    last: dict[int, float] = field(default_factory=dict)  # choice -> when tokens were last made for it
    shortcut: Shortcut | None = None
    on_its_way: int = 0  # events that the loop has not seen
    lock: threading.Lock = field(default_factory=threading.Lock)  # of these two

    def offer(self, shortcut: Shortcut) -> None:
        """On the loop, while the reader of the request waits."""
        with self.lock:
            if not self.on_its_way and shortcut.ready():
                self.shortcut = shortcut

    def retract(self) -> None:
        """When this returns, nothing is being put into the shortcut, nor will be."""
        with self.lock:
            self.shortcut = None

    def seen(self) -> None:
        """On the loop: an event has arrived."""
        with self.lock:
            self.on_its_way -= 1

    def sent(self) -> None:
        """On the engine's thread: an event goes to the loop."""
        with self.lock:
            self.shortcut = None
            self.on_its_way += 1

    def put(self, delta: StreamDelta) -> bool:
        """On the engine's thread: whether the shortcut took it."""
        if self.shortcut is None:
            return False
        with self.lock:
            shortcut, self.shortcut = self.shortcut, None
            if shortcut is None:
                return False
            try:
                taken = shortcut.put(delta)
            except Exception:
                log.exception("a piece could not be sent from the engine's thread; the loop sends it")
                return False
            if taken and not shortcut.clogged:
                self.shortcut = shortcut
            return taken


@dataclass(slots=True)
class EngineStats:
    """Counters and gauges after a step. step_histogram: steps by their seconds, see STEP_BUCKETS. gap_histogram: the
    time between two pieces of a request, see GAP_BUCKETS. finished: choices by finish reason. kv_cache_usage: share of
    cache blocks in use. round_seconds: where the time of the steps went."""

    running: int = 0
    waiting: int = 0
    kv_cache_usage: float = 0.0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    step_histogram: list[int] = field(default_factory=lambda: [0] * (len(STEP_BUCKETS) + 1))
    gap_seconds: float = 0.0
    gap_histogram: list[int] = field(default_factory=lambda: [0] * (len(GAP_BUCKETS) + 1))
    finished: dict[str, int] = field(default_factory=dict)
    spec_decode: SpecDecodeStats = field(default_factory=SpecDecodeStats)
    round_seconds: RoundSeconds = field(default_factory=RoundSeconds)


class EngineThread:
    """Runs one LLM. Every method may be called from any thread."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.error: BaseException | None = None  # what killed it
        self.closed = False  # takes no more commands
        self.stats = EngineStats()  # replaced, never changed, after each step
        self._totals = EngineStats()
        self._gate = threading.Lock()  # between posting a command and the end
        self._commands: queue.SimpleQueue[Callable[[], bool]] = queue.SimpleQueue()
        self._active: dict[Ticket, None] = {}
        self._mail: dict[asyncio.AbstractEventLoop, Mail] = {}
        self._thread = threading.Thread(target=self._run, name="paceline-engine", daemon=True)
        llm._served_by = weakref.ref(self)
        self._thread.start()

    @property
    def runs(self) -> bool:
        """Whether the thread still needs its LLM."""
        return self._thread.is_alive()

    # ---- from other threads

    def add(self, ticket: Ticket) -> None:
        """Queue a request; `notify` gets ACCEPTED or the error. Raises EngineDeadError."""
        self._post(lambda: self._add(ticket))

    def abort(self, ticket: Ticket, freed: Callable[[Any], None] | None = None) -> None:
        """End a request, which gets a last delta with the finish reason "abort"; unknown and finished ones are left
        alone. `freed(None)` is called on its loop once nothing is held any more. Raises EngineDeadError."""
        self._post(lambda: self._abort(ticket, freed))

    def stop(self) -> None:
        """Abort what runs and end the thread; returns when it has ended (at once if called from it)."""
        with self._gate:
            if not self.closed:
                self._commands.put(lambda: False)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _post(self, command: Callable[[], bool]) -> None:
        with self._gate:
            if self.closed:
                raise self._dead()
            self._commands.put(command)

    def _dead(self) -> EngineDeadError:
        why = "it was closed" if self.error is None else f"a step failed: {self.error!r}"
        return EngineDeadError(f"the engine serves no more requests: {why}")

    # ---- on its own thread

    def _run(self) -> None:
        try:
            while self._obey():
                self._send()  # who was taken in, refused or freed need not wait for a step
                if self._active:
                    self._step()
                    self._send()
                    with self.llm._lock:
                        self.llm._costs.save_now_and_then(self.llm.engine.lengths, beside=True)
        except BaseException as error:
            log.exception("the engine died")
            self.error = error
        self._end()

    def _obey(self) -> bool:
        """Carry out what was asked for, waiting for something to do. False: stop."""
        try:
            wait = not self._active and not self._mail
            while True:
                if not self._commands.get(wait)():
                    return False
                wait = False
        except queue.Empty:
            return True

    def _add(self, ticket: Ticket) -> bool:
        self._active[ticket] = None
        try:
            with self.llm._lock:
                self.llm._enqueue(ticket.request)
                self.llm._watch(ticket.request)
        except PacelineError as error:
            del self._active[ticket]
            self._tell(ticket, error)
        else:
            self._tell(ticket, ACCEPTED)
        return True

    def _abort(self, ticket: Ticket, freed: Callable[[Any], None] | None) -> bool:
        if ticket in self._active:
            del self._active[ticket]
            self._take_back(ticket)
        if freed is not None:
            self._mail.setdefault(ticket.loop, []).append((freed, None))
        self._publish()
        return True

    def _take_back(self, ticket: Ticket) -> None:
        """Free what a request holds; its reader gets what is left, and the end of each choice that had none."""
        request = ticket.request
        open_choices = [c for c in request.choices if c.finish_reason is None]
        rest = [choice.stopper.flush() for choice in open_choices]
        with self.llm._lock:
            self.llm._abort([request])
        for choice, text in zip(open_choices, rest, strict=True):
            end = StreamDelta(choice.choice, text, [], [], "abort")
            end.belongs_to(SoFar.now(request, choice))
            request.deltas.append(end)
        self._deliver(ticket)

    def _step(self) -> None:
        begin = time.perf_counter()
        with self.llm._lock:
            self.llm._step()
        seconds = time.perf_counter() - begin
        self._totals.steps += 1
        self._totals.step_seconds += seconds
        self._totals.step_histogram[bisect_left(STEP_BUCKETS, seconds)] += 1
        for ticket in [t for t in self._active if t.request.deltas]:
            self._deliver(ticket)
            if ticket.request.finished:
                del self._active[ticket]
                with self.llm._lock:
                    self.llm._abort([ticket.request])  # finished: only forgotten
        self._publish()

    def _deliver(self, ticket: Ticket) -> None:
        few = len(self.llm.engine.running) <= FEW
        while (delta := ticket.request.next_delta()) is not None:
            if ticket.prompt_only:
                prompt_alone(delta)
            self._count(ticket, delta)
            if delta.output is None and (ticket.last_only or (few and ticket.put(delta))):
                continue
            self._tell(ticket, delta)

    def _tell(self, ticket: Ticket, event: Event) -> None:
        ticket.sent()
        self._mail.setdefault(ticket.loop, []).append((ticket.notify, event))

    def _send(self) -> None:
        mail, self._mail = self._mail, {}
        for loop, letters in mail.items():
            try:
                loop.call_soon_threadsafe(_open, letters)
            except RuntimeError:  # that loop is closed: nobody reads there any more
                for ticket in [t for t in self._active if t.loop is loop]:
                    del self._active[ticket]
                    self._take_back(ticket)
                    ticket.lost()
                self._mail.pop(loop, None)

    def _end(self) -> None:
        """Every request and every waiting command gets its answer; after this nothing can be posted."""
        with self._gate:
            self.closed = True
        while True:
            try:
                self._commands.get_nowait()()
            except queue.Empty:
                break
            except BaseException:
                log.exception("a command could not be carried out by a dead engine")
        for ticket in list(self._active):
            try:
                with self.llm._lock:
                    self.llm._abort([ticket.request])
            except BaseException:
                log.exception("a request could not be aborted on a dead engine")
            self._tell(ticket, self._dead())
        self._active.clear()
        self._publish()
        self._send()

    # ---- counting

    def _count(self, ticket: Ticket, delta: StreamDelta) -> None:
        totals, request = self._totals, ticket.request
        if delta.token_ids or (ticket.prompt_only and delta.finish_reason != "abort"):
            totals.generation_tokens += len(delta.token_ids)
            now = time.perf_counter()
            before = ticket.last.get(delta.index)
            if before is not None:
                totals.gap_seconds += now - before
                totals.gap_histogram[bisect_left(GAP_BUCKETS, now - before)] += 1
            elif not ticket.last:
                totals.prompt_tokens += len(request.ids)
            ticket.last[delta.index] = now
        if delta.finish_reason is not None:
            finished = self._totals.finished
            finished[delta.finish_reason] = finished.get(delta.finish_reason, 0) + 1

    def _publish(self) -> None:
        """A copy of the counters that other threads may read."""
        engine, totals = self.llm.engine, self._totals
        self.stats = EngineStats(
            running=len(engine.running),
            waiting=len(engine.waiting),
            kv_cache_usage=1.0 - engine.pool.free / engine.pool.size,
            prompt_tokens=totals.prompt_tokens,
            generation_tokens=totals.generation_tokens,
            steps=totals.steps,
            step_seconds=totals.step_seconds,
            step_histogram=list(totals.step_histogram),
            gap_seconds=totals.gap_seconds,
            gap_histogram=list(totals.gap_histogram),
            finished=dict(totals.finished),
            preemptions=engine.scheduler.num_preemptions,
            prefix_cache_queries=engine.scheduler.stats.queries,
            prefix_cache_hits=engine.scheduler.stats.hits,
            spec_decode=engine.stats.copy(),
            round_seconds=replace(engine.round_seconds),
        )


def _open(letters: Mail) -> None:
    for callback, event in letters:
        callback(event)
