"""The end of a model: nothing is held, and who comes later is told so. What vLLM's objects have and ours have not."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline import LLM, AsyncEngineArgs, AsyncLLM, AsyncLLMEngine, BeamSearchParams, SamplingParams
from paceline.errors import EngineDeadError, EngineError
from paceline.other_members import ASYNC_MEMBERS, LLM_MEMBERS, NAMES

from .harness import assert_idle
from .test_async_llm import run

LONG = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
OPTIONS: dict[str, Any] = {"dtype": "float32", "speculative_config": {"method": "ngram"}}
USES: dict[str, Callable[[LLM], Any]] = {
    "generate": lambda llm: llm.generate([1, 2]),
    "chat": lambda llm: llm.chat([{"role": "user", "content": "a"}]),
    "stream": lambda llm: llm.stream("a"),
    "stream of messages": lambda llm: llm.stream([{"role": "user", "content": "a"}]),
    "beam search": lambda llm: llm.beam_search(["a"], BeamSearchParams(2, 2)),
    "info": lambda llm: llm.info(),
    "tokenizer": lambda llm: llm.get_tokenizer(),
    "prefix cache": lambda llm: llm.reset_prefix_cache(),
    "time": lambda llm: llm.time_forward(1, 4),
    "cost": lambda llm: llm.pass_cost(1, 4),
    "with": lambda llm: llm.__enter__(),
    "AsyncLLM": AsyncLLM,
}


def threads_of(model: Path, threads: int) -> tuple[LLM, list[weakref.ref[Any]]]:
    """A model that has run, and what must not outlive it."""
    llm = LLM(model, threads=threads, **OPTIONS)
    llm.generate([[1, 2, 3]], LONG)
    llm.time_forward(1, 4)
    held = (llm.model, llm.engine, llm.model.pool, llm.tokenizer, llm.grammars, llm.engine.proposer)
    return llm, [weakref.ref(each) for each in held]


def workers() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_what_a_model_held_is_free_behind_close(tiny_target):
    before = workers()
    llm, held = threads_of(tiny_target, 5)
    assert workers() >= before + 4 and not llm.closed
    llm.close()
    assert [each() for each in held] == [None] * len(held)
    assert workers() <= before and llm.closed
    llm.close()
    assert llm.model_name == str(tiny_target)


def test_threads_end_with_the_last_model_that_has_them(tiny_target):
    first, held = threads_of(tiny_target, 6)
    second = LLM(tiny_target, threads=6, **OPTIONS)
    assert second.model.pool is first.model.pool
    want = second.generate([[1, 2, 3]], LONG)[0].outputs[0].token_ids
    count = workers()
    first.close()
    assert held[0]() is None and held[2]() is second.model.pool and workers() == count
    assert second.generate([[1, 2, 3]], LONG)[0].outputs[0].token_ids == want
    second.close()
    assert held[2]() is None and workers() <= count - 5


def test_a_model_that_nobody_has_any_more_is_free_too(tiny_target):
    llm, held = threads_of(tiny_target, 5)
    del llm
    gc.collect()
    assert [each() for each in held] == [None] * len(held)


@pytest.mark.parametrize("use", USES)
def test_a_closed_model_says_so(tiny_target, use):
    with LLM(tiny_target, threads=1, **OPTIONS) as llm:
        assert llm.generate([[1, 2]], LONG)[0].finished
    with pytest.raises(EngineDeadError, match=r"this LLM was closed; open the model again"):
        USES[use](llm)


def test_with_closes_where_something_fails_too(tiny_target):
    with pytest.raises(ZeroDivisionError), LLM(tiny_target, threads=1, **OPTIONS) as llm:
        _ = 1 / 0
    assert llm.closed


def test_streams_of_a_closed_model_end_with_an_error_unless_they_were_over(tiny_target):
    llm = LLM(tiny_target, threads=1, **OPTIONS)
    cut, over = llm.stream([1, 2, 3], LONG), llm.stream([1, 2, 3], LONG.clone(max_tokens=2))
    pieces = [next(over)]
    next(cut)
    llm.generate([[4]], LONG.clone(max_tokens=8))  # with which `over` ends
    llm.close()
    pieces += over
    assert pieces[-1].finished and len(pieces[-1].output.outputs[0].token_ids) == 2
    with pytest.raises(EngineDeadError, match="closed before the request had ended"):
        next(cut)
    assert list(cut) == []


def test_close_waits_for_a_call_of_another_thread(tiny_target):
    llm = LLM(tiny_target, threads=1, **OPTIONS)
    want = llm.generate([[1, 2, 3]], LONG)[0].outputs[0].token_ids
    begun, go_on, got = threading.Event(), threading.Event(), []
    step = llm.engine.step

    def slow() -> Any:
        begun.set()
        assert go_on.wait(600)
        return step()

    llm.engine.step = slow  # type: ignore[method-assign]
    call = threading.Thread(target=lambda: got.extend(llm.generate([[1, 2, 3]], LONG)))
    call.start()
    assert begun.wait(600)
    closing = threading.Thread(target=llm.close)
    closing.start()
    assert not llm.closed
    go_on.set()
    call.join()
    closing.join()
    assert llm.closed and got[0].outputs[0].token_ids == want


def test_a_step_cannot_close_its_own_model(tiny_target):
    llm = LLM(tiny_target, threads=1, **OPTIONS)
    admit = llm.engine.scheduler.admit
    errors: list[Exception] = []

    def closing() -> None:
        with pytest.raises(EngineError, match="a step is running") as caught:
            llm.close()
        errors.append(caught.value)
        admit()

    llm.engine.scheduler.admit = closing  # type: ignore[method-assign]
    assert llm.generate([[1, 2, 3]], LONG)[0].finished and errors
    llm.close()


def test_a_model_that_is_served_cannot_be_closed_before(tiny_target):
    async def main() -> None:
        llm = LLM(tiny_target, threads=1, **OPTIONS)
        engine = AsyncLLM(llm)
        with pytest.raises(EngineError, match="close: an AsyncLLM runs this model; close that first"):
            llm.close()
        assert (await engine.complete([1, 2], LONG)).finished
        await engine.close()
        assert not llm.closed and llm.generate([[1, 2]], LONG)[0].finished
        llm.close()
        assert engine.stats().generation_tokens == LONG.max_tokens

    run(main())


def slow_down(llm: LLM) -> None:
    """Nothing else holds what this replaces."""
    step = llm.engine.step

    def slow() -> Any:
        time.sleep(0.05)
        return step()

    llm.engine.step = slow  # type: ignore[method-assign]


@pytest.mark.parametrize("how", ["close", "shutdown"])
def test_an_engine_closes_the_model_that_it_opened(tiny_target, how):
    async def main() -> None:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(str(tiny_target), threads=5, **OPTIONS))
        model = weakref.ref(engine.llm.model)
        slow_down(engine.llm)
        stream = await engine.submit([1, 2], LONG)
        if how == "close":
            await engine.close()
            await engine.close()
        else:
            engine.shutdown()
            engine.shutdown()
        assert engine.llm.closed and model() is None
        with pytest.raises(EngineDeadError):
            _ = [piece async for piece in stream]
        with pytest.raises(EngineDeadError):
            await engine.complete([1, 2], LONG)

    run(main())


def test_what_vllm_asks_an_engine(world):
    async def main() -> None:
        engine = AsyncLLM(world.spec)
        assert AsyncLLMEngine is AsyncLLM
        assert engine.is_running and not engine.errored
        assert await engine.get_tokenizer() is world.spec.tokenizer
        await engine.check_health()
        await engine.close()
        assert not engine.is_running and not engine.errored
        with pytest.raises(EngineDeadError, match="it was closed"):
            await engine.check_health()
        assert isinstance(engine.dead_error, EngineDeadError)

    run(main())
    assert_idle(world.spec)


def test_an_engine_whose_step_failed_is_not_healthy(world):
    async def main() -> None:
        engine, step = AsyncLLM(world.spec), world.spec.engine.step

        def failing() -> Any:
            raise ZeroDivisionError

        world.spec.engine.step = failing
        try:
            with pytest.raises(EngineDeadError):
                await engine.complete([1, 2], LONG)
            assert engine.errored and not engine.is_running
            with pytest.raises(EngineDeadError, match="ZeroDivisionError"):
                await engine.check_health()
        finally:
            world.spec.engine.step = step
            await engine.close()

    run(main())


def test_default_parameters_are_those_of_a_call_without_any(world):
    assert world.plain.get_default_sampling_params() == SamplingParams()


@pytest.mark.parametrize("name", sorted(LLM_MEMBERS))
def test_what_llm_does_not_have_is_told(world, name):
    with pytest.raises(AttributeError, match=f"^LLM has no attribute '{name}': .") as caught:
        getattr(world.plain, name)
    assert LLM_MEMBERS[name] in str(caught.value) and caught.value.name == name
    assert not hasattr(world.plain, name)


@pytest.mark.parametrize("name", sorted(ASYNC_MEMBERS))
def test_what_async_llm_does_not_have_is_told(world, name):
    async def main() -> None:
        engine = AsyncLLM(world.spec)
        try:
            with pytest.raises(AttributeError, match=f"^AsyncLLM has no attribute '{name}': ."):
                getattr(engine, name)
            assert not hasattr(engine, name)
        finally:
            await engine.close()

    run(main())


@pytest.mark.parametrize("name", sorted(NAMES))
def test_what_the_package_does_not_have_is_told(name):
    """By an import too, whose own words would hide the remedy."""
    said = f"^module 'paceline' has no attribute '{name}': ."
    with pytest.raises(AttributeError, match=said):
        getattr(paceline, name)
    assert not hasattr(paceline, name) and name not in dir(paceline)
    with pytest.raises(ImportError, match=said):
        exec(f"from paceline import LLM, {name}")


def test_other_names_are_unknown_as_anywhere():
    for wrong in (paceline, AsyncLLM, LLM):
        with pytest.raises(AttributeError, match="'no_idea'"):
            _ = wrong.no_idea
    with pytest.raises(ImportError, match="cannot import name 'no_idea'"):
        exec("from paceline import no_idea")
