"""`allowed_token_ids` and `bad_words`: every token keeps to them, anywhere in a block of drafts; and where they end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from paceline import LLM, AsyncLLM, SamplingParams
from paceline.errors import ConfigError
from paceline.outputs import CompletionOutput
from paceline.token_masks import bad_word_ids, read_masks
from paceline.tokenizer import Tokenizer

from .conftest import DTYPES, SHAPE, World
from .harness import assert_idle, nothing, params_of, repeat_last, scripted
from .test_lossless import QUICK, SCRIPTS, check_batch, distinct, prompts

V = SHAPE.vocab
LETTERS = "GHIJKLMN"  # each a token of its own, whatever stands beside it
END = V - 1


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def holds(output: Sequence[int], word: Sequence[int]) -> bool:
    return any(list(output[i : i + len(word)]) == list(word) for i in range(len(output)))


def check_masks(tokenizer: Tokenizer, params: SamplingParams, choice: CompletionOutput) -> None:
    for word in bad_word_ids(params.bad_words or (), tokenizer, V):
        assert not holds(choice.token_ids, word), (params, choice)
    assert set(choice.token_ids) <= set(params.allowed_token_ids or range(V))
    if choice.finish_reason == "abort":
        assert "no token is left" in str(choice.stop_reason) and params.allowed_token_ids


@st.composite
def masked(draw: Any) -> SamplingParams:
    """Few ids, so that words of them come up often, and now and then no token is left."""
    letters = draw(st.lists(st.sampled_from(LETTERS), min_size=1, max_size=4, unique=True))
    words = st.lists(st.sampled_from(letters), min_size=1, max_size=3).map("".join)
    allowed = [*(53 + LETTERS.index(letter) for letter in letters), *draw(st.sampled_from([[], [END], [0, 60]]))]
    return SamplingParams(
        max_tokens=draw(st.sampled_from([1, 6, 25])),
        temperature=draw(st.sampled_from([0.0, 0.8, 1.5])),
        seed=draw(st.integers(0, (1 << 64) - 1)),
        allowed_token_ids=allowed if draw(st.integers(0, 3)) else None,
        bad_words=draw(st.lists(words, max_size=5)),
        min_tokens=draw(st.sampled_from([0, 0, 1])),
        repetition_penalty=draw(st.sampled_from([1.0, 0.7])),
        logprobs=draw(st.sampled_from([None, 2])),
        n=draw(st.integers(1, 2)),
    )


def can_begin(world: World, params: SamplingParams) -> bool:
    try:
        read_masks(params, world.plain.tokenizer, V, [END])
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("dtype", DTYPES)
@QUICK
@given(
    batch=st.lists(st.tuples(prompts, masked()), min_size=1, max_size=4).map(distinct),
    kind=st.sampled_from(SCRIPTS),
    drafts=st.integers(1, 7),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_no_token_breaks_the_masks_and_drafts_change_nothing(worlds, dtype, batch, kind, drafts, seed):
    world = worlds[dtype]
    assume(all(can_begin(world, params) for _, params in batch))
    for (_, params), output in zip(batch, check_batch(world, batch, kind, drafts, seed), strict=True):
        for choice in output.outputs:
            check_masks(world.plain.tokenizer, params, choice)


def test_a_bad_word_is_ruled_out_where_it_would_be_generated(world: World):
    """Greedy decoding goes the other way at the word's last token, with a space before it too, and nowhere sooner."""
    free = world.plain.generate([5, 6, 7], params_of(ignore_eos=True))[0].outputs[0].token_ids
    tokenizer = world.plain.tokenizer
    at, word = next(
        (i, tokenizer.decode(free[i : i + 2]))
        for i in range(len(free) - 1)
        if ids_of(tokenizer, tokenizer.decode(free[i : i + 2])) == free[i : i + 2] and free[i] != 0
    )
    first = next(i for i in range(len(free)) if free[i : i + 2] == free[at : at + 2])
    for bad in (word, f" {word}"):
        params = params_of(ignore_eos=True, bad_words=[bad])
        with scripted(world.spec, lambda sequence, limit: free[sequence.num_output_tokens :][:limit]):
            got = world.spec.generate([5, 6, 7], params, num_speculative_tokens=5)[0].outputs[0].token_ids
        assert got[: first + 1] == free[: first + 1] and got[first + 1] != free[first + 1]
        assert not holds(got, free[at : at + 2])


def test_where_no_token_is_left_the_output_ends_and_others_go_on(world: World):
    """H may follow G, and then nothing: H H is a bad word, and so is H G."""
    asked = {"allowed_token_ids": [53, 54], "bad_words": ["GG", "HH", "HG"], "logit_bias": {53: 50.0}, "logprobs": 1}
    fine = params_of(ignore_eos=True, max_tokens=30)
    want = world.plain.generate([5, 6], fine)[0].outputs[0].token_ids
    for temperature in (0.0, 1.0):
        params = params_of(**asked, temperature=temperature, seed=3, max_tokens=9)
        for script in (nothing, repeat_last, lambda sequence, limit: [54, 54, 53][:limit]):
            with scripted(world.spec, script):
                dead, other = world.spec.generate([[9], [5, 6]], [params, fine], num_speculative_tokens=4)
            [choice] = dead.outputs
            assert choice.token_ids == [53, 54] and choice.text == "GH" and len(choice.logprobs or ()) == 2
            assert choice.finish_reason == "abort"
            assert choice.stop_reason == "allowed_token_ids, bad_words: no token is left that may follow"
            assert other.outputs[0].token_ids == want
    with scripted(world.spec, nothing):
        deltas = list(world.spec.stream([9], params_of(**asked)))
    assert [i for d in deltas for i in d.token_ids] == [53, 54] and deltas[-1].finish_reason == "abort"
    assert deltas[-1].output is not None
    assert_idle(world.spec)


