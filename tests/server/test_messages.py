"""Messages of a chat: what is known works, and what is not gets an error that names the field, the value and the
remedy."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.server.errors import ApiError
from paceline.server.message_checks import MOST_GUESSES, check_messages

CHAT, RESPONSES, TOKENIZE, RACE = "/v1/chat/completions", "/v1/responses", "/tokenize", "/playground/stream"
USER = {"role": "user", "content": "ab"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "get", "arguments": "{}"}}

WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"role": "banana", "content": "ab"}, "messages[1].role", "='banana': use one of 'system', 'developer', 'user'"),
    ({"role": "User", "content": "ab"}, "messages[1].role", "='User': use one of"),
    ({"role": None, "content": "ab"}, "messages[1].role", "=null: use one of"),
    ({"role": 3, "content": "ab"}, "messages[1].role", "=3: use one of"),
    ({"content": "ab"}, "messages[1].role", "=null: use one of"),
    ({"role": "user"}, "messages[1].content", "=null: a message of the role 'user' needs text"),
    ({"role": "system", "content": None}, "messages[1].content", "=null: a message of the role 'system' needs text"),
    ({"role": "developer"}, "messages[1].content", "=null: a message of the role 'developer' needs text"),
    ({"role": "assistant", "contents": "ab"}, "messages[1].contents", "='ab': unknown field; did you mean 'content'?"),
    ({"role": "tool", "contents": ["ab"]}, "messages[1].contents", "=[\"ab\"]: unknown field; did you mean 'content'?"),
    ({"role": "tool", "content": "ab", "toolcall_id": "1"}, "messages[1].toolcall_id", "did you mean 'tool_call_id'?"),
    ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content", '={"type": "text"}: a text part needs'),
    ({"role": "user", "content": [None]}, "messages[1].content", "=null: this model reads text parts only"),
    ({"role": "user", "content": 5}, "messages[1].content", "=5: use a string or a list of text parts"),
    ({"role": "user", "contents": "ab"}, "messages[1].contents", "='ab': unknown field; did you mean 'content'?"),
    ({"rol": "user", "content": "ab"}, "messages[1].role", "=null: use one of"),
    ({"role": "assistant", "content": "", "tool_call": [CALL]}, "messages[1].tool_call", "did you mean 'tool_calls'?"),
    ({"role": "assistant", "tool_calls": "get"}, "messages[1].tool_calls", "='get': use a list of calls"),
    ({"role": "assistant", "tool_calls": ["get"]}, "messages[1].tool_calls[0]", "='get': use an object with id"),
    ({"role": "assistant", "tool_calls": [CALL, {}]}, "messages[1].tool_calls[1].function", '=null: use {"name": ...,'),
    (
        {"role": "assistant", "tool_calls": [{"type": "custom", "custom": {"name": "get", "input": "ab"}}]},
        "messages[1].tool_calls[0].function",
        "=null: use",
    ),
    (
        {"role": "assistant", "tool_calls": [{"function": {"name": None, "arguments": "{}"}}]},
        "messages[1].tool_calls[0].function.name",
        "=null: name the function that was called",
    ),
    ({"role": "assistant", "tool_calls": [{"arguments": "{}"}]}, "messages[1].tool_calls[0].name", "=null: name the"),
    ({"role": "tool", "content": "ab", "tool_call_id": 1}, "messages[1].tool_call_id", "=1: use a string"),
    ({"role": "user", "content": "ab", "name": ["a"]}, "messages[1].name", '=["a"]: use a string'),
    ({"role": "assistant", "reasoning_content": {}, "content": ""}, "messages[1].reasoning_content", "={}: use a"),
]


@pytest.mark.parametrize(("message", "param", "says"), WRONG, ids=str)
def test_messages_that_are_none(server, message, param, says):
    for path in (CHAT, TOKENIZE, RACE):
        answer = server.post(path, messages=[USER, message])
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param), path
        assert error["message"].startswith(param + "=") and says in error["message"]


RIGHT: list[list[dict[str, Any]]] = [
    [{"role": "system", "content": "ab"}, {"role": "developer", "content": "ab"}, USER],
    [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "ab"}],
    [USER, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "call_1", "content": ""}],
    [
        USER,
        {"role": "assistant", "content": None, "function_call": {"name": "get", "arguments": "{}"}},
        {"role": "function", "name": "get", "content": None},
    ],
    [{"role": "user", "content": [{"type": "text", "text": "ab"}, {"type": "text", "text": "abc"}], "name": "Tom"}],
    [{"role": "user", "content": ""}],
    [{"role": "user", "content": []}],
    # an answer of this or another server, sent back as it came
    [
        USER,
        {
            "role": "assistant",
            "content": "ab",
            "refusal": None,
            "annotations": [],
            "audio": None,
            "function_call": None,
            "tool_calls": None,
            "reasoning": None,
            "reasoning_content": None,
        },
        USER,
    ],
    [USER, {"role": "assistant", "content": None, "reasoning": "ab"}, USER],
    [USER, {"role": "assistant", "content": None, "refusal": "ab"}, USER],
    # an empty answer, in the histories of agents, and an empty result, which some clients leave out
    *(
        [USER, {"role": "assistant", **none}, USER]
        for none in ({}, {"content": None}, {"content": "", "tool_calls": []})
    ),
    [USER, {"role": "assistant", "content": None, "tool_calls": [], "function_call": None, "refusal": None}, USER],
    [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "call_1"}],
    [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": None}],
    # empty tables of clients in Lua
    [USER, {"role": "assistant", "content": "ab", "tool_calls": {}, "function_call": {}}, USER],
    # what providers and clients add, however near to another name
    [
        {"role": "user", "content": "ab", "cacheControl": {"type": "ephemeral"}, "names": "ab", "tool_call": None},
        {"role": "assistant", "content": "ab", "reasoning_text": "ab", "reasoning_details": [{}], "annotation": [1]},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "context": "ab", "contents": None, "prefix": True},
        {"role": "tool", "content": [{"type": "text", "text": "ab"}], "tool_name": "get", "name": "get"},
        {"role": "assistant", "content": "ab", "context": {"citations": []}, "thinking_blocks": [], "parsed": {"a": 1}},
    ],
    [{"role": "user", "content": [{"text": "ab"}]}],
    # what only some template or client knows
    [{"role": "user", "content": "ab", "context": "abc", "provider_specific_fields": {}, "id": 5, "weight": 1}],
]


@pytest.mark.parametrize("messages", RIGHT, ids=str)
def test_messages_that_clients_send(server, messages):
    server.ok(CHAT, messages=messages, max_tokens=1)
    assert server.ok(TOKENIZE, messages=messages)["count"] > 0


def test_what_a_template_names_is_known():
    template = "{% if m.role == 'ipython' or m['role'] == \"context\" %}{{ m.contents }} banana{% endif %}"
    for role in ("ipython", "context"):
        check_messages([{"role": role}, {"role": role, "contents": "ab"}], (template,))
        with pytest.raises(ApiError, match=f"role='{role}'"):
            check_messages([{"role": role, "content": "ab"}], ())
    with pytest.raises(ApiError, match="role='banana'"):  # a word, but no string
        check_messages([{"role": "banana", "content": "ab"}], (template,))
    with pytest.raises(ApiError, match=r"messages\[0\].content=null"):
        check_messages([{"role": "user", "contents": "ab"}], (template,))


def test_guesses_are_few(monkeypatch):
    """A body may have a million names: only so many are compared with known ones."""
    import paceline.server.message_checks as module

    calls, guess = [], module.get_close_matches
    monkeypatch.setattr(module, "get_close_matches", lambda *args: calls.append(args) or guess(*args))
    message = {"role": "assistant", "content": "ab", **{f"x{i}": i for i in range(5000)}}
    check_messages([message, message], ())
    assert len(calls) == MOST_GUESSES


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"role": "banana", "content": "ab"}, "input[1].role"),
        ({"role": "tool", "content": "ab"}, "input[1].role"),
        ({"type": "message", "content": "ab"}, "input[1].role"),
        ({"role": "user"}, "input[1].content"),
        ({"role": "assistant", "content": None, "tool_calls": [CALL]}, "input[1].tool_calls"),
        ({"type": "item_reference", "id": "msg_1"}, "input[1].type"),
    ],
)
def test_responses_items_are_named_as_they_came(server, item, param):
    answer = server.post(RESPONSES, input=[USER, item], max_output_tokens=1)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert answer.json()["error"]["message"].startswith(param + "=")


def test_responses_items_that_clients_send(server):
    """An answer sent back as it came, with nothing in it too; calls with their results."""
    said = [{"type": "output_text", "text": "ab", "annotations": [], "logprobs": []}]
    call = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "get", "arguments": "", "status": None}
    items: list[list[dict[str, Any]]] = [
        [{"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": said}],
        [{"type": "message", "role": "assistant"}],
        [{"role": "assistant", "content": None}],
        [{"type": None, "role": "assistant", "content": []}],
        [call, {"type": "function_call_output", "call_id": "call_1", "output": [{"type": "input_text", "text": "ab"}]}],
        [{"type": "reasoning", "id": "rs_1", "summary": [], "content": None}, {"role": "assistant", "content": "ab"}],
    ]
    for middle in items:
        server.ok(RESPONSES, input=[USER, *middle, USER], max_output_tokens=1)
    assert server.post(RESPONSES, input=[]).json()["error"]["param"] == "input"


def test_calls_without_an_object_for_the_function_reach_the_prompt(server):
    """As datasets and models write them. A template sees the same as of OpenAI's form."""
    flat = {"id": "call_1", "name": "get", "arguments": '{"city": "Lyon"}'}
    nested = {"id": "call_1", "type": "function", "function": {"name": "get", "arguments": '{"city": "Lyon"}'}}
    counts = [
        server.ok(TOKENIZE, messages=[USER, {"role": "assistant", "content": None, "tool_calls": [call]}])["tokens"]
        for call in (flat, nested)
    ]
    assert counts[0] == counts[1] and len(counts[0]) > len(server.ok(TOKENIZE, messages=[USER])["tokens"]) + 20


