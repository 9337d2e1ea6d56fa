"""Constrained outputs match their grammar, and are the same bit for bit whatever a drafter proposes."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from engine.harness import (
    Oracle,
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
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from paceline import LLM, SamplingParams, StructuredOutputsParams
from paceline.outputs import CompletionOutput, own_logprob
from paceline.structured.vocabulary import Vocabulary

from .conftest import SHAPE, World

V = SHAPE.vocab
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
QUICK = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), phases=PHASES)
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["a", "ab", None, 12, True]},
        "inner": {
            "type": "object",
            "properties": {"abc": {"type": ["string", "null"], "maxLength": 4}, "n": {"type": "integer"}},
            "required": ["abc"],
            "additionalProperties": False,
        },
        "list": {"type": "array", "items": {"anyOf": [{"type": "boolean"}, {"const": "é€"}]}, "maxItems": 3},
    },
    "required": ["kind", "inner"],
    "additionalProperties": False,
}


def obeys_schema(value: Any) -> bool:
    assert isinstance(value, dict) and {"kind", "inner"} <= set(value) <= {"kind", "inner", "list"}
    assert any(
        value["kind"] is k or (type(k) is type(value["kind"]) and value["kind"] == k)
        for k in ("a", "ab", None, 12, True)
    )
    inner = value["inner"]
    assert isinstance(inner, dict) and {"abc"} <= set(inner) <= {"abc", "n"}
    assert inner["abc"] is None or (isinstance(inner["abc"], str) and len(inner["abc"]) <= 4)
    assert isinstance(inner.get("n", 0), int) and not isinstance(inner.get("n", 0), bool)
    items = value.get("list", [])
    assert isinstance(items, list) and len(items) <= 3 and all(isinstance(i, bool) or i == "é€" for i in items)
    return True


def is_json(text: str) -> bool:
    return obeys_schema(json.loads(text))


def is_balanced(text: str) -> bool:
    return re.fullmatch(r"\(*(x{1,3})?\)*", text) is not None and text.count("(") == text.count(")")


CHOICES = ["a", "ab", "haha ha", 'é"\\\n']
GRAMMARS: list[tuple[dict[str, Any], Any]] = [
    ({"json": SCHEMA}, is_json),
    ({"json": SCHEMA, "disable_any_whitespace": True}, lambda text: is_json(text) and not re.search(r"[\n\t]", text)),
    ({"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
    ({"regex": r"[a-c]{2,9}(é|€)?\d+z"}, lambda text: re.fullmatch(r"[a-c]{2,9}(é|€)?[0-9]+z", text)),
    ({"choice": CHOICES}, CHOICES.__contains__),
    ({"grammar": 'start: "(" start? ")" | "x"{1,3}'}, is_balanced),
]


def check_document(choice: CompletionOutput, params: SamplingParams, valid: Any) -> None:
    assert choice.finish_reason in ("stop", "length") or (params.bad_words and choice.finish_reason == "abort")
    if choice.finish_reason == "stop" and choice.stop_reason is None:
        assert valid(choice.text), choice.text
    else:
        assert params.max_tokens == len(choice.token_ids) or choice.stop_reason is not None


@st.composite
def sampling(draw: Any) -> tuple[SamplingParams, Any]:
    fields, valid = draw(st.sampled_from(GRAMMARS))

    def maybe(values: st.SearchStrategy[Any]) -> Any:
        return draw(values) if draw(st.integers(0, 3)) == 0 else None

    chosen = {
        "top_p": maybe(st.sampled_from([0.5, 0.9])),
        "top_k": maybe(st.integers(1, 30)),
        "min_p": maybe(st.sampled_from([0.05, 0.5])),
        "repetition_penalty": maybe(st.sampled_from([0.7, 1.3])),
        "presence_penalty": maybe(st.sampled_from([-0.5, 1.0])),
        "logit_bias": maybe(st.dictionaries(st.integers(0, V - 1), st.sampled_from([-100.0, 5.0]), max_size=4)),
        "stop": maybe(st.lists(st.sampled_from(["ab", "1", '"', "ha", "\n"]), min_size=1, max_size=2)),
        "stop_token_ids": maybe(st.lists(st.integers(0, V - 1), min_size=1, max_size=6)),
        "ignore_eos": maybe(st.just(True)),
        "min_tokens": maybe(st.integers(1, 20)),
        "logprobs": maybe(st.sampled_from([0, 3])),
        "n": maybe(st.integers(2, 3)),
        "bad_words": maybe(st.lists(st.sampled_from(["z", "1", "ha", "aa"]), max_size=2)),
    }
    return (
        SamplingParams(
            max_tokens=draw(st.sampled_from([20, 40, 60])),
            temperature=draw(st.sampled_from([0.0, 0.7, 1.0, 1.5])),
            seed=draw(st.integers(0, (1 << 64) - 1)),
            structured_outputs=StructuredOutputsParams(**fields),
            **{name: value for name, value in chosen.items() if value is not None},
        ),
        valid,
    )


UNCONSTRAINED = st.just((SamplingParams(max_tokens=20, seed=1), None))
prompts = st.lists(st.integers(0, V - 1), min_size=1, max_size=40)


@QUICK
@given(
    batch=st.lists(st.tuples(prompts, st.one_of(sampling(), UNCONSTRAINED)), min_size=1, max_size=5),
    kind=st.sampled_from(["oracle", "wrong", "half right", "alternating", "random", "repeat", "nothing"]),
    drafts=st.integers(1, 7),
    seed=st.integers(0, 1 << 32),
)  # fmt: skip
def test_drafts_change_nothing(world: World, batch: Any, kind: str, drafts: int, seed: int):
    """Each request alone and plain, then all at once with drafts, constrained or not."""
    want, oracle = [], Oracle()
    for prompt, (params, valid) in batch:
        output = world.plain.generate(prompt, params)[0]
        want.append(output)
        oracle.learn(output)
        for choice in output.outputs:
            if valid is not None:
                check_document(choice, params, valid)
    scripts = {
        "oracle": oracle,
        "wrong": wrong(oracle, V),
        "half right": half_right(oracle, V, seed),
        "alternating": alternating(oracle),
        "random": at_random(V, seed),
        "repeat": repeat_last,
        "nothing": nothing,
    }
    with scripted(world.spec, scripts[kind]):
        got = world.spec.generate(
            [prompt for prompt, _ in batch], [params for _, (params, _) in batch], num_speculative_tokens=drafts
        )
    for mine, his in zip(got, want, strict=True):
        assert_same(mine, his, (kind, drafts, batch))
        assert_stats(mine)
    assert_idle(world.spec)


pieces = st.recursive(
    st.sampled_from(["a", "b", "ab", "haha", "é", "[a-c]", "[^a-y]", ".", r"\d", "(?i:x)", r"\.", r"\n", "/"]),
    lambda inner: st.one_of(
        st.builds("({}|{})".format, inner, inner),
        st.builds("{}{}".format, inner, inner),
        st.builds("({}){}".format, inner, st.sampled_from(["?", "*", "+", "{2}", "{1,3}", "{0,2}", "*?"])),
    ),
    max_leaves=6,
)


@settings(parent=QUICK, max_examples=120)
@given(pattern=pieces, seed=st.integers(0, 1 << 32), drafts=st.sampled_from([0, 4]))
def test_regular_expressions_against_pythons(world: World, pattern: str, seed: int, drafts: int):
    """What stops matches the whole expression. Python's own engine is the judge."""
    params = SamplingParams(
        max_tokens=12, seed=seed, n=3, structured_outputs=StructuredOutputsParams(regex=pattern), temperature=1.0
    )
    with scripted(world.spec, at_random(V, seed)):
        output = world.spec.generate([[5, 6, 7]], params, num_speculative_tokens=drafts)[0]
    for choice in output.outputs:
        if choice.finish_reason == "stop":
            assert re.fullmatch(pattern, choice.text), (pattern, choice.text)
        else:
            assert choice.finish_reason == "length" and len(choice.token_ids) == 12