def test_a_limit_that_comes_first_is_no_dead_end(world: World):
    params = params_of(allowed_token_ids=[53, 54], bad_words=["GG", "HH", "HG"], logit_bias={53: 50.0}, max_tokens=2)
    [choice] = world.plain.generate([9], params)[0].outputs
    assert (choice.token_ids, choice.finish_reason) == ([53, 54], "length")


def test_a_grammar_and_masks_leave_what_both_permit(world: World):
    asked: dict[str, Any] = {"structured_outputs": {"regex": "[GHI]{6}"}, "temperature": 1.0, "max_tokens": 20}
    for seed in range(8):
        params = SamplingParams(**asked, seed=seed, allowed_token_ids=[54, 55, 56, END], bad_words=["II", "HHH"])
        for script in (nothing, repeat_last, lambda sequence, limit: [54, 55, 54, 55, 55][:limit]):
            with scripted(world.spec, script):
                [choice] = world.spec.generate([9], params, num_speculative_tokens=5)[0].outputs
            check_masks(world.plain.tokenizer, params, choice)
            assert len(choice.text) == 6 and set(choice.text) <= set("HI") and choice.finish_reason == "stop"
            assert choice.token_ids == world.plain.generate([9], params)[0].outputs[0].token_ids
    dead = SamplingParams(**asked, seed=1, allowed_token_ids=[60, 61], logprobs=1)
    [choice] = world.spec.generate([9], dead)[0].outputs
    assert (choice.token_ids, choice.finish_reason) == ([], "abort")
    assert choice.logprobs == [] and isinstance(choice.cumulative_logprob, float)
    assert str(choice.stop_reason).startswith("allowed_token_ids, structured_outputs: no token is left")
    assert_idle(world.spec)


def test_drafts_that_are_ruled_out_are_not_verified(world: World):
    params = params_of(allowed_token_ids=[53, 54], max_tokens=12)
    with scripted(world.spec, lambda sequence, limit: [53, 54, 60, 53, 53][:limit]):
        stats = world.spec.generate([9], params, num_speculative_tokens=5)[0].metrics.spec_decode
    assert stats.num_draft_tokens <= 2 * stats.num_drafts and stats.num_drafts


@pytest.mark.parametrize("sampler", ["coupled", "rejection"])
def test_both_samplers_with_prompt_lookup(tiny_target: Path, sampler: Any):
    lookup = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1}
    llm = LLM(tiny_target, speculative_config=lookup, sampler=sampler, threads=1, dtype="float32")
    prompt = ids_of(llm.tokenizer, "GHGHIIGHGHIIGHGH")
    for seed in range(20):
        params = SamplingParams(
            seed=seed, max_tokens=30, allowed_token_ids=range(53, 58), bad_words=["GHG", "I"], ignore_eos=True
        )
        output = llm.generate([prompt], params, num_speculative_tokens=5)[0]
        assert len(output.outputs[0].token_ids) == 30 and output.metrics.spec_decode.num_drafts
        check_masks(llm.tokenizer, params, output.outputs[0])
    assert_idle(llm)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"allowed_token_ids": [3, V]}, f"allowed_token_ids: token id {V} is outside the vocabulary of {V}"),
        ({"allowed_token_ids": [53], "bad_words": ["H", "G"]}, r"allowed_token_ids=\[53\]: bad_words rule all of them"),
        (
            {"allowed_token_ids": [END], "min_tokens": 2},
            rf"allowed_token_ids=\[{END}\]: all that is left .* stops",
        ),
    ],
)
def test_masks_that_cannot_work_are_named_before_anything_runs(world: World, fields: dict[str, Any], told: str):
    with pytest.raises(ConfigError, match=told):
        world.plain.generate([5], SamplingParams(**fields))
    assert_idle(world.plain)


def test_words_as_tokens(world: World):
    """As they begin a text and behind a space; spaces alone are themselves."""
    tokenizer = world.plain.tokenizer
    assert bad_word_ids(["a", " a", "G"], tokenizer, V) == [[1], [99], [53], [0, 53]]
    assert bad_word_ids([" ", "\n"], tokenizer, V) == [[0], [0, 0], [9], [0, 9]]
    with pytest.raises(ConfigError, match="no tokens"):
        bad_word_ids(["\ufffd"], tokenizer, V)

    class Silent:
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            return []

    with pytest.raises(ConfigError, match="bad_words='x'"):
        bad_word_ids(["x"], Silent(), V)  # type: ignore[arg-type]


def test_ends_that_masks_make_are_counted(world: World):
    async def main() -> dict[str, int]:
        engine = AsyncLLM(world.spec)
        try:
            for asked in ({"bad_words": ["GG"]}, {"structured_outputs": {"regex": "[HI]"}}, {"max_tokens": 1}):
                await engine.complete([9], SamplingParams(allowed_token_ids=[53], **asked))
            return engine.stats().finished
        finally:
            await engine.close()

    with scripted(world.spec, nothing):
        assert asyncio.run(main()) == {"abort": 2, "length": 1}
    assert_idle(world.spec)
