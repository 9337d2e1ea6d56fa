"""Sixty-four requests of mixed kinds at once, some of which leave: each is what it is alone and plain."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx
import pytest
from engine.harness import Oracle, Script, at_random, half_right, repeat_last, scripted

from paceline import LLM, SamplingParams

from .harness import Live, joined, parse_events

PLAIN = "/v1/completions"
WORDS = ["ab", "abc abc", "ha ha ha", "a\n\nab", "é€", "0123", "gh ab gh"]


def requests(seed: int, count: int = 64) -> list[dict[str, Any]]:
    """Streams and not, stops, limits, penalties, log-probabilities, several choices; `leave`: after so many chunks."""
    rng = random.Random(seed)
    out = []
    for i in range(count):
        ask: dict[str, Any] = {
            "prompt": rng.choice(WORDS) * rng.randint(1, 4),
            "max_tokens": rng.randint(1, 40),
            "seed": rng.randint(0, 5),
            "temperature": rng.choice([0.0, 0.7, 1.2]),
        }
        for name, values in (
            ("stop", ["a", "h", "ab", "\n"]),
            ("logprobs", [0, 2]),
            ("n", [2]),
            ("top_p", [0.8]),
            ("min_p", [0.1]),
            ("repetition_penalty", [1.3]),
            ("ignore_eos", [True]),
            ("min_tokens", [1]),
            ("num_speculative_tokens", [0, 3]),
            ("echo", [True]),
        ):
            if rng.random() < 0.25 and not (name == "echo" and "logprobs" in ask):
                ask[name] = rng.choice(values)
        stream = rng.random() < 0.5
        out.append({"body": ask | {"stream": stream}, "leave": rng.randint(0, 3) if stream and i % 5 == 0 else None})
    return out


def expected(plain: LLM, body: dict[str, Any]) -> list[dict[str, Any]]:
    skip = ("prompt", "stream", "num_speculative_tokens", "echo")
    params = SamplingParams(**{k: v for k, v in body.items() if k not in skip})
    output = plain.generate(body["prompt"], params)[0]
    start = body["prompt"] if body.get("echo") else ""
    return [
        {"text": start + c.text, "finish_reason": c.finish_reason, "stop_reason": c.stop_reason, "tokens": c.token_ids}
        for c in output.outputs
    ]


async def ask(client: httpx.AsyncClient, item: dict[str, Any]) -> list[dict[str, Any]] | None:
    body = {**item["body"], "return_token_ids": True}
    if not body["stream"]:
        answer = await client.post(PLAIN, json=body)
        assert answer.status_code == 200, answer.text
        choices = answer.json()["choices"]
        made = sum(len(c["token_ids"]) for c in choices)
        assert answer.json()["usage"]["completion_tokens"] == made
        return [
            {n: c[n] for n in ("text", "finish_reason", "stop_reason")} | {"tokens": c["token_ids"]} for c in choices
        ]
    async with client.stream("POST", PLAIN, json=body) as answer:
        assert answer.status_code == 200
        lines = []
        async for line in answer.aiter_lines():
            lines.append(line)
            if item["leave"] is not None and len(lines) > 2 * item["leave"]:
                return None
    chunks = parse_events(iter(lines))
    found = [joined(chunks, i) for i in range(body.get("n", 1))]
    return [{n: c[n] for n in ("text", "finish_reason", "stop_reason")} | {"tokens": c["token_ids"]} for c in found]


@pytest.fixture(scope="module", params=range(3))
def asked(request: pytest.FixtureRequest, plain: LLM) -> tuple[int, list[dict[str, Any]], list[Any], Oracle]:
    """A seed, its requests, what each makes alone and plain, and how each goes on without stops."""
    items = requests(request.param)
    want = [expected(plain, item["body"]) for item in items]
    oracle = Oracle()
    for item in items:
        body = item["body"]
        skip = ("prompt", "stream", "num_speculative_tokens", "echo", "stop")
        params = SamplingParams(**{k: v for k, v in body.items() if k not in skip})
        oracle.learn(plain.generate(body["prompt"], params)[0])
    return request.param, items, want, oracle


@pytest.mark.parametrize("drafter", ["half right", "repeats", "random"])
def test_mixed_requests_at_once_equal_the_same_alone_and_plain(server: Live, asked: Any, drafter: str):
    seed, items, want, oracle = asked
    script: Script = {
        "half right": half_right(oracle, 120, seed),
        "repeats": repeat_last,
        "random": at_random(120, seed),
    }[drafter]

    async def main() -> list[Any]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=600, limits=limits) as client:
            return await asyncio.gather(*(ask(client, item) for item in items))

    with scripted(server.llm, script):
        got = asyncio.run(main())
        server.idle()
    for mine, his, item in zip(got, want, items, strict=True):
        if mine is not None:
            assert mine == his, item
    assert sum(mine is None for mine in got) < 16
