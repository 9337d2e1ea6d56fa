"""What users of vLLM write without looking it up: names, positions and shapes."""

from __future__ import annotations

import asyncio
import copy
import json
import pickle
import threading
from dataclasses import FrozenInstanceError, asdict

import pytest

from paceline import AsyncEngineArgs, AsyncLLM, EngineArgs, RequestOutputKind, SamplingParams
from paceline.async_llm import MERGE_FROM
from paceline.errors import ConfigError
from paceline.outputs import StreamDelta

from .conftest import SHAPE
from .harness import assert_idle, half_right, scripted
from .test_async_llm import LONG, aborted_behind_three_steps, held, opened, read, run, slowed
from .test_stream import PARAMS, PROMPTS, check_deltas, known

V = SHAPE.vocab
DELTA, FINAL_ONLY = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


def test_the_id_comes_third_and_the_text_grows(world):
    """vLLM's example: print what is new of a text that grows; keep the last piece as the result."""
    outputs, oracle = known(world)

    async def main() -> None:
        async with opened(world) as engine:
            with scripted(world.spec, half_right(oracle, V, 4)):
                shown, final = "", None
                async for piece in engine.generate(PROMPTS[0], PARAMS, "my-id"):
                    assert piece.request_id == "my-id"
                    choice = piece.outputs[0]
                    assert choice.text.startswith(shown)
                    shown, final = choice.text, piece
            assert final is not None and final.finished and final.outputs[0].finish_reason == "length"
            want = outputs[0].outputs[0]
            assert (shown, final.outputs[0].token_ids, final.outputs[0].logprobs) == (
                want.text,
                want.token_ids,
                want.logprobs,
            )
            assert final.outputs[0].cumulative_logprob == want.cumulative_logprob
            assert (await engine.complete(PROMPTS[0], PARAMS, "other-id")).request_id == "other-id"
            stream = await engine.submit(PROMPTS[0], PARAMS, "third")
            assert stream.request_id == "third"
            check_deltas([d async for d in stream], outputs[0])

    run(main())


def test_what_came_so_far_can_be_read_later_and_of_aborted_requests_too(world):
    params = SamplingParams(temperature=1.1, seed=3, max_tokens=100, ignore_eos=True, logprobs=1)

    async def main() -> list[StreamDelta]:
        async with opened(world) as engine:
            stream = await aborted_behind_three_steps(engine, params)
            return [delta async for delta in stream]

    deltas = run(main())
    assert len(deltas) > 3 and deltas[-1].finish_reason == "abort"
    whole = deltas[-1].output.outputs[0]
    assert deltas[-1].outputs == [whole]
    for i, delta in enumerate(deltas[:-1]):
        [choice] = delta.outputs
        assert choice.token_ids == whole.token_ids[: len(choice.token_ids)]
        assert len(choice.token_ids) == sum(len(d.token_ids) for d in deltas[: i + 1])
        assert choice.logprobs == whole.logprobs[: len(choice.token_ids)]
        total = sum(found[token].logprob for token, found in zip(choice.token_ids, choice.logprobs, strict=True))
        assert choice.cumulative_logprob == pytest.approx(total)


def test_output_kinds(world):
    [want], _ = known(world, PROMPTS[:1])
    whole = want.outputs[0]

    async def main() -> None:
        async with opened(world) as engine:
            deltas = await read(engine, PROMPTS[0], PARAMS.clone(output_kind=DELTA))
            assert len(deltas) > 3
            assert "".join(d.outputs[0].text for d in deltas) == whole.text
            assert [t for d in deltas for t in d.outputs[0].token_ids] == whole.token_ids
            assert [p for d in deltas for p in d.outputs[0].logprobs] == whole.logprobs
            assert deltas[-1].outputs[0].finish_reason == whole.finish_reason
            assert deltas[-1].outputs[0].cumulative_logprob == whole.cumulative_logprob
            [only] = await read(engine, PROMPTS[0], PARAMS.clone(output_kind=FINAL_ONLY))
            assert only.finished and only.outputs == [whole]

    run(main())
    [only] = world.spec.stream(PROMPTS[0], PARAMS.clone(output_kind=FINAL_ONLY))
    assert only.finished and only.outputs == [whole]
    pieces = list(world.spec.stream(PROMPTS[0], PARAMS.clone(output_kind=DELTA)))
    assert len(pieces) > 3 and "".join(p.outputs[0].text for p in pieces) == whole.text
    assert world.spec.generate(PROMPTS[0], PARAMS.clone(output_kind=DELTA))[0].outputs == [whole]
    assert_idle(world.spec)


