"""The failure cases of other engines' trackers that are about reasoning, grammars and tool calls, through HTTP.

Drafts come from a drafter that knows what comes, so that tags, ends and calls fall into the middle of accepted blocks.
"""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from engine.harness import Script, at_random, nothing, repeat_last, scripted

from paceline import StructuredOutputsParams

from .harness import Live, said, streamed
from .thinker import CLOSE, EOS, OPEN, SHAPE

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Say hello world 500 times"}]
FENCES = [{"role": "user", "content": "Answer in ```json fences."}]
BLOCK = 8  # tokens of a step whose seven drafts are right
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["a", "ab", None, 12, True]},
        "name": {"type": ["string", "null"], "maxLength": 5},
        "list": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["kind", "name", "list"],
    "additionalProperties": False,
}


def obeys(value: Any) -> None:
    """The schema, by hand."""
    assert isinstance(value, dict) and set(value) == {"kind", "name", "list"}
    kind = value["kind"]
    assert any(kind is k or (type(kind) is type(k) and kind == k) for k in ("a", "ab", None, 12, True))
    assert value["name"] is None or (isinstance(value["name"], str) and len(value["name"]) <= 5)
    assert len(value["list"]) <= 3 and all(isinstance(item, bool) for item in value["list"])


FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
THINKING, SILENT = {"open": True}, {"enable_thinking": False}


def knowing(ids: list[int]) -> Script:
    return lambda s, limit: ids[s.num_output_tokens : s.num_output_tokens + limit]


def both(server: Live, script: Script | None = None, **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """(choice, usage): whole and streamed, with drafts (right ones, unless a script is given) and without."""
    ask = {"return_token_ids": True, "temperature": 1.0, **fields}
    plain = server.ok(CHAT, num_speculative_tokens=0, **ask)
    [choice] = plain["choices"]
    with scripted(server.llm, script or knowing(choice["token_ids"])):
        whole = server.ok(CHAT, **ask)
        chunks = server.events(CHAT, stream_options={"include_usage": True}, **ask)
    want = said(choice)
    assert said(whole["choices"][0]) == want and streamed(chunks) == want
    for body in (plain, whole, chunks[-1]):
        del body["usage"]["prompt_tokens_details"]
    assert plain["usage"] == whole["usage"] == chunks[-1]["usage"]
    assert plain["usage"]["completion_tokens"] == len(choice["token_ids"])
    return choice, plain["usage"]


@pytest.mark.parametrize("stop_bias", [-100, 1.5])
def test_case_6_never_more_reasoning_than_tokens(thinker, stop_bias):
    """Limits and ends of sequence inside a block of reasoning; the counts are those of plain decoding."""
    ends = set()
    for seed in range(6):
        bias = {str(EOS): stop_bias, str(CLOSE): -100 if seed % 2 else 2.0}
        choice, usage = both(
            thinker, messages=HELLO, chat_template_kwargs=THINKING, logit_bias=bias, seed=seed, max_tokens=64
        )
        thoughts, ids = usage["completion_tokens_details"]["reasoning_tokens"], choice["token_ids"]
        assert 0 <= thoughts <= usage["completion_tokens"] <= 64
        assert thoughts == (ids.index(CLOSE) if CLOSE in ids else len(ids))
        ends.add((choice["finish_reason"], CLOSE in ids))
    assert len(ends) > 1, ends


@pytest.mark.parametrize("drafts", ["right", "random", "repeats"])
def test_case_17_a_schema_with_enum_and_null_under_drafts(thinker, drafts):
    script = {"right": None, "random": at_random(SHAPE.vocab, 3), "repeats": repeat_last}[drafts]
    ended = 0
    for seed in range(4):
        fields = {"response_format": FORMAT, "chat_template_kwargs": SILENT, "seed": seed, "max_tokens": 120}
        choice, _ = both(thinker, script, messages=HELLO, **fields)
        if choice["finish_reason"] == "stop":
            obeys(json.loads(choice["message"]["content"]))
            ended += 1
    assert ended


def test_case_17_thirty_objects_at_once(thinker):
    """All are JSON objects, or the beginning of one where the limit cut them; no request disturbs another."""
    grammar = thinker.llm.grammars.compile(
        StructuredOutputsParams(json_object=True, whitespace_pattern=r" ?|\n[ \t]{0,40}")
    )

    def ask(seed: int) -> dict[str, Any]:
        fields = {"response_format": {"type": "json_object"}, "chat_template_kwargs": SILENT, "return_token_ids": True}
        bias = {str(thinker.llm.tokenizer.encode("}")[0]): 6}
        return thinker.ok(CHAT, messages=HELLO, seed=seed, max_tokens=80, temperature=1.0, logit_bias=bias, **fields)

    with scripted(thinker.llm, at_random(SHAPE.vocab, 1)), ThreadPoolExecutor(30) as pool:
        choices = [body["choices"][0] for body in pool.map(ask, range(30))]
    for choice in choices:
        assert choice["finish_reason"] in ("stop", "length")
        ids = [i for i in choice["token_ids"] if i != EOS]
        assert grammar.matcher().validate_tokens(ids) == len(ids)
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(choice["message"]["content"]), dict)
    assert sum(choice["finish_reason"] == "stop" for choice in choices) > 10


