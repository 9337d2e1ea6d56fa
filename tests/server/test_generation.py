"""Chat and plain completions: what the engine says, whole and streamed, with every field that asks for more."""

from __future__ import annotations

import pytest
from engine.harness import repeat_last, scripted

from paceline import SamplingParams
from paceline.outputs import own_logprob

from .harness import joined

CHAT = "/v1/chat/completions"
PLAIN = "/v1/completions"
MESSAGES = [{"role": "user", "content": "ab abc"}]
SAMPLED = {"temperature": 1.1, "seed": 3, "max_tokens": 20, "ignore_eos": True}


@pytest.fixture(autouse=True)
def drafts(spec):
    with scripted(spec, repeat_last):
        yield


def test_chat_equals_the_library(server, plain):
    want = plain.chat(MESSAGES, SamplingParams(**SAMPLED))[0]
    body = server.ok(CHAT, messages=MESSAGES, return_token_ids=True, **SAMPLED)
    [choice] = body["choices"]
    assert body["object"] == "chat.completion" and body["model"] == "tiny"
    assert choice["message"] == {"role": "assistant", "content": want.outputs[0].text, "refusal": None}
    assert choice["token_ids"] == want.outputs[0].token_ids and choice["finish_reason"] == "length"
    assert body["prompt_token_ids"] == want.prompt_token_ids
    prompt = len(want.prompt_token_ids)
    usage = {"prompt_tokens": prompt, "completion_tokens": 20, "total_tokens": prompt + 20}
    assert body["usage"] == usage | {"prompt_tokens_details": {"cached_tokens": 0}}


def test_a_chat_stream_is_the_whole_in_pieces(server):
    fields = {"messages": MESSAGES, "return_token_ids": True, "logprobs": True, "top_logprobs": 2, **SAMPLED}
    whole = server.ok(CHAT, **fields)
    chunks = server.events(CHAT, stream_options={"include_usage": True}, **fields)
    assert len({c["id"] for c in chunks}) == 1 and {c["object"] for c in chunks} == {"chat.completion.chunk"}
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
    choice, got = whole["choices"][0], joined(chunks)
    assert got["text"] == choice["message"]["content"]
    assert got["token_ids"] == choice["token_ids"] and got["logprobs"] == choice["logprobs"]["content"]
    assert got["finish_reason"] == choice["finish_reason"]
    assert all("usage" not in c for c in chunks[:-1])


def test_usage_in_every_chunk(server):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = server.events(CHAT, messages=MESSAGES, stream_options=options, **SAMPLED)
    made = [c["usage"]["completion_tokens"] for c in chunks]
    assert made == sorted(made) and made[0] == 0 and made[-1] == 20


def test_logprobs_are_the_library_s(server, plain):
    params = SamplingParams(logprobs=2, **SAMPLED)
    want = plain.generate("ab", params)[0].outputs[0]
    body = server.ok(PLAIN, prompt="ab", logprobs=2, **SAMPLED)
    found = body["choices"][0]["logprobs"]
    assert found["token_logprobs"] == [own_logprob(entry)[1].logprob for entry in want.logprobs]
    assert len(found["tokens"]) == len(found["text_offset"]) == 20
    for top, entry in zip(found["top_logprobs"], want.logprobs, strict=True):
        assert len(top) == len(entry) == 2 + (own_logprob(entry)[1].rank > 2)
        assert list(top.values()) == sorted((p.logprob for p in entry.values()), reverse=True)
    chat = server.ok(CHAT, messages=MESSAGES, logprobs=True, **SAMPLED)["choices"][0]["logprobs"]["content"]
    assert all(item["top_logprobs"] == [] and bytes(item["bytes"]).decode("utf-8", "replace") for item in chat)


def test_several_prompts_and_choices(server, plain):
    fields = {"prompt": [[98, 0], [1, 2, 3]], "n": 3, "return_token_ids": True, **SAMPLED}
    whole = server.ok(PLAIN, **fields)
    chunks = server.events(PLAIN, **fields)
    want = plain.generate(fields["prompt"], SamplingParams(n=3, **SAMPLED))
    flat = [(o, c) for o in want for c in o.outputs]
    assert [c["index"] for c in whole["choices"]] == list(range(6))
    for choice, (output, expected) in zip(whole["choices"], flat, strict=True):
        assert choice["text"] == expected.text and choice["token_ids"] == expected.token_ids
        assert choice["prompt_token_ids"] == output.prompt_token_ids
        got = joined(chunks, choice["index"])
        assert (got["text"], got["token_ids"]) == (expected.text, expected.token_ids)
    assert whole["usage"]["prompt_tokens"] == 5 and whole["usage"]["completion_tokens"] == 120


