"""A server measured over HTTP: the same figures as the engine in this process, from token events and counters."""

from __future__ import annotations

import json

import pytest
from fakes.llm import FakeLLM
from fakes.openai_server import FakeServer

from paceline.bench import counters, figures, runner
from paceline.bench.backend import Arm, Conversation
from paceline.bench.datasets import BenchPrompt
from paceline.bench.local import LocalBackend
from paceline.bench.remote import RemoteBackend, ServerError, _Answer, _completion
from paceline.sampling_params import SamplingParams
from paceline.speculation.stats import SpecDecodeStats

PARAMS = SamplingParams(temperature=0.0, max_tokens=20)


def prompts(*texts, later=()):
    messages = [[{"role": "user", "content": text}] for text in texts]
    return [BenchPrompt(i, first, later_turns=tuple(later)) for i, first in enumerate(messages)]


def measure(server, items=None, lengths=(None,), **options):
    backend = RemoteBackend(server.url)
    try:
        return runner.measure(
            "set", items or prompts("one", "two"), [Arm(backend, k) for k in lengths], PARAMS, **options
        )
    finally:
        backend.close()


def test_answers_and_acceptance_equal_those_of_the_engine_in_this_process():
    with FakeServer().running() as server:
        found = measure(server, prompts("one", "two", later=["go on"]), [0, 4])
    local = LocalBackend(FakeLLM())
    here = runner.measure("set", prompts("one", "two", later=["go on"]), [Arm(local, k) for k in (0, 4)], PARAMS)
    for mine, theirs in zip(figures.result_rows(found), figures.result_rows(here), strict=True):
        for key in ("completed", "output_tokens", "identical", "prompt_tokens"):
            assert mine[key] == theirs[key]
        assert mine["spec_decode"] == theirs["spec_decode"]
    assert [c.token_ids for c in found.runs[0][1].completions] == [c.token_ids for c in here.runs[0][1].completions]


@pytest.mark.parametrize("concurrency", [1, 3])
def test_as_many_requests_are_in_flight_as_there_are_clients(concurrency):
    with FakeServer().running() as server:
        measure(server, prompts(*"abcdef"), concurrency=concurrency)
    assert server.most_in_flight == concurrency


