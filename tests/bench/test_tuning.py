"""The cost model, and what `paceline tune` makes of it."""

from __future__ import annotations

import json

import pytest
from fakes.llm import FakeLLM
from hypothesis import given
from hypothesis import strategies as st

from paceline.bench import costmodel, tuning
from paceline.bench.costmodel import Costs
from paceline.bench.datasets import BenchPrompt
from paceline.bench.local import LocalBackend
from paceline.cli import options as opt
from paceline.sampling_params import SamplingParams
from paceline.speculation.cost_table import CostTable

PARAMS = SamplingParams(temperature=0.0, max_tokens=40)


def costs(verify, draft):
    tables = CostTable(), CostTable()
    for table, seconds in zip(tables, (verify, draft), strict=True):
        table.preset(seconds)
    return Costs(*tables)


def test_prediction_by_hand():
    """Survival 0.8, 0.5; a plain step takes 10 ms, a pass of 3 rows 12 ms and its drafts 1 ms: 2.3 tokens in 13 ms."""
    found = costs({1: 0.010, 2: 0.011, 3: 0.012}, {2: 0.001, 3: 0.001})
    assert costmodel.predicted_speedup([0.8, 0.5], 2, found) == pytest.approx(2.3 / 13 * 10)
    assert costmodel.predicted_speedup([0.8, 0.5], 1, found) == pytest.approx(1.8 / 12 * 10)
    assert costmodel.predicted_speedup([0.8, 0.5], 0, found) == 1.0
    # drafts in half of the steps: 1.65 tokens in 11.5 ms
    assert costmodel.predicted_speedup([0.8, 0.5], 2, found, share=0.5) == pytest.approx(1.65 / 11.5 * 10)


@given(st.lists(st.floats(0, 1), max_size=8), st.integers(1, 16), st.floats(0, 1))
def test_a_prediction_never_exceeds_the_tokens_of_a_round(survival, concurrency, share):
    found = costs({n: 0.01 + 0.001 * n for n in range(1, 200)}, {n: 0.001 for n in range(1, 200)})
    for length in range(len(survival) + 1):
        predicted = costmodel.predicted_speedup(survival, length, found, concurrency, share)
        assert 0 < predicted <= 1 + sum(survival[:length]) + 1e-9


def test_costs_come_from_full_rounds_of_each_arm():
    backend = LocalBackend(FakeLLM())
    for length, rows in ((0, 1), (3, 4), (3, 2)):
        backend.policy(length).verify.preset({rows: 0.001 * rows})
    assert costmodel.measured_costs(backend).verify.medians == {1: 0.001, 4: 0.004}


@pytest.mark.parametrize(("longest", "lengths"), [(1, [0, 1]), (7, [0, 1, 3, 5, 7]), (8, [0, 1, 3, 5, 7, 8])])
def test_the_scan_reaches_the_longest(longest, lengths):
    assert tuning.scan_lengths(longest) == lengths


def test_the_share_of_steps_with_drafts():
    """100 tokens of 2 answers: 2 first tokens, 58 tokens of 49 + 9 steps and 40 accepted ones."""
    spec = {"num_delivered_tokens": 100, "num_accepted_tokens": 40, "num_drafts": 29}
    assert costmodel.draft_share({"spec_decode": spec, "completed": 2}) == 0.5
    assert costmodel.draft_share({"spec_decode": spec | {"num_delivered_tokens": 0}, "completed": 2}) == 1.0


def tuned(**fields):
    base = {"candidate": tuning.Candidate("dflash", {"method": "dflash"}, 3), "concurrency": 1}
    base["survival"] = [0.6, 0.3, 0.1]
    base["costs"] = costs({1: 0.010, 2: 0.011, 3: 0.012, 4: 0.015}, {2: 0.001, 3: 0.001, 4: 0.001})
    base["predicted"] = {0: 1.0, 1: 1.33, 2: 1.46, 3: 1.25}
    base["speedups"] = {0: 1.0, 2: 1.5, 3: 1.3, "auto": 1.4}
    return tuning.Tuned(**base | fields)


def test_the_fastest_measured_length_is_recommended():
    from paceline.cli.tune import recommended

    found = tuned()
    assert (found.best_predicted, found.best, found.speedup) == (2, 2, 1.5)
    assert recommended(found) == {"method": "dflash", "num_speculative_tokens": 2}
    assert found.prediction_ratio == 1.0
    assert tuned(speedups={0: 1.0, 2: 1.2, 3: 1.5}).prediction_ratio == pytest.approx(0.8)


def test_the_adaptive_length_is_preferred_where_it_is_as_good():
    found = tuned(speedups={0: 1.0, 2: 1.5, "auto": 1.49})
    assert (found.best, found.most_tokens) == ("auto", 2)
    assert tuned(speedups={0: 1.0, 2: 0.9, "auto": 1.0}).best == 0


def test_plain_decoding_is_recommended_where_drafts_do_not_pay():
    from paceline.cli.tune import recommended

    found = tuned(speedups={0: 1.0, 2: 0.9, "auto": 1.0})
    assert recommended(found) == opt.NO_DRAFTS
    assert "does not pay" in tuning.reason(found, [found])


def test_the_reason_has_two_sentences_with_the_figures():
    import re

    found = tuned(ranges={2: (1.4, 1.6)})
    other = tuned(candidate=tuning.Candidate("ngram", {"method": "ngram"}, 15), speedups={0: 1.0, 1: 1.1})
    text = tuning.reason(found, [found, other])
    assert len(re.findall(r"\.(?: |$)", text)) == 2
    for part in (
        "Drafts of 2 tokens by dflash",
        "1.50x",
        "1.40 to 1.60",
        "ngram 1.10x",
        "1.90 tokens",
        "1.30x as long",
    ):
        assert part in text


def test_tuning_scans_then_measures_the_candidates():
    llm = FakeLLM(accepts=3)
    backend = LocalBackend(llm)
    for length in (0, 1, 3, 4):
        backend.policy(length).verify.preset({length + 1: 0.010 + 0.001 * length})
    prompts = {"mine": [BenchPrompt(0, [{"role": "user", "content": "a question of some length"}])]}
    found = tuning.tune(tuning.Candidate("ngram", {"method": "ngram"}, 4), backend, prompts, PARAMS, repeats=2)
    assert set(found.scanned) == {0, 1, 3, 4}
    assert set(found.predicted) == {0, 1, 2, 3, 4}
    assert {0, found.best_predicted, "auto"} <= set(found.speedups)
    assert found.identical
    json.dumps(found.as_dict(), allow_nan=False)