def test_prompts_as_texts_and_echo(server, plain):
    want = plain.generate("ab", SamplingParams(**SAMPLED))[0].outputs[0].text
    assert server.ok(PLAIN, prompt=["ab", "ab"], echo=True, **SAMPLED)["choices"][1]["text"] == "ab" + want
    assert joined(server.events(PLAIN, prompt="ab", echo=True, **SAMPLED))["text"] == "ab" + want
    begins = plain.tokenizer.decode([98, 0])
    assert server.ok(PLAIN, prompt=[98, 0], echo=True, max_tokens=1)["choices"][0]["text"].startswith(begins)
    assert server.ok(PLAIN, prompt="ab")["usage"]["completion_tokens"] <= 16, "OpenAI's default"


def test_stops_and_their_reason(server, plain):
    text = plain.generate("ab", SamplingParams(**SAMPLED))[0].outputs[0].text
    stop = text[4:6]
    for include in (False, True):
        body = server.ok(PLAIN, prompt="ab", stop=stop, include_stop_str_in_output=include, **SAMPLED)
        [choice] = body["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
        end = text.index(stop) + (len(stop) if include else 0)
        assert choice["text"] == text[:end]
        chunks = server.events(PLAIN, prompt="ab", stop=[stop], include_stop_str_in_output=include, **SAMPLED)
        got = joined(chunks)
        assert (got["text"], got["finish_reason"], got["stop_reason"]) == (text[:end], "stop", stop)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.05},
        {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
        {"temperature": 1.0, "logit_bias": {"5": 4.0, "6": -100}},
        {"temperature": 1.3, "stop_token_ids": [3, 4, 5, 6, 7, 8, 9], "min_tokens": 6},
        {"temperature": 1.0, "skip_special_tokens": False, "ignore_eos": True},
    ],
)
def test_every_sampling_field_reaches_the_sampler(server, plain, fields):
    given = {"seed": 11, "max_tokens": 30, **fields}
    want = plain.generate("abc", SamplingParams(**given))[0].outputs[0]
    [choice] = server.ok(PLAIN, prompt="abc", return_token_ids=True, **given)["choices"]
    assert choice["token_ids"] == want.token_ids and choice["text"] == want.text


def test_extras_of_other_servers(server, spec):
    fields = {"messages": MESSAGES, **SAMPLED, "logit_bias": {"5": 100}}  # one token for ever: drafts are right
    body = server.ok(CHAT, return_meta_info=True, **fields)
    stats = body["metrics"]["speculative_decoding"]
    meta, timings = body["meta_info"], body["timings"]
    assert stats["num_accepted_draft_tokens"] > 0
    assert meta["spec_accept_length"] == stats["mean_acceptance_length"] and meta["spec_verify_ct"] > 0
    assert sum(stats["acceptance_histogram"]) == stats["num_spec_steps"]
    assert (timings["draft_n"], timings["draft_n_accepted"]) == (
        stats["num_draft_tokens"],
        stats["num_accepted_draft_tokens"],
    )
    prompt = {"messages": [{"role": "user", "content": "ab ha " * 20}], "max_tokens": 2}
    for answer in (server.ok(CHAT, **prompt), server.ok(CHAT, **prompt)):  # the second one's prompt is known
        timings, usage = answer["timings"], answer["usage"]
        assert timings["cache_n"] == usage["prompt_tokens_details"]["cached_tokens"]
        assert timings["cache_n"] + timings["prompt_n"] == usage["prompt_tokens"]
    assert timings["cache_n"] > 0
    chunks = server.events(CHAT, stream_options={"include_usage": True}, **fields)
    assert "metrics" in chunks[-1] and "metrics" not in chunks[-2]
    assert "timings" in server.events(CHAT, **fields)[-1]
    assert "metrics" not in server.ok(CHAT, n=2, **fields), "as with vLLM: of one choice only"
    none = server.ok(CHAT, num_speculative_tokens=0, **fields)
    assert none["metrics"]["speculative_decoding"]["num_spec_steps"] == 0
    assert none["choices"][0]["message"] == body["choices"][0]["message"]


