"""OpenAI's old form of tools: what `tools` would give, said by `function_call`."""

from __future__ import annotations

import json
from typing import Any

import pytest
from engine.harness import repeat_last, scripted
from openai import OpenAI

from paceline.server.messages import normalised

from .test_features import ASK, CALL, FUNCTION, SAYS, SILENT, TOOLS, prompt_of

CHAT = "/v1/chat/completions"
FUNCTIONS = [FUNCTION, {"name": "now"}]
LIMIT = {"messages": ASK, "max_tokens": 200, **SILENT}


@pytest.fixture(autouse=True)
def drafts(thinker):
    with scripted(thinker.llm, repeat_last):
        yield


def joined(chunks: list[dict[str, Any]]) -> tuple[dict[str, Any], str | None]:
    """(message, finish reason) of a stream's first choice."""
    message: dict[str, Any] = {}
    reason = None
    for chunk in chunks:
        for choice in chunk["choices"]:
            assert reason is None and "tool_calls" not in choice["delta"]
            reason = choice["finish_reason"]
            for name, value in choice["delta"].items():
                if name == "function_call":
                    call = message.setdefault(name, {"name": "", "arguments": ""})
                    assert not ("name" in value and call["name"]), "the name comes once"
                    for part, text in value.items():
                        call[part] += text
                elif name != "role" and value is not None:
                    message[name] = message.get(name, "") + value
    return message, reason


def test_functions_reach_the_template_as_tools(thinker):
    assert prompt_of(thinker, functions=FUNCTIONS) == prompt_of(thinker, tools=TOOLS)
    for choice in ("none", "auto"):
        old = prompt_of(thinker, functions=FUNCTIONS, function_call=choice)
        assert old == prompt_of(thinker, tools=TOOLS, tool_choice=choice)
    assert prompt_of(thinker, functions=[], function_call="none") == prompt_of(thinker)


def test_a_call_that_the_model_makes(thinker):
    """The first one: an answer in this form has no room for another."""
    [choice] = thinker.ok(CHAT, functions=FUNCTIONS, structured_outputs=SAYS, **LIMIT)["choices"]
    message = choice["message"]
    assert message["function_call"] == {"name": "get", "arguments": '{"q": [1, 2]}'} and "tool_calls" not in message
    assert message["content"] == "Well. Done." and choice["finish_reason"] == "function_call"
    said, reason = joined(thinker.events(CHAT, functions=FUNCTIONS, structured_outputs=SAYS, **LIMIT))
    assert (said["content"], said["function_call"], reason) == (
        message["content"],
        message["function_call"],
        "function_call",
    )
    none = thinker.ok(CHAT, functions=FUNCTIONS, function_call="none", structured_outputs=SAYS, **LIMIT)["choices"][0]
    assert none["message"]["content"] == f"Well. {CALL}{CALL} Done." and none["finish_reason"] == "stop"


def test_a_named_function(thinker):
    """The same tokens as for a named tool."""
    asked = {"functions": FUNCTIONS, "function_call": {"name": "get"}, "return_token_ids": True, **LIMIT}
    [choice] = thinker.ok(CHAT, **asked)["choices"]
    named = {"type": "function", "function": {"name": "get"}}
    [new] = thinker.ok(CHAT, tools=TOOLS, tool_choice=named, return_token_ids=True, **LIMIT)["choices"]
    assert choice["token_ids"] == new["token_ids"] and choice["finish_reason"] == new["finish_reason"] == "stop"
    call = choice["message"]["function_call"]
    assert call == new["message"]["tool_calls"][0]["function"] and choice["message"]["content"] is None
    assert call["name"] == "get" and set(json.loads(call["arguments"])) >= {"a", "b"}
    said, reason = joined(thinker.events(CHAT, **asked))
    assert (said["function_call"], reason) == (call, "stop") and not said.get("content")


def test_past_calls_and_results(thinker):
    """As their new form has them, ids being made up; a result belongs to its function's last call."""

    def calls(name: str, arguments: str, at: str) -> dict[str, Any]:
        call = {"name": name, "arguments": arguments}
        return {"role": "assistant", "content": None, "tool_calls": [{"id": at, "type": "function", "function": call}]}

    old = [
        *ASK,
        {"role": "assistant", "content": None, "function_call": {"name": "get", "arguments": '{"a": 7}'}},
        {"role": "function", "name": "get", "content": "42"},
        {"role": "assistant", "content": None, "function_call": {"name": "now", "arguments": "{}"}},
        {"role": "function", "name": "now", "content": "noon"},
    ]
    new = [
        *ASK,
        calls("get", '{"a": 7}', "call00001"),
        {"role": "tool", "name": "get", "tool_call_id": "call00001", "content": "42"},
        calls("now", "{}", "call00003"),
        {"role": "tool", "name": "now", "tool_call_id": "call00003", "content": "noon"},
    ]
    for text in (
        prompt_of(thinker, messages=old, functions=FUNCTIONS),
        prompt_of(thinker, messages=old),
    ):
        assert '"arguments": {"a": 7}' in text and "42" in text and "noon" in text
    assert prompt_of(thinker, messages=old) == prompt_of(thinker, messages=new)
    assert normalised(old) == normalised(new)


def test_the_openai_client(thinker):
    client = OpenAI(base_url=f"{thinker.url}/v1", api_key="none", max_retries=0)
    fields: Any = {"model": "thinker", "messages": ASK, "functions": FUNCTIONS, "max_tokens": 200}
    fields |= {"function_call": {"name": "get"}, "temperature": 1.0, "seed": 3, "extra_body": {**SILENT}}
    whole = client.chat.completions.create(**fields).choices[0].message.function_call
    assert whole is not None and whole.name == "get"
    names, arguments = [], ""
    for chunk in client.chat.completions.create(**fields, stream=True):
        for choice in chunk.choices:
            if choice.delta.function_call is not None:
                names.append(choice.delta.function_call.name)
                arguments += choice.delta.function_call.arguments or ""
    assert arguments == whole.arguments and [name for name in names if name] == ["get"]
