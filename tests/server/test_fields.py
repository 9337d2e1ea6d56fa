"""Every field is served, harmless, or refused by its name; nothing that would change an answer is passed over."""

from __future__ import annotations

import json

import pytest

from paceline.server.features import CHAT_ONLY
from paceline.server.features import REFUSED as OLD
from paceline.server.fields import ACCEPTED, REFUSED

CHAT, PLAIN, RESPONSES, ANTHROPIC = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
M = [{"role": "user", "content": "ab"}]
BASE = {
    CHAT: {"messages": M, "max_tokens": 2},
    PLAIN: {"prompt": "ab", "max_tokens": 2},
    RESPONSES: {"input": "ab", "max_output_tokens": 2},
    ANTHROPIC: {"messages": M, "max_tokens": 2},
}


def refused(server, path, status=400, **fields):
    answer = server.post(path, **{**BASE[path], **fields})
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


@pytest.mark.parametrize("name", sorted(ACCEPTED))
def test_harmless_fields_are_accepted_and_change_nothing(server, name):
    fields = {"seed": 1, "return_token_ids": True}
    want = server.ok(PLAIN, **BASE[PLAIN], **fields)["choices"]
    value = 1 if name == "priority" else "x"
    assert server.ok(PLAIN, **BASE[PLAIN], **fields, **{name: value})["choices"] == want


@pytest.mark.parametrize("name", sorted({**REFUSED, **OLD}))
@pytest.mark.parametrize("path", [CHAT, PLAIN])
def test_known_fields_without_support_are_refused_by_name(server, name, path):
    error = refused(server, path, **{name: [{"x": 1}]})
    assert error["param"] == name and error["code"] == "unsupported_field" and name in error["message"]
    server.ok(path, **BASE[path], **{name: None})
    server.ok(path, **BASE[path], **{name: []})


@pytest.mark.parametrize("name", sorted(CHAT_ONLY))
def test_fields_of_other_endpoints_are_refused_by_name(server, name):
    path = RESPONSES if name in ("response_format", "prompt_logprobs") else PLAIN
    error = refused(server, path, **{name: [{"x": 1}]})
    assert error["param"] == name and error["code"] == "unsupported_field" and name in error["message"]
    server.ok(path, **BASE[path], **{name: None})


@pytest.mark.parametrize(
    "fields",
    [
        {"best_of": 1},
        {"response_format": {"type": "text"}},
        {"tool_choice": "none"},
        {"tool_choice": "auto", "tools": []},
        {"modalities": ["text"]},
        {"length_penalty": 1.0},
        {"truncate_prompt_tokens": -1},
        {"stream": False, "logprobs": None},
        {"temperature": None, "top_p": None, "seed": None, "stop": None, "n": None},
    ],
)
def test_values_that_ask_for_nothing_pass(server, fields):
    server.ok(CHAT, **BASE[CHAT], **fields)


