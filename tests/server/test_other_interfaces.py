"""The Responses and Messages interfaces: the same tokens in other clothes."""

from __future__ import annotations

import json

from .harness import Live

ASK = "ab abc"
SAMPLED = {"temperature": 1.1, "seed": 3, "ignore_eos": True}


def chat_text(server: Live, messages=None, **fields):
    messages = messages or [{"role": "user", "content": ASK}]
    body = server.ok("/v1/chat/completions", messages=messages, max_tokens=12, **SAMPLED, **fields)
    return body["choices"][0]["message"]["content"], body["usage"]


def named_events(server: Live, path: str, **body):
    with server.client.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        lines = list(answer.iter_lines())
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    data = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert names == [d["type"] for d in data]
    return data


def test_responses(server):
    text, usage = chat_text(server)
    for given in (ASK, [{"role": "user", "content": [{"type": "input_text", "text": ASK}]}]):
        body = server.ok("/v1/responses", input=given, max_output_tokens=12, **SAMPLED)
        assert body["output"][0]["content"][0]["text"] == text
        assert body["status"] == "incomplete" and body["incomplete_details"] == {"reason": "max_output_tokens"}
        assert body["usage"]["input_tokens"] == usage["prompt_tokens"] and body["usage"]["output_tokens"] == 12
    events = named_events(server, "/v1/responses", input=ASK, max_output_tokens=12, **SAMPLED)
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    kinds = [e["type"].removeprefix("response.") for e in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert "".join(e["delta"] for e in events if e["type"].endswith("text.delta")) == text
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == text


def test_responses_with_instructions_and_a_natural_end(server):
    messages = [{"role": "system", "content": "h"}, {"role": "user", "content": ASK}]
    text, usage = chat_text(server, messages)
    body = server.ok("/v1/responses", input=ASK, instructions="h", max_output_tokens=12, **SAMPLED)
    assert body["output"][0]["content"][0]["text"] == text and body["usage"]["input_tokens"] == usage["prompt_tokens"]
    stop = text[2:4]
    body = server.ok("/v1/responses", input=ASK, instructions="h", max_output_tokens=12, stop=stop, **SAMPLED)
    assert body["status"] == "completed" and body["incomplete_details"] is None


def test_messages(server):
    text, usage = chat_text(server)
    ask = {"messages": [{"role": "user", "content": [{"type": "text", "text": ASK}]}], "max_tokens": 12, **SAMPLED}
    body = server.ok("/v1/messages", **ask)
    assert body["content"] == [{"type": "text", "text": text}] and body["stop_reason"] == "max_tokens"
    assert body["usage"]["input_tokens"] == usage["prompt_tokens"] and body["usage"]["output_tokens"] == 12
    counted = server.ok("/v1/messages/count_tokens", messages=ask["messages"], model="tiny")
    assert counted == {"input_tokens": usage["prompt_tokens"]}
    events = named_events(server, "/v1/messages", **ask)
    assert [e["type"] for e in events[:2]] == ["message_start", "content_block_start"]
    assert [e["type"] for e in events[-3:]] == ["content_block_stop", "message_delta", "message_stop"]
    assert "".join(e["delta"]["text"] for e in events if e["type"] == "content_block_delta") == text
    assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}


def test_messages_stop_and_system_and_prefill(server):
    text, _ = chat_text(server, [{"role": "system", "content": "h"}, {"role": "user", "content": ASK}])
    ask = {"messages": [{"role": "user", "content": ASK}], "system": [{"type": "text", "text": "h"}], **SAMPLED}
    stop = text[2:4]
    body = server.ok("/v1/messages", **ask, max_tokens=12, stop_sequences=[stop])
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", stop)
    assert "".join(part["text"] for part in body["content"]) == text[: text.index(stop)]
    prefilled = [{"role": "user", "content": ASK}, {"role": "assistant", "content": "ha"}]
    want, _ = chat_text(server, prefilled, continue_final_message=True)
    body = server.ok("/v1/messages", messages=prefilled, max_tokens=12, **SAMPLED)
    assert body["content"][0]["text"] == want


def test_usage_of_messages_counts_each_token_once(server):
    """Anthropic's clients add up what was read from the cache and what was not; a stream's end says it too."""
    ask = {"messages": [{"role": "user", "content": "ab abc " * 12}], "max_tokens": 2, **SAMPLED}
    counted = server.ok("/v1/messages/count_tokens", messages=ask["messages"])["input_tokens"]
    server.ok("/v1/messages", **ask)
    usage = server.ok("/v1/messages", **ask)["usage"]
    assert usage["cache_read_input_tokens"] >= 16
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted
    [end] = [e for e in named_events(server, "/v1/messages", **ask) if e["type"] == "message_delta"]
    assert end["usage"] == usage


def test_models_as_both_interfaces_have_them(server):
    for model in server.client.get("/v1/models").json()["data"]:
        assert model["object"] == model["type"] == "model" and model["display_name"] == model["id"]
        assert model["created_at"].endswith("Z")
        assert server.client.get(f"/v1/models/{model['id']}").json() == model


def test_what_asks_for_nothing_here_is_no_error(server):
    keep = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    base = {"messages": [{"role": "user", "content": ASK}], "max_tokens": 1}
    for fields in ({"context_management": keep}, {"container": None, "mcp_servers": []}, {"inference_geo": "eu"}):
        server.ok("/v1/messages", **base, **fields)
    edits = {"edits": [{"type": "clear_tool_uses_20250919"}]}
    answer = server.post("/v1/messages", **base, context_management=edits)
    assert answer.status_code == 400 and "context_management" in answer.json()["error"]["message"]