@pytest.mark.parametrize("prompt_opens", [True, False], ids=["in the prompt", "in the output"])
def test_case_18_reasoning_that_ends_inside_a_block(thinker, prompt_opens):
    """What comes behind the end tag obeys the schema, wherever in a block of drafts the tag was."""
    places, direct = set(), 0
    for seed in range(10):
        bias = {str(CLOSE): 3.0} if prompt_opens else {str(CLOSE): 3.0, str(OPEN): 2.5}
        choice, usage = both(
            thinker,
            messages=FENCES,
            response_format=FORMAT,
            chat_template_kwargs=THINKING if prompt_opens else {},
            logit_bias=bias,
            seed=seed,
            max_tokens=200,
        )
        ids = choice["token_ids"]
        if CLOSE in ids:
            places.add(ids.index(CLOSE) % BLOCK)
            tags = 0 if prompt_opens else 1
            assert usage["completion_tokens_details"]["reasoning_tokens"] == ids.index(CLOSE) - tags
        else:
            assert not prompt_opens, "the prompt begins the reasoning, so it has to end"
            direct += 1
        if choice["finish_reason"] == "stop":
            obeys(json.loads(choice["message"]["content"]))
            assert "```" not in choice["message"]["content"]
    assert len(places) > 1
    assert prompt_opens or direct < 10


@pytest.mark.parametrize("choice_of_tool", ["required", "auto"])
def test_case_19_a_call_in_any_number_of_deltas(thinker, choice_of_tool):
    """The whole call in a few deltas of eight tokens, token by token, and in blocks of any length between."""
    fields: dict[str, Any] = {"tools": [TOOL], "tool_choice": choice_of_tool, "chat_template_kwargs": SILENT}
    if choice_of_tool == "auto":
        call = r'<tool_call>\n\{"name": "f", "arguments": \{"x": "[a-z<>/_"]{0,0}[a-z<>/_]{12,20}"\}\}\n</tool_call>'
        fields["structured_outputs"] = {"regex": f"Let me see[.] {call} and {call} so it is[.]"}
    else:
        fields["parallel_tool_calls"] = False
    counts = []
    for script in (nothing, None, at_random(SHAPE.vocab, 2)):
        choice, _ = both(thinker, script, messages=HELLO, seed=5, max_tokens=300, **fields)
        counts.append(said(choice))
    assert counts[0] == counts[1] == counts[2]
    got = counts[0]
    assert got["finish_reason"] == "tool_calls"
    assert all(name == "f" and isinstance(json.loads(arguments), dict) for name, arguments in got["calls"])
    if choice_of_tool == "auto":
        assert len(got["calls"]) == 2 and got["content"] == "Let me see. and so it is."
    else:
        obeys(json.loads(got["calls"][0][1]))


def test_case_19_deltas_do_differ(thinker):
    ask = {"messages": HELLO, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "seed": 5}
    ask |= {"chat_template_kwargs": SILENT, "max_tokens": 300, "temperature": 1.0}
    ids = thinker.ok(CHAT, return_token_ids=True, **ask)["choices"][0]["token_ids"]
    sizes = []
    for script in (nothing, knowing(ids)):
        with scripted(thinker.llm, script):
            sizes.append(len(thinker.events(CHAT, **ask)))
    assert sizes[1] < sizes[0], "the same call in fewer, larger pieces"


def test_case_20_the_first_token_of_any_kind_is_the_first(thinker):
    """A stream of reasoning alone: it starts with the first token, and times are counted from there."""
    bias = {str(EOS): -100, str(CLOSE): -100}
    ask = {"messages": HELLO, "chat_template_kwargs": THINKING, "logit_bias": bias, "seed": 1, "max_tokens": 30}
    before = _count(thinker, "vllm:time_to_first_token_seconds_count")
    with scripted(thinker.llm, repeat_last):
        chunks = thinker.events(CHAT, stream_options={"include_usage": True, "continuous_usage_stats": True}, **ask)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    first = next(c for c in chunks if any(len(v or "") for k, v in c["choices"][0]["delta"].items() if k != "role"))
    assert first["choices"][0]["delta"]["reasoning"] and first["usage"]["completion_tokens"] <= 3
    times = chunks[-1]["metrics"]
    assert times["time_to_first_token_ms"] > 0
    assert times["mean_itl_ms"] == pytest.approx(times["generation_time_ms"] / 29), "per token, not per chunk"
    assert _count(thinker, "vllm:time_to_first_token_seconds_count") == before + 1


def _count(server: Live, name: str) -> float:
    found = re.search(rf"^{name}{{.*}} (\S+)$", server.client.get("/metrics").text, re.M)
    return float(found[1]) if found else 0.0


def test_case_30_acceptance_and_reasoning_of_each_request_are_in_the_log(thinker, caplog):
    """The same prompt with thinking on and off: a drafter that was trained without shows in the two lines."""
    ask = {"messages": HELLO, "max_tokens": 24, "seed": 1, "temperature": 1.0, "logit_bias": {str(CLOSE): -100}}
    lines = []
    for switch in ({"chat_template_kwargs": THINKING}, {"reasoning_effort": "none"}):
        fields = ask | switch | {"ignore_eos": True}
        ids = thinker.ok(CHAT, return_token_ids=True, num_speculative_tokens=0, **fields)["choices"][0]["token_ids"]
        caplog.clear()
        good = knowing(ids)
        script = good if "reasoning_effort" in switch else (lambda s, limit, good=good: [i ^ 1 for i in good(s, limit)])
        with caplog.at_level("INFO", logger="paceline.server.service"), scripted(thinker.llm, script):
            thinker.ok(CHAT, **fields)
        [line] = [r.getMessage() for r in caplog.records if r.getMessage().startswith("Request")]
        lines.append(line)
    thinking, silent = lines
    pattern = r"\d+ \+ 24 tokens \(length\).* (\d+) of reasoning, draft acceptance rate = ([01]\.\d{5})"
    assert [re.search(pattern, line).groups() for line in lines] == [("24", "0.00000"), ("0", "1.00000")], lines
    assert "accept len: 1.00" in thinking and "accept len" in silent
