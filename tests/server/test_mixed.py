"""Sixty-four requests of mixed kinds at once, over all interfaces: each is what it is alone and without speculation."""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import suppress
from typing import Any

import httpx
import pytest
from engine.harness import Script, at_random, repeat_last, scripted

from .harness import Live, comparable, joined, parse_events, said, streamed
from .thinker import CLOSE, OPEN, SHAPE

CHAT, PLAIN, RESPONSES, ANTHROPIC = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
WORDS = ["ab", "abc abc", "ha ha ha", "a\n\nab", "é€", "0123", "gh ab gh"]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", None, 7]}, "b": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get", "description": "d", "parameters": SCHEMA}
OTHER = {"name": "now", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": f} for f in (FUNCTION, OTHER)]
CALL = '<tool_call>\n{"name": "get", "arguments": {"q": "QQ"}}\n</tool_call>'
AUTO = "Well[.] " + CALL.replace("{", r"\{").replace("}", r"\}").replace("QQ", "[a-e]{2,9}") + "( ok)?"
NAMED = {"type": "function", "function": {"name": "get"}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}


def chat(rng: random.Random) -> dict[str, Any]:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": rng.choice(WORDS) * rng.randint(1, 4)}],
        "max_tokens": rng.randint(1, 90),
        "chat_template_kwargs": rng.choice([{}, {"open": True}, {"enable_thinking": False}]),
        "logit_bias": {str(CLOSE): 3.0, str(OPEN): 2.0},
    }
    body |= rng.choice(
        [
            {},
            {"stop": rng.choice(["a", "h", "ab"])},
            {"response_format": FORMAT},
            {"response_format": {"type": "json_object"}},
            {"structured_outputs": {"regex": "[a-d]{3,40}(x|yz)"}},
            {"guided_choice": ["yes", "no", "ab ab"]},
            {"tools": TOOLS, "tool_choice": "required"},
            {"tools": TOOLS, "tool_choice": NAMED},
            {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
            {"tools": TOOLS, "structured_outputs": {"regex": AUTO}},
            {"tools": TOOLS, "response_format": FORMAT},
            {"tools": TOOLS, "n": 2, "logprobs": True, "top_logprobs": 2},
            {"include_reasoning": False},
        ]
    )
    return body


def completion(rng: random.Random) -> dict[str, Any]:
    body: dict[str, Any] = {"prompt": rng.choice(WORDS), "max_tokens": rng.randint(1, 60), "logprobs": 1}
    return body | rng.choice(
        [{"n": 2}, {"guided_regex": "(ab|c){2,9}"}, {"structured_outputs": {"json": SCHEMA}}, {"stop": ["b"]}, {}]
    )


def response(rng: random.Random) -> dict[str, Any]:
    flat = [{"type": "function", **f} for f in (FUNCTION, OTHER)]
    body: dict[str, Any] = {"input": rng.choice(WORDS), "max_output_tokens": rng.randint(8, 90)}
    body |= {"chat_template_kwargs": {"open": rng.random() < 0.5}, "logit_bias": {str(CLOSE): 3.0}}
    return body | rng.choice(
        [
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}},
            {"tools": flat, "tool_choice": "required"},
            {"tools": flat, "structured_outputs": {"regex": AUTO}},
            {},
        ]
    )


def message(rng: random.Random) -> dict[str, Any]:
    tools = [{"name": f["name"], "input_schema": f["parameters"]} for f in (FUNCTION, OTHER)]
    body: dict[str, Any] = {"messages": [{"role": "user", "content": rng.choice(WORDS)}]}
    body |= {"max_tokens": rng.randint(8, 90), "logit_bias": {str(CLOSE): 3.0}}
    body |= {"chat_template_kwargs": {"open": rng.random() < 0.5}}
    return body | rng.choice(
        [
            {"tools": tools, "tool_choice": {"type": "any"}},
            {"tools": tools, "tool_choice": {"type": "tool", "name": "get"}},
            {"tools": tools, "structured_outputs": {"regex": AUTO}},
            {"stop_sequences": ["ab"]},
            {},
        ]
    )


def requests(seed: int, count: int = 64) -> list[dict[str, Any]]:
    """`leave`: after so many lines of a stream the client goes away."""
    rng = random.Random(seed)
    kinds = [(CHAT, chat), (CHAT, chat), (PLAIN, completion), (RESPONSES, response), (ANTHROPIC, message)]
    out = []
    for i in range(count):
        path, make = rng.choice(kinds)
        body = make(rng) | {"seed": rng.randint(0, 5), "temperature": rng.choice([0.0, 0.7, 1.1])}
        if path in (CHAT, PLAIN):
            body["return_token_ids"] = True
        for name, value in (
            ("top_p", 0.8),
            ("repetition_penalty", 1.2),
            ("min_p", 0.05),
            ("num_speculative_tokens", 3),
        ):
            if rng.random() < 0.2:
                body[name] = value
        stream = rng.random() < 0.6
        out.append({"path": path, "body": body, "stream": stream, "leave": rng.randint(1, 9) if i % 6 == 5 else None})
    return out


