"""Whatever a drafter proposes, a client sees what plain decoding gives: ids, text, log-probabilities bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from paceline import SamplingParams
from paceline.outputs import RequestOutput

from .conftest import DTYPES, SHAPE, World
from .harness import (
    Oracle,
    Script,
    Scripted,
    alternating,
    assert_idle,
    assert_same,
    assert_stats,
    at_random,
    half_right,
    nothing,
    open_llm,
    repeat_last,
    scripted,
    wrong,
)

V = SHAPE.vocab
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), phases=PHASES)
STOPS = ["ab", "a", "h", "ha ha", "é", "€", "\n\n", "bc", " a", "g0", "😀", "dd", "e1"]

tokens = st.integers(0, V - 1)
prompts = st.one_of(
    st.lists(tokens, min_size=1, max_size=70),
    st.builds(lambda part, times: part * times, st.lists(tokens, min_size=1, max_size=5), st.integers(1, 12)),
)


@st.composite
def sampling(draw: Any) -> SamplingParams:
    """Any parameters, each in use about a third of the time."""

    def maybe(values: st.SearchStrategy[Any]) -> Any:
        return draw(values) if draw(st.integers(0, 2)) == 0 else None

    chosen = {
        "top_p": maybe(st.sampled_from([0.5, 0.9, 0.99])),
        "top_k": maybe(st.integers(1, 30)),
        "min_p": maybe(st.sampled_from([0.05, 0.5])),
        "repetition_penalty": maybe(st.sampled_from([0.7, 1.3, 2.0])),
        "presence_penalty": maybe(st.sampled_from([-0.5, 1.0])),
        "frequency_penalty": maybe(st.sampled_from([-0.3, 0.8])),
        "logit_bias": maybe(st.dictionaries(tokens, st.sampled_from([-100.0, -2.0, 2.0, 5.0]), max_size=4)),
        "stop": maybe(st.lists(st.sampled_from(STOPS), min_size=1, max_size=3)),
        "stop_token_ids": maybe(st.lists(tokens, min_size=1, max_size=6)),
        "include_stop_str_in_output": maybe(st.just(True)),
        "ignore_eos": maybe(st.just(True)),
        "logprobs": maybe(st.sampled_from([0, 3])),
        "prompt_logprobs": maybe(st.sampled_from([0, 2])),
        "n": maybe(st.integers(2, 3)),
        "skip_special_tokens": maybe(st.just(False)),
        "allowed_token_ids": maybe(st.lists(tokens, min_size=20, unique=True)),
        "bad_words": maybe(st.lists(st.sampled_from(STOPS), max_size=4)),
    }
    limit = draw(st.sampled_from([1, 2, 5, 17, 30, 30, 30, None]))
    if limit is not None and limit > 1:
        chosen["min_tokens"] = maybe(st.integers(1, limit))
    return SamplingParams(
        max_tokens=limit,
        temperature=draw(st.sampled_from([0.0, 0.0, 0.7, 1.0, 1.5])),
        seed=draw(st.integers(0, (1 << 64) - 1)),
        **{name: value for name, value in chosen.items() if value is not None},
    )


def without_stops(p: SamplingParams) -> SamplingParams:
    """As long as possible with the same draws. With min_tokens the stops decide which ids are banned: they stay."""
    fields = {name: getattr(p, name) for name in SamplingParams.__dataclass_fields__}
    if not p.min_tokens:
        fields |= {"stop": (), "stop_token_ids": (), "ignore_eos": True}
    return SamplingParams(**{**fields, "max_tokens": None, "logprobs": None})


SCRIPTS = ("oracle", "far-sighted oracle", "wrong", "half right", "alternating", "random", "repeat", "nothing")


def script_for(name: str, oracle: Oracle, seed: int) -> Script:
    scripts: dict[str, Script] = {
        "oracle": oracle,
        "far-sighted oracle": oracle,
        "wrong": wrong(oracle, V),
        "half right": half_right(oracle, V, seed),
        "alternating": alternating(oracle),
        "random": at_random(V, seed),
        "repeat": repeat_last,
        "nothing": nothing,
    }
    return scripts[name]


Alone = dict[tuple[Any, ...], RequestOutput]


def check_batch(
    world: World,
    batch: list[tuple[list[int], SamplingParams]],
    kind: str,
    drafts: int,
    seed: int,
    alone: Alone | None = None,
) -> list[RequestOutput]:
    """Each request alone and plain, which is returned, then all of them at once with drafts. `alone` keeps the former
    for tests whose requests come again."""
    about = f"{world.dtype}, script {kind}, {drafts} drafts, seed {seed}, batch {batch}"
    known: Alone = {} if alone is None else alone

    def plainly(prompt: list[int], params: SamplingParams) -> RequestOutput:
        key = (world.dtype, tuple(prompt), repr(params))
        if key not in known:
            known[key] = world.plain.generate(prompt, params)[0]
        return known[key]

    want = [plainly(prompt, params) for prompt, params in batch]
    oracle = Oracle()
    for (prompt, params), output in zip(batch, want, strict=True):
        far = kind != "oracle"
        oracle.learn(plainly(prompt, without_stops(params)) if far else output)
    with scripted(world.spec, script_for(kind, oracle, seed)):
        got = world.spec.generate([b[0] for b in batch], [b[1] for b in batch], num_speculative_tokens=drafts)
    for mine, his in zip(got, want, strict=True):
        assert_same(mine, his, about)
        assert_stats(mine)
        stats = mine.metrics.spec_decode
        if "oracle" in kind or kind == "alternating":
            assert stats.num_accepted_tokens == stats.num_draft_tokens, about
        if kind == "wrong":
            assert stats.num_accepted_tokens == 0, about
    assert_idle(world.spec)
    assert_idle(world.plain)
    return want


def distinct(batch: list[tuple[list[int], SamplingParams]]) -> list[tuple[list[int], SamplingParams]]:
    """The oracle tells requests apart by prompt and seed."""
    return list({(tuple(prompt), params.seed): (prompt, params) for prompt, params in batch}.values())


batches = st.lists(st.tuples(prompts, sampling()), min_size=1, max_size=5).map(distinct)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(QUICK)
@given(batch=batches, kind=st.sampled_from(SCRIPTS), drafts=st.integers(1, 7), seed=st.integers(0, 99))
def test_any_request_with_any_drafts(worlds, dtype, batch, kind, drafts, seed):
    check_batch(worlds[dtype], batch, kind, drafts, seed)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@settings(QUICK, max_examples=400)
@given(batch=batches, kind=st.sampled_from(SCRIPTS), drafts=st.integers(1, 7), seed=st.integers(0, 99))
def test_any_request_with_any_drafts_at_length(worlds, dtype, batch, kind, drafts, seed):
    check_batch(worlds[dtype], batch, kind, drafts, seed)


@pytest.fixture(scope="module")
def alone() -> Alone:
    return {}


@pytest.mark.parametrize("kind", SCRIPTS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_many_sequences_at_once_equal_each_alone(world, alone, kind, temperature):
    """More than run at once, more than the cache holds, prompts longer than a pass."""
    rng = np.random.default_rng(5)
    batch = [
        (
            rng.integers(0, V, rng.integers(1, 90)).tolist(),
            SamplingParams(temperature=temperature, seed=i, max_tokens=int(rng.integers(1, 50)), logprobs=1),
        )
        for i in range(14)
    ]
    check_batch(world, batch, kind, 7, 3, alone)


def test_the_same_prompt_many_times(world):
    """Identical neighbours: equal outputs, and acceptance that does not depend on how many there are."""
    prompt, params = [3, 1, 4, 1, 5, 9, 2, 6] * 3, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    want = world.plain.generate(prompt, params)[0]
    rates = set()
    llm = open_llm(world.folder, Scripted(), dtype=world.dtype)  # with room: a full cache shortens drafts
    for count in (1, 4, 16):
        known = world.plain.generate(prompt, SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))[0]

        def script(sequence: Any, limit: int, ids: list[int] = known.outputs[0].token_ids) -> list[int]:
            done = sequence.num_output_tokens
            return [*ids[done : done + 3], 0, 0][:limit]  # right up to the fourth

        with scripted(llm, script):
            got = llm.generate([prompt] * count, params, num_speculative_tokens=4)
        for output in got:
            # unseeded: every request has its own seed, which greedy decoding does not use
            assert output.outputs[0].token_ids == want.outputs[0].token_ids
            rates.add(output.metrics.spec_decode.acceptance_rate)
    assert len(rates) == 1, rates


def test_draft_lengths_do_not_matter(world):
    prompt, params = [7, 8, 9, 10] * 6, SamplingParams(temperature=0.9, seed=17, max_tokens=50, logprobs=2)
    want = world.plain.generate(prompt, params)[0]
    oracle = Oracle()
    oracle.learn(want)
    steps = {}
    for drafts in range(0, 8):
        with scripted(world.spec, oracle):
            got = world.spec.generate(prompt, params, num_speculative_tokens=drafts)[0]
        assert_same(got, want, drafts)
        steps[drafts] = got.metrics.spec_decode.num_drafts
    assert steps[0] == 0
    length = len(want.outputs[0].token_ids)
    assert steps[7] <= -(-(length - 1) // 8) + 1, "an oracle's drafts are taken whole"
    with scripted(world.spec, oracle):
        off = world.spec.generate(prompt, params, speculation=False)[0]
    assert_same(off, want, "speculation=False")
    assert off.metrics.spec_decode.num_drafts == 0


@pytest.mark.parametrize("lengths", ["measured", "at random"])
def test_lengths_chosen_step_by_step_do_not_matter(tiny_target, world, lengths):
    """Without a fixed number the clock chooses, each step, for each sequence; and so might anything else."""
    options: dict[str, Any] = {"dtype": world.dtype, "max_num_batched_tokens": 24, "max_num_seqs": 6}
    llm = open_llm(tiny_target, Scripted(), adaptive=True, **options)
    if lengths == "at random":
        rng = np.random.default_rng(2)

        def at_random_lengths(
            requests: Any, limits: Any, others: int = 0, found: Any = (), decoding: int = 0
        ) -> list[int]:
            return [int(rng.integers(0, limit + 1)) for limit in limits]

        llm.engine.lengths.choose = at_random_lengths  # type: ignore[method-assign]
    prompts = [[(5 * i + j) % V for i in range(10 * j + 1)] for j in range(8)]
    params = [SamplingParams(temperature=0.8, seed=j, max_tokens=50, logprobs=1, ignore_eos=True) for j in range(8)]
    want, oracle = [world.plain.generate(p, q)[0] for p, q in zip(prompts, params, strict=True)], Oracle()
    for output in want:
        oracle.learn(output)
    for script in (oracle, half_right(oracle, V, 3), wrong(oracle, V)):
        with scripted(llm, script):
            for mine, his in zip(llm.generate(prompts, params), want, strict=True):
                assert_same(mine, his, lengths)
                assert_stats(mine)
    assert_idle(llm)


def test_seeds(world):
    """The same seed gives the same text whatever runs beside it; requests without one differ."""
    prompt = [11, 12, 13]
    params = SamplingParams(temperature=1.5, seed=99, max_tokens=20, ignore_eos=True)
    free = SamplingParams(temperature=1.5, max_tokens=20, ignore_eos=True)
    alone = world.plain.generate(prompt, params)[0].outputs[0].token_ids
    with scripted(world.spec, at_random(V, 1)):
        beside = world.spec.generate([prompt] * 6, [free, params, free, params, free, free])
    ids = [o.outputs[0].token_ids for o in beside]
    assert ids[1] == ids[3] == alone
    assert len({tuple(i) for n, i in enumerate(ids) if n not in (1, 3)}) == 4
    # an unseeded request names the seed that draws it again
    for output in beside:
        again = world.plain.generate(
            prompt, SamplingParams(temperature=1.5, seed=output.outputs[0].seed, max_tokens=20, ignore_eos=True)
        )
        assert again[0].outputs[0].token_ids == output.outputs[0].token_ids
    # choices of a request differ from each other
    several = world.spec.generate(prompt, SamplingParams(temperature=1.5, seed=99, n=4, max_tokens=20, ignore_eos=True))
    assert several[0].outputs[0].token_ids == alone
    assert len({tuple(c.token_ids) for c in several[0].outputs}) == 4
