"""Any body at all: an answer below 500, in time, in its shape, and nothing left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .harness import Live, parse_events

PATHS = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"]
TOKEN_PATHS = ["/tokenize", "/detokenize"]
QUICK = settings(
    max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True, derandomize=False
)

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(-3, 20)
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(["ab", "text", "user", "auto", "none", "json_object"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant", "tool", "function"]) | values},
        optional={
            "content": st.text(max_size=20) | values,
            "tool_calls": values,
            "function_call": values | st.just({"name": "f", "arguments": "{}"}),
            "name": values,
        },
    ),
    max_size=4,
)
functions = st.fixed_dictionaries(
    {"name": st.sampled_from(["f", "g"])},
    optional={
        "parameters": values | st.fixed_dictionaries({"properties": st.dictionaries(st.text(max_size=3), values)})
    },
)
tools = (
    st.fixed_dictionaries({"type": st.just("function"), "function": functions})
    | st.builds(lambda f: {"type": "function", **f}, functions)
    | values
)
likely = {
    "messages": messages,
    "input": st.text(max_size=20) | messages,
    "prompt": st.text(max_size=20)
    | st.lists(st.integers(0, 119), max_size=30)
    | st.lists(st.text(max_size=4), max_size=3),
    "tokens": st.lists(st.integers(-1, 130), max_size=20),
    "system": st.text(max_size=10),
    "max_tokens": st.integers(1, 12),
    "max_completion_tokens": st.integers(1, 12),
    "max_output_tokens": st.integers(1, 12),
    "n": st.integers(1, 3),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0.01, 1),
    "top_k": st.integers(-1, 20),
    "min_p": st.floats(0, 1),
    "logit_bias": st.dictionaries(st.integers(0, 119).map(str), st.integers(-100, 100), max_size=3),
    "allowed_token_ids": st.lists(st.integers(0, 119), max_size=6),
    "bad_words": st.lists(st.text(min_size=1, max_size=3), max_size=3),
    "seed": st.integers(0, 2**64 - 1),
    "stop": st.text(max_size=3) | st.lists(st.text(min_size=1, max_size=3), max_size=3),
    "stop_token_ids": st.lists(st.integers(0, 119), max_size=3),
    "repetition_penalty": st.floats(0.1, 2),
    "presence_penalty": st.floats(-2, 2),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}),
    "logprobs": st.booleans() | st.integers(0, 5),
    "top_logprobs": st.integers(0, 5),
    "echo": st.booleans(),
    "prompt_logprobs": st.integers(0, 3),
    "min_tokens": st.integers(0, 5),
    "num_speculative_tokens": st.integers(0, 7),
    "return_token_ids": st.booleans(),
    "return_meta_info": st.booleans(),
    "continue_final_message": st.booleans(),
    "add_generation_prompt": st.booleans(),
    "chat_template_kwargs": st.dictionaries(st.text(max_size=5), values, max_size=2),
    "model": st.sampled_from(["tiny", "nix"]),
    "response_format": values | st.fixed_dictionaries({"type": st.sampled_from(["json_schema", "json_object"])}),
    "structured_outputs": values
    | st.dictionaries(st.sampled_from(["regex", "json", "choice", "grammar", "json_object"]), values, max_size=2),
    "guided_regex": st.text(max_size=6),
    "text": st.dictionaries(st.sampled_from(["format", "verbosity"]), values, max_size=2),
    "tools": values | st.lists(tools, max_size=2),
    "functions": values | st.lists(functions, max_size=2),
    "function_call": values | st.sampled_from(["auto", "none"]) | st.fixed_dictionaries({"name": st.just("f")}),
    "tool_choice": values | st.sampled_from(["required", "auto", "none"]),
    "parallel_tool_calls": st.booleans(),
    "reasoning_effort": st.sampled_from(["none", "low", ""]),
    "thinking": values | st.fixed_dictionaries({"type": st.sampled_from(["enabled", "disabled"])}),
    "output_config": st.dictionaries(st.sampled_from(["format", "effort"]), values, max_size=2),
    "user": values,
}


@st.composite
def bodies(draw: Any, required: list[str]) -> dict[str, Any]:
    """Mostly what a client might send; now and then any value for a field, or any field."""
    chosen = draw(st.lists(st.sampled_from(sorted(likely)), max_size=7, unique=True))
    body = {name: draw(likely[name]) for name in {*chosen, *required}}
    body.setdefault("max_tokens", 4)
    if draw(st.integers(0, 3)) == 0:
        body[draw(st.sampled_from(sorted(likely)) | st.text(max_size=8))] = draw(values)
    return body


def check(server: Live, path: str, content: bytes) -> None:
    answer = server.client.post(path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code < 500 or answer.status_code == 503, (answer.status_code, content)
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert error["message"] and error["type"]
    elif answer.headers["content-type"].startswith("text/event-stream"):
        assert all(
            "error" not in chunk or chunk["error"] is None for chunk in parse_events(iter(answer.text.split("\n")))
        )
    else:
        answer.json()


@pytest.mark.parametrize(
    ("path", "required"),
    [
        *zip(PATHS, (["messages"], ["prompt"], ["input"], ["messages"], ["messages"]), strict=True),
        *zip(TOKEN_PATHS, (["prompt"], ["tokens"]), strict=True),
    ],
)
def test_likely_bodies(server, path, required):
    @QUICK
    @given(body=bodies(required))
    def run(body: dict[str, Any]) -> None:
        check(server, path, json.dumps(body).encode())

    run()
    server.idle()


@QUICK
@given(
    path=st.sampled_from([*PATHS, *TOKEN_PATHS]), body=values | st.dictionaries(st.sampled_from(sorted(likely)), values)
)
def test_any_json(server, path, body):
    check(server, path, json.dumps(body).encode())


@QUICK
@given(path=st.sampled_from([*PATHS, *TOKEN_PATHS]), content=st.binary(max_size=200))
def test_any_bytes(server, path, content):
    check(server, path, content)


@pytest.mark.slow
def test_schemathesis_finds_no_server_error(server):
    """The schema the server publishes, against itself: no 5xx for anything it allows or forbids.

    Its value lies in the boundaries of every field, one by one ("coverage"). Random bodies are above, where they know
    what fields mean, and an interface without state has no sequences of requests to try.
    """
    pytest.importorskip("schemathesis")
    command = [
        os.path.join(os.path.dirname(sys.executable), "schemathesis"),
        "run",
        f"{server.url}/openapi.json",
        "--checks=not_a_server_error",
        "--phases=coverage,fuzzing",
        "--max-examples=5",
        "--request-timeout=600",
        "--suppress-health-check=all",
        "--seed=1",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    server.idle()
