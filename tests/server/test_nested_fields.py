"""Objects inside of requests keep to the rules of the fields around them, and errors speak JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.server.errors import in_json, shown
from paceline.server.fields import ELSEWHERE
from paceline.server.tool_fields import check_chat

from .test_feature_errors import ANTHROPIC, CHAT, PLAIN, RESPONSES
from .test_feature_errors import BASE as ENDPOINTS
from .test_features import ANTHROPIC_TOOLS, ASK, FLAT, FUNCTION, SCHEMA, SILENT, TOOLS

BASE = {
    **ENDPOINTS,
    "/v1/messages/count_tokens": {"messages": ASK},
    "/tokenize": {"messages": ASK},
}
INNER = {"name": "n", "schema": SCHEMA}
NAMED = {"type": "function", "function": {"name": "get"}}
FORM = {"type": "json_schema", "json_schema": INNER}


def refused(server, path: str, **fields: Any) -> dict[str, Any]:
    answer = server.post(path, **{**BASE[path], **fields})
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"),
    [
        (CHAT, {"response_format": {**FORM, "foo": 1}}, "response_format.foo", "leave it out"),
        (CHAT, {"response_format": {**FORM, "schema": {}}}, "response_format.schema", None),
        (CHAT, {"response_format": {**FORM, "schema": SCHEMA}}, "response_format.schema", "belongs into json_schema"),
        (
            PLAIN,
            {"response_format": {"type": "json_schema", "json_schema": {**INNER, "strct": True}}},
            "response_format.json_schema.strct",
            "did you mean 'strict'?",
        ),
        (CHAT, {"response_format": {"type": "json_object", "shema": {}}}, "response_format.shema", "'schema'?"),
        (CHAT, {"response_format": {"type": "json_object", "json_schema": INNER}}, "response_format.json_schema", ""),
        (CHAT, {"response_format": {"type": "text", "schema": SCHEMA}}, "response_format.schema", "json_schema"),
        (CHAT, {"response_format": {"type": "json_object", "schema": [1]}}, "response_format.schema", "JSON schema"),
        (
            CHAT,
            {"tools": [{"type": "function", "function": {"name": "f", "paramters": {}}}]},
            "tools[0].function.paramters",
            "did you mean 'parameters'?",
        ),
        (
            "/tokenize",
            {"tools": [TOOLS[0], {"type": "function", "function": {"name": "f", "input_schema": SCHEMA}}]},
            "tools[1].function.input_schema",
            "use parameters",
        ),
        (CHAT, {"tools": [{**TOOLS[0], "parameters": SCHEMA}]}, "tools[0].parameters", "inside of function"),
        (CHAT, {"tools": [{**TOOLS[0], "x": 1}]}, "tools[0].x", ""),
        (CHAT, {"tools": TOOLS, "tool_choice": {**NAMED, "nme": "x"}}, "tool_choice.nme", "did you mean 'name'?"),
        (
            CHAT,
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "get", "x": 1}}},
            "tool_choice.function.x",
            "",
        ),
        (CHAT, {"functions": [{**FUNCTION, "paramters": {}}]}, "functions[0].paramters", "'parameters'?"),
        (CHAT, {"functions": [FUNCTION], "function_call": {"name": "get", "x": 1}}, "function_call.x", ""),
        (CHAT, {"stream": True, "stream_options": {"foo": 1}}, "stream_options.foo", "leave it out"),
        (PLAIN, {"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp", "did you mean 'regex'?"),
        (CHAT, {"thinking": {"type": "disabled", "budget": 1}}, "thinking.budget", "did you mean 'budget_tokens'?"),
        (RESPONSES, {"text": {"fromat": {"type": "text"}}}, "text.fromat", "did you mean 'format'?"),
        (RESPONSES, {"text": {"format": {"type": "text", "x": 1}}}, "text.format.x", ""),
        (RESPONSES, {"text": {"format": FORM}}, "text.format.json_schema", "beside type"),
        (RESPONSES, {"reasoning": {"efort": "low"}}, "reasoning.efort", "did you mean 'effort'?"),
        (RESPONSES, {"tools": [{**FLAT[0], "paramters": {}}]}, "tools[0].paramters", "'parameters'?"),
        (RESPONSES, {"tools": [{**FLAT[0], "function": FUNCTION}]}, "tools[0].function", "beside type"),
        (RESPONSES, {"tools": FLAT, "tool_choice": {"type": "function", "name": "get", "x": 1}}, "tool_choice.x", ""),
    ],
)
def test_unknown_fields_are_refused_by_their_path(thinker, path, fields, param, words):
    if words is None:  # it asks for nothing
        thinker.ok(path, **{**BASE[path], **fields})
        return
    error = refused(thinker, path, **fields)
    assert error["param"] == param and param in error["message"] and words in error["message"]
    assert error["code"] in ("unknown_field", "unsupported_field", None)


@pytest.mark.parametrize("path", [ANTHROPIC, "/v1/messages/count_tokens"])
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tools": [{**ANTHROPIC_TOOLS[0], "input_shema": {}}]}, "tools[0].input_shema: unknown field; did you mean"),
        ({"tools": [{**ANTHROPIC_TOOLS[0], "parameters": SCHEMA}]}, "use input_schema"),
        ({"tools": [{**ANTHROPIC_TOOLS[0], "input_examples": [{"a": 1}]}]}, "tools[0].input_examples"),
        ({"tools": [{**ANTHROPIC_TOOLS[0], "allowed_callers": ["code_execution"]}]}, "tools[0].allowed_callers"),
        ({"tools": ANTHROPIC_TOOLS, "tool_choice": {"type": "auto", "disable_parallel": True}}, "tool_choice.disable"),
        ({"output_config": {"formt": {}}}, "output_config.formt: unknown field; did you mean 'format'?"),
        ({"output_format": {"type": "json_schema", "schema": SCHEMA, "x": 1}}, "output_format.x"),
        ({"output_config": {"format": {"type": "json_schema", "schema": SCHEMA, "x": 1}}}, "output_config.format.x"),
    ],
)
def test_those_of_messages_too(thinker, path, fields, words):
    assert words in refused(thinker, path, **fields)["message"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"tools": [{**TOOLS[0], "cache_control": {"type": "ephemeral"}, "defer_loading": True}]}),
        (CHAT, {"tools": [{"type": "function", "function": {**FUNCTION, "strict": True, "return": {}}}]}),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {**INNER, "description": "d"}}}),
        (CHAT, {"stream_options": {"include_obfuscation": False}, "stream": True}),
        (CHAT, {"structured_outputs": {"regex": "a", "disable_fallback": True}}),
        (RESPONSES, {"tools": [{**FLAT[0], "strict": True, "defer_loading": False}]}),
        (RESPONSES, {"text": {"format": {"type": "json_schema", **INNER, "description": "d", "strict": False}}}),
        (ANTHROPIC, {"tools": [{**ANTHROPIC_TOOLS[0], "cache_control": {"type": "ephemeral"}, "strict": True}]}),
        (ANTHROPIC, {"tools": [{**ANTHROPIC_TOOLS[0], "allowed_callers": ["direct"], "input_examples": []}]}),
        (ANTHROPIC, {"thinking": {"type": "enabled", "budget_tokens": 2000, "display": "summarized"}}),
    ],
)
def test_what_the_interfaces_define_and_nothing_here_depends_on_is_taken(thinker, path, fields):
    answer = thinker.post(path, **{**BASE[path], **fields})
    assert answer.status_code == 200, answer.text


def test_a_json_object_with_a_schema_keeps_to_it(thinker):
    """llama.cpp's form means what OpenAI's does."""
    ask = {"messages": ASK, "max_tokens": 200, **SILENT}
    want = thinker.ok(CHAT, **ask, response_format={**FORM, "json_schema": {**INNER, "strict": True}})["choices"]
    assert set(json.loads(want[0]["message"]["content"])) == {"a", "b"}
    for kind in ("json_object", "json_schema"):
        form = {"type": kind, "schema": SCHEMA, "strict": True}
        assert thinker.ok(CHAT, **ask, response_format=form)["choices"] == want
    free = thinker.ok(CHAT, **ask, response_format={"type": "json_object", "schema": {}})["choices"][0]
    assert free["message"]["content"].startswith("{") and free != want[0]
    body = thinker.ok(
        RESPONSES,
        input="ab",
        text={"format": {"type": "json_object", "schema": SCHEMA}},
        max_output_tokens=200,
        **SILENT,
    )
    assert {"a", "b"} <= set(json.loads(body["output"][0]["content"][0]["text"]))


@pytest.mark.parametrize(
    ("path", "fields", "where"),
    [
        (CHAT, {"tools": "chat", "tool_choice": "required"}, "tools[1].function.parameters"),
        (CHAT, {"tools": "chat", "tool_choice": {"type": "function", "function": {"name": "bad"}}}, None),
        (CHAT, {"functions": "old", "function_call": {"name": "bad"}}, "functions[1].parameters"),
        (CHAT, {"tools": "chat", "response_format": FORM}, "tools[1].function.parameters"),
        (RESPONSES, {"tools": "flat", "tool_choice": "required"}, "tools[1].parameters"),
        (ANTHROPIC, {"tools": "anthropic", "tool_choice": {"type": "any"}}, "tools[1].input_schema"),
    ],
)
def test_a_schema_that_does_not_compile_names_its_tool(thinker, path, fields, where):
    bad = {"type": "object", "properties": {"a": {"type": "nonsense"}}}
    flat = [{"name": "good", "parameters": SCHEMA}, {"name": "bad", "parameters": bad}, {"name": "now"}]
    forms = {
        "old": flat,
        "chat": [{"type": "function", "function": tool} for tool in flat],
        "flat": [{"type": "function", **tool} for tool in flat],
        "anthropic": [{"name": tool["name"], "input_schema": tool.get("parameters", {})} for tool in flat],
    }
    given = {name: forms.get(value, value) if isinstance(value, str) else value for name, value in fields.items()}
    error = refused(thinker, path, **given)
    where = where or "tools[1].function.parameters"
    assert error["message"] == f"{where}: the schema cannot be compiled: Invalid type: nonsense"
    assert error.get("param", where) == where


# ---- hints


@pytest.mark.parametrize("name", sorted(ELSEWHERE))
def test_names_of_other_servers_are_answered_with_what_there_is(thinker, name):
    error = refused(thinker, CHAT, **{name: 1})
    assert error["message"] == f"{name}: unknown field; {ELSEWHERE[name]}" and error["code"] == "unknown_field"


def test_names_that_newcomers_try(thinker):
    assert "use max_tokens" in refused(thinker, CHAT, n_predict=5)["message"]
    assert "/v1/completions" in refused(thinker, CHAT, echo=True)["message"]
    for name in ("timings_per_token", "return_progress", "options"):
        assert "did you mean" not in refused(thinker, PLAIN, **{name: True})["message"]
    assert thinker.ok("/tokenize", content="ab")["tokens"] == thinker.ok("/tokenize", prompt="ab")["tokens"]
    error = refused(thinker, "/tokenize", content="ab", prompt="ab", messages=None)
    assert error["param"] == "content"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": -1}, "max_tokens=-1: use 1 to 2**31 - 1, or null for no limit"),
        ({"seed": -1}, "seed=-1: use 0 to 2**64 - 1, or null for a random one"),
        ({"temperature": True}, "temperature=true: use a valid number"),
        ({"n": None, "stop": [None]}, "stop=[null]: use a valid string"),
        ({"structured_outputs": {"json_object": 3}}, "structured_outputs.json_object=3: use true or leave it out"),
        ({"tools": [{"type": "function", "function": {"name": None}}]}, "tools[0].function.name=null"),
        ({"tool_choice": {"type": "x", "y": [True, None]}, "tools": TOOLS}, 'tool_choice={"type": "x", "y": [true'),
    ],
)
def test_errors_speak_json(thinker, fields, message):
    error = refused(thinker, CHAT, **fields)
    assert error["message"].startswith(message)


def test_words_in_quotes_are_the_clients():
    assert in_json("a=None: 'None' or \"True\", not True") == "a=null: 'None' or \"True\", not true"
    assert in_json("the model's None, a client's True") == "the model's null, a client's true"
    assert shown("None") == "'None'" and shown({"a": [None, True, 1.5]}) == '{"a": [null, true, 1.5]}'
    assert len(shown(["x" * 1000])) < 200


@pytest.mark.parametrize(
    "fields",
    [
        {"n_predict": None, "provider": None, "keep_alive": None, "num_ctx": None, "whatever": None},
        {"timings_per_token": False, "return_progress": False, "id_slot": -1, "dynatemp_range": 0},
        {"response_format": {"type": "text", "json_schema": None, "foo": None}},
        {"verbosity": "medium", "client_metadata": {"origin": "a"}},
    ],
)
def test_what_asks_for_nothing_is_taken(server, fields: dict[str, Any]):
    """As docs/api.md says: null is the same as no field, whatever its name."""
    answer = server.post(CHAT, **{**BASE[CHAT], **fields})
    assert answer.status_code == 200, answer.text


def test_null_inside_of_tools_is_no_field():
    tools = [{"type": "function", "custom": None, "function": {"name": "g", "id": None}}]
    check_chat(tools, {"type": "function", "function": {"name": "g", "arguments": None}})


@pytest.mark.parametrize("name", ["source", "self", "text", "messages_"])
def test_variables_of_a_template_may_have_any_name(server, name: str):
    answer = server.post(CHAT, **BASE[CHAT], chat_template_kwargs={name: 1})
    assert answer.status_code == 200, answer.text