def test_a_grammar_that_can_go_no_further_stops(world: World):
    """Without an end-of-sequence token, within min_tokens, with ignore_eos, and when the limit comes with it."""
    asked = StructuredOutputsParams(regex="abchaha")
    ids = world.plain.tokenizer.encode("abchaha", add_special_tokens=False)
    for fields in ({}, {"ignore_eos": True}, {"min_tokens": 20}, {"max_tokens": len(ids)}):
        params = SamplingParams(**{"max_tokens": 30, "structured_outputs": asked, "temperature": 0, **fields})
        for script in (nothing, repeat_last):
            with scripted(world.spec, script):
                choice = world.spec.generate([[5]], params, num_speculative_tokens=5)[0].outputs[0]
            assert (choice.text, choice.finish_reason, choice.stop_reason) == ("abchaha", "stop", None)
            assert world.plain.tokenizer.decode(choice.token_ids) == "abchaha"
    params = SamplingParams(max_tokens=len(ids) - 1, structured_outputs=asked, temperature=0)
    choice = world.spec.generate([[5]], params)[0].outputs[0]
    assert choice.finish_reason == "length" and "abchaha".startswith(choice.text)


def test_logprobs_are_raw(world: World):
    """Those of the logits before the mask: the token that the mask chose may rank low."""
    params = SamplingParams(
        max_tokens=6, temperature=0, logprobs=2, structured_outputs=StructuredOutputsParams(regex="z{6}")
    )
    constrained = world.plain.generate([[5, 6]], params)[0].outputs[0]
    free = world.plain.generate([[5, 6]], SamplingParams(max_tokens=1, temperature=0, logprobs=2))[0].outputs[0]
    assert constrained.logprobs is not None and free.logprobs is not None
    _, own = own_logprob(constrained.logprobs[0])
    assert own.rank > 1 and own.logprob < -1
    assert all(constrained.logprobs[0][token] == entry for token, entry in free.logprobs[0].items())


