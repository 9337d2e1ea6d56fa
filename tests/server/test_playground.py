"""The page's files, and the stream that it reads: tokens with their marks, passes, figures."""

from __future__ import annotations

import re

import pytest
from engine.harness import Oracle, half_right, scripted
from fastapi.testclient import TestClient

from paceline import SamplingParams
from paceline.outputs import StreamDelta
from paceline.server.app import build_app
from paceline.server.playground import ASSETS, HEADERS, Pieces

from .harness import live

STREAM = "/playground/stream"
ASK = {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 40, "temperature": 1.0, "seed": 3}


def run(server, **fields):
    """(start, steps, end) of a stream."""
    with server.client.stream("POST", STREAM, json={**ASK, **fields}) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [line for line in answer.iter_lines() if line]
    assert lines.pop() == "data: [DONE]"
    from .harness import parse_events

    start, *steps, end = parse_events(iter(lines))
    assert (start["type"], end["type"]) == ("start", "end") and {s["type"] for s in steps} == {"step"}
    return start, steps, end


def learned(llm, prompt_ids):
    oracle = Oracle()
    params = SamplingParams(temperature=1.0, max_tokens=60, seed=3, ignore_eos=True)
    oracle.learn(llm.generate([prompt_ids], params, speculation=False)[0])
    return oracle


def test_a_run_says_what_a_chat_says_token_by_token(server, spec):
    want = server.ok("/v1/chat/completions", **ASK, return_token_ids=True)
    start, steps, end = run(server)
    [choice] = want["choices"]
    assert start["prompt_tokens"] == want["usage"]["prompt_tokens"] and start["seed"] == 3
    assert end["text"] == choice["message"]["content"] and end["token_ids"] == choice["token_ids"]
    assert end["finish_reason"] == choice["finish_reason"]
    assert "".join(text for s in steps for text, _ in s["pieces"]) == end["text"]
    assert sum(s["tokens"] for s in steps) == end["usage"]["completion_tokens"] == len(end["token_ids"])
    times = [s["seconds"] for s in steps]
    assert times == sorted(times) and times[0] > 0


def test_marks_and_passes_are_those_of_the_drafts(server, spec):
    """With drafts that are right now and then: the stream's passes are the counters, its marks the accepted tokens."""
    ids = server.ok("/tokenize", messages=ASK["messages"])["tokens"]
    _, plain_steps, plain = run(server, num_speculative_tokens=0)
    assert all(s["passes"] == [[0, 0]] * s["tokens"] for s in plain_steps)  # a reader that is late gets several at once
    assert not any(accepted for s in plain_steps for _, accepted in s["pieces"])
    with scripted(spec, half_right(learned(spec, ids), spec.model.vocab_size, seed=5)):
        _, steps, end = run(server, num_speculative_tokens=5)
    assert end["token_ids"] == plain["token_ids"] and end["text"] == plain["text"]
    drafted = [pass_ for s in steps for pass_ in s["passes"] if pass_[0]]
    figures = end["metrics"]["speculative_decoding"]
    assert figures["num_spec_steps"] == len(drafted) > 0
    assert figures["num_draft_tokens"] == sum(d for d, _ in drafted)
    assert figures["num_accepted_draft_tokens"] == sum(a for _, a in drafted) > 0
    rates = end["per_position_acceptance_rates"]
    assert rates == sorted(rates, reverse=True)
    assert 1 + sum(rates) == pytest.approx(figures["mean_acceptance_length"])
    assert any(accepted for s in steps for _, accepted in s["pieces"])
    for step in steps[:-1]:  # the last may be cut by the limit
        assert step["tokens"] == sum(a + 1 for _, a in step["passes"])


