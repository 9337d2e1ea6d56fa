"""Closed loops of clients, repeats, several turns, and the arm that chooses its draft length."""

from __future__ import annotations

import io
import json

import pytest
from fakes.llm import FakeLLM
from rich.console import Console

from bench.test_runner_and_report import completion
from paceline.bench import figures, grid, report, runner
from paceline.bench.backend import Arm, Run
from paceline.bench.datasets import BenchPrompt
from paceline.bench.local import LocalBackend
from paceline.sampling_params import SamplingParams

PARAMS = SamplingParams(temperature=0.0, max_tokens=20)


def prompts(*texts, later=()):
    return [
        BenchPrompt(i, [{"role": "user", "content": text}], later_turns=tuple(later)) for i, text in enumerate(texts)
    ]


def measure(llm, items, lengths, **options):
    backend = LocalBackend(llm)
    return runner.measure("set", items, [Arm(backend, k) for k in lengths], PARAMS, **options)


def asked(llm):
    """(first word of the question, draft length) of the measured requests, in the order in which they were sent."""
    return [
        (text.rpartition("<user>")[2].split("\n")[0], k)
        for text, params, k in llm.log
        if params.max_tokens == PARAMS.max_tokens
    ]


@pytest.mark.parametrize("concurrency", [1, 2, 3, 5])
def test_as_many_requests_are_in_flight_as_there_are_clients(llm, concurrency):
    measure(llm, prompts(*"abcdefghijkl"), [0, 4], concurrency=concurrency)
    assert llm.most_streams == concurrency
    assert llm.open_streams == 0


def test_above_concurrency_1_an_arm_runs_the_set_and_arms_alternate_over_repeats(llm):
    measure(llm, prompts("one", "two", "three", "four"), [0, 4], concurrency=2, repeats=2)
    lengths = [k for _, k in asked(llm)]
    assert lengths == [0] * 4 + [4] * 4 + [4] * 4 + [0] * 4


def test_at_concurrency_1_the_order_turns_from_prompt_to_prompt_and_repeat_to_repeat(llm):
    measure(llm, prompts("one", "two"), [0, 4], repeats=2)
    assert asked(llm) == [
        *[("one", 0), ("one", 4), ("two", 4), ("two", 0)],
        *[("one", 4), ("one", 0), ("two", 0), ("two", 4)],
    ]


def test_the_prefix_cache_is_emptied_before_every_timed_unit(llm):
    measure(llm, prompts("one", "two", "three"), [0, 4], repeats=2)
    assert llm.cache_resets == 2 + 2 * 3 * 2  # warm-up of each arm; a unit per prompt, arm and repeat
    llm.cache_resets = 0
    measure(llm, prompts("one", "two", "three", "four"), [0, 4], repeats=3, concurrency=2)
    assert llm.cache_resets == 2 + 2 * 3


