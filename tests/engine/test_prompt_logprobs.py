"""Log-probabilities of prompts: those of decoding token by token, whatever the cache has and the chunks are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from models.hybrid import HybridShape, write_hybrid

from paceline import LLM, SamplingParams
from paceline import engine as engine_module
from paceline.outputs import PromptLogprobs

from .conftest import DTYPES, SHAPE, World
from .harness import (
    assert_idle,
    assert_same,
    at_random,
    kib,
    open_llm,
    params_of,
    run_with_failing_passes,
    scripted,
)
from .test_lossless import QUICK, prompts

V = SHAPE.vocab


def bits(found: PromptLogprobs | None) -> list[Any]:
    assert found is not None
    return [
        None if at is None else [(i, e.logprob.hex(), e.rank, e.decoded_token) for i, e in at.items()] for at in found
    ]


def by_decoding(llm: LLM, prompt: list[int], count: int) -> list[Any]:
    """The same from the output's log-probabilities, one request per place: its token is forced by allowed_token_ids."""
    found: list[Any] = [None]
    for at in range(1, len(prompt)):
        params = params_of(max_tokens=1, logprobs=count, allowed_token_ids=[prompt[at]], ignore_eos=True)
        found += llm.generate(prompt[:at], params)[0].outputs[0].logprobs or ()
    return bits(found)


