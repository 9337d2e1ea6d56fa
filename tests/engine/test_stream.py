"""`stream`: the same output in pieces, many at once, closed at any time."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest

from paceline import SamplingParams
from paceline.errors import CapacityError, ConfigError
from paceline.outputs import RequestOutput, StreamDelta

from .conftest import SHAPE
from .harness import Oracle, assert_idle, assert_same, assert_stats, half_right, nothing, scripted, wrong

V = SHAPE.vocab
PROMPTS = [[1, 2, 3], [9, 8, 7, 6, 5] * 8, [30, 31] * 3]
PARAMS = SamplingParams(temperature=1.1, seed=3, max_tokens=45, logprobs=1, ignore_eos=True)


def known(world, prompts=PROMPTS, params=PARAMS) -> tuple[list[RequestOutput], Oracle]:
    """What plain decoding gives, and an oracle that knows it."""
    outputs, oracle = [world.plain.generate(p, params)[0] for p in prompts], Oracle()
    for output in outputs:
        oracle.learn(output)
    return outputs, oracle


def check_deltas(deltas: list[StreamDelta], want: RequestOutput) -> None:
    """Pieces joined are the output; `output` comes once, with the very last piece; each choice finishes once; what the
    pieces say of all before them is true."""
    for choice in want.outputs:
        mine = [d for d in deltas if d.index == choice.index]
        assert "".join(d.text for d in mine) == choice.text
        assert [t for d in mine for t in d.token_ids] == choice.token_ids
        assert [d.finish_reason for d in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1].finish_reason == choice.finish_reason
        assert all(len(d.token_ids) == len(d.accepted) for d in mine)
        for i, d in enumerate(mine):
            [so_far] = [o for o in d.outputs if o.index == choice.index]
            assert len(d.outputs) == (len(want.outputs) if d is deltas[-1] else 1)
            assert so_far.text == "".join(d.text for d in mine[: i + 1])
            assert so_far.token_ids == [t for d in mine[: i + 1] for t in d.token_ids]
            assert so_far.logprobs == (None if choice.logprobs is None else choice.logprobs[: len(so_far.token_ids)])
            assert (so_far.finish_reason, so_far.seed) == (d.finish_reason, choice.seed)
            assert so_far.finished() == (i == len(mine) - 1)
    assert [d.finished for d in deltas] == [False] * (len(deltas) - 1) + [True]
    assert all(d.prompt_token_ids == want.prompt_token_ids and d.prompt == want.prompt for d in deltas)
    assert len({d.request_id for d in deltas}) == 1
    assert [d.output is not None for d in deltas] == [False] * (len(deltas) - 1) + [True]
    output = deltas[-1].output
    assert output is not None
    assert_same(output, want, "stream")
    assert_stats(output)


@pytest.mark.parametrize("index", range(len(PROMPTS)))
def test_pieces_make_the_whole(world, index):
    outputs, oracle = known(world)
    for script in (nothing, oracle, half_right(oracle, V, 1), wrong(oracle, V)):
        with scripted(world.spec, script):
            deltas = list(world.spec.stream(PROMPTS[index], PARAMS))
        check_deltas(deltas, outputs[index])
        taken = sum(sum(d.accepted) for d in deltas)
        stats = deltas[-1].output.metrics.spec_decode
        assert taken == stats.num_accepted_tokens - stats.num_cut_tokens
    assert_idle(world.spec)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("stops", [(), (17, 40, 41, 77, 90)])
def test_several_choices(world, n, stops):
    """All of one length end in the same step; with stops they end in different ones. One last delta either way."""
    params = SamplingParams(temperature=1.3, seed=8, n=n, max_tokens=12, stop_token_ids=stops, ignore_eos=True)
    outputs, oracle = known(world, params=params)
    if stops:
        assert len({len(c.token_ids) for o in outputs for c in o.outputs}) > 1
    for script in (nothing, oracle, half_right(oracle, V, 2)):
        for prompt, want in zip(PROMPTS, outputs, strict=True):
            with scripted(world.spec, script):
                check_deltas(list(world.spec.stream(prompt, params)), want)
    assert_idle(world.spec)


@pytest.mark.parametrize("order", ["in turn", "one ahead", "backwards"])
def test_interleaved_streams(world, order):
    """Whoever asks, a pass serves everybody, and nobody loses what somebody else's pass made."""
    outputs, oracle = known(world)
    with scripted(world.spec, half_right(oracle, V, 5)):
        streams = [world.spec.stream(p, PARAMS) for p in PROMPTS]
        got: list[list[StreamDelta]] = [[] for _ in streams]
        if order == "one ahead":
            got[0] = list(streams[0])
        turns = list(range(3)) if order != "backwards" else [2, 1, 0]
        alive = set(turns)
        while alive:
            for i in turns:
                delta = next(streams[i], None)
                if delta is None:
                    alive.discard(i)
                else:
                    got[i].append(delta)
    for deltas, want in zip(got, outputs, strict=True):
        check_deltas(deltas, want)
    assert_idle(world.spec)


