"""Where outputs end, when the end lies inside an accepted block. Each case names what other engines got wrong there."""

from __future__ import annotations

from typing import Any

import pytest

from paceline import SamplingParams
from paceline.errors import CapacityError, ConfigError

from .conftest import SHAPE, World
from .harness import Oracle, assert_idle, assert_same, assert_stats, repeat_last, scripted, wrong

V = SHAPE.vocab
LAST = SHAPE.context
PROMPT = [21, 22, 23, 24, 25]


def free_run(world: World, seed: int = 0, length: int = 40, prompt: list[int] = PROMPT) -> list[int]:
    """A long output without stops, varied enough that ids do not repeat soon."""
    params = SamplingParams(temperature=1.2, seed=seed, max_tokens=length, ignore_eos=True)
    return world.plain.generate(prompt, params)[0].outputs[0].token_ids


def run(world: World, prompt: list[int] = PROMPT, *, drafts: int = 7, known: list[int] | None = None, **values: Any):
    """Plain, then with an oracle that sees far beyond the end; both are the same. Returns the output."""
    params = SamplingParams(**{"temperature": 1.2, "seed": 0, "logprobs": 2, **values})
    want = world.plain.generate(prompt, params)[0]
    ids = free_run(world, params.seed or 0, LAST - len(prompt), prompt) if known is None else known
    with scripted(world.spec, lambda s, limit: ids[s.num_output_tokens : s.num_output_tokens + limit]):
        got = world.spec.generate(prompt, params, num_speculative_tokens=drafts)[0]
    assert_same(got, want, values)
    assert_stats(got)
    assert_idle(world.spec)
    return got


def first_at(ids: list[int], least: int) -> int:
    """The first index from `least` on whose id did not occur before."""
    return next(i for i in range(least, len(ids)) if ids[i] not in ids[:i])


@pytest.mark.parametrize("within", range(9))
def test_stop_id_anywhere_in_a_block(world, within):
    """The first token comes from the prompt's pass; the block behind it is tokens 1 to 8."""
    ids = free_run(world)
    at = first_at(ids, within)
    got = run(world, stop_token_ids=[ids[at]], max_tokens=39)
    choice = got.outputs[0]
    assert choice.token_ids == ids[: at + 1] and choice.finish_reason == "stop" and choice.stop_reason == ids[at]
    assert len(choice.logprobs) == at + 1
    assert ids[at] not in choice.token_ids[:-1]


def test_eos_inside_a_block(world):
    """No stop_reason for the model's own end of sequence, and its text is not shown."""
    eos = V - 1
    # biased so that plain decoding itself ends soon
    params: dict[str, Any] = {"logit_bias": {eos: 5.0}, "temperature": 1.5}
    for seed in range(200):
        want = world.plain.generate(PROMPT, SamplingParams(seed=seed, max_tokens=60, **params))[0].outputs[0]
        if want.finish_reason == "stop" and 2 < len(want.token_ids) < 8:
            break
    longer = world.plain.generate(PROMPT, SamplingParams(seed=seed, max_tokens=60, ignore_eos=True, **params))
    known = longer[0].outputs[0].token_ids
    got = run(world, known=known, seed=seed, max_tokens=60, **params).outputs[0]
    assert got.finish_reason == "stop" and got.stop_reason is None
    assert got.token_ids[-1] == eos and eos not in got.token_ids[:-1]
    assert "<|end|>" not in got.text
    shown = run(world, known=known, seed=seed, max_tokens=60, skip_special_tokens=False, **params).outputs[0]
    assert shown.text == got.text, "a stop token adds no text, special or not"
    ignored = run(world, known=known, seed=seed, max_tokens=60, ignore_eos=True, **params).outputs[0]
    assert ignored.token_ids[: len(got.token_ids)] == got.token_ids and ignored.finish_reason == "length"