@pytest.mark.parametrize("dtype", DTYPES)
@QUICK
@given(
    batch=st.lists(st.tuples(prompts, st.sampled_from([None, 0, 1, 5])), min_size=1, max_size=5),
    chunk=st.sampled_from([1, 3, 1 << 20]),
    n=st.integers(1, 2),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_neither_neighbours_nor_drafts_nor_the_cache_change_them(worlds, dtype, batch, chunk, n, seed):
    """Alone and computed anew; then all at once, with drafts, twice, so that the cache knows the prompts, rows with
    logits being few or many. The outputs stay what they are without."""
    world = worlds[dtype]

    def asked(count: int | None) -> SamplingParams:
        return params_of(temperature=0.8, seed=seed, max_tokens=6, prompt_logprobs=count, n=n)

    want = []
    for prompt, count in batch:
        world.plain.reset_prefix_cache()
        want.append(world.plain.generate(prompt, asked(count))[0])
        [without] = world.plain.generate(prompt, asked(None))
        assert [c.token_ids for c in without.outputs] == [c.token_ids for c in want[-1].outputs]
    with pytest.MonkeyPatch.context() as patch, scripted(world.spec, at_random(V, seed)):
        patch.setattr(engine_module, "SCORED_BYTES", chunk * 4 * V)
        for _ in range(2):
            got = world.spec.generate([p for p, _ in batch], [asked(c) for _, c in batch], num_speculative_tokens=4)
            for mine, his, (prompt, count) in zip(got, want, batch, strict=True):
                assert_same(mine, his, batch)
                if count is None:
                    assert mine.prompt_logprobs is None
                else:
                    assert bits(mine.prompt_logprobs) == bits(his.prompt_logprobs)
                    assert len(mine.prompt_logprobs or ()) == len(prompt)
    assert_idle(world.spec)


def test_they_are_those_of_decoding(world: World):
    prompt = [7, 3, 3, 60, 2, 9, 9, 9, 41, 5, 0, 1] * 3
    for count in (0, 1, 4):
        output = world.plain.generate(prompt, params_of(max_tokens=1, prompt_logprobs=count))[0]
        assert bits(output.prompt_logprobs) == by_decoding(world.plain, prompt, count)
        assert output.num_cached_tokens == 0
        for at, token in zip((output.prompt_logprobs or ())[1:], prompt[1:], strict=True):
            assert at is not None and next(iter(at)) == token and count <= len(at) <= count + 1
            assert set(range(1, count + 1)) <= {entry.rank for entry in at.values()}


def test_all_of_the_vocabulary_sums_to_one(world: World):
    output = world.plain.generate([4, 8, 15], params_of(max_tokens=1, prompt_logprobs=10**6))[0]
    for at in (output.prompt_logprobs or ())[1:]:
        assert at is not None and len(at) == V
        assert abs(np.exp([entry.logprob for entry in at.values()]).sum() - 1) < 1e-4
        assert sorted(entry.rank for entry in at.values()) == list(range(1, V + 1))


def test_one_token_and_streams(world: World):
    [one] = world.plain.generate([5], params_of(max_tokens=1, prompt_logprobs=2))
    assert one.prompt_logprobs == [None]
    want = world.plain.generate([5, 6, 7], params_of(max_tokens=4, prompt_logprobs=2))[0]
    deltas = list(world.plain.stream([5, 6, 7], params_of(max_tokens=4, prompt_logprobs=2)))
    assert deltas[-1].output is not None and deltas[-1].output.prompt_logprobs == want.prompt_logprobs


def test_what_others_left_in_the_cache_is_computed_again_and_shared_on(world: World):
    """The cache is read by the request behind it, and by its own other choices."""
    llm = open_llm(world.folder, dtype=world.dtype)
    prompt = [(7 * i) % V for i in range(64)]
    llm.generate(prompt, params_of(max_tokens=1))
    asked = llm.generate(prompt, params_of(max_tokens=2, prompt_logprobs=1, n=3, temperature=1.0, seed=1))[0]
    assert asked.num_cached_tokens == 0
    assert llm.generate(prompt, params_of(max_tokens=1))[0].num_cached_tokens == 48
    assert llm.engine.scheduler.stats.hits >= 48 * 3
    assert_idle(llm)


def test_a_preempted_prompt_goes_on_where_it_was(world: World, monkeypatch: pytest.MonkeyPatch):
    """An earlier request takes its blocks when it has been read in part: rows that were scored may come from the cache,
    the others are computed."""
    monkeypatch.setattr(engine_module, "SCORED_BYTES", 4 * V)  # a row a pass
    alone = open_llm(world.folder, dtype=world.dtype)
    llm = open_llm(world.folder, dtype=world.dtype, kv_cache_space=kib(7, alone))
    prompts = [[9, 8, 7], [(11 * i) % V for i in range(70)]]
    params = [params_of(max_tokens=80, ignore_eos=True), params_of(max_tokens=5, seed=1, prompt_logprobs=2)]
    scored = []
    preempt = llm.engine.scheduler._preempt

    def noted(sequence: Any) -> None:
        scored.append(len(sequence.prompt_logprobs))
        preempt(sequence)

    monkeypatch.setattr(llm.engine.scheduler, "_preempt", noted)
    [_, got] = llm.generate(prompts, params)
    assert any(0 < count < 69 for count in scored)
    want = alone.generate(prompts[1], params[1])[0]
    assert_same(got, want, "preempted")
    assert bits(got.prompt_logprobs) == bits(want.prompt_logprobs)
    assert_idle(llm)


def test_passes_that_fail_are_made_again(world: World):
    prompt, params = [(3 * i) % V for i in range(60)], params_of(max_tokens=5, prompt_logprobs=1, seed=1)
    want = world.plain.generate(prompt, params)[0]
    request = world.spec._add(prompt, params, (0, True))
    run_with_failing_passes(world.spec)
    assert bits(request.output().prompt_logprobs) == bits(want.prompt_logprobs)
    assert_idle(world.spec)


def test_a_recurrent_model_leaves_its_states_for_others(tmp_path):
    folder = write_hybrid(tmp_path, HybridShape(), tokenizer=True)
    llm = open_llm(folder, max_num_batched_tokens=24)
    vocab = llm.model.vocab_size
    prompt = [(5 * i) % vocab for i in range(50)]
    want = llm.generate(prompt, params_of(max_tokens=3, prompt_logprobs=2, seed=1))[0]
    assert llm.generate(prompt, params_of(max_tokens=1))[0].num_cached_tokens
    again = llm.generate(prompt, params_of(max_tokens=3, prompt_logprobs=2, seed=1))[0]
    assert again.num_cached_tokens == 0 and bits(again.prompt_logprobs) == bits(want.prompt_logprobs)
    assert_same(again, want, "again")
    assert_idle(llm)