def test_every_run_computes_its_prompt_anew(server):
    long = [{"role": "user", "content": "abc " * 40}]
    for _ in range(2):
        _, _, end = run(server, messages=long, max_tokens=2)
        assert end["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"num_speculative_tokens": 99}, "num_speculative_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, None),
        ({"model": "nix"}, "model"),
        ({"n": 2}, "n"),
        ({"max_tokens": "5"}, "max_tokens"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(server, fields, param):
    answer = server.post(STREAM, **{**ASK, **fields})
    assert answer.status_code in (400, 404)
    if param:
        assert answer.json()["error"]["param"] == param


def test_the_page_loads_its_own_files_alone(server):
    page = server.client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    found = re.findall(r'(?:src|href)="([^"]*)"', page.text)
    assert found and {"/" + path for path in found} <= ASSETS.keys()
    everything = "".join(server.client.get(path).text for path in ASSETS)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", everything)
    assert "<script>" not in page.text and "style=" not in page.text and "onclick" not in page.text
    for path, (_, media_type) in ASSETS.items():
        answer = server.client.get(path)
        assert answer.status_code == 200 and answer.headers["content-type"].startswith(media_type)
        assert HEADERS.items() <= dict(answer.headers).items()
    for other in ("/playground/", "/playground/playground.py", "/playground/../app.py", "/playground/%2e%2e/app.py"):
        assert server.client.get(other).status_code == 404


def test_modules_of_the_page_import_what_is_served(server):
    for path in ASSETS:
        if path.endswith(".js"):
            for name in re.findall(r'from "\./([^"]+)"', server.client.get(path).text):
                assert f"/playground/{name}" in ASSETS


def test_controls_have_names(server):
    """Every field of the page has a label, every button words or a label."""
    text = server.client.get("/").text
    labelled = set(re.findall(r'for="([^"]+)"', text))
    for label in re.findall(r"<label[ >].*?</label>", text, re.DOTALL):
        labelled |= set(re.findall(r'id="([^"]+)"', label))
        if 'type="radio"' in label:
            labelled.add("radio")
    for tag in re.findall(r"<(?:input|select|textarea)[^>]*>", text):
        name = re.search(r'id="([^"]+)"', tag)
        assert (name[1] if name else "radio") in labelled, tag
    for attributes, words in re.findall(r"<button([^>]*)>(.*?)</button>", text, re.DOTALL):
        assert "aria-label" in attributes or re.search(r"[A-Za-z]{3}", words)
    assert '<html lang="en">' in text and "<title>" in text


def test_a_key_guards_the_stream_and_not_the_page(spec):
    with live(spec, api_keys=("secret",)) as server:
        for path in ASSETS:
            assert server.client.get(path).status_code == 200
        assert server.post(STREAM, **ASK).status_code == 401
        assert server.client.get("/server_info").status_code == 401
        server.client.headers["authorization"] = "Bearer secret"
        run(server)


def test_deltas_that_were_joined_keep_their_passes():
    from paceline.async_llm import _add

    a = StreamDelta(0, "a", [1, 2], [True, False], None, passes=[(3, 1)])
    b = StreamDelta(0, "b", [3], [False], None, passes=[(2, 0)])
    mine = a.passes
    _add(a, b)
    assert a.passes == [(3, 1), (2, 0)] and mine == [(3, 1)]
    assert (a.text, a.token_ids, a.accepted) == ("ab", [1, 2, 3], [True, False, False])


def test_characters_of_several_tokens_belong_to_the_last(spec):
    """The text of all pieces is the engine's own, characters of several tokens and the end included."""
    euro = spec.tokenizer.encode("a€b", add_special_tokens=False)
    from paceline.detokenizer import IncrementalDetokenizer

    pieces = Pieces(IncrementalDetokenizer(spec.tokenizer))
    flags = [bool(i % 2) for i in range(len(euro))]
    found = pieces.take(StreamDelta(0, "", euro, flags, None))
    assert "".join(text for text, _ in found) == "a€b"
    assert all(text for text, _ in found)


def test_schema_has_the_stream_and_not_the_files(spec):
    from paceline import AsyncLLM
    from paceline.server.settings import ServerSettings

    app = build_app(AsyncLLM(spec), ServerSettings(("tiny",)))
    with TestClient(app) as client:
        paths = client.get("/openapi.json").json()["paths"]
    assert STREAM in paths and not ASSETS.keys() & paths.keys()