@pytest.mark.parametrize("cap", range(1, 18))
def test_max_tokens_inside_a_block(world, cap):
    """Exactly `cap` tokens, ids, log-probabilities and counters alike, whatever the block was."""
    got = run(world, max_tokens=cap, ignore_eos=True)
    choice = got.outputs[0]
    assert choice.finish_reason == "length" and choice.stop_reason is None
    assert len(choice.token_ids) == len(choice.logprobs) == cap
    stats = got.metrics.spec_decode
    assert stats.num_delivered_tokens == cap
    assert stats.num_cut_tokens == 0, "no draft is made that could not be delivered"


def test_stop_before_the_cap_in_one_block(world):
    """The length limit must not hide a stop that came earlier in the same block."""
    ids = free_run(world)
    at = first_at(ids, 3)
    assert at < 8
    choice = run(world, stop_token_ids=[ids[at]], max_tokens=at + 3).outputs[0]
    assert choice.finish_reason == "stop" and len(choice.token_ids) == at + 1


def test_stop_behind_the_cap_in_one_block(world):
    ids = free_run(world)
    at = first_at(ids, 4)
    choice = run(world, stop_token_ids=[ids[at]], max_tokens=at - 1).outputs[0]
    assert choice.finish_reason == "length" and choice.stop_reason is None and len(choice.token_ids) == at - 1


def test_stop_at_the_cap(world):
    ids = free_run(world)
    at = first_at(ids, 4)
    choice = run(world, stop_token_ids=[ids[at]], max_tokens=at + 1).outputs[0]
    assert choice.finish_reason == "stop" and choice.stop_reason == ids[at]


def long_text(world: World) -> tuple[int, list[int], str]:
    """A seed whose text has a stop string early in a block of seven."""
    for seed in range(300):
        ids = free_run(world, seed)
        text = world.plain.tokenizer.decode(ids[1:9])
        if len(text) > 5 and "�" not in text and text.isascii():
            return seed, ids, text
    raise AssertionError("no such seed")


@pytest.mark.parametrize("include", [False, True])
def test_stop_string_early_in_a_block(world, include):
    """A stop string over two tokens at the start of the block ends ids, text, log-probabilities and usage there."""
    seed, ids, _ = long_text(world)
    decode = world.plain.tokenizer.decode
    stop = decode(ids[:3])[-2:]
    found = next(n for n in range(1, 40) if stop in decode(ids[:n]))
    choice = run(world, seed=seed, stop=[stop], max_tokens=39, include_stop_str_in_output=include).outputs[0]
    assert found <= 3 and len(choice.token_ids) == len(choice.logprobs) == found
    assert choice.finish_reason == "stop" and choice.stop_reason == stop
    whole = decode(ids[:found])
    end = whole.index(stop) + (len(stop) if include else 0)
    assert choice.text == whole[:end]


def test_several_stop_strings_in_one_block(world):
    """The one whose last character comes first counts, in whatever order they are listed."""
    seed, ids, _ = long_text(world)
    decode = world.plain.tokenizer.decode
    late, early = decode(ids[:8])[-2:], decode(ids[:4])[-2:]
    for stops in ([late, early], [early, late]):
        choice = run(world, seed=seed, stop=stops, max_tokens=39).outputs[0]
        assert choice.finish_reason == "stop"
        assert len(choice.token_ids) <= 4


def test_min_tokens_bans_stops_inside_a_block(world):
    ids = free_run(world)
    at = first_at(ids, 2)
    want = SamplingParams(temperature=1.2, seed=0, stop_token_ids=[ids[at]], min_tokens=at + 4, max_tokens=30)
    known = world.plain.generate(PROMPT, want)[0].outputs[0].token_ids
    assert ids[at] not in known[: at + 4]
    run(world, known=[*known, 1, 2, 3], stop_token_ids=[ids[at]], min_tokens=at + 4, max_tokens=30)