def test_several_choices_each_grow_and_the_last_piece_has_all(world):
    params = SamplingParams(temperature=1.3, seed=8, n=3, max_tokens=20, stop_token_ids=(17, 40, 41), ignore_eos=True)
    [want], _ = known(world, PROMPTS[:1], params)

    async def main() -> None:
        async with opened(world) as engine:
            texts = {}
            async for piece in engine.generate(PROMPTS[0], params, "n"):
                for choice in piece.outputs:
                    texts[choice.index] = choice.text
                last = piece
            assert texts == {c.index: c.text for c in want.outputs}
            assert last.outputs == want.outputs

    run(main())


@pytest.mark.parametrize("n", [1, 2, 5])
def test_a_slow_readers_pieces_are_joined_for_each_choice(world, n):
    """However many choices: beyond MERGE_FROM pieces at most one more of each waits, and the end behind them."""
    params = SamplingParams(temperature=1.1, seed=3, n=n, max_tokens=90, logprobs=1, ignore_eos=True)
    want = world.plain.generate([1, 2, 3], params)[0]

    async def main() -> None:
        async with opened(world) as engine:
            slow = await engine.submit([1, 2, 3], params)
            await engine.drain()
            deltas = [d async for d in slow]
            assert MERGE_FROM <= len(deltas) <= MERGE_FROM + n + 1
            assert [p for d in deltas if d.index == 0 for p in d.logprobs] == want.outputs[0].logprobs
            check_deltas(deltas, want)

    run(main())


def test_a_reader_that_catches_up_gets_single_steps_again(world, monkeypatch):
    monkeypatch.setattr("paceline.async_llm.MERGE_FROM", 2)
    params = SamplingParams(temperature=1.1, seed=3, n=2, max_tokens=60, ignore_eos=True)
    want = world.plain.generate([1, 2, 3], params)[0]

    async def main() -> None:
        async with opened(world) as engine:
            stream = await engine.submit([1, 2, 3], params)
            deltas = []
            async for delta in stream:
                deltas.append(delta)
                if len(deltas) % 7 == 0:
                    await asyncio.sleep(0.02)
            assert not stream._newest and not stream._pieces
            check_deltas(deltas, want)

    run(main())


def test_a_prompt_alone_has_its_logprobs_and_no_token(world):
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=2, prompt_logprobs=2)
    want = world.plain.generate(PROMPTS[1], params)[0]

    async def main() -> None:
        async with opened(world) as engine:
            stream = await engine.submit(PROMPTS[1], params, prompt_only=True)
            [delta] = [d async for d in stream]
            assert (delta.text, delta.token_ids, delta.logprobs, delta.finish_reason) == ("", [], [], "length")
            [choice] = delta.output.outputs
            assert (choice.text, choice.token_ids, choice.logprobs) == ("", [], [])
            assert (choice.finish_reason, choice.stop_reason, choice.cumulative_logprob) == ("length", None, 0.0)
            assert delta.output.prompt_logprobs == want.prompt_logprobs
            stats = engine.stats()
            assert (stats.generation_tokens, stats.prompt_tokens) == (0, len(PROMPTS[1]))
            assert stats.finished == {"length": 1}

    run(main())


def test_engine_args(tiny_target):
    args = AsyncEngineArgs(model=str(tiny_target), threads=1, dtype="float32", speculative_config=None)
    args.max_model_len = 64
    args.disable_log_requests = True

    async def main() -> None:
        engine = AsyncLLM.from_engine_args(args, max_waiting=3)
        assert engine.llm.max_model_len == 64
        assert engine.capacity == engine.llm.engine.max_num_seqs + 3
        assert len((await engine.complete([1, 2], SamplingParams(max_tokens=4, ignore_eos=True))).outputs[0].text)
        engine.shutdown()
        assert not engine.alive
        engine.shutdown()

    run(main())


def test_engine_args_are_checked_by_the_engine(tiny_target):
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization.*kv_cache_space"):
        AsyncLLM.from_engine_args(EngineArgs(str(tiny_target), gpu_memory_utilization=0.9))
    with pytest.raises(ConfigError, match=r"engine_args: dict given; use AsyncEngineArgs\(model="):
        AsyncLLM.from_engine_args({"model": str(tiny_target)})  # type: ignore[arg-type]