@pytest.mark.parametrize("path", list(BASE))
def test_unknown_fields_are_refused_with_a_hint(server, path):
    body = server.post(path, **BASE[path], temprature=0.5).json()
    assert "did you mean 'temperature'" in body["error"]["message"]
    odd = json.dumps({**BASE[path], "\ud800x" * 100: 1})
    answer = server.client.post(path, content=odd, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and "unicode" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"temperature": -1}, "temperature"),
        (CHAT, {"temperature": "hot"}, "temperature"),
        (CHAT, {"temperature": True}, "temperature"),
        (CHAT, {"top_p": 0}, "top_p"),
        (CHAT, {"n": 0}, "n"),
        (CHAT, {"n": 1025}, "n"),
        (CHAT, {"n": 1000}, "n"),
        (CHAT, {"max_tokens": 0}, "max_tokens"),
        (PLAIN, {"max_tokens": 0}, "max_tokens"),
        (PLAIN, {"max_tokens": 0, "echo": True, "stream": True}, "max_tokens"),
        (CHAT, {"max_tokens": 1.5}, "max_tokens"),
        (CHAT, {"max_completion_tokens": -3}, "max_completion_tokens"),
        (CHAT, {"seed": -1}, "seed"),
        (CHAT, {"stop": [""]}, "stop"),
        (CHAT, {"stop": ["a"] * 65}, "stop"),
        (CHAT, {"stop_token_ids": [120]}, "stop_token_ids"),
        (CHAT, {"allowed_token_ids": []}, "allowed_token_ids"),
        (CHAT, {"allowed_token_ids": [3, 120]}, "allowed_token_ids"),
        (PLAIN, {"allowed_token_ids": ["a"]}, "allowed_token_ids.0"),
        (PLAIN, {"allowed_token_ids": [1], "bad_words": ["a"]}, "allowed_token_ids"),
        (CHAT, {"bad_words": [""]}, "bad_words"),
        (CHAT, {"bad_words": "a"}, "bad_words"),
        (PLAIN, {"bad_words": ["a", 1]}, "bad_words.1"),
        (PLAIN, {"bad_words": ["a"] * 4097}, "bad_words"),
        (CHAT, {"logit_bias": {"120": 1}}, "logit_bias"),
        (CHAT, {"logit_bias": {"x": 1}}, "logit_bias"),
        (CHAT, {"logit_bias": {"1": 101}}, "logit_bias"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"min_tokens": 3}, "min_tokens"),
        (CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),
        (CHAT, {"stream": True, "stream_options": {"include_usge": True}}, "stream_options.include_usge"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": "hi"}, "messages"),
        (CHAT, {"messages": [{"content": "hi"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        (CHAT, {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        (CHAT, {"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs"),
        (CHAT, {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        (CHAT, {"num_speculative_tokens": 8}, "num_speculative_tokens"),
        (CHAT, {"num_speculative_tokens": -1}, "num_speculative_tokens"),
        (CHAT, {"request_id": ""}, "request_id"),
        (PLAIN, {"prompt": []}, "prompt"),
        (PLAIN, {"prompt": ""}, "prompt"),
        (PLAIN, {"prompt": [[]]}, "prompt"),
        (PLAIN, {"prompt": [[120]]}, "prompt"),
        (PLAIN, {"prompt": [-1]}, "prompt"),
        (PLAIN, {"prompt": ["a", 1]}, "prompt"),
        (PLAIN, {"prompt": ["a"] * 1000}, "prompt"),
        (PLAIN, {"prompt_logprobs": 21}, "prompt_logprobs"),
        (CHAT, {"prompt_logprobs": -1}, "prompt_logprobs"),
        (CHAT, {"prompt_logprobs": True}, "prompt_logprobs"),
        (CHAT, {"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
        (PLAIN, {"prompt_logprobs": 2, "stream": True}, "prompt_logprobs"),
        (PLAIN, {"logprobs": 21}, "logprobs"),
        (PLAIN, {"logprobs": -1}, "logprobs"),
        (PLAIN, {"echo": True, "logprobs": 0, "stream": True}, "echo"),
        (RESPONSES, {"previous_response_id": "resp_1"}, "previous_response_id"),
        (RESPONSES, {"background": True}, "background"),
        (RESPONSES, {"input": [{"type": "function_call_output"}]}, "input[0].call_id"),
        (RESPONSES, {"include": ["message.output_text.logprobs"]}, "include"),
        (RESPONSES, {"n": 2}, "n"),
    ],
)
def test_bad_values_name_their_field(server, path, fields, param):
    error = refused(server, path, **fields)
    assert error["param"] == param, error
    assert error["type"] == "invalid_request_error" and param.partition("[")[0] in error["message"]


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        (CHAT, {"temperature": "hot"}, "temperature='hot': use a valid number"),
        (CHAT, {"n": 1.5}, "n=1.5: use a valid integer"),
        (CHAT, {"stop": 5}, "stop=5: use a valid string, or a valid list"),
        (CHAT, {"logit_bias": 5}, "logit_bias=5: use a valid dictionary"),
        (PLAIN, {"prompt": 5}, "prompt=5: use a valid string, or a valid list"),
        (PLAIN, {"logprobs": "x" * 3000}, "logprobs='xxx"),
    ],
)
def test_values_of_the_wrong_type_are_shown_with_what_to_use(server, path, fields, message):
    error = refused(server, path, **fields)
    assert error["message"].startswith(message) and len(error["message"]) <= 500


def test_prompts_beyond_the_context(server):
    error = refused(server, PLAIN, prompt=[1] * 160)
    assert error["code"] == "context_length_exceeded" and "160" in error["message"]


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"{", "JSON"),
        (b"[1]", "body"),
        (b"", "body"),
        (b"null", "body"),
        (b'{"prompt": "a", "max_tokens": 1e999}', "max_tokens"),
        (b'{"prompt": "a", "temperature": NaN}', "temperature"),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", ""),
        (b"[" * 100_000, ""),
        (b'{"prompt": "\xff\xfe"}', ""),
        (b'{"prompt": {"a": 1}}', "prompt"),
    ],
)
def test_bodies_that_are_no_request(server, content, word):
    answer = server.client.post(PLAIN, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert word in answer.json()["error"]["message"]


def test_a_body_without_its_content_type_says_so(server):
    answer = server.client.post(PLAIN, content=json.dumps(BASE[PLAIN]))
    assert answer.status_code == 400 and "content-type: application/json" in answer.json()["error"]["message"]


def test_lone_surrogates_and_odd_characters_come_back(server):
    body = {"prompt": "a\ud800\u0000b\u2028", "echo": True, "max_tokens": 1, "model": "tiny"}
    answer = server.client.post(PLAIN, content=json.dumps(body), headers={"content-type": "application/json"})
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"].startswith("a?\u0000b\u2028")


def test_a_request_id_in_use_is_refused(server):
    with server.client.stream(
        "POST", PLAIN, json={"prompt": "a", "request_id": "mine", "stream": True, "max_tokens": 150, "ignore_eos": True}
    ) as answer:
        next(answer.iter_bytes())
        if server.engine.in_flight:
            found = server.post(PLAIN, prompt="a", request_id="mine", max_tokens=1)
            assert found.status_code in (200, 400)  # 200: the first has ended meanwhile
    server.idle()  # until the server has noticed that its client left, the name is taken
    assert server.ok(PLAIN, prompt="a", request_id="mine", max_tokens=1)["id"] == "mine"


def test_anthropic_errors_have_its_shape(server):
    answer = server.post(ANTHROPIC, messages=M)
    assert answer.status_code == 400
    assert answer.json()["type"] == "error" and "max_tokens" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("old", "param"),
    [
        ({"role": "assistant", "content": None, "function_call": {"name": "f"}}, "messages[1].function_call"),
        ({"role": "assistant", "content": None, "function_call": "f"}, "messages[1].function_call"),
        (
            {
                "role": "assistant",
                "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
                "function_call": {"name": "f", "arguments": "{}"},
            },
            "messages[1].function_call",
        ),
        ({"role": "function", "content": "1"}, "messages[1].name"),
    ],
)
def test_calls_in_the_old_form_that_are_none(server, old, param):
    answer = server.post("/v1/chat/completions", messages=[{"role": "user", "content": "ab"}, old], max_tokens=1)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param
    none = {"role": "assistant", "content": "ab", "function_call": None, "tool_calls": None, "audio": None}
    server.ok("/v1/chat/completions", messages=[{"role": "user", "content": "ab"}, none], max_tokens=1)


def test_errors_of_a_long_value_are_short(server):
    answer = server.post(
        "/v1/chat/completions", messages=[{"role": "user", "content": "ab"}], tool_choice="a" * 5000, max_tokens=1
    )
    assert answer.status_code == 400 and len(answer.text) < 600


def test_a_wrong_method_says_which_is_right(server):
    answer = server.client.get("/v1/chat/completions")
    assert answer.status_code == 405 and answer.headers["allow"] == "POST"


def test_a_connection_that_is_cut_is_announced(server, monkeypatch, caplog):
    """Behind an error of its own the server ends the connection; a client that knows does not send its next request
    there."""
    with monkeypatch.context() as patch:
        patch.setattr(server.service, "check_model", lambda _: 1 / 0)
        asked = {"messages": [{"role": "user", "content": "a"}]}
        for path, kind, body in (
            (PLAIN, "server_error", {"prompt": "a"}),
            ("/v1/messages", "api_error", asked),
        ):
            answer = server.post(path, max_tokens=1, **body)
            assert answer.status_code == 500 and answer.headers["connection"] == "close"
            assert answer.json()["error"]["type"] == kind
    server.ok(PLAIN, prompt="a", max_tokens=1)


@pytest.mark.parametrize("name", ["a\nERROR forged", "\x1b[2J", "\ud800", "\u2028", "", "a" * 257])
def test_names_of_requests_cannot_write_the_log(server, caplog, name):
    answer = server.client.post(
        PLAIN,
        content=json.dumps({"prompt": "a", "max_tokens": 1, "request_id": name}),
        headers={"content-type": "application/json"},
    )
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "request_id"
    assert server.ok(PLAIN, prompt="a", max_tokens=1, request_id="größe 7/x")["id"] == "größe 7/x"
