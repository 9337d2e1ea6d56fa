"""Calls that a limit cuts, at every place: under a grammar of calls nothing of their markup is content."""

from __future__ import annotations

from typing import Any

import pytest
from engine.harness import Script, scripted
from hypothesis import given
from hypothesis import strategies as st

from paceline.parsing.chat import ChatParser
from paceline.parsing.registry import make_tool_parser
from paceline.parsing.tools import Form
from paceline.server.reader import Reader, message_of

from .harness import Live, said, streamed
from .test_features import ASK, CALL, FLAT, SILENT, TOOLS, items_of
from .test_other_interfaces import named_events
from .test_reader import deltas, runs
from .thinker import CLOSE

CHAT, RESPONSES, ANTHROPIC = "/v1/chat/completions", "/v1/responses", "/v1/messages"
ARGUMENTS = '{"a": "x, [\\"<tool_call>", "b": true}'
WHOLE = {
    "hermes": f'<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>',
    "llama3_json": f'{{"name": "f", "parameters": {ARGUMENTS}}}',
    "mistral": f'[TOOL_CALLS][{{"name": "f", "arguments": {ARGUMENTS}}}]',
    "pythonic": "[f(a='x, [\"<tool_call>', b=True)]",
}
TWO = {
    "hermes": "\n".join([WHOLE["hermes"]] * 2),
    "llama3_json": "; ".join([WHOLE["llama3_json"]] * 2),
    "mistral": f"{WHOLE['mistral'][:-1]}, {WHOLE['mistral'].removeprefix('[TOOL_CALLS][')}",
    "pythonic": f"{WHOLE['pythonic'][:-1]}, {WHOLE['pythonic'][1:]}",
}


def reader(name: str, form: Form) -> Reader:
    parser = make_tool_parser(name, ("f",))
    return Reader(ChatParser(None, parser), calls=True, form=form, opening=parser.markers[0])


@pytest.mark.parametrize("name", sorted(TWO))
@given(cut=st.integers(0, 400), cuts=st.lists(st.integers(0, 400), max_size=6))
def test_any_format_cut_anywhere(name: str, cut: int, cuts: list[int]) -> None:
    text = TWO[name]
    whole = message_of(reader(name, "calls").whole(text))
    assert [call.name for call in whole.tool_calls] == ["f", "f"] and not whole.content
    message = message_of(reader(name, "calls").whole(text[:cut]))
    assert not message.content
    for got, want in zip(message.tool_calls, whole.tool_calls, strict=False):
        assert got.name == want.name and want.arguments.startswith(got.arguments)
    piecewise = reader(name, "calls")
    parts = [part for delta in deltas(text[:cut], cuts) for part in piecewise.read(delta)]
    assert runs(parts) == runs(reader(name, "calls").whole(text[:cut]))


@pytest.mark.parametrize("name", sorted(TWO))
def test_where_an_answer_may_come_instead(name: str) -> None:
    """A tag is no beginning of an answer in JSON; formats without one may be either until the call is known."""
    for cut in range(len(TWO[name]) + 1):
        message = message_of(reader(name, "calls or answer").whole(TWO[name][:cut]))
        tagged = name == "hermes" or (name == "mistral" and cut > 1)
        assert not message.content or not (tagged or message.tool_calls), (cut, message)
    for answer in ('{"a": "<', '{"a": "<tool_call>', "[", '["[TOOL_CALLS]', "{", "7", '"<|python_tag|'):
        assert message_of(reader(name, "calls or answer").whole(answer)).content == answer


# ---- through HTTP, at every max_tokens

NOW = TOOLS[1:]  # its calls are short


def knowing(ids: list[int]) -> Script:
    return lambda s, limit: ids[s.num_output_tokens : s.num_output_tokens + limit]


def cut_everywhere(server: Live, most: int = 70, **fields: Any) -> list[dict[str, Any]]:
    """The answers at each max_tokens from 1 to the whole length, or to the most, streamed and whole, under drafts."""
    ask = {"messages": ASK, **SILENT, **fields}
    [whole] = server.ok(CHAT, max_tokens=most, return_token_ids=True, num_speculative_tokens=0, **ask)["choices"]
    found = []
    with scripted(server.llm, knowing(whole["token_ids"])):
        for limit in range(1, len(whole["token_ids"]) + 1):
            [choice] = server.ok(CHAT, max_tokens=limit, **ask)["choices"]
            assert streamed(server.events(CHAT, max_tokens=limit, **ask)) == said(choice)
            found.append(choice)
    assert [choice["finish_reason"] for choice in found[:-1]] == ["length"] * (len(found) - 1)
    assert said(found[-1]) | {"token_ids": []} == said(whole) | {"token_ids": []}
    return found