def test_trimmed_drafts_are_not_counted(world: World):
    x = world.plain.tokenizer.encode("x", add_special_tokens=False)[0]
    params = SamplingParams(
        max_tokens=12, temperature=0, structured_outputs=StructuredOutputsParams(regex="[a-b]{12}"), seed=1
    )
    with scripted(world.spec, lambda sequence, limit: [x] * limit):
        output = world.spec.generate([[5]], params, num_speculative_tokens=4)[0]
    assert output.metrics.spec_decode.num_draft_tokens == output.metrics.spec_decode.num_drafts == 0
    policy = world.spec.engine.lengths
    assert policy.overall.hits[0] < policy.overall.tries[0], "the policy knows that the drafter was wrong"


def test_forced_tokens_are_accepted(world: World):
    params = SamplingParams(
        max_tokens=40, temperature=1, seed=2, structured_outputs=StructuredOutputsParams(regex="(abchaha){5}")
    )
    with scripted(world.spec, nothing):
        output = world.spec.generate([[5]], params, num_speculative_tokens=6)[0]
    stats = output.metrics.spec_decode
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 5
    assert output.outputs[0].text == "abchaha" * 5
    plain = world.spec.generate([[5]], params, speculation=False)[0]
    assert plain.metrics.spec_decode.num_draft_tokens == 0, "plain decoding stays plain"
    assert plain.outputs[0].token_ids == output.outputs[0].token_ids


def test_streams(world: World):
    params = SamplingParams(max_tokens=60, seed=5, structured_outputs={"json": SCHEMA})
    want = world.plain.generate([[5, 6]], params)[0].outputs[0]
    with scripted(world.spec, at_random(V, 1)):
        deltas = list(world.spec.stream([5, 6], params, num_speculative_tokens=4))
    assert "".join(d.text for d in deltas) == want.text and deltas[-1].finish_reason == want.finish_reason
    assert [i for d in deltas for i in d.token_ids] == want.token_ids


def test_thirty_concurrent_json_objects(world: World):
    """vLLM #15554, #27969, #47025: never a crash, never invalid JSON, with drafts of every kind in flight."""
    params = [
        SamplingParams(max_tokens=80, seed=i, temperature=1.0, structured_outputs={"json": {"type": "object"}})
        for i in range(30)
    ]
    prompt = world.plain.tokenizer.encode("Say hello world 500 times")
    before = world.spec.engine.scheduler.num_preemptions
    with scripted(world.spec, at_random(V, 7)):
        outputs = world.spec.generate([prompt] * 30, params, num_speculative_tokens=5)
    assert world.spec.engine.scheduler.num_preemptions > before, "the cache is too small for all of them"
    for seed in (0, 11):
        assert_same(outputs[seed], world.plain.generate([prompt], params[seed])[0], "preempted")
    finished = [o.outputs[0] for o in outputs if o.outputs[0].finish_reason == "stop"]
    assert all(isinstance(json.loads(choice.text), dict) for choice in finished) and len(finished) >= 5
    for output in outputs:
        assert output.outputs[0].text.lstrip().startswith("{")
    assert_idle(world.spec)


