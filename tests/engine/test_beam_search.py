"""`LLM.beam_search` against all sequences there are, and against the rules written out over whole distributions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cache

import pytest
from models.hybrid import HybridShape, write_hybrid

from paceline import AsyncLLM, BeamSearchParams, SamplingParams
from paceline.beam_search import BeamSearchSequence
from paceline.errors import CapacityError, ConfigError

from .harness import assert_idle, kib, open_llm

PROMPTS = [[1, 2, 3], [9, 8, 7, 6, 5] * 8, [30, 31] * 3]
Distribution = Callable[[tuple[int, ...]], list[float]]


@pytest.fixture
def ends(world, monkeypatch) -> tuple[int, ...]:
    """Tokens that end a sequence: some of the likely ones, or none would ever do."""
    found = (17, 40, 41, 77)
    for llm in (world.plain, world.spec):
        monkeypatch.setattr(llm.tokenizer, "eos_token_ids", found)
    return found


def distribution(world) -> Distribution:
    """Log-probabilities of all tokens behind a text, by another way: those of a prompt."""
    asked = SamplingParams(max_tokens=1, prompt_logprobs=-1)

    @cache
    def of(tokens: tuple[int, ...]) -> list[float]:
        found = world.plain.generate([*tokens, 0], asked)[0].prompt_logprobs[-1]
        return [found[token].logprob for token in range(world.vocab)]

    return of


def as_tuple(s: BeamSearchSequence) -> tuple[tuple[int, ...], float, str | None, int | str | None]:
    return tuple(s.tokens), s.cum_logprob, s.finish_reason, s.stop_reason


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.5])
def test_a_beam_that_holds_everything_finds_the_best_of_all_sequences(world, ends, penalty):
    """With as many beams as there are tokens nothing is lost within two steps: all 14,000 sequences are compared."""
    of, prompt, width = distribution(world), tuple(PROMPTS[0]), world.vocab
    every = []
    for token, first in enumerate(of(prompt)):
        if token in ends:
            every.append((first / len(prompt) ** penalty, (*prompt,), first, "stop"))
            continue
        for other, second in enumerate(of((*prompt, token))):
            tokens, reason = ((*prompt, token), "stop") if other in ends else ((*prompt, token, other), "length")
            every.append(((first + second) / len(tokens) ** penalty, tokens, first + second, reason))
    every.sort(key=lambda found: -found[0])
    params = BeamSearchParams(beam_width=width, max_tokens=2, length_penalty=penalty)
    [output] = world.spec.beam_search([list(prompt)], params)
    assert len(output.sequences) == width
    assert [s.cum_logprob for s in output.sequences] == [total for _, _, total, _ in every[:width]]
    found = sorted((tuple(s.tokens), s.finish_reason) for s in output.sequences)
    assert found == sorted((tokens, reason) for _, tokens, _, reason in every[:width])
    if penalty < 2:
        assert {s.finish_reason for s in output.sequences} == {"stop", "length"}
    assert_idle(world.spec)


def by_the_rules(of: Distribution, prompt: list[int], params: BeamSearchParams, ends: tuple[int, ...]) -> list:
    """Beam search as vLLM describes it, over whole distributions."""
    stops = () if params.ignore_eos else ends
    seen = max(2 * params.beam_width, params.beam_width + len(stops))
    live, ended = [(tuple(prompt), 0.0)], []

    def score(tokens: tuple[int, ...], total: float, reason: str) -> float:
        kept_end = reason == "stop" and params.include_stop_str_in_output
        return total / (len(tokens) - kept_end) ** params.length_penalty

    for _ in range(params.max_tokens):
        found = []
        for tokens, total in live:
            values = of(tokens)
            for token in sorted(range(len(values)), key=lambda t: (-values[t], t))[:seen]:
                if token in stops:
                    kept = (*tokens, token) if params.include_stop_str_in_output else tokens
                    ended.append((kept, total + values[token], "stop", token))
                else:
                    found.append(((*tokens, token), total + values[token]))
        live = sorted(found, key=lambda f: -score(f[0], f[1], "length"))[: params.beam_width]
    every = [*ended, *((*beam, "length", None) for beam in live)]
    return sorted(every, key=lambda f: -score(*f[:3]))[: params.beam_width]


@pytest.mark.parametrize(
    "options",
    [
        {"beam_width": 1},
        {"beam_width": 2},
        {"beam_width": 4, "include_stop_str_in_output": True},
        {"beam_width": 3, "length_penalty": 0.0},
        {"beam_width": 3, "length_penalty": 3.0, "ignore_eos": True},
    ],
    ids=str,
)
def test_narrow_beams_keep_to_the_rules(world, ends, options):
    """Several prompts side by side, on a small cache with preemption, as each alone would go."""
    params = BeamSearchParams(max_tokens=6, **options)
    of = distribution(world)
    outputs = world.spec.beam_search(PROMPTS, params)
    assert len(outputs) == len(PROMPTS)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert [as_tuple(s) for s in output.sequences] == by_the_rules(of, prompt, params, ends)
        for s in output.sequences:
            assert s.text == world.plain.tokenizer.decode(s.tokens, skip_special_tokens=False)
            assert s.tokens[: len(prompt)] == prompt
            made = [*s.tokens[len(prompt) :]]
            if s.finish_reason == "stop" and not params.include_stop_str_in_output:
                made.append(s.stop_reason)
            total = 0.0
            for token, found in zip(made, s.logprobs, strict=True):
                total += found[token].logprob
            assert s.cum_logprob == total
    assert_idle(world.spec)


def test_one_beam_without_ends_is_greedy_decoding(world):
    params = BeamSearchParams(1, 12, ignore_eos=True)
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for prompt in ("ab abc", PROMPTS[1], {"prompt_token_ids": PROMPTS[0], "cache_salt": "mine"}):
        [output] = world.spec.beam_search(prompt, params)
        want = world.plain.generate(prompt, greedy)[0]
        assert output.sequences[0].tokens == [*want.prompt_token_ids, *want.outputs[0].token_ids]


def test_beams_end_where_the_context_does(world):
    room = 3
    prompt = [5] * (world.plain.max_model_len - room)
    [output] = world.plain.beam_search([prompt], BeamSearchParams(2, 50, ignore_eos=True))
    assert [(len(s.tokens), s.finish_reason) for s in output.sequences] == [(world.plain.max_model_len, "length")] * 2
    with pytest.raises(CapacityError, match="prompt"):
        world.plain.beam_search([[5] * world.plain.max_model_len], BeamSearchParams(2, 5))


def test_beams_that_will_not_fit_the_cache_are_refused_before_anything_runs(tiny_target, world):
    """As for `generate`, not after as many steps as fit. What just fits is served, and what the context ends too."""
    small = open_llm(tiny_target, None, kv_cache_space=kib(3, world.plain), dtype=world.dtype)
    assert small.engine.pool.size == 3
    with pytest.raises(CapacityError, match=r"prompt and max_tokens: 49 tokens do not fit the cache of 48"):
        small.beam_search([[5, 6], [5] * 40], BeamSearchParams(2, 9))
    assert small.engine.scheduler.stats.queries == 0
    [_, output] = small.beam_search([[5, 6], [5] * 40], BeamSearchParams(4, 8, ignore_eos=True))
    assert {len(s.tokens) for s in output.sequences} == {48} and len(output.sequences) == 4
    assert_idle(small)


def test_more_beams_than_tokens(world, ends):
    [output] = world.spec.beam_search([PROMPTS[0]], BeamSearchParams(world.vocab + 9, 1))
    assert sorted(s.stop_reason or s.tokens[-1] for s in output.sequences) == list(range(world.vocab))


def test_vllms_other_arguments(world):
    params = BeamSearchParams(2, 4)
    want = world.spec.beam_search(PROMPTS, params)
    for limit in (1, 2, 9, None):
        assert world.spec.beam_search(PROMPTS, params, None, True, limit) == want
    assert world.spec.beam_search([], params) == []
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(ConfigError, match=f"^concurrency_limit={wrong}: use a whole number"):
            world.spec.beam_search(PROMPTS, params, concurrency_limit=wrong)
    with pytest.raises(ConfigError, match=r"^lora_request='a': is not supported"):
        world.spec.beam_search(PROMPTS, params, lora_request="a")  # type: ignore[arg-type]


def test_beams_beside_requests_of_an_engines_thread(world, ends):
    """They share the passes: both are what each is alone, and nothing is left."""
    params = BeamSearchParams(3, 6)
    sampled = SamplingParams(temperature=1.1, seed=3, max_tokens=60, ignore_eos=True, logprobs=1)
    want, text = world.plain.beam_search(PROMPTS, params), world.plain.generate([1, 2, 3], sampled)[0]

    async def main() -> None:
        engine = AsyncLLM(world.spec)
        try:
            streams = [await engine.submit([1, 2, 3], sampled) for _ in range(2)]
            assert await asyncio.to_thread(world.spec.beam_search, PROMPTS, params) == want
            for stream in streams:
                assert [d async for d in stream][-1].output.outputs == text.outputs
            assert_idle(world.spec)
        finally:
            await engine.close()

    asyncio.run(asyncio.wait_for(main(), 600))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("beam_width", 0),
        ("beam_width", True),
        ("max_tokens", 0),
        ("ignore_eos", 1),
        ("temperature", 0.7),
        ("length_penalty", float("nan")),
        ("length_penalty", -33.0),
        ("include_stop_str_in_output", None),
        ("beam_size", 3),
    ],
)
def test_parameters_are_checked(field, value):
    with pytest.raises(ConfigError, match=f"^{field}={value!r}: "):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, field: value})


def test_other_parameters_are_refused_with_the_remedy(world):
    with pytest.raises(ConfigError, match=r"params: SamplingParams given; use BeamSearchParams\(beam_width="):
        world.plain.beam_search(["ab"], SamplingParams())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"use_beam_search=True: use LLM\.beam_search"):
        SamplingParams(use_beam_search=True)  # type: ignore[call-arg]


def test_recurrent_states_of_beams(tmp_path):
    """Beams share beginnings and part ways: with a prefix cache each finds its own state or computes it again."""
    folder = write_hybrid(tmp_path, HybridShape(context=256), tokenizer=True)
    params = BeamSearchParams(3, 20, ignore_eos=True)
    prompts = [[5, 6, 7], list(range(40))]
    cached, anew = (open_llm(folder, None, enable_prefix_caching=on) for on in (True, False))
    found = [[as_tuple(s) for o in llm.beam_search(prompts, params) for s in o.sequences] for llm in (cached, anew)]
    assert found[0] == found[1] and len(found[0]) == 6
    greedy = anew.generate(prompts, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    alone = anew.beam_search(prompts, BeamSearchParams(1, 20, ignore_eos=True))
    for output, want in zip(alone, greedy, strict=True):
        assert output.sequences[0].tokens == [*want.prompt_token_ids, *want.outputs[0].token_ids]
    assert_idle(cached)
