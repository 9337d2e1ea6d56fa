"""Fields that clients of vLLM send: token masks and log-probabilities of prompts."""

from __future__ import annotations

from typing import Any

import pytest
from engine.harness import params_of, repeat_last, scripted

from .harness import joined
from .test_cases import both, ids_of, knowing

CHAT, PLAIN, RESPONSES, ANTHROPIC = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
M = [{"role": "user", "content": "ab"}]


@pytest.mark.parametrize("script", ["knowing", "repeat"])
def test_allowed_ids_and_bad_words(server, plain, script):
    asked: dict[str, Any] = {"allowed_token_ids": list(range(53, 60)), "bad_words": ["G", "HI", "II"]}
    right = knowing(ids_of(plain, length=20, **asked))
    choice = both(server, right if script == "knowing" else repeat_last, max_tokens=20, **asked)
    assert set(choice["text"]) <= set("HIJKLM") and len(choice["text"]) == 20
    assert "HI" not in choice["text"] and "II" not in choice["text"]


@pytest.mark.parametrize(
    ("path", "fields", "text"),
    [
        (CHAT, {"messages": M, "max_tokens": 8}, lambda body: body["choices"][0]["message"]["content"]),
        (PLAIN, {"prompt": "ab", "max_tokens": 8}, lambda body: body["choices"][0]["text"]),
        (RESPONSES, {"input": "ab", "max_output_tokens": 8}, lambda body: body["output"][0]["content"][0]["text"]),
        (ANTHROPIC, {"messages": M, "max_tokens": 8}, lambda body: body["content"][0]["text"]),
    ],
)
def test_masks_on_every_endpoint(server, path, fields, text):
    for letters in ("GH", "XYZ"):
        ids = [53 + ord(letter) - ord("G") for letter in letters]
        assert set(text(server.ok(path, allowed_token_ids=ids, bad_words=[], **fields))) <= set(letters)


def test_a_dead_end_says_which_fields_made_it(server):
    asked = {"prompt": "ab", "allowed_token_ids": [53, 54], "bad_words": ["GG", "GH", "HG", "HH"], "temperature": 0}
    for script in (None, repeat_last):
        with scripted(server.llm, script or (lambda *_: [])):
            choice = server.ok(PLAIN, **asked, return_token_ids=True)["choices"][0]
            chunks = server.events(PLAIN, **asked, return_token_ids=True)
        assert len(choice["token_ids"]) == 1 and choice["finish_reason"] == "abort"
        assert choice["stop_reason"] == "allowed_token_ids, bad_words: no token is left that may follow"
        got = joined(chunks)
        assert {name: got[name] for name in ("text", "token_ids", "finish_reason", "stop_reason")} == {
            name: choice[name] for name in ("text", "token_ids", "finish_reason", "stop_reason")
        }


# ---- prompts


def of_prompt(plain, prompt: list[int], count: int) -> list[Any]:
    found = plain.generate(prompt, params_of(max_tokens=1, prompt_logprobs=count))[0].prompt_logprobs
    return [
        None
        if at is None
        else {str(i): {"logprob": e.logprob, "rank": e.rank, "decoded_token": e.decoded_token} for i, e in at.items()}
        for at in found
    ]