@pytest.mark.parametrize("room", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("limit", [None, 500])
def test_the_context_ends_inside_a_block(world, room, limit):
    """A prompt of max_model_len - room: exactly `room` tokens, then "length"."""
    prompt = [(7 * i) % 100 for i in range(LAST - room)]
    got = run(world, prompt, max_tokens=limit, ignore_eos=True)
    choice = got.outputs[0]
    assert choice.finish_reason == "length" and len(choice.token_ids) == room
    assert len(got.prompt_token_ids) + len(choice.token_ids) == LAST


def test_prompts_without_room_are_refused(world):
    for length in (LAST, LAST + 1, 3 * LAST):
        with pytest.raises(CapacityError, match="max_model_len"):
            world.spec.generate([1] * length)
    with pytest.raises(ConfigError, match="prompt"):
        world.spec.generate([[]])
    with pytest.raises(ConfigError, match=f"token id {V}"):
        world.spec.generate([[1, V]])
    with pytest.raises(ConfigError, match="token id -1"):
        world.spec.generate([[1, -1]])
    with pytest.raises(ConfigError, match="logit_bias"):
        world.spec.generate([[1]], SamplingParams(logit_bias={V: 1.0}))
    with pytest.raises(ConfigError, match="stop_token_ids"):
        world.spec.generate([[1]], SamplingParams(stop_token_ids=[V]))
    with pytest.raises(ConfigError, match="sampling_params"):
        world.spec.generate([[1], [2]], [SamplingParams()])
    # one bad request among good ones: nothing runs, nothing stays behind
    with pytest.raises(CapacityError):
        world.spec.generate([[1], [1] * LAST, [2]])
    assert_idle(world.spec)
    assert world.spec.generate([]) == []


def test_always_wrong_drafts_cost_nothing_but_time(world):
    """No draft kept: one token per step, nothing out of bounds (a count of 0 used as index - 1)."""
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, seed=5)
    want, oracle = world.plain.generate(PROMPT, params)[0], Oracle()
    oracle.learn(
        world.plain.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, seed=5))[0]
    )
    with scripted(world.spec, wrong(oracle, V)):
        got = world.spec.generate(PROMPT, params)[0]
    assert_same(got, want, params)
    stats = got.metrics.spec_decode.as_dict()
    assert stats["num_accepted_tokens"] == 0 and stats["acceptance_length"] == 1.0
    assert stats["fully_rejected_rate"] == 1.0 and stats["fully_accepted_rate"] == 0.0
    # the first token comes with the prompt; the last needs no draft
    assert stats["num_drafts"] == 28


def test_counters_of_cut_blocks(world):
    """Accepted drafts behind a stop are counted apart; what was delivered is what the client has."""
    ids = free_run(world)
    at = first_at(ids, 3)
    got = run(world, stop_token_ids=[ids[at]], max_tokens=39)
    stats = got.metrics.spec_decode
    assert stats.num_drafts == 1 and stats.num_draft_tokens == stats.num_accepted_tokens == 7
    assert stats.num_delivered_tokens == at + 1 and stats.num_cut_tokens == 7 - at


def test_penalties_see_drafts_of_the_same_block(world):
    """A repeating prompt under a repetition penalty: every row counts the drafts before it."""
    prompt = [5, 6, 7] * 8
    penalties: list[dict[str, Any]] = [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.9},
    ]
    for penalty in penalties:
        params = SamplingParams(temperature=0.0, max_tokens=40, seed=1, ignore_eos=True, logprobs=0, **penalty)
        want = world.plain.generate(prompt, params)[0]
        oracle = Oracle()
        oracle.learn(want)
        for script in (oracle, repeat_last):
            with scripted(world.spec, script):
                assert_same(world.spec.generate(prompt, params)[0], want, penalty)


def test_bias_and_min_p_hold_at_every_draft_position(world):
    banned = list(range(0, V, 2))
    for values in ({"logit_bias": dict.fromkeys(banned, -100.0)}, {"min_p": 0.5}):
        params = SamplingParams(temperature=1.0, seed=4, max_tokens=40, ignore_eos=True, **values)
        want = world.plain.generate(PROMPT, params)[0]
        oracle = Oracle()
        oracle.learn(want)
        for script in (oracle, lambda s, limit: [0] * limit):
            with scripted(world.spec, script):
                got = world.spec.generate(PROMPT, params)[0]
            assert_same(got, want, values)
            if "logit_bias" in values:
                assert not set(got.outputs[0].token_ids) & set(banned)