@pytest.mark.parametrize("sampler", ["coupled", "rejection"])
def test_both_samplers_with_prompt_lookup(folder: Any, sampler: Any):
    lookup = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1}
    llm = LLM(folder, speculative_config=lookup, sampler=sampler, threads=1, dtype="float32")
    prompt = llm.tokenizer.encode('{"abc": "a", "d": true} {"abc": "a", "d": true}')
    for seed in range(12):
        asked = {"json": SCHEMA, "disable_any_whitespace": True}
        params = SamplingParams(max_tokens=60, seed=seed, structured_outputs=asked)
        choice = llm.generate([prompt], params)[0].outputs[0]
        check_document(choice, params, lambda text: obeys_schema(json.loads(text)))
    assert_idle(llm)


# ---- failures


def test_a_dead_end_aborts_that_request_alone(folder: Any, monkeypatch: pytest.MonkeyPatch):
    """A model without the tokens that the grammar needs: the request ends, says why, and others go on."""
    original = Vocabulary.__init__

    def without_x(self: Any, tokenizer: Any, vocab_size: int) -> None:
        original(self, _Without(tokenizer, b"x"), vocab_size)

    monkeypatch.setattr(Vocabulary, "__init__", without_x)
    llm = open_llm(folder)
    dead = SamplingParams(max_tokens=10, temperature=0, structured_outputs=StructuredOutputsParams(regex="[ab]{2}x"))
    fine = SamplingParams(max_tokens=10, temperature=0, structured_outputs=StructuredOutputsParams(regex="[ab]{5}"))
    outputs = [o.outputs[0] for o in llm.generate([[5], [5], [5]], [dead, fine, SamplingParams(max_tokens=4)])]
    assert outputs[0].finish_reason == "abort" and re.fullmatch("[ab]{2}", outputs[0].text)
    assert str(outputs[0].stop_reason).startswith("grammar: ")
    assert outputs[1].finish_reason == "stop" and re.fullmatch("[ab]{5}", outputs[1].text)
    assert outputs[2].finish_reason in ("length", "stop")
    assert_idle(llm)


class _Without:
    def __init__(self, tokenizer: Any, missing: bytes) -> None:
        self._tokenizer, self._missing = tokenizer, missing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def token_bytes(self, token: int) -> bytes:
        found = self._tokenizer.token_bytes(token)
        return b"" if self._missing in found else found

    def encode(self, text: str, **_: Any) -> list[int]:
        return []


def test_a_failing_matcher_is_begun_again(world: World, monkeypatch: pytest.MonkeyPatch):
    """Drafts may lead a matcher over one of its limits; the request goes on from its committed tokens."""
    params = SamplingParams(max_tokens=30, seed=4, structured_outputs={"json": SCHEMA})
    want = world.plain.generate([[5, 6]], params)[0]
    oracle = Oracle()
    oracle.learn(want)
    from paceline.structured.compiler import CompiledGrammar

    nul = next(i for i in range(V) if world.plain.tokenizer.token_bytes(i) == b"\0")
    original, calls = CompiledGrammar.mask, iter(range(1 << 30))

    def flaky(self: Any, matcher: Any) -> Any:
        if next(calls) % 3:
            return original(self, matcher)
        matcher.consume_token(nul)  # stands nowhere in JSON: the matcher is broken for good
        assert matcher.is_error()
        return None

    monkeypatch.setattr(CompiledGrammar, "mask", flaky)
    with scripted(world.spec, oracle):
        got = world.spec.generate([[5, 6]], params, num_speculative_tokens=4)[0]
    assert_same(got, want, "flaky matcher")
    assert got.metrics.spec_decode.num_accepted_tokens > 0
    assert_idle(world.spec)
