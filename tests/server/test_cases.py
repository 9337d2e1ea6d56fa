"""The failure cases of other engines' trackers, through HTTP with a drafter that knows (or does not know) what comes.

The numbers are those of the list of 32 cases that this project keeps. Where a case is about the engine alone, its test
is there, and the table at the end of docs/server.md says where.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from engine.harness import Oracle, Script, half_right, nothing, repeat_last, scripted, wrong

from paceline import LLM, SamplingParams

from .harness import Live, joined

PLAIN = "/v1/completions"
PROMPT = [21, 22, 23, 24, 25]
V = 120
SAMPLED = {"temperature": 1.2, "seed": 0, "ignore_eos": True}


def ids_of(plain: LLM, length: int = 60, **fields: Any) -> list[int]:
    """What comes, far beyond any stop."""
    params = SamplingParams(**{**SAMPLED, "max_tokens": length, **fields})
    return plain.generate([PROMPT], params)[0].outputs[0].token_ids


def knowing(ids: list[int]) -> Script:
    return lambda s, limit: ids[s.num_output_tokens : s.num_output_tokens + limit]


def both(server: Live, script: Script, **fields: Any) -> dict[str, Any]:
    """Whole and streamed, with drafts and without: all four say the same. Returns the choice of the first."""
    ask = {"prompt": PROMPT, "return_token_ids": True, "logprobs": 2, **SAMPLED, **fields}
    with scripted(server.llm, script):
        first = server.ok(PLAIN, **ask)
        chunks = server.events(PLAIN, stream_options={"include_usage": True}, **ask)
    without = server.ok(PLAIN, num_speculative_tokens=0, **ask)
    [choice] = first["choices"]
    assert choice == without["choices"][0]
    for body in (first, without, chunks[-1]):  # what the prefix cache had depends on who came before
        del body["usage"]["prompt_tokens_details"]
    assert first["usage"] == without["usage"]
    got = joined(chunks)
    for name in ("text", "token_ids", "finish_reason", "stop_reason"):
        assert got[name] == choice[name], name
    assert got["logprobs"] == choice["logprobs"]["token_logprobs"]
    assert chunks[-1]["usage"] == first["usage"]
    count = len(choice["token_ids"])
    assert count == first["usage"]["completion_tokens"] == len(choice["logprobs"]["tokens"])
    return choice


def first_at(ids: list[int], least: int) -> int:
    return next(i for i in range(least, len(ids)) if ids[i] not in ids[:i])


def ascii_run(plain: LLM) -> tuple[int, list[int]]:
    """A seed whose first block is plain characters, for stop strings."""
    for seed in range(300):
        ids = ids_of(plain, seed=seed)
        text = plain.tokenizer.decode(ids[1:9])
        if len(text) > 5 and text.isascii() and text.isprintable():
            return seed, ids
    raise AssertionError("no such seed")


@pytest.mark.parametrize("case", [1, 4])
def test_case_1_and_4_a_stop_string_ends_everything_there(server, plain, case):
    """1: nothing of the tokens behind a stop leaks. 4: a stop early in a long accepted block is seen."""
    seed, ids = ascii_run(plain)
    tokens = 6 if case == 1 else 3
    stop = plain.tokenizer.decode(ids[:tokens])[-2:]
    choice = both(server, knowing(ids), seed=seed, stop=[stop], max_tokens=40)
    whole = plain.tokenizer.decode(ids)
    assert choice["text"] == whole[: whole.index(stop)] and choice["stop_reason"] == stop
    assert len(choice["token_ids"]) <= tokens


def test_case_2_a_stop_before_the_cap_in_one_block(server, plain):
    ids = ids_of(plain)
    at = first_at(ids, 2)
    choice = both(server, knowing(ids), stop_token_ids=[ids[at]], max_tokens=at + 3)
    assert choice["finish_reason"] == "stop" and choice["token_ids"] == ids[: at + 1]


def test_case_3_a_stop_behind_the_cap(server, plain):
    ids = ids_of(plain)
    at = first_at(ids, 4)
    choice = both(server, knowing(ids), stop_token_ids=[ids[at]], max_tokens=2)
    assert choice["finish_reason"] == "length" and choice["token_ids"] == ids[:2]


@pytest.mark.parametrize("cap", [1, 7, 8, 9])
def test_case_5_a_block_that_crosses_the_limit(server, plain, cap):
    choice = both(server, knowing(ids_of(plain)), max_tokens=cap)
    assert choice["finish_reason"] == "length" and len(choice["token_ids"]) == cap


def test_case_7_and_10_counters_of_a_request(server, plain):
    """Committed tokens add up; survival never rises; acceptance length is 1 + accepted / drafts."""
    ids = ids_of(plain)
    oracle = knowing(ids)
    at = first_at(ids, 3)
    with scripted(server.llm, lambda s, limit: oracle(s, limit)[: 1 + s.num_output_tokens % 5]):
        ask = {"prompt": PROMPT, "stop_token_ids": [ids[at]], "max_tokens": 40, **SAMPLED}
        body = server.ok(PLAIN, **ask)
    stats = body["metrics"]["speculative_decoding"]
    histogram = stats["acceptance_histogram"]
    assert sum(histogram) == stats["num_spec_steps"] > 0
    assert sum(a * n for a, n in enumerate(histogram)) == stats["num_accepted_draft_tokens"]
    mean = 1 + stats["num_accepted_draft_tokens"] / stats["num_spec_steps"]
    assert stats["mean_acceptance_length"] == pytest.approx(mean)
    assert body["usage"]["completion_tokens"] == at + 1


def test_case_8_steps_without_tokens_are_counted_without_harm(server, plain):
    """Chunks of a long prompt, and aborts: no negative count, no crash of /metrics."""
    long_prompt = [(7 * i) % 100 for i in range(130)]  # three chunks of this server's 48 rows
    with scripted(server.llm, repeat_last):
        server.ok(PLAIN, prompt=long_prompt, max_tokens=4)
        with server.client.stream("POST", PLAIN, json={"prompt": long_prompt, "stream": True, "max_tokens": 20}) as s:
            next(s.iter_bytes())
    server.idle()
    values = [float(line.rsplit(" ", 1)[1]) for line in metrics(server).splitlines() if line[0] != "#"]
    assert values and min(values) >= 0


def metrics(server: Live) -> str:
    return server.client.get("/metrics").text


def counters(server: Live) -> tuple[float, float, float, list[float]]:
    """(drafts, draft tokens, accepted tokens, accepted per position), summed over labels as a dashboard does."""
    text = metrics(server)

    def total(name: str) -> float:
        found = re.findall(rf"^vllm:spec_decode_{name}_total{{.*}} (\S+)$", text, re.M)
        return sum(map(float, found))

    pattern = r'^vllm:spec_decode_num_accepted_tokens_per_pos_total{.*position="(\d+)".*} (\S+)$'
    positions = {int(p): float(v) for p, v in re.findall(pattern, text, re.M)}
    assert sorted(positions) == list(range(len(positions)))
    per_position = [positions[p] for p in sorted(positions)]
    return total("num_drafts"), total("num_draft_tokens"), total("num_accepted_tokens"), per_position


def test_case_9_and_10_identities_of_the_metrics(server, plain):
    oracle = Oracle()
    for seed in range(4):
        params = SamplingParams(**{**SAMPLED, "seed": seed, "max_tokens": 60})
        oracle.learn(plain.generate([PROMPT], params)[0])
    before = counters(server)
    with scripted(server.llm, half_right(oracle, V, 5)):
        for seed in range(4):
            server.ok(PLAIN, prompt=PROMPT, **{**SAMPLED, "seed": seed, "max_tokens": 50})
    after = counters(server)
    drafts, tokens, accepted = (b - a for a, b in zip(before[:3], after[:3], strict=True))
    old = before[3] + [0.0] * (len(after[3]) - len(before[3]))
    positions = [b - a for a, b in zip(old, after[3], strict=True)]
    assert drafts > 0 and 0 < accepted <= tokens
    assert sum(positions) == accepted, "acceptance length = 1 + sum of the rates per position"
    assert positions == sorted(positions, reverse=True) and positions[0] <= drafts
    text = metrics(server)
    lengths = re.findall(r"^paceline:draft_length_(count|sum){.*} (\S+)$", text, re.M)
    assert dict(lengths) == {"count": str(after[0]), "sum": str(after[1])}


def test_case_14_seeds(server):
    """One seed, one text, whatever runs beside it; without a seed texts differ."""
    ask = {"prompt": PROMPT, "max_tokens": 20, "temperature": 1.2, "ignore_eos": True}
    alone = server.ok(PLAIN, seed=7, **ask)["choices"][0]["text"]
    mixed = server.ok(PLAIN, **{**ask, "prompt": [PROMPT, [1, 2], PROMPT]}, seed=7)["choices"]
    assert mixed[0]["text"] == mixed[2]["text"] == alone
    unseeded = [server.ok(PLAIN, **ask)["choices"][0]["text"] for _ in range(12)]
    assert len(set(unseeded)) == 12
    assert len({c["text"] for c in server.ok(PLAIN, n=4, seed=7, **ask)["choices"]}) == 4


@pytest.mark.parametrize("fields", [{"min_p": 0.5}, {"logit_bias": {str(i): -100 for i in range(0, V, 2)}}])
def test_case_15_min_p_and_logit_bias_are_honoured_with_drafts(server, plain, fields):
    given = {
        name: {int(k): v for k, v in value.items()} if name == "logit_bias" else value for name, value in fields.items()
    }
    ids = ids_of(plain, **given)
    choice = both(server, knowing(ids), max_tokens=40, **fields)
    assert choice["token_ids"] == ids[:40]
    if "logit_bias" in fields:
        assert all(token % 2 for token in choice["token_ids"])


def test_case_16_penalties_see_tokens_of_the_same_block(server, plain):
    fields = {"temperature": 0.0, "repetition_penalty": 1.3}
    ids = ids_of(plain, **fields)
    for script in (knowing(ids), repeat_last):
        assert both(server, script, max_tokens=40, **fields)["token_ids"] == ids[:40]


def test_case_22_drafts_that_are_always_wrong(server, plain):
    oracle = Oracle()
    oracle.learn(plain.generate([PROMPT], SamplingParams(**SAMPLED, max_tokens=60))[0])
    choice = both(server, wrong(oracle, V), max_tokens=30)
    assert len(choice["token_ids"]) == 30


@pytest.mark.parametrize("count", [1, 4, 16])
def test_case_25_acceptance_does_not_depend_on_the_batch(server, plain, count):
    prompts = [[30 + i, 2, 3, i] for i in range(count)]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    oracle = Oracle()
    for output in plain.generate(prompts, SamplingParams(temperature=0.0, seed=1, max_tokens=60, ignore_eos=True)):
        oracle.learn(output)
    ask = {"temperature": 0.0, "seed": 1, "max_tokens": 40, "ignore_eos": True, "return_token_ids": True}
    want = [plain.generate([p], params)[0].outputs[0].token_ids for p in prompts]
    before = counters(server)
    with scripted(server.llm, oracle):
        choices = server.ok(PLAIN, prompt=prompts, **ask)["choices"]
    after = counters(server)
    assert [c["token_ids"] for c in choices] == want
    drafts, tokens, accepted = (b - a for a, b in zip(before[:3], after[:3], strict=True))
    assert drafts and accepted == tokens, "all drafts were right, alone or among many"


@pytest.mark.parametrize("room", [1, 3, 9])
def test_case_28_the_context_ends_inside_a_block(server, plain, room):
    prompt = [(7 * i) % 100 for i in range(160 - room)]
    ids = plain.generate([prompt], SamplingParams(**SAMPLED))[0].outputs[0].token_ids
    choice = both(server, knowing([*ids, *range(20)]), prompt=prompt, max_tokens=500)
    assert choice["finish_reason"] == "length" and len(choice["token_ids"]) == room


def test_case_30_acceptance_of_each_request_is_in_the_log(server, caplog):
    with caplog.at_level("INFO", logger="paceline.server.service"), scripted(server.llm, repeat_last):
        server.ok(PLAIN, prompt=PROMPT, max_tokens=12, logit_bias={"5": 100}, ignore_eos=True)
    [line] = [r.getMessage() for r in caplog.records if r.getMessage().startswith("Request")]
    assert re.search(
        r"5 \+ 12 tokens \(length\).*draft acceptance rate = [01]\.\d{5} \(\d+ accepted / \d+ generated\)", line
    )
    with caplog.at_level("INFO", logger="paceline.server.service"), scripted(server.llm, nothing):
        server.ok(PLAIN, prompt=PROMPT, max_tokens=3)
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("Request")]
    assert len(lines) == 2 and lines[-1].endswith("no drafts")