def test_clones():
    params = SamplingParams(temperature=0.5, stop="x", logit_bias={3: 1.0}, seed=4)
    assert params.clone() == params
    assert params.clone(temperature=0).temperature == 0
    assert params.clone(temperature=0).clone(temperature=0.5) == params
    with pytest.raises(ConfigError, match="temperature=-1"):
        params.clone(temperature=-1)
    with pytest.raises(ConfigError, match=r"temprature.*'temperature'"):
        params.clone(temprature=1)
    with pytest.raises(FrozenInstanceError, match=r"temperature=0: .* cannot change; .*params.clone\(temperature="):
        params.temperature = 0  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(params)) == params


def test_output_kind_is_checked():
    with pytest.raises(ConfigError, match=r"output_kind='delta': use RequestOutputKind\.CUMULATIVE"):
        SamplingParams(output_kind="delta")  # type: ignore[arg-type]


def test_parameters_survive_json():
    """Kinds are numbers there, ids texts."""
    for kind in RequestOutputKind:
        params = SamplingParams(
            temperature=0.5, stop=["x"], logit_bias={3: 1.0}, output_kind=kind, structured_outputs={"regex": "a+"}
        )
        again = SamplingParams(**json.loads(json.dumps(asdict(params))))
        assert again == params and again.output_kind is kind
        assert copy.copy(params) == copy.deepcopy(params) == params
    for wrong in (3, -1, True, 1.0):
        with pytest.raises(ConfigError, match=f"output_kind={wrong}: use RequestOutputKind"):
            SamplingParams(output_kind=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_pieces_are_plain_values(world, kind):
    """They go through queues of processes, into JSON and into copies, which know what the pieces knew."""
    pieces = list(world.spec.stream(PROMPTS[0], PARAMS.clone(output_kind=kind, n=2, max_tokens=6)))
    for made in (lambda p: pickle.loads(pickle.dumps(p)), copy.copy, copy.deepcopy, lambda p: copy.copy(copy.copy(p))):
        for piece in pieces:
            again = made(piece)
            assert again == piece and again.outputs == piece.outputs
            assert (again.request_id, again.prompt, again.finished) == (piece.request_id, piece.prompt, piece.finished)
            assert again.prompt_token_ids == piece.prompt_token_ids
    for piece in pieces:
        found = json.loads(json.dumps(asdict(piece)))
        assert found["token_ids"] == piece.token_ids and "so_far" not in found
    assert pickle.loads(pickle.dumps(StreamDelta(0, "a", [1], [False], None))).text == "a"
    assert_idle(world.spec)


@pytest.mark.parametrize("wrong", [5, True, ["a"], [], b"a", SamplingParams()], ids=str)
def test_a_request_id_is_a_text(world, wrong):
    async def main() -> None:
        async with opened(world) as engine:
            with pytest.raises(ConfigError, match=r"^request_id=.*: use a string"):
                await engine.submit(PROMPTS[0], PARAMS, wrong)

    run(main())


def test_several_are_aborted_at_once(world):
    async def main() -> None:
        async with opened(world) as engine:
            with slowed(engine):
                streams = [await engine.submit([1, 2, 3], LONG, name) for name in "abc"]
                assert await engine.abort(["a", "c", "unknown"])
                assert list(engine._live) == ["b"]
            ends = [[delta async for delta in stream][-1].finish_reason for stream in streams]
            assert ends == ["abort", "length", "abort"]
            assert not await engine.abort([]) and not await engine.abort(["a", "unknown"])

    run(main())


def test_an_abort_reaches_a_request_that_is_being_prepared(world, monkeypatch):
    prepare, begun, go_on = world.spec._prepare, threading.Event(), threading.Event()

    def late(*args):
        begun.set()
        assert go_on.wait(600)
        return prepare(*args)

    async def main() -> None:
        async with opened(world) as engine:
            monkeypatch.setattr(world.spec, "_prepare", late)
            reading = asyncio.create_task(read(engine, PROMPTS[0], PARAMS, "a"))
            await asyncio.to_thread(begun.wait, 600)
            given_up = asyncio.create_task(engine.abort("a"))
            aborting = asyncio.create_task(engine.abort("a"))
            await asyncio.sleep(0)
            given_up.cancel()  # which leaves the others alone
            await asyncio.sleep(0)
            go_on.set()
            assert await aborting
            assert (await reading)[-1].finish_reason == "abort"
            begun.clear()
            go_on.clear()
            wrong = asyncio.create_task(engine.submit([V + 1], PARAMS, "b"))
            await asyncio.to_thread(begun.wait, 600)
            aborting = asyncio.create_task(engine.abort("b"))
            await asyncio.sleep(0)
            go_on.set()
            assert not await aborting
            with pytest.raises(ConfigError, match="outside the vocabulary"):
                await wrong

    run(main())


def test_a_stream_has_one_reader(world):
    """The second one is told so; it does not take the first one's place, who would wait for ever."""
    want = world.plain.generate(PROMPTS[0], PARAMS)[0]

    async def main() -> None:
        async with opened(world) as engine:
            with held(engine) as gate:
                stream = await engine.submit(PROMPTS[0], PARAMS)
                first = asyncio.create_task(anext(stream))
                await asyncio.sleep(0)
                with pytest.raises(RuntimeError, match="one reader"):
                    await anext(stream)
                gate.set()
                check_deltas([await first, *[delta async for delta in stream]], want)

    run(main())


def test_the_last_piece_alone_is_whole_whatever_its_kind(world):
    want = world.plain.generate(PROMPTS[0], PARAMS.clone(n=3))[0]

    async def main() -> None:
        async with opened(world) as engine:
            for kind in RequestOutputKind:
                stream = await engine.submit(PROMPTS[0], PARAMS.clone(n=3, output_kind=kind), last_only=True)
                [piece] = [delta async for delta in stream]
                assert piece.outputs == want.outputs

    run(main())


def test_options_of_vllm_that_ask_for_nothing(tiny_target):
    options = {"tokenizer": None, "enable_lora": False, "enable_chunked_prefill": True, "swap_space": None}
    args = EngineArgs(str(tiny_target), threads=1, dtype="float32", speculative_config=None, **options)
    assert args.open().max_model_len == SHAPE.context
    for name, value in (("enable_lora", True), ("tokenizer", "other"), ("max_modle_len", None)):
        with pytest.raises(ConfigError, match=f"^{name}: there is no such option"):
            EngineArgs(str(tiny_target), **{name: value}).open()


def test_images_beside_a_prompt_are_not_forgotten(world):
    with pytest.raises(ConfigError, match="'multi_modal_data' is not supported"):
        world.spec.generate({"prompt": "ab", "multi_modal_data": {"image": "x.png"}}, PARAMS)
    for nothing in (None, {}):
        assert world.spec.generate({"prompt": "ab", "multi_modal_data": nothing}, PARAMS)


def test_pieces_made_by_hand_have_no_request():
    with pytest.raises(AttributeError, match="made by hand"):
        _ = StreamDelta(0, "a", [1], [False], None).outputs


@pytest.mark.parametrize("count", [-1, V, V + 5])
def test_logprobs_of_the_whole_vocabulary(world, count):
    """Every id once, in order of rank, and probabilities that add up to one; drafts change nothing."""
    params = SamplingParams(temperature=1.1, seed=3, max_tokens=6, ignore_eos=True, logprobs=count)
    asked = params.clone(prompt_logprobs=count)
    want = world.plain.generate(PROMPTS[0], asked)[0]
    few = world.plain.generate(PROMPTS[0], params.clone(logprobs=3))[0].outputs[0]
    whole = want.outputs[0]
    for found in (*whole.logprobs, *want.prompt_logprobs[1:]):
        assert sorted(found) == list(range(world.vocab))
        assert sorted(entry.rank for entry in found.values()) == list(range(1, world.vocab + 1))
        assert sum(2.718281828459045**entry.logprob for entry in found.values()) == pytest.approx(1, abs=1e-4)
    for all_of_them, best in zip(whole.logprobs, few.logprobs, strict=True):
        assert {token: all_of_them[token] for token in best} == best
    _, oracle = known(world, PROMPTS[:1], params)
    with scripted(world.spec, half_right(oracle, V, 3)):
        spec = world.spec.generate(PROMPTS[0], asked)[0]
    assert (spec.outputs[0].logprobs, spec.prompt_logprobs) == (whole.logprobs, want.prompt_logprobs)


def test_other_arguments_of_vllms_generate(world):
    """Taken where they ask for nothing, beside text and messages; refused by name where they ask for something."""
    params = SamplingParams(temperature=0, seed=1, max_tokens=3, ignore_eos=True)
    nothing = {"lora_request": None, "priority": 0, "trace_headers": None, "prompt_text": None, "reasoning_ended": None}
    messages = [{"role": "user", "content": "ab"}]

    async def main() -> None:
        async with opened(world) as engine:
            for prompt in ("ab abc", messages):
                output = await engine.complete(prompt, params, "a", **nothing)
                assert output.outputs == (await engine.complete(prompt, params)).outputs
                for name, value in (("lora_request", "a LoRA"), ("priority", 3)):
                    with pytest.raises(ConfigError, match=f"^{name}={value!r}: is not supported; leave it out"):
                        await read(engine, prompt, params, "a", **{name: value})

    run(main())