def whole(path: str, answer: dict[str, Any]) -> Any:
    """An answer in the form that its stream can be brought into too."""
    if path == CHAT:
        return {"choices": [said(c) for c in answer["choices"]], "usage": comparable(answer["usage"])}
    if path == PLAIN:
        keys = ("text", "finish_reason", "stop_reason", "token_ids")
        choices = [{k: c[k] for k in keys} | {"logprobs": c["logprobs"]["token_logprobs"]} for c in answer["choices"]]
        return {"choices": choices, "usage": comparable(answer["usage"])}
    if path == ANTHROPIC:
        kept = {k: answer[k] for k in ("content", "stop_reason", "stop_sequence")}
        return comparable(kept | {"made": answer["usage"]["output_tokens"]})
    return comparable(answer)


def from_stream(path: str, lines: list[str], n: int) -> Any:
    events = parse_events(iter(lines))
    if path == RESPONSES:
        return comparable(events[-1]["response"])
    if path == ANTHROPIC:
        content: list[dict[str, Any]] = []
        for event in events:
            if event["type"] == "content_block_start":
                content.append({**event["content_block"], "parts": []})
            elif event["type"] == "content_block_delta" and event["delta"]["type"] != "signature_delta":
                [text] = [v for k, v in event["delta"].items() if k != "type"]
                content[-1]["parts"].append(text)
        for block in content:
            text, kind = "".join(block.pop("parts")), block["type"]
            try:
                block["input" if kind == "tool_use" else kind] = json.loads(text) if kind == "tool_use" else text
            except ValueError:
                block["input"] = {}
        [end] = [event for event in events if event["type"] == "message_delta"]
        return comparable({"content": content, **end["delta"], "made": end["usage"]["output_tokens"]})
    usage = comparable(events[-1]["usage"])
    if path == CHAT:
        return {"choices": [streamed(events, i) for i in range(n)], "usage": usage}
    return {"choices": [joined(events, i) for i in range(n)], "usage": usage}


async def ask(client: httpx.AsyncClient, item: dict[str, Any]) -> Any:
    path, body = item["path"], item["body"]
    if not item["stream"]:
        call = client.post(path, json=body)
        if item["leave"] is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(call, 0.01 * item["leave"])
            return None
        answer = await call
        assert answer.status_code == 200, answer.text
        return whole(path, answer.json())
    if path in (CHAT, PLAIN):
        body = body | {"stream_options": {"include_usage": True}}
    async with client.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, await answer.aread()
        lines = []
        async for line in answer.aiter_lines():
            lines.append(line)
            if item["leave"] is not None and len(lines) > item["leave"]:
                return None
    return None if item["leave"] is not None else from_stream(path, lines, body.get("n", 1))


Known = dict[tuple[tuple[int, ...], int, int], list[int]]


def alone(server: Live, items: list[dict[str, Any]]) -> tuple[list[Any], Known]:
    """Every answer, one after the other and whole; and how each output goes on, for drafters that know."""
    requests: list[Any] = []
    enqueue = server.llm._enqueue
    server.llm._enqueue = lambda request: (requests.append(request), enqueue(request))[1]  # type: ignore[method-assign]
    try:
        answers = [whole(item["path"], server.ok(item["path"], **item["body"])) for item in items]
    finally:
        server.llm._enqueue = enqueue  # type: ignore[method-assign]
    known = {
        (tuple(s.token_ids[: s.num_prompt_tokens]), s.state.seed, s.choice): s.token_ids[s.num_prompt_tokens :]
        for request in requests
        for s in request.choices
    }
    return answers, known


def knowing(known: Known, seed: int) -> Script:
    rng = random.Random(seed)

    def script(s: Any, limit: int) -> list[int]:
        ids = known.get((tuple(s.token_ids[: s.num_prompt_tokens]), s.state.seed, s.choice), [])
        right = ids[s.num_output_tokens : s.num_output_tokens + limit]
        return right if rng.random() < 0.7 else [*right[: rng.randint(0, limit)], rng.randrange(SHAPE.vocab)]

    return script


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_mixed_requests_at_once_equal_the_same_alone_and_plain(thinker: Live, plain_thinker: Live, seed: int):
    items = requests(seed)
    want, known = alone(plain_thinker, items)

    async def main() -> list[Any]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=thinker.url, timeout=600, limits=limits) as client:
            return await asyncio.gather(*(ask(client, item) for item in items))

    scripts = [knowing(known, seed), repeat_last, at_random(SHAPE.vocab, seed)]
    for script in scripts if seed else scripts[:1]:
        with scripted(thinker.llm, script):
            got = asyncio.run(main())
            thinker.idle()
        compared = 0
        for mine, his, item in zip(got, want, items, strict=True):
            if item["leave"] is None:
                assert mine == his, item
                compared += 1
        assert compared > 50
    calls = [
        c for item, a in zip(items, want, strict=True) if item["path"] == CHAT for s in a["choices"] for c in s["calls"]
    ]
    assert calls and all(name in ("get", "now") for name, _ in calls)
