"""Schemas, grammars and tools that cannot be served: 400 by the field's name, soon, and nobody else waits for them."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest
from engine.harness import nothing, open_llm, scripted

from paceline.errors import ConfigError
from paceline.server.features import ModelFeatures
from paceline.structured.params import MAX_SOURCE

from .harness import live
from .test_features import ANTHROPIC_TOOLS, ASK, FLAT, SCHEMA, TOOLS

CHAT, PLAIN, RESPONSES, ANTHROPIC = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": ASK, "max_tokens": 2},
    PLAIN: {"prompt": "ab", "max_tokens": 2},
    RESPONSES: {"input": "ab", "max_output_tokens": 2},
    ANTHROPIC: {"messages": ASK, "max_tokens": 2},
}


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}
    return schema


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **function}}


LONG = {"enum": ["x" * 1000 + str(i) for i in range(MAX_SOURCE // 1000)]}
BAD = {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}
REQUIRED = {"tool_choice": "required"}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"response_format": {"type": "yaml"}}, "response_format.type"),
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (CHAT, {"response_format": schema_format(None)}, "response_format.json_schema.schema"),
        (CHAT, {"response_format": schema_format({"type": "nonsense"})}, "response_format.json_schema.schema"),
        (CHAT, {"response_format": schema_format({"uniqueItems": True})}, "response_format.json_schema.schema"),
        (CHAT, {"response_format": schema_format({"$ref": "#/$defs/x"})}, "response_format.json_schema.schema"),
        (CHAT, {"response_format": schema_format({"$ref": "http://x/y"})}, "response_format.json_schema.schema"),
        (CHAT, {"response_format": schema_format(False)}, "response_format.json_schema.schema"),
        (CHAT, {"response_format": schema_format({"not": {}})}, "response_format.json_schema.schema"),
        (CHAT, {"response_format": schema_format(BAD)}, "response_format.json_schema.schema"),
        (CHAT, {"response_format": schema_format(LONG)}, "response_format.json_schema.schema"),
        (CHAT, {"response_format": schema_format(SCHEMA), "guided_json": SCHEMA}, "guided_json"),
        (
            CHAT,
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
        ),
        (CHAT, {"response_format": []}, "response_format"),
        (PLAIN, {"response_format": schema_format({"type": "nonsense"})}, "response_format.json_schema.schema"),
        (PLAIN, {"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        (PLAIN, {"structured_outputs": {"regex": "(?=a)"}}, "structured_outputs.regex"),
        (
            PLAIN,
            {"structured_outputs": {"regex": "(((((a{1,1000}){1,1000}){1,1000}){1,1000}))"}},
            None,
        ),
        (PLAIN, {"structured_outputs": {"grammar": "start: x"}}, "structured_outputs.grammar"),
        (PLAIN, {"structured_outputs": {"grammar": "start: start"}}, "structured_outputs.grammar"),
        (PLAIN, {"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        (PLAIN, {"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        (PLAIN, {"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs"),
        (PLAIN, {"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        (PLAIN, {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": "("}}, "structured_outputs.json"),
        (PLAIN, {"guided_regex": "("}, "guided_regex"),
        (PLAIN, {"guided_grammar": "nonsense"}, "guided_grammar"),
        (PLAIN, {"guided_choice": [""]}, "guided_choice"),
        (PLAIN, {"guided_json": {"type": "nonsense"}}, "guided_json"),
        (PLAIN, {"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex"),
        (PLAIN, {"tools": TOOLS}, "tools"),
        (PLAIN, {"reasoning_effort": "low"}, "reasoning_effort"),
        (CHAT, {"tools": [tool(), tool()]}, "tools[1].function.name"),
        (CHAT, {"tools": [tool(name="a b")]}, "tools[0].function.name"),
        (CHAT, {"tools": [{"type": "web_search"}]}, "tools[0].type"),
        (CHAT, {"tools": [tool(parameters={"type": "array"})]}, "tools[0].function.parameters.type"),
        (CHAT, {"tools": [tool(parameters={"required": 5})]}, "tools[0].function.parameters.required"),
        (
            CHAT,
            {"tools": [tool(name="a"), tool(parameters={"properties": {"a": {"type": "x"}}})], **REQUIRED},
            "tools[1].function.parameters",
        ),
        (CHAT, {"tools": [tool(parameters=nested(200))], **REQUIRED}, None),
        (CHAT, {"tools": [tool()] * 129}, "tools"),
        (CHAT, {"tools": [tool(parameters={"properties": {"a": LONG}})], **REQUIRED}, "tools"),
        (
            CHAT,
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice.function.name",
        ),
        (CHAT, {"tools": TOOLS, "tool_choice": "all"}, "tool_choice"),
        (CHAT, REQUIRED, "tool_choice"),
        (CHAT, {"tools": TOOLS, **REQUIRED, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        (CHAT, {"tools": "x"}, "tools"),
        (CHAT, {"function_call": {"name": "f"}}, "function_call"),
        (CHAT, {"function_call": "required"}, "function_call"),
        (CHAT, {"functions": [{"name": "f"}], "function_call": "required"}, "function_call"),
        (CHAT, {"functions": [{"name": "f"}], "function_call": {"nme": "f"}}, "function_call"),
        (CHAT, {"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call.name"),
        (CHAT, {"functions": [{"name": "f"}], "tools": TOOLS}, "functions"),
        (CHAT, {"functions": [{"name": "f"}], "tool_choice": "auto"}, "tool_choice"),
        (CHAT, {"function_call": "auto", "tools": TOOLS, "tool_choice": "auto"}, "function_call"),
        (CHAT, {"functions": [{"name": "f"}, {"name": "f"}]}, "functions[1].name"),
        (CHAT, {"functions": [{"name": "a b"}]}, "functions[0].name"),
        (CHAT, {"functions": [{"name": "f", "parameters": {"type": "array"}}]}, "functions[0].parameters.type"),
        (
            CHAT,
            {"functions": [{"name": "f", "parameters": BAD}], "function_call": {"name": "f"}},
            "functions[0].parameters",
        ),
        (CHAT, {"functions": ["f"]}, "functions.0"),
        (PLAIN, {"functions": [{"name": "f"}]}, "functions"),
        (
            CHAT,
            {
                "functions": [{"name": "f"}],
                "function_call": {"name": "f"},
                "structured_outputs": {"regex": "a"},
            },
            "structured_outputs",
        ),
        (CHAT, {"reasoning_effort": "much"}, "reasoning_effort"),
        (CHAT, {"thinking": {"type": "on"}}, "thinking.type"),
        (CHAT, {"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        (CHAT, {"thinking_token_budget": 10}, "thinking_token_budget"),
        (
            CHAT,
            {"tools": TOOLS, "response_format": schema_format({"type": "nonsense"})},
            "response_format.json_schema.schema",
        ),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}, "text.format.schema"),
        (RESPONSES, {"text": {"format": {"type": "x"}}}, "text.format.type"),
        (RESPONSES, {"text": {"verbosity": "low"}}, "text.verbosity"),
        (RESPONSES, {"text": {"x": 1}}, "text.x"),
        (RESPONSES, {"reasoning": {"effort": "x"}}, "reasoning.effort"),
        (RESPONSES, {"tools": [{"type": "web_search"}]}, "tools[0].type"),
        (RESPONSES, {"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        (RESPONSES, {"tools": FLAT, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
        (RESPONSES, {"tools": FLAT, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        (RESPONSES, {"input": [{"type": "item_reference"}]}, "input[0].type"),
        (RESPONSES, {"input": [{"type": "function_call_output", "call_id": "a"}]}, "input[0].output"),
        (RESPONSES, {"input": [{"type": "function_call", "call_id": "a"}]}, "input[0].name"),
        (RESPONSES, {"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(thinker, path, fields, param):
    begin = time.monotonic()
    for stream in (False, True):
        answer = thinker.post(path, **{**BASE[path], **fields, "stream": stream})
        if param is None and answer.status_code == 200:
            continue  # may work or not; must not hang or fail
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert param in (None, error["param"]), error
        assert (error["param"] or "") in error["message"] and len(error["message"]) < 1000
    assert time.monotonic() - begin < 60


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "a", "input_schema": {"type": "array"}}]}, "tools[0].input_schema.type"),
        ({"tools": ANTHROPIC_TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
        ({"tools": ANTHROPIC_TOOLS, "tool_choice": "any"}, "tool_choice.type"),
        ({"output_config": {"x": 1}}, "output_config.x"),
        ({"output_format": {"type": "json_schema", "schema": {"type": "x"}}}, "output_format.schema"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0].id"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content"),
    ],
)
def test_anthropic_errors(thinker, fields, words):
    answer = thinker.post(ANTHROPIC, **{**BASE[ANTHROPIC], **fields})
    assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text


@pytest.mark.parametrize("depth", [30, 150, 300])
def test_deep_schemas_work_or_are_refused(thinker, depth):
    answer = thinker.post(CHAT, **BASE[CHAT], response_format=schema_format(nested(depth)))
    assert answer.status_code in (200, 400), answer.text


def test_recursive_schemas_are_served(thinker):
    tree = {
        "type": "object",
        "properties": {"v": {"type": "boolean"}, "sub": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}},
        "required": ["v", "sub"],
        "additionalProperties": False,
    }
    fields = {**BASE[CHAT], "max_tokens": 300, "seed": 1, "chat_template_kwargs": {"enable_thinking": False}}
    body = thinker.ok(CHAT, **fields, response_format=schema_format(tree))["choices"][0]
    if body["finish_reason"] == "stop":
        assert {"v", "sub"} == set(json.loads(body["message"]["content"]))
    answer = thinker.post(CHAT, **BASE[CHAT], response_format=schema_format({"$ref": "#"}))
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "response_format.json_schema.schema"


def test_nobody_waits_for_another_s_grammar(thinker, monkeypatch):
    """While grammars compile for ever, others chat, encode and get figures; grammars that are known work too."""
    known = {"structured_outputs": {"choice": ["yes", "no"]}}
    thinker.ok(PLAIN, **BASE[PLAIN], **known)
    gate = threading.Event()
    build = type(thinker.llm.grammars)._build
    monkeypatch.setattr(type(thinker.llm.grammars), "_build", lambda *a: gate.wait(600) and build(*a))
    results: list[int] = []
    slow = threading.Thread(
        target=lambda: results.append(thinker.post(PLAIN, **BASE[PLAIN], guided_regex="[a-z]{7}").status_code)
    )
    with scripted(thinker.llm, nothing):
        slow.start()
        while not thinker.engine.in_flight:
            time.sleep(0.001)
        assert thinker.client.get("/health").status_code == 200
        thinker.ok(CHAT, **BASE[CHAT])
        thinker.ok("/tokenize", prompt="ab")
        thinker.ok(PLAIN, **BASE[PLAIN], **known)
        assert not results
        gate.set()
        slow.join(600)
    assert results == [200]


def test_a_client_that_leaves_while_its_grammar_compiles(thinker, monkeypatch):
    gate = threading.Event()
    build = type(thinker.llm.grammars)._build
    monkeypatch.setattr(type(thinker.llm.grammars), "_build", lambda *a: gate.wait(600) and build(*a))
    import httpx

    with pytest.raises(httpx.ReadTimeout), httpx.Client(base_url=thinker.url, timeout=0.3) as client:
        client.post(PLAIN, json={**BASE[PLAIN], "guided_regex": "[a-z]{9}"})
    gate.set()
    thinker.idle()


@pytest.mark.parametrize(
    ("tool_parser", "reasoning_parser", "words"),
    [("nix", "auto", "tool_call_parser"), ("auto", "nix", "reasoning_parser"), ("pythonic", "auto", "chat template")],
)
def test_parsers_that_do_not_exist_or_fit(server, tool_parser, reasoning_parser, words):
    with pytest.raises(ConfigError, match=words):
        ModelFeatures(server.llm.tokenizer, "llama", tool_parser, reasoning_parser)


def test_parsers_can_be_switched_off(thinker_folder):
    with live(open_llm(thinker_folder), tool_call_parser="none", reasoning_parser="none") as server:
        answer = server.post(CHAT, **BASE[CHAT], tools=TOOLS)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools"
        answer = server.ok(CHAT, **BASE[CHAT], temperature=0, min_tokens=2, chat_template_kwargs={"open": True})
        message = answer["choices"][0]["message"]
        assert "reasoning" not in message and message["content"]


def test_switches_that_a_model_does_not_have_are_refused(server):
    for field, value in (("reasoning_effort", "high"), ("thinking", {"type": "enabled", "budget_tokens": 9})):
        answer = server.post(CHAT, **BASE[CHAT], **{field: value})
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "unsupported_field"
    for field, value in (("reasoning_effort", "none"), ("thinking", {"type": "disabled"})):
        server.ok(CHAT, **BASE[CHAT], **{field: value})
