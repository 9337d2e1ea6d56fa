from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from fakes.llm import FakeLLM, FakeTokenizer
from rich.console import Console

from paceline.bench import figures, report, runner
from paceline.bench.backend import Arm, Completion
from paceline.bench.datasets import BenchPrompt
from paceline.bench.local import LocalBackend
from paceline.errors import PacelineError
from paceline.sampling_params import SamplingParams

SPEC_KEYS = {
    *("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_delivered_tokens", "acceptance_rate"),
    *("acceptance_length", "per_position_acceptance_rates", "conditional_acceptance_rates"),
    *("fully_rejected_rate", "fully_accepted_rate"),
}


def prompts(*texts, **extra):
    return [BenchPrompt(i, [{"role": "user", "content": text}], extra) for i, text in enumerate(texts)]


def run(llm, texts, arms, **fields):
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 50} | fields)
    return measured(llm, prompts(*texts), arms, params)


def measured(llm, items, arms, params, **options):
    backend = LocalBackend(llm)
    return runner.measure("set", items, [Arm(backend, k) for k in arms], params, **options)


def test_arms_interleave_prompt_by_prompt_after_a_warm_up_each(llm):
    run(llm, ["one", "two", "three"], [0, 3, 7])
    asked = [(text.removeprefix("<user>").split("\n")[0], k, params.max_tokens) for text, params, k in llm.log]
    assert asked == [
        *[("one", k, runner.WARM_UP_TOKENS) for k in (0, 3, 7)],
        *[("one", k, 50) for k in (0, 3, 7)],
        *[("two", k, 50) for k in (7, 3, 0)],
        *[("three", k, 50) for k in (0, 3, 7)],
    ]


def test_result_has_exactly_the_promised_keys(llm):
    rows = figures.result_rows(run(llm, ["one", "two"], [0, 4]))
    assert [tuple(row) for row in rows] == [figures.RESULT_KEYS] * 2
    assert [set(row["spec_decode"]) for row in rows] == [SPEC_KEYS] * 2
    json.dumps(rows, allow_nan=False)


def test_figures_by_hand(llm):
    """Answers of 10 tokens ("abcdefghi" + end) and 4; plain rounds take 10 ms, rounds of 3 tokens 12 ms."""
    llm.answers.update({"long": "abcdefghi", "short": "abc"})
    plain, spec = figures.result_rows(run(llm, ["long", "short"], [0, 4]))
    assert (plain["completed"], plain["failed"], plain["output_tokens"]) == (2, 0, 14)
    assert plain["decode_tok_s"] == pytest.approx((9 + 3) / 0.12)
    assert spec["decode_tok_s"] == pytest.approx((9 + 3) / (3 * 0.012 + 1 * 0.012))
    assert spec["mean_tpot_ms"] == pytest.approx((36 / 9 + 12 / 3) / 2)
    assert spec["mean_ttft_ms"] == pytest.approx(50)
    assert (plain["speedup"], spec["speedup"]) == (1.0, pytest.approx(2.5))
    assert (plain["identical"], spec["identical"]) == (True, True)
    assert spec["spec_decode"]["num_drafts"] == 4
    assert spec["spec_decode"]["acceptance_length"] == pytest.approx(3)
    assert plain["spec_decode"]["num_drafts"] == 0


def test_one_token_answers_have_no_decode_speed(llm):
    (row,) = figures.result_rows(run(llm, ["one"], [0], max_tokens=1))
    assert (row["output_tokens"], row["decode_tok_s"], row["mean_tpot_ms"], row["speedup"]) == (
        1,
        None,
        None,
        None,
    )
    assert row["mean_ttft_ms"] == pytest.approx(50)


def test_without_a_plain_arm_there_is_no_speedup_but_a_comparison(llm):
    rows = figures.result_rows(run(llm, ["one"], [3, 7]))
    assert [row["speedup"] for row in rows] == [None, None]
    assert [row["identical"] for row in rows] == [True, True]


def test_a_single_arm_is_compared_with_nothing(llm):
    (row,) = figures.result_rows(run(llm, ["one"], [0]))
    assert row["identical"] is None


def test_a_difference_shows_in_the_arm_that_differs():
    rows = figures.result_rows(run(FakeLLM(corrupt_speculation=True), ["one"], [4, 0]))
    assert [row["identical"] for row in rows] == [False, True]


def completion(**fields):
    base = {
        "prompt": prompts("x")[0],
        "num_speculative_tokens": 0,
        "token_ids": [1, 2],
        "logprobs": [-0.5, -0.25],
        "finish_reason": "length",
        "ttft_s": 0.1,
        "decode_s": 0.1,
        "wall_s": 0.2,
        "stats": None,
    }
    return Completion(**base | fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"token_ids": [1, 3]},
        {"logprobs": [-0.5, -0.25000000000000006]},
        {"logprobs": [-0.5, 0.0]},
        {"logprobs": None},
        {"finish_reason": "stop"},
        {"error": "refused"},
    ],
)
def test_same_output_means_every_bit(fields):
    assert completion().same_output(completion(num_speculative_tokens=7, wall_s=9.0))
    assert not completion().same_output(completion(**fields))
    assert not completion(**fields).same_output(completion())