@pytest.mark.parametrize("begun", ["ha ha", "e", "|", "a ", ""])
def test_the_last_message_can_be_continued(server, plain, begun):
    """As in the library, also where the template writes such a text behind it."""
    messages = [*MESSAGES, {"role": "assistant", "content": begun}]
    body = server.ok(CHAT, messages=messages, continue_final_message=True, return_token_ids=True, **SAMPLED)
    text = plain.tokenizer.apply_chat_template([*MESSAGES, {"role": "assistant", "content": "#"}])
    assert body["prompt_token_ids"] == plain.tokenizer.encode(text[: text.index("#")] + begun, add_special_tokens=False)
    want = plain.chat(messages, SamplingParams(**SAMPLED), continue_final_message=True)[0]
    assert body["prompt_token_ids"] == want.prompt_token_ids
    assert body["choices"][0]["message"]["content"] == want.outputs[0].text


def test_text_parts_and_template_variables(server, plain, monkeypatch):
    parts = [{"role": "user", "content": [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]}]
    body = server.ok(CHAT, messages=parts, return_token_ids=True, max_tokens=1)
    assert body["prompt_token_ids"] == plain.tokenizer.encode_chat([{"role": "user", "content": "ab\nc"}])
    monkeypatch.setitem(server.llm.tokenizer.templates, "default", "{{ mark }}{{ messages[0].content }}")
    body = server.ok(CHAT, messages=MESSAGES, chat_template_kwargs={"mark": "abc"}, return_token_ids=True, max_tokens=1)
    assert body["prompt_token_ids"] == plain.tokenizer.encode("abcab abc")


def test_names_of_the_model(server):
    assert server.ok(CHAT, messages=MESSAGES, model="other-name", max_tokens=1)["model"] == "other-name"
    answer = server.post(CHAT, messages=MESSAGES, model="gpt-4")
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"
    assert [m["id"] for m in server.client.get("/v1/models").json()["data"]] == ["tiny", "other-name"]
    assert server.client.get("/v1/models/tiny").json()["max_model_len"] == 160
    assert server.client.get("/v1/models/nix").status_code == 404


def test_tokenize_and_detokenize(server, plain):
    found = server.ok("/tokenize", prompt="ab abc", return_token_strs=True)
    assert found["tokens"] == plain.tokenizer.encode("ab abc") and found["count"] == len(found["tokens"])
    assert "".join(found["token_strs"]) == "ab abc" and found["max_model_len"] == 160
    chat = server.ok("/tokenize", messages=MESSAGES)
    assert chat["tokens"] == plain.tokenizer.encode_chat(MESSAGES)
    assert server.ok("/detokenize", tokens=found["tokens"])["prompt"] == "ab abc"
    for path, body in (
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}),
        ("/detokenize", {"tokens": [120]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": ["a"]}),
    ):
        assert server.post(path, **body).status_code == 400


def test_small_endpoints(server):
    get = server.client.get
    assert get("/health").status_code == get("/ping").status_code == 200
    assert get("/version").json()["version"] == "0.1.0"
    info = get("/server_info").json()
    assert info["engine"]["vocab_size"] == 120 and info["limits"]["max_running_and_waiting"] == 200
    assert "path" not in info["engine"]
    assert get("/load").json() == {"server_load": 0}
    assert get("/nix").status_code == 404 and get(CHAT).status_code == 405


def test_known_beginnings_are_found_and_change_nothing(server, plain):
    """Failure case 23 for this engine: the same long prompt twice, then longer; hits are reported, salts keep apart."""
    prompt = [(5 * i) % 100 for i in range(80)]
    assert server.post("/reset_prefix_cache").status_code == 200

    def cached(**fields):
        body = server.ok(PLAIN, return_token_ids=True, **SAMPLED, **fields)
        ids = fields["prompt"]
        assert (
            body["choices"][0]["token_ids"] == plain.generate([ids], SamplingParams(**SAMPLED))[0].outputs[0].token_ids
        )
        return body["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached(prompt=prompt) == 0
    assert cached(prompt=prompt) >= 48
    assert cached(prompt=[*prompt, 1, 2, 3]) >= 48
    assert cached(prompt=prompt, cache_salt="mine") == 0 and cached(prompt=prompt, cache_salt="mine") >= 48
    text = server.client.get("/metrics").text
    hits = [line for line in text.splitlines() if line.startswith("vllm:prefix_cache_hits_total")]
    assert float(hits[0].split()[-1]) >= 144
