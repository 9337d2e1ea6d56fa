"""Tools, structured outputs and reasoning in each interface: what the fields do, and what the answers look like."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from engine.harness import repeat_last, scripted

from paceline.parsing.chat import make_chat_parser, parse_chat
from paceline.server.tool_prompt import in_words

from .harness import comparable, said, streamed
from .test_other_interfaces import named_events
from .thinker import CLOSE, EOS, OPEN

CHAT, PLAIN, RESPONSES, ANTHROPIC = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
ASK = [{"role": "user", "content": "ab abc"}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", None, 7]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
}
FUNCTION = {"name": "get", "description": "Gets it", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": FUNCTION}, {"type": "function", "function": {"name": "now"}}]
FLAT = [{"type": "function", **FUNCTION}, {"type": "function", "name": "now"}]
ANTHROPIC_TOOLS = [{"name": "get", "input_schema": SCHEMA}, {"name": "now", "input_schema": {"type": "object"}}]
SILENT = {"chat_template_kwargs": {"enable_thinking": False}, "temperature": 1.0, "seed": 3}
THINKING = {"chat_template_kwargs": {"open": True}, "temperature": 1.0, "logit_bias": {str(CLOSE): 3.0, str(EOS): -100}}
CALL = '<tool_call>\n{"name": "get", "arguments": {"q": [1, 2]}}\n</tool_call>'
SAYS = {"regex": re.escape(f"Well. {CALL}{CALL} Done.")}


@pytest.fixture(autouse=True)
def drafts(thinker):
    with scripted(thinker.llm, repeat_last):
        yield


def prompt_of(thinker, **fields: Any) -> str:
    ids = thinker.ok(CHAT, return_token_ids=True, **{"max_tokens": 1, "messages": ASK, **fields})["prompt_token_ids"]
    return thinker.llm.tokenizer.decode(ids, skip_special_tokens=False)


# ---- forms of answers


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}},
        {"structured_outputs": {"json": SCHEMA, "disable_additional_properties": True}},
        {"guided_json": {**SCHEMA, "additionalProperties": False}, "guided_whitespace_pattern": " ?"},
        {"guided_json": json.dumps({**SCHEMA, "additionalProperties": False}), "guided_decoding_backend": "auto"},
    ],
)
def test_a_schema_under_each_of_its_names(thinker, fields):
    fields = {"max_tokens": 200, **fields}
    for path, ask in ((CHAT, {"messages": ASK, **SILENT}), (PLAIN, {"prompt": "ab", "temperature": 1.0, "seed": 3})):
        [choice] = thinker.ok(path, **ask, **fields)["choices"]
        value = json.loads(choice["text"] if path == PLAIN else choice["message"]["content"])
        assert set(value) == {"a", "b"} and value["a"] in ("x", None, 7) and isinstance(value["b"], bool)
        assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"regex": "[ab]{3,9}c"}}, "[ab]{3,9}c"),
        ({"guided_regex": "[ab]{3,9}c"}, "[ab]{3,9}c"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"guided_grammar": 'start: "a" | "(" start ")"'}, r"\(*a\)*"),
        ({"response_format": {"type": "text"}}, ".*"),
    ],
)
def test_other_grammars(thinker, fields, pattern):
    for path, ask in ((CHAT, {"messages": ASK, **SILENT}), (PLAIN, {"prompt": "ab", "temperature": 1.0, "seed": 3})):
        [choice] = thinker.ok(path, max_tokens=30, **ask, **fields)["choices"]
        text = choice["text"] if path == PLAIN else choice["message"]["content"]
        assert re.fullmatch(pattern, text, re.S) or choice["finish_reason"] == "length"


def test_strict_closes_objects_and_white_space_is_bounded(thinker):
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    ask = {"messages": ASK, **SILENT, "max_tokens": 60}
    ends, line = (thinker.llm.tokenizer.encode(c)[0] for c in ("}", "\n\n"))
    open_ = thinker.ok(CHAT, **ask, response_format=form, logit_bias={str(ends): -100})["choices"][0]
    assert open_["message"]["content"].count('"') > 4, "other properties are allowed"
    form["json_schema"]["strict"] = True
    closed = thinker.ok(CHAT, **ask, response_format=form, logit_bias={str(ends): -100})["choices"][0]
    assert closed["message"]["content"].count('"') <= 6
    loop = thinker.ok(CHAT, **ask, response_format={"type": "json_object"}, logit_bias={str(line): 100})["choices"][0]
    assert "\n\n" not in loop["message"]["content"]
    loop = thinker.ok(CHAT, **ask, structured_outputs={"json_object": True}, logit_bias={str(line): 100})["choices"][0]
    assert "\n\n\n" in loop["message"]["content"], "vLLM's object means what it means there"


# ---- chat: tools


def test_tools_reach_the_template_and_calls_the_client(thinker):
    whole = thinker.ok(CHAT, messages=ASK, tools=TOOLS, structured_outputs=SAYS, max_tokens=200, **SILENT)
    [choice] = whole["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls" and message["content"] == "Well. Done."
    assert [c["function"] for c in message["tool_calls"]] == [{"name": "get", "arguments": '{"q": [1, 2]}'}] * 2
    assert {c["type"] for c in message["tool_calls"]} == {"function"}
    assert len({c["id"] for c in message["tool_calls"]}) == 2
    assert '"description": "Gets it"' in prompt_of(thinker, tools=TOOLS)
    assert "Gets it" not in prompt_of(thinker, tools=TOOLS, tool_choice="none")
    ask = {"messages": ASK, "tools": TOOLS, "structured_outputs": SAYS, "max_tokens": 200, **SILENT}
    assert streamed(thinker.events(CHAT, **ask)) == said(choice) | {"token_ids": []}
    one = thinker.ok(CHAT, **ask, parallel_tool_calls=False)["choices"][0]["message"]
    assert len(one["tool_calls"]) == 1
    none = thinker.ok(CHAT, **ask, tool_choice="none")["choices"][0]
    assert none["message"]["content"] == f"Well. {CALL}{CALL} Done." and none["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("choice", "names", "reason"),
    [
        ("required", {"get", "now"}, "tool_calls"),
        ({"type": "function", "function": {"name": "get"}}, {"get"}, "stop"),
    ],
)
def test_calls_that_have_to_be(thinker, choice, names, reason):
    fields = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 200, **SILENT}
    found = thinker.ok(CHAT, messages=ASK, **fields)["choices"][0]
    [call] = found["message"]["tool_calls"]
    assert found["finish_reason"] == reason and call["function"]["name"] in names
    assert found["message"]["content"] is None
    json.loads(call["function"]["arguments"])


def test_an_answer_in_a_form_or_a_call(thinker):
    """With response_format and tools, either comes, as the model likes; both are kept to."""
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
    seen = set()
    for bias in (8, -100):
        fields = {"tools": TOOLS, "response_format": form, "max_tokens": 300, **SILENT}
        bias_of_tag = {str(thinker.llm.tokenizer.encode("<tool_call>")[0]): bias}
        fields |= {"parallel_tool_calls": False, "logit_bias": bias_of_tag}
        choice = thinker.ok(CHAT, messages=ASK, **fields)["choices"][0]
        if calls := choice["message"].get("tool_calls"):
            json.loads(calls[0]["function"]["arguments"])
        else:
            assert set(json.loads(choice["message"]["content"])) == {"a", "b"}
        seen.add(choice["finish_reason"])
    assert seen == {"tool_calls", "stop"}


def test_past_calls_and_results_reach_the_template(thinker):
    call = {"id": "call_1", "type": "function", "function": {"name": "get", "arguments": '{"q": 1}'}}
    messages = [
        *ASK,
        {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "42"}]},
    ]
    text = prompt_of(thinker, messages=messages, tools=TOOLS)
    assert '<think>\nhm\n</think>\n<tool_call>\n{"name": "get", "arguments": {"q": 1}}\n</tool_call>' in text
    assert "<|start|>tool\n42" in text
    items = [
        {"role": "user", "content": "ab abc"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "call_1", "name": "get", "arguments": '{"q": 1}', "id": "fc_1"},
        {"type": "function_call_output", "call_id": "call_1", "output": "42"},
    ]
    count = len(thinker.llm.tokenizer.encode(text, add_special_tokens=False))
    found = thinker.ok(RESPONSES, input=items, tools=FLAT, max_output_tokens=1)
    assert found["usage"]["input_tokens"] == thinker.ok("/tokenize", messages=messages, tools=_plain(FLAT))["count"]
    blocks = [
        *ASK,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "tool_use", "id": "call_1", "name": "get", "input": {"q": 1}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "42"}]},
    ]
    counted = thinker.ok("/v1/messages/count_tokens", messages=blocks, tools=ANTHROPIC_TOOLS)["input_tokens"]
    same = [
        {"type": "function", "function": {"name": t["name"], "parameters": t["input_schema"]}} for t in ANTHROPIC_TOOLS
    ]
    assert counted == thinker.ok("/tokenize", messages=messages, tools=same)["count"]
    assert count == thinker.ok("/tokenize", messages=messages, tools=TOOLS)["count"]


def _plain(flat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {k: v for k, v in t.items() if k != "type"}} for t in flat]


def test_a_template_without_tools_gets_them_in_words(server):
    """The shared tiny model's template knows of no tools."""
    call = {"id": "1", "type": "function", "function": {"name": "get", "arguments": '{"q": 1}'}}
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "1", "content": "42"},
        {"role": "tool", "tool_call_id": "1", "content": "43"},
    ]
    answer = server.post(CHAT, messages=messages, tools=TOOLS, max_tokens=1)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
    tokenizer = server.llm.tokenizer
    for tools in (TOOLS, None):
        past = [m | {"tool_calls": [_read(call), _read(call)]} if "tool_calls" in m else m for m in messages]
        text = tokenizer.apply_chat_template(in_words(past, tools))
        assert text.count("<|start|>user\n") == 2 and "<|start|>tool" not in text
        assert (TOOLS[0]["function"]["description"] in text) == (tools is not None)
        body = {"messages": messages} if tools is None else {"messages": messages, "tools": tools}
        assert server.ok("/tokenize", **body)["tokens"] == tokenizer.encode(text, add_special_tokens=False)
    assert "<tool_response>\n42\n</tool_response>\n<tool_response>\n43\n</tool_response>" in text
    assert text.count('<tool_call>\n{"name": "get", "arguments": {"q": 1}}\n</tool_call>') == 2