def test_equal_bits_even_where_floats_would_not_compare(llm):
    nan = float("nan")
    assert completion(logprobs=[nan]).same_output(completion(logprobs=[nan]))
    assert not completion(logprobs=[0.0]).same_output(completion(logprobs=[-0.0]))


def test_a_refused_request_counts_as_failed_and_the_rest_goes_on(llm):
    llm.context = 60
    completions = run(llm, ["short", "x" * 80, "other"], [0, 4])
    rows = figures.result_rows(completions)
    assert [(row["completed"], row["failed"], row["identical"]) for row in rows] == [(2, 1, False)] * 2
    failed = [row for row in figures.output_rows(completions) if "error" in row]
    assert [(row["index"], row["token_ids"], row["finish_reason"]) for row in failed] == [(1, [], None)] * 2
    assert "context holds 60" in failed[0]["error"]


def test_all_requests_refused_leaves_figures_empty(llm):
    llm.context = 5
    (row,) = figures.result_rows(run(llm, ["too long"], [0]))
    assert (row["completed"], row["failed"], row["output_tok_s"], row["mean_ttft_ms"]) == (0, 1, None, None)


def test_output_rows_carry_ids_hex_logprobs_and_the_files_keys(llm):
    llm.answers["one"] = "ab"
    params = SamplingParams(temperature=0.0, max_tokens=50, logprobs=0)
    items = prompts("one", id="q7", index="theirs")
    rows = list(figures.output_rows(measured(llm, items, [0, 4], params)))
    assert [row["num_speculative_tokens"] for row in rows] == [0, 4]
    assert set(rows[0]) == {"id", "index", "num_speculative_tokens", "token_ids", "logprobs", "finish_reason"}
    assert (rows[0]["id"], rows[0]["index"], rows[0]["finish_reason"]) == ("q7", 0, "stop")
    assert rows[0]["token_ids"] == [*b"ab", 256]
    assert [float.fromhex(value) for value in rows[0]["logprobs"]] == [-1 / (1 + t) for t in rows[0]["token_ids"]]
    named = list(figures.output_rows(measured(llm, items, [0], params), "set"))
    assert named[0]["dataset"] == "set"


def test_progress_is_told_once_per_prompt_and_arm(llm):
    told = []
    measured(llm, prompts("a", "b"), [0, 1, 2], SamplingParams(temperature=0.0, max_tokens=3), on_step=told.append)
    assert len(told) == 6


def test_table_shows_sets_failures_and_differences(llm):
    rows = figures.result_rows(run(llm, ["one"], [0, 4]))
    bad = figures.result_rows(run(FakeLLM(corrupt_speculation=True), ["one"], [0, 4]))
    for row in rows:
        row["dataset"] = "mine"
    bad[1]["failed"] = 3
    console = Console(file=io.StringIO(), width=80)
    console.print(report.result_table(rows + bad))
    text = console.file.getvalue()
    assert text.count(" mine ") == 1
    assert "2.17x" in text
    assert "NO" in text
    assert "…" not in text
    assert "1 of 4" in text


def test_table_fits_80_columns_with_whole_names_whatever_the_figures():
    spec = {"num_drafts": 9, "num_draft_tokens": 9, "acceptance_length": 16.0, "acceptance_rate": 1.0}
    figures = {"completed": 164, "failed": 0, "output_tokens": 83968, "decode_tok_s": 1048.5, "mean_tpot_ms": 123.45}
    row = {
        "dataset": "humaneval",
        "concurrency": 1,
        "num_speculative_tokens": 15,
        "mean_ttft_ms": 1234.0,
        "speedup": 10.25,
    }
    console = Console(file=io.StringIO(), width=80)
    console.print(report.result_table([row | figures | {"identical": True, "spec_decode": spec}]))
    line = next(line for line in console.file.getvalue().splitlines() if "humaneval" in line)
    assert line.split() == [
        *("humaneval", "15", "164", "83968", "1048.5", "123.45", "1234", "10.25x", "16.00", "100.0%", "yes"),
    ]


def test_a_device_that_is_full_is_an_error_of_ours():
    with pytest.raises(PacelineError, match="cannot write /dev/full"):
        report.write_json(Path("/dev/full"), {})


def test_files_are_written_whole_and_unwritable_paths_refused_early(tmp_path):
    report.write_json(tmp_path / "r.json", [{"a": 1}])
    assert json.loads((tmp_path / "r.json").read_text()) == [{"a": 1}]
    report.write_jsonl(tmp_path / "i.jsonl", [{"a": "é"}, {"b": 2}])
    assert [json.loads(line) for line in (tmp_path / "i.jsonl").read_text().splitlines()] == [
        {"a": "é"},
        {"b": 2},
    ]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["i.jsonl", "r.json"]
    with pytest.raises(PacelineError, match="there is no folder"):
        report.check_writable(tmp_path / "no" / "r.json", "--output")
    with pytest.raises(PacelineError, match="is a folder"):
        report.check_writable(tmp_path, "--output")


def test_a_base_models_prompt_is_plain_text(llm):
    llm.tokenizer = FakeTokenizer(chat_template=None)
    run(llm, ["one"], [0])
    assert llm.log[0][0] == "one"