def test_logprobs_of_prompts(server, plain):
    prompts = [[5, 6, 7, 97, 101, 10], [8], [0] * 40]
    for count in (0, 3):
        body = server.ok(PLAIN, prompt=prompts, n=2, max_tokens=2, prompt_logprobs=count)
        for i, choice in enumerate(body["choices"]):
            assert choice["prompt_logprobs"] == of_prompt(plain, prompts[i // 2], count)
        chat = server.ok(CHAT, messages=M, max_tokens=2, prompt_logprobs=count, return_token_ids=True)
        assert chat["prompt_logprobs"] == of_prompt(plain, chat["prompt_token_ids"], count)
    without = server.ok(CHAT, messages=M, max_tokens=2)
    assert "prompt_logprobs" not in without and "prompt_logprobs" not in without["choices"][0]


@pytest.mark.parametrize("count", [0, 2])
def test_echo_with_logprobs(server, plain, count):
    """As evaluation harnesses ask for them: of the prompt's tokens, the first having none, then of the output's."""
    prompts = ["ab abc ha", "abchaha", "a"]
    asked = {"max_tokens": 3, "temperature": 0, "ignore_eos": True, "return_token_ids": True, "logprobs": count}
    echoed, alone = (server.ok(PLAIN, prompt=prompts, echo=echo, **asked)["choices"] for echo in (True, False))
    for text, choice, without in zip(prompts, echoed, alone, strict=True):
        assert choice["text"] == text + without["text"] and "prompt_logprobs" not in choice
        found, rest = choice["logprobs"], without["logprobs"]
        ids = choice["prompt_token_ids"]
        own = of_prompt(plain, ids, count)
        assert found["token_logprobs"][0] is None
        assert found["token_logprobs"][1 : len(ids)] == [
            at[str(i)]["logprob"] for i, at in zip(ids[1:], own[1:], strict=True)
        ]
        for name in ("tokens", "token_logprobs"):
            assert len(found[name]) == len(ids) + 3 and found[name][len(ids) :] == rest[name]
        assert "".join(found["tokens"][: len(ids)]) == text
        for token, offset in zip(found["tokens"][: len(ids)], found["text_offset"], strict=False):
            assert text.startswith(token, offset)
        assert found["text_offset"][len(ids) :] == [len(text) + offset for offset in rest["text_offset"]]
        assert found["top_logprobs"][0] is None and found["top_logprobs"][len(ids) :] == rest["top_logprobs"]
        for at, top in zip(own[1:], found["top_logprobs"][1 : len(ids)], strict=True):
            assert sorted(top.values()) == sorted(entry["logprob"] for entry in at.values())
        if not count:  # of each token its own alone, as vLLM has it; OpenAI's schema knows no null there
            own_only = [{t: v} for t, v in zip(found["tokens"], found["token_logprobs"], strict=True)]
            assert found["top_logprobs"][1:] == own_only[1:]


def test_the_token_that_nobody_asked_for_is_not_counted(server):
    def counts() -> dict[str, float]:
        lines = server.client.get("/metrics").text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        wanted = ("generation_tokens_total", "request_generation_tokens_sum", "prompt_tokens_total", "request_success")
        return {name: float(value) for name, value in pairs if any(f"vllm:{w}" in name for w in wanted)}

    before = counts()
    body = server.ok(PLAIN, prompt=["ab abc", "ha"], echo=True, max_tokens=0, logprobs=1, n=2)
    after = counts()
    changed = {name.partition("{")[0]: after[name] - before[name] for name in after if after[name] != before[name]}
    assert changed == {"vllm:prompt_tokens_total": body["usage"]["prompt_tokens"], "vllm:request_success_total": 4}
    assert all('finished_reason="length"' in n for n in after if after[n] != before[n] and "request_success" in n)


def test_prompts_alone_are_scored(server):
    """Nothing is added with max_tokens=0; what is said of the prompt is the same."""
    asked = {"prompt": ["ab abc ha", "abchaha"], "echo": True, "n": 2, "return_token_ids": True}
    asked |= {"temperature": 0, "ignore_eos": True}  # tokens with text
    for more in ({"logprobs": 2}, {"prompt_logprobs": 1}, {}):
        alone, longer = (server.ok(PLAIN, **asked, **more, max_tokens=tokens) for tokens in (0, 3))
        assert alone["usage"] == longer["usage"] | {
            "completion_tokens": 0,
            "total_tokens": longer["usage"]["prompt_tokens"],
        }
        for choice, other in zip(alone["choices"], longer["choices"], strict=True):
            own = len(choice["prompt_token_ids"])
            assert choice["token_ids"] == [] and choice["finish_reason"] == "length"
            assert other["text"].startswith(choice["text"]) and len(other["text"]) > len(choice["text"])
            assert choice.get("prompt_logprobs") == other.get("prompt_logprobs")
            if "logprobs" in more:
                assert choice["logprobs"] == {name: entries[:own] for name, entries in other["logprobs"].items()}


@pytest.mark.parametrize("token", [-1, 1 << 70, 120])
def test_what_is_no_token_cannot_be_echoed(server, token):
    for more in ({"max_tokens": 0, "logprobs": 1}, {}, {"stream": True}):
        answer = server.post(PLAIN, prompt=[5, token], echo=True, **more)
        assert answer.status_code == 400
        assert f"token id {token} is outside the vocabulary" in answer.json()["error"]["message"]


def test_nothing_is_fewer_than_any_tokens(server):
    answer = server.post(PLAIN, prompt="ab", echo=True, max_tokens=0, min_tokens=1)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "min_tokens=1: must not exceed max_tokens=0"


def test_offsets_of_tokens_that_share_a_character(server, plain):
    """A token that begins inside a character has that one's offset; tokens before it are where they are."""
    for prompt, offsets in (("a😀b", [0, 1, 1, 1, 1, 2]), ([1, 2, 12], [0, 1, 2])):
        asked = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "logprobs": 0, "return_token_ids": True}
        [choice] = server.ok(PLAIN, **asked, echo=True)["choices"]
        echo = prompt if isinstance(prompt, str) else plain.tokenizer.decode(prompt)
        assert choice["logprobs"]["text_offset"][: len(offsets)] == offsets
        assert choice["logprobs"]["text_offset"][len(offsets)] == len(echo)
    ids = [plain.tokenizer.encode(text, add_special_tokens=False) for text in ("G", "😀")]
    masks = {"allowed_token_ids": sorted({*ids[0], *ids[1]}), "structured_outputs": {"regex": "G😀G"}}
    asked = {"prompt": "ab", "max_tokens": 20, "logprobs": 0, **masks}
    want = [0, *[1] * len(ids[1]), 2]
    [choice] = server.ok(PLAIN, **asked)["choices"]
    assert choice["text"] == "G😀G" and choice["logprobs"]["text_offset"] == want
    chunks = [chunk["choices"][0]["logprobs"] for chunk in server.events(PLAIN, **asked)]
    assert [offset for found in chunks if found for offset in found["text_offset"]] == want


def test_echo_beside_prompt_logprobs(server, plain):
    """Each has as many alternatives as were asked for."""
    for of_prompts, of_tokens in ((0, 3), (3, 1)):
        asked = {"prompt": [5, 6, 7], "echo": True, "max_tokens": 1}
        [choice] = server.ok(PLAIN, **asked, logprobs=of_tokens, prompt_logprobs=of_prompts)["choices"]
        assert choice["prompt_logprobs"] == of_prompt(plain, [5, 6, 7], of_prompts)
        assert {len(top) for top in choice["logprobs"]["top_logprobs"][1:]} <= {of_tokens, of_tokens + 1}


@pytest.mark.parametrize(("path", "status"), [(RESPONSES, "failed"), (ANTHROPIC, None)])
def test_a_dead_end_on_other_endpoints(server, path, status):
    asked: dict[str, Any] = {"allowed_token_ids": [53], "bad_words": ["GG"]}
    asked |= {"input": "ab"} if path == RESPONSES else {"messages": M, "max_tokens": 8}
    body = server.ok(path, **asked)
    assert body.get("status") == status and body["usage"]["output_tokens"] == 1