def _read(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}


# ---- chat: reasoning


def test_reasoning_is_apart_and_counted(thinker):
    ask = {"messages": ASK, "max_tokens": 60, "seed": 2, "return_token_ids": True, **THINKING}
    body = thinker.ok(CHAT, **ask)
    [choice] = body["choices"]
    text = thinker.llm.tokenizer.decode(choice["token_ids"])
    want = parse_chat(make_chat_parser("<think>\n", reasoning="qwen3"), [text])
    message = choice["message"]
    assert CLOSE in choice["token_ids"] and want.reasoning
    assert (message["reasoning"], message["content"]) == (want.reasoning, want.content)
    assert message["reasoning_content"] == message["reasoning"]
    count = choice["token_ids"].index(CLOSE)
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": count}
    assert streamed(thinker.events(CHAT, **ask)) == said(choice)
    hidden = thinker.ok(CHAT, include_reasoning=False, **ask)
    assert "reasoning" not in hidden["choices"][0]["message"] and hidden["usage"] == body["usage"] | {
        "prompt_tokens_details": hidden["usage"]["prompt_tokens_details"]
    }
    assert hidden["choices"][0]["message"]["content"] == want.content
    assert streamed(thinker.events(CHAT, include_reasoning=False, **ask))["reasoning"] == ""


