"""`AsyncLLM`: the same output from a thread of its own, ended at any moment, and nothing held afterwards."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline import AsyncLLM, SamplingParams
from paceline.async_llm import MERGE_FROM, RequestStream
from paceline.engine_thread import FEW, STEP_BUCKETS
from paceline.errors import CapacityError, ConfigError, EngineDeadError, QueueFullError
from paceline.outputs import RequestOutput, StreamDelta
from paceline.speculation import costs

from .conftest import SHAPE, World
from .harness import Oracle, Scripted, assert_idle, assert_same, half_right, open_llm, scripted
from .test_stream import PARAMS, PROMPTS, check_deltas, known

V = SHAPE.vocab
LONG = SamplingParams(temperature=1.1, seed=3, max_tokens=100, ignore_eos=True)


def run(main: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(main, 600))  # a hang is a failure, not a stuck test run


@asynccontextmanager
async def opened(world: World, **options: Any) -> AsyncIterator[AsyncLLM]:
    """Nothing may be left when the test is over, before anything is closed."""
    engine = AsyncLLM(world.spec, **options)
    try:
        yield engine
        assert not engine._live and engine._places == 0 and not engine._thread._active
        assert engine.error is None
        assert_idle(world.spec)
    finally:
        await engine.close()


async def read(engine: AsyncLLM, *args: Any, **kwargs: Any) -> list[StreamDelta]:
    async with aclosing(engine.generate(*args, **kwargs)) as stream:
        return [delta async for delta in stream]


class Gate:
    """Lets through as many steps as allowed; all of them once it is set."""

    def __init__(self) -> None:
        self._steps = threading.Semaphore(0)
        self._open = False

    def wait(self) -> None:
        if not self._open:
            self._steps.acquire()

    def allow(self, steps: int) -> None:
        self._steps.release(steps)

    def set(self) -> None:
        self._open = True
        self._steps.release(1 << 20)


@contextmanager
def held(engine: AsyncLLM) -> Iterator[Gate]:
    """Steps wait for the gate that this gives."""
    step, gate = engine.llm.engine.step, Gate()

    def waiting() -> Any:
        gate.wait()
        return step()

    engine.llm.engine.step = waiting  # type: ignore[method-assign]
    try:
        yield gate
    finally:
        gate.set()
        engine.llm.engine.step = step  # type: ignore[method-assign]


async def aborted_behind_three_steps(engine: AsyncLLM, params: SamplingParams) -> RequestStream:
    """The stream of a request that was aborted; it has not been read."""
    with held(engine) as gate:
        stream = await engine.submit([1, 2, 3], params, request_id="a")
        gate.allow(3)
        while engine.stats().steps < 3:
            await asyncio.sleep(0)
        aborting = asyncio.create_task(engine.abort("a"))
        await asyncio.sleep(0)
        gate.allow(1)
        assert await aborting
    return stream


@contextmanager
def slowed(engine: AsyncLLM) -> Iterator[None]:
    """Steps take so long that a request of a hundred of them outlives what a test does beside it."""
    step = engine.llm.engine.step

    def sleepy() -> Any:
        time.sleep(0.03)
        return step()

    engine.llm.engine.step = sleepy  # type: ignore[method-assign]
    try:
        yield
    finally:
        engine.llm.engine.step = step  # type: ignore[method-assign]


def test_pieces_make_the_whole_and_requests_share_passes(world):
    outputs, oracle = known(world)

    async def main() -> None:
        async with opened(world) as engine:
            with scripted(world.spec, half_right(oracle, V, 1)):
                got = await asyncio.gather(*(read(engine, p, PARAMS) for p in PROMPTS))
                for deltas, want in zip(got, outputs, strict=True):
                    check_deltas(deltas, want)
                    assert [p for d in deltas for p in d.logprobs] == want.outputs[0].logprobs
                alone = [await engine.complete(p, PARAMS) for p in PROMPTS]
            for mine, want in zip(alone, outputs, strict=True):
                assert_same(mine, want, "complete")

    run(main())


def test_texts_and_messages(world):
    params = SamplingParams(temperature=0.0, seed=1, max_tokens=10, ignore_eos=True)
    messages = [{"role": "user", "content": "ab"}]

    async def main() -> None:
        async with opened(world) as engine:
            text, chat = await asyncio.gather(engine.complete("abc ab", params), engine.complete(messages, params))
            assert_same(text, world.plain.generate("abc ab", params)[0], "text")
            assert text.prompt == "abc ab"
            assert_same(chat, world.plain.chat(messages, params)[0], "messages")
            with pytest.raises(ConfigError, match="enable_thinking"):
                await engine.complete("abc", params, enable_thinking=False)

    run(main())


def test_several_choices_with_plain_and_fixed_drafts(world):
    params = SamplingParams(temperature=1.3, seed=8, n=3, max_tokens=12, stop_token_ids=(17, 40, 41), ignore_eos=True)
    outputs, oracle = known(world, params=params)

    async def main() -> None:
        async with opened(world) as engine:
            with scripted(world.spec, oracle):
                for drafts in (None, 0, 3):
                    for prompt, want in zip(PROMPTS, outputs, strict=True):
                        check_deltas(await read(engine, prompt, params, num_speculative_tokens=drafts), want)

    run(main())


@pytest.mark.parametrize(
    ("prompt", "params", "options", "error"),
    [
        ([], None, {}, ConfigError),
        ([V], None, {}, ConfigError),
        ([1] * SHAPE.context, None, {}, CapacityError),
        ([1], SamplingParams(stop_token_ids=[V]), {}, ConfigError),
        ([1], SamplingParams(n=500), {}, CapacityError),
        ([1], None, {"num_speculative_tokens": -1}, ConfigError),
        ([1], {"temperature": 0}, {}, ConfigError),
    ],
)
def test_what_cannot_be_served_is_refused_before_the_first_piece(world, prompt, params, options, error):
    async def main() -> None:
        async with opened(world) as engine:
            with pytest.raises(error):
                await engine.submit(prompt, params, **options)
            with pytest.raises(error):
                await engine.complete(prompt, params, **options)

    run(main())


def test_a_request_id_names_one_request_at_a_time(world):
    async def main() -> None:
        async with opened(world) as engine:
            stream = await engine.submit([1, 2], LONG, request_id="mine")
            with pytest.raises(ConfigError, match="'mine' is in use"):
                await engine.submit([1], LONG, request_id="mine")
            await stream.aclose()
            assert (await engine.complete([1, 2], PARAMS, request_id="mine")).finished

    run(main())


def test_abort_by_id_ends_the_stream_with_what_there_is(world):
    async def main() -> None:
        async with opened(world) as engine:
            with held(engine) as gate:
                stream = await engine.submit([1, 2, 3], LONG, request_id="a")
                gate.allow(3)
                deltas = [await anext(stream) for _ in range(3)]
                stats = engine.stats()
                assert stats.running == 1 and stats.kv_cache_usage > 0 and stats.steps == 3, "they follow every step"
                aborting = asyncio.create_task(engine.abort("a"))
                await asyncio.sleep(0)
                gate.allow(1)
                assert await aborting
            deltas += [d async for d in stream]
            assert [d.finish_reason for d in deltas][-1] == "abort"
            output = deltas[-1].output
            assert output is not None and output.finished
            assert "".join(d.text for d in deltas) == output.outputs[0].text
            assert [t for d in deltas for t in d.token_ids] == output.outputs[0].token_ids
            assert len(output.outputs[0].token_ids) < 100
            assert not await engine.abort("a") and not await engine.abort("unknown")
            assert engine.stats().finished == {"abort": 1}

    run(main())


def test_outputs_have_the_name_of_their_request(world):
    async def main() -> None:
        async with opened(world) as engine:
            for name in ("mine", "mine too"):
                assert (await engine.complete([1, 2, 3], PARAMS, request_id=name)).request_id == name
            assert (await engine.complete([1, 2, 3], PARAMS)).request_id.startswith("request-")

    run(main())


def test_a_name_is_no_model_that_is_open(tmp_path):
    for name in ("smollm2-135m", tmp_path):
        with pytest.raises(ConfigError, match=r"llm: .* pass LLM"):
            AsyncLLM(name)


def test_pieces_that_are_joined_with_the_end_keep_their_logprobs(world, monkeypatch):
    """What ends an aborted choice adds no token, and so no log-probability."""
    monkeypatch.setattr("paceline.async_llm.MERGE_FROM", 1)
    params = SamplingParams(temperature=1.1, seed=3, max_tokens=100, ignore_eos=True, logprobs=1)

    async def main() -> None:
        async with opened(world) as engine:
            stream = await aborted_behind_three_steps(engine, params)
            [delta] = [d async for d in stream]
            assert delta.output is not None and delta.finish_reason == "abort"
            assert len(delta.token_ids) >= 3 and delta.token_ids == delta.output.outputs[0].token_ids
            assert delta.logprobs == delta.output.outputs[0].logprobs

    run(main())


def test_a_request_that_expires_holds_nothing_and_says_so_behind_what_it_made(world):
    async def main() -> None:
        async with opened(world) as engine:
            with held(engine) as gate:
                stream = await engine.submit([1, 2, 3], LONG)
                gate.allow(3)
                while len(stream._pieces) < 3:
                    await asyncio.sleep(0)
                made = [await anext(stream)]
                stream.expire()
                stream.expire()
            await engine.drain()  # though nobody reads
            assert_idle(world.spec)
            with pytest.raises(TimeoutError):
                while True:
                    made.append(await anext(stream))
            assert len(made) == 3 and all(d.finish_reason is None for d in made)
            with pytest.raises(TimeoutError):
                await anext(stream)
            await stream.aclose()

    run(main())


def test_a_reader_that_waits_hears_at_once_that_its_request_expires(world):
    async def main() -> None:
        async with opened(world) as engine:
            with held(engine):
                stream = await engine.submit([1, 2, 3], LONG)
                waiting = asyncio.ensure_future(anext(stream))
                await asyncio.sleep(0)
                stream.expire()
                with pytest.raises(TimeoutError):
                    await waiting  # while the engine stands still
            await stream.aclose()
            ended = await engine.submit([1, 2, 3], PARAMS)
            await engine.drain()
            ended.expire()
            assert [d async for d in ended][-1].output.finished

    run(main())


@pytest.mark.parametrize("after", [0, 1, 2, 5])
def test_leaving_early_frees_everything(world, after):
    """Failure case 24: cancel a stream in the middle, then send the prompt again: nothing leaks, same output."""
    outputs, oracle = known(world)

    async def main() -> None:
        async with opened(world) as engine:
            with scripted(world.spec, oracle):
                async with aclosing(engine.generate(PROMPTS[1], PARAMS)) as stream:
                    for _ in range(after):
                        await anext(stream)
                assert_idle(world.spec)
                check_deltas(await read(engine, PROMPTS[1], PARAMS), outputs[1])

    run(main())


def test_a_generator_that_is_dropped_is_aborted(world):
    async def main() -> None:
        async with opened(world) as engine:
            stream = engine.generate(PROMPTS[0], LONG)
            await anext(stream)
            del stream
            gc.collect()
            await engine.drain()

    run(main())


# ---- races

endings = st.sampled_from(["read", "complete", "close", "cancel", "cancel twice", "abort"])
plans = st.lists(
    st.tuples(st.integers(0, 2), endings, st.integers(0, 12), st.integers(0, 6)), min_size=1, max_size=9
)  # which prompt, how it ends, pieces (or turns of the loop) before that, turns before it starts


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(plan=plans, seed=st.integers(0, 1000))
def test_any_mixture_of_endings(worlds, plan, seed):
    """Whatever is cancelled, closed or aborted at whatever moment: the others get their output, nothing is held."""
    world = worlds["float32"]
    outputs, oracle = _known_once(world)

    async def one(engine: AsyncLLM, which: int, ending: str, after: int, start: int) -> None:
        for _ in range(start):
            await asyncio.sleep(0)
        if ending == "complete":
            assert_same(await engine.complete(PROMPTS[which], PARAMS), outputs[which], plan)
        elif ending == "read":
            check_deltas(await read(engine, PROMPTS[which], PARAMS), outputs[which])
        elif ending == "close":
            async with aclosing(engine.generate(PROMPTS[which], PARAMS)) as stream:
                for _ in range(after):
                    if await anext(stream, None) is None:
                        break
        elif ending == "abort":
            name = f"{id(object())}-{start}-{after}-{which}-{len(engine._live)}"
            async with await engine.submit(PROMPTS[which], PARAMS, request_id=name) as stream:
                for _ in range(after):
                    await asyncio.sleep(0)
                await engine.abort(name)
                pieces = [d async for d in stream]
                assert pieces[-1].output is not None
        else:
            task = asyncio.create_task(read(engine, PROMPTS[which], PARAMS))
            for _ in range(3 * after):
                await asyncio.sleep(0)
            task.cancel()
            if ending == "cancel twice":
                await asyncio.sleep(0)
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def main() -> None:
        engine = AsyncLLM(world.spec)
        try:
            with scripted(world.spec, half_right(oracle, V, seed)):
                async with asyncio.TaskGroup() as group:
                    for item in plan:
                        group.create_task(one(engine, *item))
                await engine.drain()  # one that was cancelled twice did not wait for its end
            assert not engine._live and engine._places == 0 and engine.error is None
            assert_idle(world.spec)
        finally:
            await engine.close()

    run(main())


_KNOWN: dict[int, tuple[list[RequestOutput], Oracle]] = {}


def _known_once(world: World) -> tuple[list[RequestOutput], Oracle]:
    if id(world) not in _KNOWN:
        _KNOWN[id(world)] = known(world)
    return _KNOWN[id(world)]


# ---- limits


def test_the_queue_is_bounded(world):
    """As many as run and wait are taken in; one more is refused at once, and taken when a place is free."""

    async def main() -> None:
        async with opened(world, max_waiting=2) as engine:
            assert engine.capacity == world.spec.engine.max_num_seqs + 2
            with slowed(engine):  # none of them ends meanwhile
                streams = [await engine.submit([1, 2], LONG) for _ in range(engine.capacity)]
                with pytest.raises(QueueFullError, match="try again"):
                    await engine.submit([1], LONG)
                await streams[0].aclose()
                with pytest.raises(QueueFullError):
                    await engine.submit([1], SamplingParams(n=2, max_tokens=3))
            streams[0] = await engine.submit([1], PARAMS)
            assert [d async for d in streams[0]][-1].output.finished
            for stream in streams:
                await stream.aclose()

    run(main())


def test_a_slow_reader_holds_up_nobody_and_loses_nothing(world):
    """Its request ends while it has read nothing; what it finds then is whole, in few pieces."""
    want = world.plain.generate([1, 2, 3], LONG)[0]

    async def main() -> None:
        async with opened(world) as engine:
            slow = await engine.submit([1, 2, 3], LONG)
            assert (await engine.complete([1, 2, 3], LONG)).finished
            await engine.drain()
            assert_idle(world.spec)
            deltas = [d async for d in slow]
            assert len(deltas) <= MERGE_FROM + 1
            check_deltas(deltas, want)

    run(main())


def test_one_call_per_loop_and_step(world):
    """Not one per token or request: the loop is woken once for all that a step made."""

    async def main() -> None:
        async with opened(world) as engine:
            loop = asyncio.get_running_loop()
            streams = [await engine.submit([1, 2, i], LONG) for i in range(6)]
            with held(engine) as gate:
                calls, original = [], loop.call_soon_threadsafe
                steps = engine.stats().steps

                def counted(callback: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
                    calls.append(callback)
                    return original(callback, *args, **kwargs)

                loop.call_soon_threadsafe = counted  # type: ignore[method-assign]
                gate.set()
                for stream in streams:
                    async for _ in stream:
                        pass
                loop.call_soon_threadsafe = original  # type: ignore[method-assign]
            assert 0 < len(calls) <= engine.stats().steps - steps + 1
            assert engine.stats().generation_tokens == 600

    run(main())


def test_the_event_loop_is_free_while_a_step_runs(world):
    async def main() -> None:
        async with opened(world) as engine:
            with held(engine) as gate:
                task = asyncio.create_task(engine.complete([1, 2], PARAMS))
                for _ in range(50):
                    await asyncio.sleep(0)
                assert not task.done()
                gate.set()
            assert (await task).finished

    run(main())


def test_loops_of_several_threads(world):
    outputs, oracle = known(world)
    engine = AsyncLLM(world.spec)
    problems: list[BaseException] = []

    def work(i: int) -> None:
        async def main() -> None:
            for _ in range(3):
                check_deltas(await read(engine, PROMPTS[i % 3], PARAMS), outputs[i % 3])

        try:
            run(main())
        except BaseException as error:
            problems.append(error)

    with scripted(world.spec, oracle):
        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    run(engine.close())
    assert problems == []
    assert_idle(world.spec)


def test_a_loop_that_closes_with_a_request_in_flight(world):
    """Nobody can read any more: the engine finds out and frees the request."""
    engine = AsyncLLM(world.spec)
    loop = asyncio.new_event_loop()
    with held(engine) as gate:
        loop.run_until_complete(engine.submit([1, 2, 3], LONG))
        loop.close()
        gate.set()

    async def main() -> None:
        assert (await engine.complete([1, 2], PARAMS)).finished
        assert not engine._live and engine._places == 0
        await engine.close()

    run(main())
    assert_idle(world.spec)


# ---- the end


def test_drain_lets_requests_finish_and_takes_no_more(world):
    async def main() -> None:
        async with opened(world) as engine:
            stream = await engine.submit([1, 2], PARAMS)
            draining = asyncio.create_task(engine.drain())
            await asyncio.sleep(0)
            with pytest.raises(EngineDeadError, match="shutting down"):
                await engine.submit([1], PARAMS)
            await draining
            assert not engine.alive and engine.error is None
            assert [d async for d in stream][-1].finish_reason == "length"

    run(main())


def test_close_ends_every_request_with_an_error(world):
    async def main() -> None:
        engine = AsyncLLM(world.spec)
        with held(engine) as gate:
            stream = await engine.submit([1, 2], LONG)
            closing = asyncio.create_task(engine.close())
            await asyncio.sleep(0)
            gate.set()
            await closing
        with pytest.raises(EngineDeadError, match="closed"):
            async for _ in stream:
                pass
        await stream.aclose()
        with pytest.raises(EngineDeadError, match="closed"):
            await engine.submit([1], PARAMS)
        assert_idle(world.spec)

    run(main())


def test_a_failed_step_is_told_to_everybody(tiny_target, caplog):
    """Requests in flight, waiting or sent later: each gets the error with its cause, and the engine says it is dead."""
    llm = open_llm(tiny_target, Scripted())

    def broken(sequence: Any, limit: int) -> list[int]:
        raise RuntimeError("the drafter broke")

    async def main() -> None:
        engine = AsyncLLM(llm)
        with held(engine) as gate:
            stream = await engine.submit([1, 2], LONG)
            waiting = [asyncio.create_task(engine.complete([4, i], LONG)) for i in range(3)]
            while engine._thread._commands.qsize() < len(waiting):
                await asyncio.sleep(0.001)
            gate.set()
        with pytest.raises(EngineDeadError, match="the drafter broke"):
            async for _ in stream:
                pass
        for task in waiting:
            with pytest.raises(EngineDeadError, match="the drafter broke"):
                await task
        with pytest.raises(EngineDeadError, match="the drafter broke"):
            await engine.submit([1], LONG)
        assert isinstance(engine.error, RuntimeError) and not engine.alive
        assert not engine._live and engine._places == 0
        await engine.drain()
        await engine.close()

    with scripted(llm, broken):
        run(main())
    assert_idle(llm)
    assert "the engine died" in caplog.text


def test_stats_add_up(world):
    outputs, oracle = known(world)

    async def main() -> None:
        async with opened(world) as engine:
            before = engine.llm.engine.stats.copy()
            with scripted(world.spec, oracle):
                await asyncio.gather(*(engine.complete(p, PARAMS) for p in PROMPTS))
            stats = engine.stats()
            assert (stats.running, stats.waiting, stats.kv_cache_usage) == (0, 0, 0.0)
            assert stats.prompt_tokens == sum(map(len, PROMPTS))
            assert stats.generation_tokens == sum(len(o.outputs[0].token_ids) for o in outputs)
            assert stats.finished == {"length": len(PROMPTS)}
            assert sum(stats.step_histogram) == stats.steps and len(stats.step_histogram) == len(STEP_BUCKETS) + 1
            spec = stats.spec_decode.since(before)
            assert spec.num_delivered_tokens == stats.generation_tokens
            assert sum(spec.drafted_histogram) == spec.num_drafts
            assert sum(k * n for k, n in enumerate(spec.drafted_histogram)) == spec.num_draft_tokens

    run(main())


@pytest.mark.parametrize("bad", [-1, 1.5, True, "2"])
def test_max_waiting_is_checked(world, bad):
    with pytest.raises(ConfigError, match="max_waiting"):
        AsyncLLM(world.spec, max_waiting=bad)


def test_measured_costs_are_saved_while_it_serves(world, tmp_path, monkeypatch):
    """A server runs for weeks: what it measured must not wait for its end, nor a step for the file."""
    file = costs.CostFile(tmp_path / "costs.json")
    monkeypatch.setattr(costs, "SAVE_AFTER", 1)
    monkeypatch.setattr(world.spec, "_costs", file)

    async def main() -> None:
        async with opened(world) as engine:
            while not file.path.exists():
                file._next = 0.0
                await engine.complete(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
                await asyncio.sleep(0.01)

    run(main())
    assert set(json.loads(file.path.read_text())) == {"verify", "draft"}


def test_grammars_compile_beside_other_requests(world, monkeypatch):
    """Requests without a grammar, and with a known one, do not wait for those whose grammars compile."""
    gate, build = threading.Event(), type(world.spec.grammars)._build
    known_, new = ({"regex": expression} for expression in ("[ab]{2}", "[ab]{3}"))

    def params(grammar: Any = None) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=3, structured_outputs=grammar)

    async def main() -> None:
        async with opened(world) as engine:
            await engine.complete(PROMPTS[0], params(known_))
            monkeypatch.setattr(type(world.spec.grammars), "_build", lambda *a: gate.wait(600) and build(*a))
            waiting = asyncio.ensure_future(engine.complete(PROMPTS[0], params(new)))
            more = [asyncio.ensure_future(engine.complete(PROMPTS[0], params({"choice": [c]}))) for c in "abcde"]
            left = asyncio.ensure_future(engine.complete(PROMPTS[0], params({"regex": "[ab]{4}"})))
            await asyncio.sleep(0.05)
            left.cancel()
            for grammar in (None, known_):
                await engine.complete(PROMPTS[0], params(grammar))
            assert not waiting.done() and not any(one.done() for one in more)
            gate.set()
            assert len((await waiting).outputs[0].text) == 3
            assert [(await one).outputs[0].text for one in more] == list("abcde")

    run(main())


def test_places_are_free_before_a_request_is_forgotten(world):
    """`in_flight` is read without the lock: a count of 0 has to mean that the places are free as well."""
    seen = []

    class Watched(dict[str, Any]):
        def __delitem__(self, name: str) -> None:
            seen.append(engine._places)
            super().__delitem__(name)

    async def main() -> None:
        nonlocal engine
        async with opened(world) as engine:
            engine._live = Watched()
            await engine.complete(PROMPTS[0], SamplingParams(max_tokens=1, n=2))

    engine: Any = None
    run(main())
    assert seen == [0]


def test_nobody_waits_for_others_grammars_without_end(world, monkeypatch):
    gate, build = threading.Event(), type(world.spec.grammars)._build

    def params(expression: str) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=3, structured_outputs={"regex": expression})

    async def main() -> None:
        async with opened(world) as engine:
            monkeypatch.setattr(type(world.spec.grammars), "_build", lambda *a: gate.wait(600) and build(*a))
            hostile = [asyncio.ensure_future(engine.complete(PROMPTS[0], params(f"x{{{i}}}"))) for i in range(1, 5)]
            while len(engine._grammars._threads) < 4 or engine._grammars._work_queue.qsize():
                await asyncio.sleep(0.005)
            monkeypatch.setattr("paceline.async_llm.GRAMMAR_PATIENCE", 0.05)
            with pytest.raises(QueueFullError, match="structured_outputs: other grammars"):
                await engine.complete(PROMPTS[0], params("y"))
            assert engine._places == 4
            gate.set()
            assert [len((await one).outputs[0].text) for one in hostile] == [1, 2, 3, 3]

    run(main())


class Fickle:
    """A shortcut that takes what it likes."""

    def __init__(self, rng: random.Random, log: list[StreamDelta]) -> None:
        self.rng, self.log = rng, log
        self.taken = 0
        self.clogged = False
        self.closed = False

    def ready(self) -> bool:
        return self.rng.random() < 0.8

    def put(self, delta: StreamDelta) -> bool:
        assert not self.closed and delta.output is None
        dice = self.rng.random()
        if dice < 0.1:
            raise OSError("broken")
        if dice < 0.3:
            return False
        self.clogged = dice < 0.5
        self.taken += 1
        self.log.append(delta)
        return True

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("n", [1, 3, FEW + 1])
def test_pieces_by_a_shortcut_and_by_the_loop_stay_in_order(world, n):
    """Several requests, each with a shortcut that refuses, fails and clogs at random: nothing is lost, doubled or
    overtaken, and nothing is put there once its stream is closed."""
    params = SamplingParams(temperature=1.1, seed=3, max_tokens=60, ignore_eos=True, n=n)
    want = world.plain.generate([1, 2, 3], params)[0]
    rng = random.Random(n)

    async def one(engine: AsyncLLM) -> int:
        log: list[StreamDelta] = []
        shortcut = Fickle(rng, log)
        async with await engine.submit([1, 2, 3], params) as stream:
            stream.shorten(shortcut)
            async for delta in stream:
                log.append(delta)
        assert shortcut.closed
        check_deltas(log, want)
        return shortcut.taken

    async def main() -> None:
        async with opened(world) as engine:
            taken = [await one(engine) for _ in range(6)] + await asyncio.gather(*(one(engine) for _ in range(3)))
            assert (sum(taken) > 0) == (n <= FEW)

    run(main())


def test_a_stream_that_is_closed_puts_nothing_more_into_its_shortcut(world):
    async def main() -> None:
        async with opened(world) as engine:
            for after in range(1, 12):
                log: list[StreamDelta] = []
                shortcut = Fickle(random.Random(after), log)
                stream = await engine.submit([1, 2, 3], LONG)
                stream.shorten(shortcut)
                async for delta in stream:
                    log.append(delta)
                    if len(log) >= after:
                        break
                await stream.aclose()
                count = len(log)
                assert shortcut.closed
                await engine.complete([1, 2], PARAMS)
                assert len(log) == count

    run(main())