# ---- the limit has the name that the client gave it


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_errors_call_the_limit_as_the_client_does(server, path):
    own = {CHAT: "max_completion_tokens", RESPONSES: "max_output_tokens"}[path]
    asked: dict[str, Any] = {"messages": [USER]} if path == CHAT else {"input": "ab"}
    for name, others in ((own, {}), (own, {"max_tokens": 5}), ("max_tokens", {})):
        error = server.post(path, **asked, **{**others, name: 0}).json()["error"]
        assert error["param"] == name and error["message"].startswith(f"{name}=0: use 1 to ")
        error = server.post(path, **asked, **{**others, name: 3}, min_tokens=4).json()["error"]
        assert error["message"] == f"min_tokens=4: must not exceed {name}=3"


def test_a_cache_that_is_too_small_names_the_clients_field(server, monkeypatch):
    monkeypatch.setattr(server.llm.engine.pool, "size", 4)
    for path, asked, name in (
        (CHAT, {"messages": [USER]}, "max_completion_tokens"),
        (CHAT, {"messages": [USER]}, "max_tokens"),
        (RESPONSES, {"input": "ab"}, "max_output_tokens"),
    ):
        answer = server.post(path, **asked, **{name: 100})
        assert answer.status_code == 400
        assert f"prompt and {name}: " in answer.json()["error"]["message"]
        assert f"lower {name} or raise" in answer.json()["error"]["message"]


def test_responses_say_which_limit_holds(server):
    for given, limit in (({"max_output_tokens": 3}, 3), ({"max_tokens": 4}, 4), ({}, None)):
        body = server.ok(RESPONSES, input="ab", **(given or {"stop_token_ids": list(range(100)), "seed": 1}))
        assert body["max_output_tokens"] == limit
        if limit:
            assert body["usage"]["output_tokens"] <= limit
    assert server.ok(RESPONSES, input="ab", max_tokens=9, max_output_tokens=2)["max_output_tokens"] == 2