def test_a_beginning_that_thinks_is_continued(thinker):
    for begun, inside in (("<think>\nab", True), ("<think>\na</think>\nb", False)):
        messages = [*ASK, {"role": "assistant", "content": begun}]
        fields = {"continue_final_message": True, "max_tokens": 4, "logit_bias": {str(CLOSE): -100, str(OPEN): -100}}
        message = thinker.ok(CHAT, messages=messages, **fields)["choices"][0]["message"]
        assert bool(message["reasoning"]) == inside and bool(message["content"]) != inside
    messages = [*ASK, {"role": "assistant", "content": "<think>\na</think>\n"}]
    fields = {"continue_final_message": True, "max_tokens": 9, "structured_outputs": {"choice": ["yes", "no"]}}
    assert thinker.ok(CHAT, messages=messages, **fields)["choices"][0]["message"]["content"] in ("yes", "no")


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "low"}, True),
        ({"thinking": {"type": "disabled"}}, False),
        ({"thinking": {"type": "enabled", "budget_tokens": 100}}, True),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "high"}, False),
    ],
)
def test_switches_of_the_template(thinker, fields, thinks):
    assert prompt_of(thinker, **fields).endswith("</think>\n\n") != thinks


def test_switches_of_other_interfaces(thinker):
    long = len(thinker.llm.tokenizer.encode(prompt_of(thinker, reasoning_effort="none"), add_special_tokens=False))
    for path, fields in (
        (RESPONSES, {"input": "ab abc", "reasoning": {"effort": "none", "summary": "auto"}, "max_output_tokens": 1}),
        (ANTHROPIC, {"messages": ASK, "thinking": {"type": "disabled"}, "max_tokens": 1}),
        (ANTHROPIC, {"messages": ASK, "output_config": {"effort": "none"}, "max_tokens": 1}),
    ):
        usage = thinker.ok(path, **fields)["usage"]
        cached = usage.get(
            "cache_read_input_tokens", 0
        )  # beside input_tokens in one interface, part of them in the other
        assert usage["input_tokens"] + cached == long


