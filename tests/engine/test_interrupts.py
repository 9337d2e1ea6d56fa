"""Ctrl-C, closed streams and forks: what runs beside them is not touched."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest

from paceline import SamplingParams
from paceline.errors import EngineError
from paceline.interrupts import uninterrupted

from .conftest import World
from .harness import assert_idle

PROMPT = [7, 8, 9, 10]
LONG = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, logprobs=0)


def test_sigint_waits_for_the_end_of_the_block() -> None:
    reached = False
    with pytest.raises(KeyboardInterrupt), uninterrupted, uninterrupted:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        reached = True
    assert reached
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_prepared_loop_is_interrupted_between_its_blocks() -> None:
    seen: list[str] = []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append("delivered"))
    own = signal.getsignal(signal.SIGINT)
    try:
        with uninterrupted.prepared(), uninterrupted.prepared():
            for _ in range(2):
                with uninterrupted, uninterrupted:
                    os.kill(os.getpid(), signal.SIGINT)
                    time.sleep(0.01)
                    seen.append("block ended")
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
            seen.append("loop ended")
        assert signal.getsignal(signal.SIGINT) is own
        assert seen == [*["block ended", "delivered"] * 2, "delivered", "loop ended"]
        with uninterrupted:
            pass
        assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("delay", [0.0, 0.001, 0.003, 0.01, 0.02])
def test_an_interrupted_generate_leaves_other_streams_alone(world: World, delay: float) -> None:
    llm = world.plain
    expected = llm.generate([PROMPT], LONG)[0].outputs[0]
    stream = llm.stream(PROMPT, LONG)
    ids = list(next(stream).token_ids)
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(delay, lambda: signal.pthread_kill(main, signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        while True:
            llm.generate([[1, 2, 3]] * 3, LONG)
    timer.join()
    output: Any = None
    for delta in stream:
        ids += delta.token_ids
        output = delta.output or output
    assert ids == expected.token_ids
    assert output.outputs[0].token_ids == expected.token_ids
    assert output.outputs[0].logprobs == expected.logprobs
    assert_idle(llm)


def test_a_stream_closed_inside_a_step_ends_behind_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = world.plain
    expected = llm.generate([PROMPT], LONG)[0].outputs[0].token_ids
    victim = llm.stream([3, 4], LONG)
    next(victim)
    forward = llm.engine._forward

    def closing(work: Any) -> Any:
        victim.close()
        return forward(work)

    monkeypatch.setattr(llm.engine, "_forward", closing)
    assert llm.generate([PROMPT], LONG)[0].outputs[0].token_ids == expected
    monkeypatch.undo()
    assert_idle(llm)


def test_generating_inside_a_step_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = world.plain
    forward = llm.engine._forward

    def nested(work: Any) -> Any:
        with pytest.raises(EngineError, match="step is running"):
            llm.engine.step()
        return forward(work)

    monkeypatch.setattr(llm.engine, "_forward", nested)
    llm.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=3))
    monkeypatch.undo()
    assert_idle(llm)


def test_a_forked_child_is_told_to_load_its_own(world: World) -> None:
    child = os.fork()
    if child == 0:
        try:
            world.plain.generate([PROMPT], LONG)
        except EngineError:
            os._exit(7)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7


def test_logits_that_are_not_finite_are_an_error(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = world.plain
    forward = llm.engine._forward

    def damaged(work: Any) -> Any:
        logits, taps = forward(work)
        logits[:] = np.nan
        return logits, taps

    monkeypatch.setattr(llm.engine, "_forward", damaged)
    with pytest.raises(EngineError, match="not finite"):
        llm.generate([PROMPT], LONG)
    monkeypatch.undo()
    assert_idle(llm)


def test_a_forked_child_can_load_and_end(world: World) -> None:
    """Its own pool works, and letting go of the parent's does not wait for threads that are not there."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            own = type(world.plain)(world.folder, dtype="float32", threads=2, speculative_config=None)
            expected = own.generate([PROMPT], LONG)[0].outputs[0].token_ids
            del own
            code = 9 if len(expected) == 60 else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 9