def test_generate_during_a_stream(world):
    outputs, oracle = known(world)
    with scripted(world.spec, oracle):
        stream = world.spec.stream(PROMPTS[0], PARAMS)
        deltas = [next(stream), next(stream)]
        between = world.spec.generate(PROMPTS[1:], PARAMS)
        deltas += list(stream)
    check_deltas(deltas, outputs[0])
    for got, want in zip(between, outputs[1:], strict=True):
        assert_same(got, want, "generate between two deltas")
    assert_idle(world.spec)


@pytest.mark.parametrize("after", [0, 1, 2, 5])
def test_closing_early_frees_everything(world, after):
    """Then the same prompt again gives the same output, and the blocks are all back."""
    outputs, oracle = known(world)
    with scripted(world.spec, oracle):
        stream = world.spec.stream(PROMPTS[1], PARAMS)
        for _ in range(after):
            next(stream)
        stream.close()
        assert_idle(world.spec)
        check_deltas(list(world.spec.stream(PROMPTS[1], PARAMS)), outputs[1])
    assert_idle(world.spec)


def test_a_stream_that_is_dropped_unread_is_aborted(world):
    stream = world.spec.stream(PROMPTS[0], PARAMS)
    assert world.spec.engine.busy
    del stream
    gc.collect()
    assert_idle(world.spec)


def test_closing_one_stream_leaves_its_neighbours(world):
    outputs, oracle = known(world)
    rng = np.random.default_rng(0)
    with scripted(world.spec, half_right(oracle, V, 7)):
        for round_ in range(6):
            streams = [world.spec.stream(p, PARAMS) for p in PROMPTS]
            victim = round_ % 3
            got: list[list[StreamDelta]] = [[], [], []]
            for _ in range(int(rng.integers(0, 8))):
                for i, stream in enumerate(streams):
                    got[i].append(next(stream))
            streams[victim].close()
            world.spec.engine.check()
            for i in {0, 1, 2} - {victim}:
                got[i] += list(streams[i])
                check_deltas(got[i], outputs[i])
            assert list(streams[victim]) == []
            assert_idle(world.spec)


def test_several_threads_at_once(world):
    """Streams and calls from several threads share the passes; each gets its own, whole."""
    outputs, oracle = known(world)
    done: dict[int, object] = {}

    def work(i: int) -> None:
        try:
            if i % 2:
                check_deltas(list(world.spec.stream(PROMPTS[i % 3], PARAMS)), outputs[i % 3])
            else:
                assert_same(world.spec.generate(PROMPTS[i % 3], PARAMS)[0], outputs[i % 3], "thread")
            done[i] = True
        except BaseException as error:
            done[i] = error

    with scripted(world.spec, oracle):
        threads = [threading.Thread(target=work, args=(i,)) for i in range(9)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert done == dict.fromkeys(range(9), True)
    assert_idle(world.spec)


def test_text_and_chat_prompts(world):
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    text = "abc ab"
    want = world.plain.generate(text, params)[0]
    assert want.prompt == text and want.prompt_token_ids == world.plain.tokenizer.encode(text)
    assert "".join(d.text for d in world.spec.stream(text, params)) == want.outputs[0].text
    messages = [{"role": "user", "content": "ab"}]
    answer = world.plain.chat(messages, params)[0]
    assert answer.prompt_token_ids == world.plain.tokenizer.encode_chat(messages)
    deltas = list(world.spec.stream(messages, params))
    assert deltas[-1].output.outputs[0].token_ids == answer.outputs[0].token_ids
    both = world.spec.chat([messages, messages], params)
    assert [o.outputs[0].text for o in both] == [answer.outputs[0].text] * 2


def test_errors_come_with_the_call_not_with_the_first_piece(world):
    with pytest.raises(CapacityError):
        world.spec.stream([1] * SHAPE.context, PARAMS)
    with pytest.raises(ConfigError):
        world.spec.stream([V], PARAMS)
    with pytest.raises(ConfigError, match="num_speculative_tokens"):
        world.spec.stream([1], PARAMS, num_speculative_tokens=-1)
    assert_idle(world.spec)


def test_a_drafter_that_raises_leaves_nothing_behind(world):
    """The error reaches the caller; blocks are free and the engine goes on working."""
    outputs, oracle = known(world)

    def broken(sequence, limit):
        if sequence.num_output_tokens > 5:
            raise RuntimeError("broken drafter")
        return oracle(sequence, limit)[:1]

    with scripted(world.spec, broken):
        with pytest.raises(RuntimeError, match="broken drafter"):
            world.spec.generate(PROMPTS, PARAMS)
        assert_idle(world.spec)
        with pytest.raises(RuntimeError, match="broken drafter"):
            list(world.spec.stream(PROMPTS[0], PARAMS))
        assert_idle(world.spec)
    with scripted(world.spec, oracle):
        assert_same(world.spec.generate(PROMPTS[0], PARAMS)[0], outputs[0], "after an error")