# ---- Responses


def items_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items from deltas alone, checked against what the events that end them say."""
    texts: dict[int, str] = {}
    items = {}
    for event in events:
        kind, index = event["type"], event.get("output_index")
        if kind.endswith(".delta"):
            texts[index] = texts.get(index, "") + event["delta"]
        elif kind in ("response.output_text.done", "response.reasoning_text.done"):
            assert event["text"] == texts.get(index, "")
        elif kind == "response.function_call_arguments.done":
            assert event["arguments"] == texts.get(index, "")
        elif kind == "response.output_item.added":
            assert index == len(items)
            items[index] = event["item"]
        elif kind == "response.output_item.done":
            assert items[index]["id"] == event["item"]["id"]
            items[index] = event["item"]
    return [items[i] for i in sorted(items)]


def test_responses_with_calls_and_reasoning(thinker):
    ask = {
        "input": "ab abc",
        "tools": FLAT,
        "max_output_tokens": 200,
        **THINKING,
        "seed": 2,
        "structured_outputs": SAYS,
    }
    body = thinker.ok(RESPONSES, **ask)
    assert body["status"] == "completed" and body["tools"] == FLAT and body["tool_choice"] == "auto"
    assert [i["type"] for i in body["output"]] == ["reasoning", "message", "function_call", "function_call", "message"]
    thought, text, call, _, last = body["output"]
    assert (
        thought["content"][0]["type"] == "reasoning_text" and thought["content"][0]["text"] and thought["summary"] == []
    )
    assert text["content"][0]["text"] + last["content"][0]["text"] == "Well. Done."
    assert (call["name"], call["arguments"], call["status"]) == ("get", '{"q": [1, 2]}', "completed")
    assert 0 < body["usage"]["output_tokens_details"]["reasoning_tokens"] < body["usage"]["output_tokens"]
    events = named_events(thinker, RESPONSES, **ask)
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    assert events[-1]["type"] == "response.completed"
    assert items_of(events) == events[-1]["response"]["output"]
    assert comparable(events[-1]["response"]) == comparable(body)


def test_responses_formats_and_choices(thinker):
    form = {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}
    body = thinker.ok(RESPONSES, input="ab", text={"format": form}, max_output_tokens=200, **SILENT)
    assert set(json.loads(body["output"][0]["content"][0]["text"])) == {"a", "b"}
    assert body["text"] == {"format": form} and body["status"] == "completed"
    named = {"type": "function", "name": "get"}
    ask = {"input": "ab", "tools": FLAT, "tool_choice": named, "max_output_tokens": 200, **SILENT}
    body = thinker.ok(RESPONSES, **ask)
    [call] = body["output"]
    assert call["name"] == "get" and set(json.loads(call["arguments"])) == {"a", "b"} and body["tool_choice"] == named
    cut = thinker.ok(RESPONSES, **{**ask, "max_output_tokens": body["usage"]["output_tokens"] - 8})
    [part] = cut["output"]
    assert cut["status"] == part["status"] == "incomplete" and part["type"] == "function_call"
    assert call["arguments"] != part["arguments"] and call["arguments"].startswith(part["arguments"])


def test_a_grammar_that_cannot_go_on_fails_the_request_alone(thinker, monkeypatch):
    from paceline.structured.constraint import GrammarConstraint

    prepare = GrammarConstraint.prepare

    def failing(self, drafts, room=0):
        kept = prepare(self, drafts, room)
        self.failed = "too complex" if self._count > 5 else None
        return kept

    monkeypatch.setattr(GrammarConstraint, "prepare", failing)
    form = {"regex": "[a-z]{30,}"}
    body = thinker.ok(RESPONSES, input="ab", structured_outputs=form, **SILENT)
    assert body["status"] == "failed" and "too complex" in body["error"]["message"]
    assert (
        named_events(thinker, RESPONSES, input="ab", structured_outputs=form, **SILENT)[-1]["type"] == "response.failed"
    )
    [choice] = thinker.ok(CHAT, messages=ASK, structured_outputs=form, **SILENT)["choices"]
    assert choice["finish_reason"] == "abort" and choice["stop_reason"].startswith("grammar: ")


# ---- Anthropic


def test_messages_with_calls_and_thinking(thinker):
    ask = {
        "messages": ASK,
        "tools": ANTHROPIC_TOOLS,
        "max_tokens": 200,
        **THINKING,
        "seed": 2,
        "structured_outputs": SAYS,
    }
    body = thinker.ok(ANTHROPIC, **ask)
    assert body["stop_reason"] == "tool_use"
    assert [b["type"] for b in body["content"]] == ["thinking", "text", "tool_use", "tool_use", "text"]
    assert body["content"][0]["thinking"] and body["content"][0]["signature"] == ""
    assert body["content"][2] == {
        "type": "tool_use",
        "id": body["content"][2]["id"],
        "name": "get",
        "input": {"q": [1, 2]},
    }
    events = named_events(thinker, ANTHROPIC, **ask)
    assert [e["type"] for e in events[:2]] == ["message_start", "content_block_start"]
    starts = [e for e in events if e["type"] == "content_block_start"]
    stops = [e["index"] for e in events if e["type"] == "content_block_stop"]
    assert [e["index"] for e in starts] == stops == [0, 1, 2, 3, 4]
    assert [e["content_block"]["type"] for e in starts] == [b["type"] for b in body["content"]]
    partial = "".join(e["delta"]["partial_json"] for e in events if e.get("index") == 2 and "delta" in e)
    assert json.loads(partial) == {"q": [1, 2]}
    thoughts = "".join(e["delta"].get("thinking", "") for e in events if e.get("index") == 0 and "delta" in e)
    assert thoughts == body["content"][0]["thinking"]
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == body["usage"]["output_tokens"]


def test_messages_choices_and_formats(thinker):
    ask = {"messages": ASK, "tools": ANTHROPIC_TOOLS, "max_tokens": 200, **SILENT}
    for choice, names in (
        ({"type": "any", "disable_parallel_tool_use": True}, {"get", "now"}),
        ({"type": "tool", "name": "get"}, {"get"}),
    ):
        body = thinker.ok(ANTHROPIC, **ask, tool_choice=choice)
        [block] = body["content"]
        assert block["type"] == "tool_use" and block["name"] in names and isinstance(block["input"], dict)
    cut = thinker.ok(ANTHROPIC, **{**ask, "max_tokens": body["usage"]["output_tokens"] - 8}, tool_choice=choice)
    [block] = cut["content"]
    assert cut["stop_reason"] == "max_tokens" and (block["name"], block["input"]) == ("get", {})
    for field in (
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        {"output_format": {"type": "json_schema", "schema": SCHEMA}},
    ):
        body = thinker.ok(ANTHROPIC, messages=ASK, max_tokens=200, **SILENT, **field)
        assert {"a", "b"} <= set(json.loads(body["content"][0]["text"]))