def test_times_come_from_token_events():
    """A role alone, empty deltas and usage are no tokens; reasoning is."""
    answer = _Answer(sent=1.0)
    answer.take({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, 2.0)
    answer.take({"choices": [{"delta": {"reasoning_content": "hm"}, "token_ids": [1]}]}, 3.0)
    answer.take({"choices": [{"delta": {"content": "a"}, "token_ids": [2, 3]}]}, 4.0)
    answer.take({"choices": [{"delta": {}, "finish_reason": "stop"}]}, 5.0)
    answer.take({"choices": [], "usage": {"completion_tokens": 3, "prompt_tokens": 9}}, 6.0)
    completion = _completion(Conversation(prompts("one")[0]), None, answer)
    assert (completion.ttft_s, completion.decode_s, completion.wall_s) == (2.0, 1.0, 3.0)
    assert (completion.text, completion.token_ids, completion.finish_reason) == ("a", [1, 2, 3], "stop")


def test_tokens_are_counted_from_usage_where_no_ids_are_told():
    with FakeServer("no ids").running() as server:
        found = measure(server, lengths=[0, 4])
    rows = figures.result_rows(found)
    assert [row["identical"] for row in rows] == [True, True]
    assert rows[0]["output_tokens"] == 2 * len(b"You said: one\0")
    assert [row["text"] for row in figures.output_rows(found)] == ["You said: one"] * 2 + ["You said: two"] * 2


def test_texts_that_differ_are_seen_without_ids():
    with FakeServer("no ids").running() as server:
        server.llm.corrupt_speculation = True
        rows = figures.result_rows(measure(server, lengths=[0, 4]))
    assert [row["identical"] for row in rows] == [True, False]


def test_a_strict_server_gets_openais_fields_alone():
    with FakeServer("strict").running() as server:
        (row,) = figures.result_rows(measure(server))
    assert row["completed"] == 2
    assert not {"return_token_ids", "cache_salt"} & set(server.bodies[-1])


def test_the_request_says_what_was_asked():
    with FakeServer().running() as server:
        backend = RemoteBackend(server.url + "/v1/", extra_body={"chat_template_kwargs": {"enable_thinking": False}})
        params = SamplingParams(temperature=0.8, top_p=0.9, top_k=20, seed=5, max_tokens=7, ignore_eos=True)
        runner.measure("set", prompts("one"), [Arm(backend, 3)], params)
        backend.close()
    body = server.bodies[-1]
    expected = {"model": "fake-model", "temperature": 0.8, "top_p": 0.9, "top_k": 20, "seed": 5, "max_tokens": 7}
    assert {key: body[key] for key in expected} == expected
    assert (body["ignore_eos"], body["num_speculative_tokens"]) == (True, 3)
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert body["stream_options"] == {"include_usage": True}


def test_every_run_has_a_salt_of_its_own_and_the_cache_is_emptied():
    with FakeServer().running() as server:
        measure(server, repeats=2)
    salts = [body["cache_salt"] for body in server.bodies]
    assert len(set(salts)) == len(salts) == 5
    assert server.resets == 5
    with FakeServer("no metrics").running() as server:
        measure(server, repeats=2)
    assert server.resets == 1


def test_prompts_that_were_cached_all_the_same_are_warned_about():
    with FakeServer("cached").running() as server:
        (row,) = figures.result_rows(measure(server))
    assert "in its cache already" in row["warnings"][0]


def test_acceptance_from_response_fields_wins_over_metrics():
    with FakeServer("per request", "no metrics").running() as server:
        found = measure(server)
    assert found.runs[0][0].spec_decode.as_dict()["acceptance_length"] == pytest.approx(3.0)
    assert all(c.stats is not None for c in found.runs[0][0].completions)


def test_llama_cpp_tells_tokens_but_not_drafts():
    with FakeServer("llama.cpp").running() as server:
        (row,) = figures.result_rows(measure(server))
    spec = row["spec_decode"]
    assert spec["acceptance_rate"] == pytest.approx(0.5)
    assert (spec["num_drafts"], spec["acceptance_length"], spec["per_position_acceptance_rates"]) == (None, None, [])
    json.dumps(row, allow_nan=False)


@pytest.mark.parametrize(
    ("quirks", "told"),
    [
        (["no ids", "no usage"], "neither token ids nor usage"),
        (["broken", "no ids"], "neither token ids nor usage"),
        (["error event"], "out of blocks"),
    ],
)
def test_a_request_that_fails_is_a_failed_completion(quirks, told):
    with FakeServer(*quirks).running() as server:
        (row,) = figures.result_rows(measure(server, prompts("one", later=["more"])))
    assert (row["completed"], row["failed"]) == (0, 2)
    assert told in row["warnings"][0]


def test_a_server_that_is_not_there_or_is_no_server_of_this_kind():
    with pytest.raises(ServerError, match="cannot be reached"):
        RemoteBackend("http://127.0.0.1:9")
    with pytest.raises(ServerError, match=r"'localhost:8000/v1' .* write it as http://localhost:8000/v1"):
        RemoteBackend("localhost:8000/v1")
    with FakeServer().running() as server:
        with pytest.raises(ServerError, match="HTTP 404; is this the right URL"):
            RemoteBackend(server.url + "/elsewhere")
        with pytest.raises(ServerError, match="serves fake-model"):
            RemoteBackend(server.url, model="other")


def test_counters_are_summed_over_engines_and_read_as_differences():
    text = """# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 5.0
vllm:spec_decode_num_draft_tokens_total{engine="0"} 45
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 7
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="0"} 3
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 4
vllm:spec_decode_num_accepted_tokens_per_pos_created{engine="0",position="0"} 1.7e9
vllm:spec_decode_broken nan-ish
vllm:generation_tokens_total 99
"""
    after = counters.parse(text)
    assert after[counters.DRAFTS] == 15
    stats = counters.from_metrics({}, after)
    assert stats.num_drafts == 15
    assert stats.num_accepted_tokens_per_pos[:2] == [10, 4]
    assert stats.acceptance_length == pytest.approx(1 + 14 / 15)
    assert counters.from_metrics(after, after).num_drafts == 0
    assert counters.from_metrics({}, {}) is None


@pytest.mark.parametrize("observed", [[(4, 4), (4, 0), (4, 2)], [(7, 1)], []])
def test_counters_give_back_the_statistics_that_made_them(observed):
    stats = SpecDecodeStats()
    for drafted, accepted in observed:
        stats.observe(drafted, accepted, 0)
    drafts, tokens = stats.num_drafts, stats.num_draft_tokens
    assert counters.from_survivors(drafts, tokens, stats.num_accepted_tokens_per_pos).as_dict() == stats.as_dict()


def test_sglangs_and_garbled_response_fields():
    info = {"spec_correct_drafts_histogram": [1, 2, 0, 1], "spec_num_proposed_drafts": 12}
    stats = counters.from_response({"meta_info": info}, 9)
    assert (stats.num_drafts, stats.num_accepted_tokens, stats.num_delivered_tokens) == (4, 5, 9)
    assert counters.from_response({"metrics": None, "timings": [], "meta_info": {"spec_verify_ct": 3}}, 1) is None
