"""Other origins, other paths, other methods: what a browser or a client of another server meets."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from engine.harness import open_llm

from paceline.cli.web_options import check_certificate, origins, several
from paceline.errors import ConfigError
from paceline.server.other_paths import OTHERS, remedy

from .harness import Live, live

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
FAR, NEAR = "https://app.example", "http://localhost:3000"
ALLOW = "access-control-allow-origin"


def preflight(server: Live, origin: str, path: str = CHAT, **headers: str) -> httpx.Response:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    return server.client.options(path, headers={"origin": origin, **asked, **headers})


def allowed(server: Live, origin: str, path: str = "/v1/models", **headers: str) -> str | None:
    return server.client.get(path, headers={"origin": origin, **headers}).headers.get(ALLOW)


@pytest.fixture(scope="module")
def llm(folder):
    return open_llm(folder, None)


def test_without_a_key_pages_of_this_machine_alone(server):
    for origin in (NEAR, "http://127.0.0.1", "https://[::1]:8443"):
        answer = preflight(server, origin)
        assert answer.status_code == 200 and answer.headers[ALLOW] == origin
        assert "authorization" in answer.headers["access-control-allow-headers"]
        assert "POST" in answer.headers["access-control-allow-methods"]
        assert allowed(server, origin) == origin
    for origin in (FAR, "null", "http://localhost.example", "http://localhost:3000.example", "http://evil-localhost"):
        assert preflight(server, origin).status_code == 400
        assert allowed(server, origin) is None
    plain = server.client.get("/v1/models")
    assert plain.status_code == 200 and ALLOW not in plain.headers
    assert server.client.options(CHAT).status_code == 405


def test_with_a_key_all_and_errors_say_so_too(llm):
    with live(llm, api_keys=("secret",), max_body_bytes=2000, max_waiting=0) as server:
        key = {"authorization": "Bearer secret", "origin": FAR}
        assert preflight(server, FAR).headers[ALLOW] == "*"
        found = {}
        for headers, path, body in (
            ({"origin": FAR}, PLAIN, {"prompt": "a"}),
            (key, PLAIN, {"prompt": "a" * 3000}),
            (key, "/v1/embeddings", {}),
            (key, PLAIN, {"prompt": "a", "temprature": 1}),
            (key, PLAIN, {"prompt": ["a"] * 9, "max_tokens": 1}),
            (key, PLAIN, {"prompt": "a", "max_tokens": 1}),
        ):
            answer = server.client.post(path, headers=headers, json=body)
            found[answer.status_code] = answer.headers.get(ALLOW)
        assert found == dict.fromkeys((401, 413, 404, 400, 200), "*")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(server.service, "check_model", lambda _: 1 / 0)
            broken = server.client.post(PLAIN, headers=key, json={"prompt": "a", "max_tokens": 1})
        assert broken.status_code == 500 and broken.headers[ALLOW] == "*"
        chunks = {"prompt": "a", "max_tokens": 3, "stream": True}
        with server.client.stream("POST", PLAIN, headers=key, json=chunks) as stream:
            assert stream.headers[ALLOW] == "*" and b"[DONE]" in stream.read()
            assert "retry-after" in stream.headers["access-control-expose-headers"].lower()


def test_a_full_queue_and_too_many_connections_say_so(llm):
    with live(llm, max_waiting=0, max_connections=1, allowed_origins=(FAR,)) as server:
        many = server.client.post(PLAIN, headers={"origin": FAR}, json={"prompt": "a", "max_tokens": 1})
        assert many.status_code == 503 and many.json()["error"]["code"] == "too_many_connections"
        assert many.headers[ALLOW] == FAR and many.headers["retry-after"] == "5"
        assert server.client.get("/health", headers={"origin": FAR}).headers[ALLOW] == FAR


def test_what_the_operator_says_counts(llm):
    options: dict[str, Any] = {"allowed_methods": ("GET",), "allowed_headers": ("x-one",), "allow_credentials": True}
    with live(llm, allowed_origins=(FAR,), **options) as server:
        assert preflight(server, FAR).status_code == 400
        asked = {"access-control-request-method": "GET", "access-control-request-headers": "x-one"}
        fine = preflight(server, FAR, "/v1/models", **asked)
        assert fine.status_code == 200 and fine.headers[ALLOW] == FAR
        assert fine.headers["access-control-allow-credentials"] == "true"
        assert allowed(server, NEAR) is None and allowed(server, FAR) == FAR


def test_the_options_are_read_as_vllm_has_them():
    assert several("--x", None) is None and several("--x", ["a", "b "]) == ("a", "b")
    assert origins(['["*"]']) == ("*",) and origins([f'["{FAR}", "null"]', NEAR]) == (FAR, "null", NEAR)
    for bad in ("localhost:3000", "https://", "https://a/b", "", '["', "[1]", '[""]'):
        with pytest.raises(ConfigError, match="--allowed-origins"):
            origins([bad])


def test_certificates_are_checked_at_the_start(tmp_path):
    check_certificate(None, None)
    nothing, broken = tmp_path / "none.pem", tmp_path / "broken.pem"
    broken.write_text("-----BEGIN CERTIFICATE-----\nnonsense\n")
    for certificate, key, words in (
        (nothing, None, "--ssl-certfile .*No such file"),
        (broken, None, "--ssl-certfile"),
        (None, broken, "--ssl-keyfile .*needs --ssl-certfile"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_certificate(certificate, key)


# ---- paths


@pytest.mark.parametrize(
    ("method", "path", "words"),
    [
        ("POST", "/completion", "use POST /v1/completions"),
        ("GET", "/props", "use GET /server_info"),
        ("GET", "/slots", "/load"),
        ("POST", "/infill", "no fill-in-the-middle"),
        ("POST", "/apply-template", "/tokenize"),
        ("GET", "/tokenizer_info", "/server_info"),
        ("POST", "/v1/embeddings", "no embeddings"),
        ("POST", "/v1/rerank", "no embeddings"),
        ("POST", "/v1/score", "no embeddings"),
        ("POST", "/chat/completions", "use /v1/chat/completions"),
        ("POST", "/completions", "use /v1/completions"),
        ("GET", "/models", "use /v1/models"),
        ("POST", "/v1/tokenize", "use /tokenize"),
        ("POST", "/v1/v1/chat/completions", "use /v1/chat/completions: the client adds /v1"),
        ("POST", "/openai/v1/chat/completions", "use /v1/chat/completions"),
        ("POST", "/v1/chat/completions/", "without the slash"),
        ("GET", "/v1/responses/resp_1", "nothing is stored"),
        ("POST", "/api/chat", "Ollama"),
        ("POST", "/api/generate", "use POST /v1/completions"),
        ("POST", "/v1/chat/completion", "did you mean /v1/chat/completions?"),
        ("GET", "/nothing/like/it", "/openapi.json"),
        ("GET", "//", "/openapi.json"),
    ],
)
def test_paths_that_are_not_served_say_which_is(server, method, path, words):
    answer = server.client.request(method, server.url + path)
    assert answer.status_code == 404, answer.text
    error = answer.json()["error"]
    assert words in error["message"] and path in error["message"] and error["type"] == "not_found_error"
    assert error["code"] == "unknown_path"


def test_the_wrong_method_is_told_the_right_one(server):
    for method, path, right in (
        ("GET", CHAT, "POST"),
        ("POST", "/v1/models", "GET"),
        ("PUT", PLAIN, "POST"),
        ("POST", "/health", "GET"),
    ):
        answer = server.client.request(method, path)
        assert answer.status_code == 405 and answer.headers["allow"] == right
        assert f"use {right}" in answer.json()["error"]["message"]
        assert answer.json()["error"]["code"] == "method_not_allowed"


def test_an_unknown_path_below_messages_has_anthropics_shape(server):
    body = server.client.post("/v1/messages/batches", json={}).json()
    assert body["type"] == "error" and "nothing is stored" in body["error"]["message"]


def test_what_is_named_is_served(server):
    """Nothing in the table is a path of this server, and every path that it names is."""
    served = server.app.state.paths
    posted = {
        "/v1/chat/completions",
        "/v1/messages",
        "/v1/responses",
    }  # served themselves; the rows are for those below
    assert not (set(OTHERS) - posted) & served and posted <= served
    for what in OTHERS.values():
        for word in what.replace(",", " ").split():
            assert not word.startswith("/") or word in served, what
    for path in ("", "/", "x" * 10_000, "/" * 500, "/v1/", "/\ud800"):
        assert remedy(path, served)