def test_a_short_set_is_repeated_for_many_clients_with_prefixes_of_their_own(llm):
    salts = []
    stream = llm.stream

    def spy(prompt, params, **options):
        salts.append(prompt["cache_salt"] if isinstance(prompt, dict) else None)
        return stream(prompt, params, **options)

    llm.stream = spy
    found = measure(llm, prompts("one", "two"), [0], concurrency=3)
    (run,) = found.runs[0]
    assert len(run.completions) == 6
    assert [(c.copy, c.prompt.index) for c in run.completions] == [(i // 2, i % 2) for i in range(6)]
    assert salts[3:] == [None, None, "copy 1", "copy 1", "copy 2", "copy 2"]
    assert len(list(figures.output_rows(found))) == 2
    (row,) = figures.result_rows(found)
    assert (row["completed"], row["identical"]) == (6, True)


def test_a_later_turn_follows_on_the_answer(llm):
    llm.answers.update({"one": "first answer", "and now?": "second answer"})
    found = measure(llm, prompts("one", later=["and now?"]), [0, 4])
    text = llm.log[-1][0]
    assert text == "<user>one\n<assistant>first answer\n<user>and now?\n<assistant>"
    plain, _ = found.runs[0]
    assert [(c.turn, c.text) for c in plain.completions] == [(0, "first answer"), (1, "second answer")]
    rows = list(figures.output_rows(found))
    assert [(r.get("turn"), r["num_speculative_tokens"]) for r in rows] == [(None, 0), (None, 4), (1, 0), (1, 4)]


def test_a_failed_turn_fails_the_later_ones_too(llm):
    llm.context = 10
    (row,) = figures.result_rows(measure(llm, prompts("one long question", later=["and now?"]), [0]))
    assert (row["completed"], row["failed"]) == (0, 2)


def test_the_adaptive_arm_is_asked_for_no_length_and_reports_what_it_chose(llm):
    rows = figures.result_rows(measure(llm, prompts("one", "two"), [0, "auto"], concurrency=2))
    assert [row["num_speculative_tokens"] for row in rows] == [0, "auto"]
    assert rows[0]["chosen_draft_lengths"] is None
    assert rows[1]["chosen_draft_lengths"] == {"4": sum(rows[1]["chosen_draft_lengths"].values())}
    (line,) = report.choice_lines(rows)
    assert line == "set, concurrency 2, drafts of auto: 4 in 100%"


def test_fixed_arms_teach_the_adaptive_one_nothing(llm):
    mine = llm.engine.lengths
    seen = {}
    stream = llm.stream

    def spy(prompt, params, *, num_speculative_tokens):
        seen.setdefault(num_speculative_tokens, set()).add(id(llm.engine.lengths))
        return stream(prompt, params, num_speculative_tokens=num_speculative_tokens)

    llm.stream = spy
    measure(llm, prompts("one", "two"), [0, 3, "auto"])
    assert seen[None] == {id(mine)}
    assert len({*seen[0], *seen[3], id(mine)}) == 3
    assert llm.engine.lengths is mine


def test_costs_of_fixed_arms_are_never_worth_saving():
    from paceline.bench.local import ArmPolicy
    from paceline.speculation.costs import CostFile

    policy = ArmPolicy()
    for _ in range(1000):
        policy.verify.observe(4, 0.001)
        policy.draft.observe(4, 0.001)
    assert policy.verify.medians == pytest.approx({4: 0.001})
    file = CostFile(None)
    file.save(policy)  # would fail on a path of None


def fake_run(tokens, seconds, wall):
    return Run([completion(token_ids=[1] * tokens, logprobs=None, decode_s=seconds)], wall)


def measurement(plain, spec, concurrency=1):
    """Runs of one answer of 11 tokens: seconds of decoding (and of wall time) per repeat and arm."""
    backend = LocalBackend(FakeLLM())
    arms = [Arm(backend, 0), Arm(backend, 7)]
    runs = [[fake_run(11, a, a), fake_run(11, b, b)] for a, b in zip(plain, spec, strict=True)]
    return runner.Measurement("set", concurrency, arms, runs)


def test_rates_are_medians_and_ratios_are_taken_within_a_repeat():
    plain, spec = figures.result_rows(measurement([1.0, 2.0, 4.0], [0.5, 1.0, 2.0]))
    assert (plain["decode_tok_s"], spec["decode_tok_s"]) == (5.0, 10.0)
    assert (spec["speedup"], spec["spread"]["speedup"]) == (2.0, [2.0, 2.0])
    assert spec["spread"]["decode_tok_s"] == [5.0, 20.0]
    assert (plain["completed"], plain["output_tokens"], plain["repeats"]) == (1, 11, 3)
    assert spec["output_tok_s"] == pytest.approx(11.0)
    assert spec["warnings"] == []  # the machine drifted, the comparison did not
    assert "too wide to conclude" in plain["warnings"][0]


def test_counts_are_those_of_the_repeat_of_median_speed_or_of_the_worst():
    found = measurement([1.0, 4.0, 2.0], [1.0, 1.0, 1.0])
    found.runs[0][0], found.runs[1][0], found.runs[2][0] = (fake_run(n, n - 1, 1.0) for n in (11, 21, 31))
    found.runs[1][0].completions[0] = fake_run(21, 0.5, 1.0).completions[0]
    assert figures.result_rows(found)[0]["output_tokens"] in (11, 31)
    found.runs[2][0].completions[0] = completion(error="refused", token_ids=[])
    assert (figures.result_rows(found)[0]["completed"], figures.result_rows(found)[0]["failed"]) == (0, 1)


UNDECIDED = "whether it is faster is not decided"


def test_a_wide_spread_and_an_undecided_comparison_are_said():
    _, spec = figures.result_rows(measurement([1.0, 1.0, 1.0], [0.8, 1.0, 1.2]))
    assert spec["warnings"] == ["speedup ranges from 0.833 to 1.25 over 3 repeats, on both sides of 1: " + UNDECIDED]
    _, spec = figures.result_rows(measurement([1.0, 1.0, 1.0], [0.5, 0.4, 0.3]))
    assert spec["warnings"] == ["speedup ranges from 2 to 3.33 over 3 repeats: too wide to conclude"]
    _, spec = figures.result_rows(measurement([1.0, 1.0, 1.0], [0.98, 1.0, 1.0]))
    assert spec["warnings"] == []
    _, spec = figures.result_rows(measurement([1.0], [0.5]))
    assert spec["warnings"] == []


def test_above_concurrency_1_output_speed_decides():
    _, spec = figures.result_rows(measurement([1.0, 1.0], [1.0, 0.5], concurrency=4))
    assert spec["warnings"][0].startswith("output_speedup ranges from 1 to 2")


def test_answers_are_compared_across_repeats_and_concurrency(llm):
    first = measure(llm, prompts("one", "two"), [0])
    answers = figures.reference_answers(first)
    llm.answers["two"] = "another"
    (row,) = figures.result_rows(measure(llm, prompts("one", "two"), [0], concurrency=2), answers)
    assert row["identical"] is False


def test_the_grid_goes_on_with_the_fastest_length_only(llm):
    llm.accepts = 4
    backend = LocalBackend(llm)
    arms = [Arm(backend, k) for k in (0, 3, 4)]
    sets = {"a": prompts("one", "two"), "b": prompts("three")}
    stages = grid.default_grid(arms, (1, 2))
    told = []
    found = list(grid.run_grid(stages, sets, PARAMS, 1, told.append))
    assert [(m.dataset, m.concurrency, [a.length for a in m.arms]) for m, _ in found] == [
        ("a", 1, [0, 3, 4]),
        ("b", 1, [0, 3, 4]),
        ("a", 2, [0, 4]),
        ("b", 2, [0, 4]),
    ]
    assert len(told) == grid.total_steps(stages, sets, 1)


def test_tables_of_concurrent_runs_fit_80_columns(llm):
    rows = [
        row
        for c in (1, 16)
        for row in figures.result_rows(measure(llm, prompts("one", "two"), [0, 7, "auto"], concurrency=c))
    ]
    for row in rows:
        row.update(
            dataset="humaneval", decode_tok_s=1048.5, output_tok_s=10480.5, mean_tpot_ms=123.4, mean_ttft_ms=1234.0
        )
        row.update(output_speedup=10.25 if row["num_speculative_tokens"] else 1.0)
    console = Console(file=io.StringIO(), width=80)
    console.print(report.result_table(rows))
    text = console.file.getvalue()
    assert "…" not in text
    assert text.count("humaneval") == 2
    assert "10480.5 10.25" in text
    json.dumps(rows, allow_nan=False)
