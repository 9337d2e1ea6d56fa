"""Bodies as large as they may be: what is wrong with them is found at the first wrong item, not after all of them."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from paceline.server.anthropic import MessagesRequest
from paceline.server.body import parse
from paceline.server.errors import ApiError
from paceline.server.playground import PlaygroundRequest
from paceline.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest
from paceline.server.responses import ResponsesRequest

ASK = [{"role": "user", "content": "ab"}]
MANY = 20_000
_OBJECT = (ResponsesRequest, "prompt")  # another thing by the same name


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (CompletionRequest, "prompt", ["a"] * MANY + [1]),
        (CompletionRequest, "prompt", [1] * MANY + ["a"]),
        (CompletionRequest, "prompt", [[1]] * MANY + ["a"]),
        (CompletionRequest, "prompt", [None] * MANY),
        (CompletionRequest, "prompt", [[None] * MANY]),
        (CompletionRequest, "stop", [1] * MANY),
        (CompletionRequest, "stop_token_ids", ["a"] * MANY),
        (CompletionRequest, "logit_bias", dict.fromkeys(map(str, range(MANY)), "a")),
        (CompletionRequest, "guided_choice", [1] * MANY),
        (ChatRequest, "messages", [1] * MANY),
        (ChatRequest, "tools", [1] * MANY),
        (ResponsesRequest, "input", [1] * MANY),
        (ResponsesRequest, "include", [1] * MANY),
        (MessagesRequest, "messages", [1] * MANY),
        (MessagesRequest, "system", [1] * MANY),
        (MessagesRequest, "stop_sequences", [1] * MANY),
        (DetokenizeRequest, "tokens", ["a"] * MANY),
        (PlaygroundRequest, "messages", [1] * MANY),
    ],
)
def test_one_error_is_enough(kind, field, value):
    base = {"prompt": "a", "messages": ASK, "input": "a", "tokens": [1], "max_tokens": 1}
    known = {name: item for name, item in base.items() if name in kind.model_fields and (kind, name) != _OBJECT}
    kind.model_validate(known)
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(known | {field: value})
    assert 1 <= caught.value.error_count() <= 8
    assert all(error["loc"][0] == field for error in caught.value.errors())


@pytest.mark.parametrize("prompt", ["a", ["a", "b"], [1, 2], [[1], [2, 3]]])
def test_prompts_of_every_kind_stay_what_they_are(prompt):
    assert CompletionRequest.model_validate({"prompt": prompt}).prompt == prompt


def test_too_many_prompts_are_not_encoded(server, monkeypatch):
    monkeypatch.setattr(server.engine, "encode", None)
    answer = server.post("/v1/completions", prompt=["a"] * 5000)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "prompt"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("NaN", "a.b[1]: NaN"),
        ("-Infinity", "a.b[1]: -Infinity"),
        ("1e400", "a.b[1]: 1e400"),
        ("-1E+0400", "a.b[1]: -1E+0400"),
        ("1" * 320 + ".5", "a.b[1]: 11111"),
        ("9" * 5000, "digits"),
        ("[" * 100_000, "nested too deeply"),
        ('"a', "character"),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-32"])
def test_numbers_that_are_none(text, words, encoding):
    body = f'{{"x": 1.5, "a": {{"b": [1e-400, {text}]}}}}'.encode(encoding)
    with pytest.raises(ApiError, match="not valid JSON") as caught:
        parse(body)
    assert words in caught.value.message and caught.value.code == "invalid_json" and caught.value.status == 400
    assert len(caught.value.message) < 200


@pytest.mark.parametrize("number", ["1e308", "1e-400", "-0.0", "1.5", "1E+30", "123456789012345678901234567890"])
def test_numbers_that_are_some(number):
    for pad in ("", ' "e999"'):
        assert parse(f"[{number}{',' + pad if pad else ''}]".encode())[0] == json.loads(number)


def test_bodies_in_other_forms_are_told_so(server):
    def post(content: bytes, **headers: str) -> tuple[int, str]:
        answer = server.client.post(
            "/v1/completions", content=content, headers={"content-type": "application/json", **headers}
        )
        return answer.status_code, answer.json()["error"]["message"]

    assert post(b"\x1f\x8b\x08", **{"content-encoding": "gzip"}) == (
        415,
        "content-encoding: 'gzip' is not supported; send the body as it is",
    )
    assert post(b'{"prompt": "\xff"}') == (400, "the body is not valid JSON: it is not encoded in UTF-8")


@pytest.mark.parametrize("value", ["NaN", "1e400", '{"a": [Infinity]}'])
def test_what_is_sent_back_can_be_sent_back(server, value):
    """The Responses interface answers with some of what it was asked."""
    content = f'{{"input": "ab", "max_output_tokens": 1, "metadata": {value}}}'
    answer = server.client.post("/v1/responses", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and answer.json()["error"]["param"].startswith("metadata")
