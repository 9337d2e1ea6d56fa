"""The layer that the step loop uses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import sampling
from paceline.sampling_params import SamplingParams

VOCAB = 120


def toy_logits(tokens: list[int]) -> np.ndarray:
    """A language model: the row depends on the last two tokens."""
    rng = np.random.default_rng([7, *tokens[-2:]])
    return rng.normal(0, 1.5, VOCAB).astype(np.float32)


def drafter_logits(tokens: list[int]) -> np.ndarray:
    return toy_logits(tokens) + np.random.default_rng([9, len(tokens)]).normal(0, 0.5, VOCAB).astype(np.float32)


def generate(params, seed, length, num_drafts, neighbours=0):
    """Tokens and raw logprobs of one request, with or without drafts, alone or in a batch."""
    prompt = [3, 1, 4]
    states, texts = [], []
    for i in range(neighbours + 1):
        s = sampling.make_state(params, prompt, vocab_size=VOCAB, seed=seed + i, eos_token_ids=[0])
        states.append(s)
        texts.append(list(prompt))
    logprobs = []
    while len(texts[0]) < len(prompt) + length:
        blocks = []
        for s, text in zip(states, texts, strict=True):
            drafts: list[int] = []
            for _ in range(num_drafts):
                x = drafter_logits([*text, *drafts])
                # one draft at a time: the state counts the earlier ones through `commit` of a copy
                copy = sampling.make_state(params, prompt, vocab_size=VOCAB, seed=s.seed, eos_token_ids=[0])
                copy.commit([*text[len(prompt) :], *drafts])
                drafts += sampling.draft(x[None], [copy], [1])[0]
            blocks.append(drafts)
        contexts = [[*t, *d[:j]] for t, d in zip(texts, blocks, strict=True) for j in range(len(d) + 1)]
        logits = np.stack([toy_logits(c) for c in contexts])
        committed = sampling.verify(logits, states, blocks if num_drafts else ())
        logprobs += sampling.token_logprobs(logits, range(len(committed[0])), committed[0], 2)
        for s, text, new in zip(states, texts, committed, strict=True):
            s.commit(new)
            text += new
    return texts[0][3 : 3 + length], logprobs[:length]


SETTINGS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0, repetition_penalty=1.4, frequency_penalty=0.3),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=1.2, top_k=20, top_p=0.9, min_p=0.02, presence_penalty=0.5, logit_bias={5: 2.0}),
    SamplingParams(temperature=0.9, repetition_penalty=1.2, min_tokens=10, stop_token_ids=[5]),
    SamplingParams(temperature=1.0, allowed_token_ids=range(0, 50, 3)),
]


@pytest.mark.parametrize("params", SETTINGS)
def test_drafts_and_neighbours_change_nothing(params):
    plain = generate(params, 5, 24, 0)
    for num_drafts in (1, 4):
        assert generate(params, 5, 24, num_drafts) == plain
    assert generate(params, 5, 24, 3, neighbours=2) == plain
    if params.temperature > 0:
        assert generate(params, 6, 24, 0)[0] != plain[0]


def test_min_tokens_bans_eos_and_stop_ids_unless_eos_is_ignored():
    x = np.zeros((1, VOCAB), np.float32)
    x[0, 0], x[0, 5], x[0, 9] = 9, 8, 7
    params = SamplingParams(temperature=0, min_tokens=1, stop_token_ids=[5])
    state = sampling.make_state(params, [1], vocab_size=VOCAB, seed=0, eos_token_ids=[0])
    assert sampling.sample(x, [state]) == [9]
    state.commit([9])
    assert sampling.sample(x, [state]) == [0]
    ignoring = SamplingParams(temperature=0, min_tokens=1, stop_token_ids=[5], ignore_eos=True)
    state = sampling.make_state(ignoring, [1], vocab_size=VOCAB, seed=0, eos_token_ids=[0])
    assert sampling.sample(x, [state]) == [0]


def test_verify_without_drafts_commits_one_token_each():
    rng = np.random.default_rng(0)
    x = rng.normal(0, 1, (3, VOCAB)).astype(np.float32)
    states = [sampling.make_state(SamplingParams(), [1], vocab_size=VOCAB, seed=i) for i in range(3)]
    assert sampling.verify(x, states) == [[t] for t in sampling.sample(x, states)]
    rejected = sampling.verify(x, states, mode="rejection")
    assert [len(c) for c in rejected] == [1, 1, 1]
    assert rejected == sampling.verify(x, states, [[], [], []], mode="rejection")


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32), st.integers(0, 5))
def test_verify_commits_accepted_drafts_and_one_token(content, wrong_from):
    rng = np.random.default_rng(content)
    x = rng.normal(0, 1, (6, VOCAB)).astype(np.float32)
    state = sampling.make_state(SamplingParams(temperature=0), [1], vocab_size=VOCAB, seed=0)
    best = x.argmax(axis=1).tolist()
    drafts = [t if i < wrong_from else (t + 1) % VOCAB for i, t in enumerate(best[:5])]
    for mode in ("coupled", "rejection"):
        assert sampling.verify(x, [state], [drafts], mode=mode) == [best[: wrong_from + 1]]


def test_logprobs_name_the_best_alternatives():
    x = np.zeros((2, VOCAB), np.float32)
    x[1, [4, 8]] = [2, 1]
    [first, second] = sampling.token_logprobs(x, [1, 0], [8, 3], 2)
    assert (first.token_id, first.rank) == (8, 2)
    assert [t for t, _ in first.top] == [4, 8]
    assert first.top[1][1] == first.logprob < first.top[0][1]
    assert (second.rank, [t for t, _ in second.top]) == (4, [0, 1])
    assert len(sampling.token_logprobs(x, [0], [3], 10**9)[0].top) == VOCAB
    assert sampling.token_logprobs(x, [0], [3], 0)[0].top == []


def test_drawn_seeds_differ_and_are_exact_as_doubles():
    seeds = {sampling.draw_seed() for _ in range(200)}
    assert len(seeds) == 200
    assert max(seeds) >= 2**51 and all(0 <= s < 2**53 for s in seeds)