@pytest.mark.parametrize("choice", ["required", "several", "named"])
def test_chats(thinker, choice):
    chosen = {"type": "function", "function": {"name": "now"}} if choice == "named" else "required"
    found = cut_everywhere(thinker, tools=NOW, tool_choice=chosen, parallel_tool_calls=choice == "several")
    assert all(one["message"]["content"] is None for one in found)
    counts = [len(one["message"].get("tool_calls", [])) for one in found]
    assert counts == sorted(counts) and counts[0] == 0 and counts[-1] >= 1 + (choice == "several")


def test_behind_reasoning(thinker):
    fields = {"chat_template_kwargs": {"open": True}, "logit_bias": {str(CLOSE): 6.0}, "parallel_tool_calls": False}
    found = cut_everywhere(thinker, tools=NOW, tool_choice="required", **fields)
    assert all(one["message"]["content"] is None for one in found)
    assert found[-1]["message"]["reasoning"] and found[-1]["message"]["tool_calls"]


def test_the_old_form(thinker):
    fields = {"functions": [{"name": "now"}], "function_call": {"name": "now"}, **SILENT, "messages": ASK}
    count = thinker.ok(CHAT, max_tokens=70, **fields)["usage"]["completion_tokens"]
    found = [thinker.ok(CHAT, max_tokens=limit, **fields)["choices"][0] for limit in range(1, count + 1, 3)]
    assert all(one["message"]["content"] is None for one in found)
    assert "function_call" in found[-1]["message"] and "function_call" not in found[0]["message"]


@pytest.mark.parametrize("bias", [8, -100])
def test_an_answer_in_a_form_or_a_call(thinker, bias):
    form = {"type": "json_object", "schema": {"properties": {"a": {"enum": ["x", 7]}}, "required": ["a"]}}
    form["strict"] = True
    tag = {str(thinker.llm.tokenizer.encode("<tool_call>")[0]): bias}
    found = cut_everywhere(thinker, tools=NOW, response_format=form, parallel_tool_calls=False, logit_bias=tag)
    assert bool(found[-1]["message"].get("tool_calls")) == (bias > 0)
    for one in found:
        assert not one["message"]["content"] or bias < 0


def test_with_auto_the_text_is_the_model_s(thinker):
    """Nothing says that it was to be a call: what a limit leaves of a tag, or of a call without a name, is content."""
    found = cut_everywhere(thinker, tools=TOOLS, structured_outputs={"choice": [f"Well. {CALL}"]})
    for one in found:
        text, calls = one["message"]["content"], one["message"].get("tool_calls")
        assert text == "Well." if calls else f"Well. {CALL}".startswith(text)
    assert found[-1]["message"]["tool_calls"]
    assert any("<tool_call>" in one["message"]["content"] for one in found[:-1])


def test_the_responses_interface(thinker):
    ask = {"input": "ab abc", "tools": [FLAT[1]], "tool_choice": "required", "parallel_tool_calls": False, **SILENT}
    whole = thinker.ok(RESPONSES, **ask, max_output_tokens=70)
    for limit in range(1, whole["usage"]["output_tokens"] + 1):
        body = thinker.ok(RESPONSES, **ask, max_output_tokens=limit)
        assert {item["type"] for item in body["output"]} <= {"function_call"}
        events = named_events(thinker, RESPONSES, **ask, max_output_tokens=limit)
        pieces = [(item["name"], item["arguments"]) for item in items_of(events)]
        assert pieces == [(item["name"], item["arguments"]) for item in body["output"]]
    assert body["status"] == "completed" and pieces


@pytest.mark.parametrize(
    "choice", [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "now"}]
)
def test_the_messages_interface(thinker, choice):
    tools = [{"name": "now", "input_schema": {"type": "object", "properties": {}}}]
    ask = {"messages": ASK, "tools": tools, "tool_choice": choice, **SILENT}
    whole = thinker.ok(ANTHROPIC, **ask, max_tokens=70)
    for limit in range(1, whole["usage"]["output_tokens"] + 1):
        body = thinker.ok(ANTHROPIC, **ask, max_tokens=limit)
        assert {block["type"] for block in body["content"]} <= {"tool_use"}
        events = named_events(thinker, ANTHROPIC, **ask, max_tokens=limit)
        blocks = [e["content_block"] for e in events if e["type"] == "content_block_start"]
        assert [block["name"] for block in blocks] == [block["name"] for block in body["content"]]
    assert body["stop_reason"] == "tool_use" and body["content"]
