"""Routing keys: a common prefix of two prompts is a common prefix of their keys, on every route; any body has a key."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.ray.metrics import merge_metrics
from paceline.ray.routing import KEY_LIMIT, routing_key


def key(request: object, path: str = "/v1/chat/completions") -> str:
    return routing_key(path, json.dumps(request).encode())


def common(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_a_conversation_that_goes_on_begins_as_before() -> None:
    first = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    second = [*first, {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "And now?"}]
    assert key({"messages": second, "seed": 1}).startswith(key({"seed": 2, "messages": first}))


def test_content_parts_count_as_their_text() -> None:
    plain = {"messages": [{"role": "user", "content": "Hello"}]}
    parts = {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]}
    assert key(plain) == key(parts)


@pytest.mark.parametrize(
    ("path", "request_body"),
    [
        ("/v1/completions", {"prompt": "Once upon"}),
        ("/v1/completions", {"prompt": ["Once upon", "a time"]}),
        ("/v1/responses", {"instructions": "Once", "input": "upon"}),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Once upon"}]}]}),
        ("/v1/messages", {"system": [{"type": "text", "text": "Once"}], "messages": []}),
    ],
)
def test_every_route_has_its_prompt(path: str, request_body: object) -> None:
    assert "Once" in key(request_body, path)


def test_system_and_tools_come_first() -> None:
    request = {"messages": [{"role": "user", "content": "Q"}], "tools": [{"name": "f"}], "system": "S"}
    found = key(request, "/v1/messages")
    assert found.startswith("S") and found.index('"f"') < found.index("Q")


@given(st.lists(st.integers(0, 0xFFFFF), min_size=1), st.lists(st.integers(0, 0xFFFFF), min_size=1))
def test_token_ids_share_as_many_characters_as_ids(a: list[int], b: list[int]) -> None:
    shared = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert common(key({"prompt": a}, "/v1/completions"), key({"prompt": b}, "/v1/completions")) == shared


NAMES = ["messages", "prompt", "input", "content", "text", "role", "tools", "system", "instructions", "other"]
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=12,
)


@given(values)
def test_any_json_has_a_key_that_is_not_empty_and_can_be_sent(value: object) -> None:
    found = key(value)
    assert 0 < len(found) <= KEY_LIMIT
    json.dumps(found)


@given(st.binary())
def test_any_bytes_have_a_key(body: bytes) -> None:
    assert routing_key("/v1/completions", body)


def test_a_body_nested_too_deeply_has_the_path_as_key() -> None:
    assert routing_key("/v1/completions", b"[" * 100_000) == "/v1/completions"


def test_merged_metrics_tell_replicas_apart_and_describe_a_family_once() -> None:
    page = '# HELP n Some.\n# TYPE n counter\nn{a="b c"} 1\nn{} 2\nm 3 1700000000\n'
    assert merge_metrics({"y": page, "x": page}) == (
        "# HELP n Some.\n# TYPE n counter\n"
        'n{replica="x",a="b c"} 1\nn{replica="x"} 2\nm{replica="x"} 3 1700000000\n'
        'n{replica="y",a="b c"} 1\nn{replica="y"} 2\nm{replica="y"} 3 1700000000\n'
    )
    assert merge_metrics({}) == ""
