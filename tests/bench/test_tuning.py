"""The cost model, and what `paceline tune` makes of it."""

from __future__ import annotations

import json

import pytest
from fakes.llm import FakeLLM
from hypothesis import given
from hypothesis import strategies as st

from paceline.bench import costmodel, tuning
from paceline.bench.backend import Arm
from paceline.bench.costmodel import Costs, Offer
from paceline.bench.datasets import BenchPrompt
from paceline.bench.local import LocalBackend
from paceline.cli import options as opt
from paceline.sampling_params import SamplingParams
from paceline.speculation.cost_table import CostTable
from paceline.speculation.length import DraftLengthPolicy

PARAMS = SamplingParams(temperature=0.0, max_tokens=40)


def costs(verify, draft, plain=None):
    tables = CostTable(), CostTable(), CostTable()
    for table, seconds in zip(tables, (verify, draft, plain or verify), strict=True):
        table.preset(seconds)
    return Costs(*tables)


def test_prediction_by_hand():
    """Survival 0.8, 0.5; a plain step takes 10 ms, a pass of 3 rows 12 ms and its drafts 1 ms: 2.3 tokens in 13 ms."""
    found, offer = costs({1: 0.010, 2: 0.011, 3: 0.012}, {2: 0.001, 3: 0.001}), Offer([0.8, 0.5])
    assert costmodel.predicted_speedup(offer, 2, found) == pytest.approx(2.3 / 13 * 10)
    assert costmodel.predicted_speedup(offer, 1, found) == pytest.approx(1.8 / 12 * 10)
    assert costmodel.predicted_speedup(offer, 0, found) == 1.0
    # drafts in half of the steps: 1.65 tokens in 11.5 ms
    assert costmodel.predicted_speedup(Offer([0.8, 0.5], share=0.5), 2, found) == pytest.approx(1.65 / 11.5 * 10)
    # the drafter makes a quarter of the drafts: 12.25 ms
    assert costmodel.predicted_speedup(Offer([0.8, 0.5], asked=0.25), 2, found) == pytest.approx(2.3 / 12.25 * 10)
    # a plain step is not a pass of one row that verifies
    found = costs({1: 0.010, 2: 0.011, 3: 0.012}, {2: 0.001, 3: 0.001}, {1: 0.008})
    assert costmodel.predicted_speedup(offer, 2, found) == pytest.approx(2.3 / 13 * 8)


def test_how_many_drafts_are_made_in_a_step_of_several_requests_is_chance():
    """Two requests, each asks in half of the steps: none, one or two drafts of two rows take 0, 1 or 3 ms."""
    found = costs({1: 0.010, 4: 0.010}, {2: 0.001, 4: 0.003})
    assert found.round_seconds(1, 2, 0.5) == pytest.approx(0.010 + 0.5 * 0.001 + 0.25 * 0.003)
    assert found.round_seconds(1, 2) == pytest.approx(0.013)
    assert found.round_seconds(1, 2, 0.0) == pytest.approx(0.010)


@given(st.lists(st.floats(0, 1), max_size=8), st.integers(1, 16), st.floats(0, 1), st.floats(0, 1))
def test_a_prediction_never_exceeds_the_tokens_of_a_round(survival, concurrency, share, asked):
    found = costs({n: 0.01 + 0.001 * n for n in range(1, 200)}, {n: 0.001 for n in range(1, 200)})
    for length in range(len(survival) + 1):
        predicted = costmodel.predicted_speedup(Offer(survival, share, asked), length, found, concurrency)
        assert 0 < predicted <= 1 + sum(survival[:length]) + 1e-9


def test_costs_come_from_full_rounds_of_each_arm():
    backend = LocalBackend(FakeLLM())
    for length, rows in ((0, 4), (0, 1), (3, 4), (3, 2)):
        backend.policy(length).verify.preset({rows: 0.001 * rows + 0.01 * length})
    found = costmodel.measured_costs(backend)
    assert (found.verify.medians, found.plain.medians) == ({4: 0.034}, {1: 0.001, 4: 0.004})


def test_an_arm_s_costs_are_means_over_all_of_its_steps():
    """Not of its last ones, which ran when the machine was as fast as it was then; the first of a size is left out."""
    policy = LocalBackend(FakeLLM()).policy(1)
    for seconds in (9.0, *[0.001] * 60, *[0.003] * 20):
        policy.observe_step(2, 1, seconds)
    assert policy.verify.medians == pytest.approx({2: 0.0015})
    assert policy.verify.changes == 0, "nothing to keep for later runs"


def test_an_arm_counts_the_context_that_waited():
    for policy, known in ((LocalBackend(FakeLLM()).policy(3), {4: 0.004}), (DraftLengthPolicy(), {})):
        for _ in range(2):
            policy.observe_draft(4, 9, 0.004)
        assert policy.draft.medians == known


def row(k, drafts, found, survival, delivered=100, accepted=40):
    """RESULT of 2 answers."""
    spec = {
        "num_delivered_tokens": delivered,
        "num_accepted_tokens": accepted,
        "per_position_acceptance_rates": survival,
    }
    spec |= {"num_drafts": drafts}
    return {"num_speculative_tokens": k, "completed": 2, "spec_decode": spec, "num_found_drafts": found}


def test_what_drafts_of_a_length_were_like():
    """100 tokens of 2 answers: 2 first tokens, 58 tokens of 49 + 9 steps and 40 accepted ones."""
    assert costmodel.offer_of(row(3, 29, 0, [0.6])) == Offer([0.6], 0.5, 1.0)
    assert costmodel.offer_of(row(3, 40, 30, [0.6])) == Offer([0.6], 40 / 58, 0.25)
    assert costmodel.offer_of(row(3, 0, 0, [], delivered=0)) == Offer([], 1.0, 1.0)


def test_a_length_is_expected_to_be_as_the_shortest_measured_one_that_reaches_it():
    rows = [row(7, 58, 29, [0.5, 0.25, 0.125]), row(0, 0, 0, []), row(1, 58, 0, [0.75]), row("auto", 58, 0, [0.9])]
    found = costmodel.offers(rows)
    assert list(found) == list(range(8))
    assert found[0] == found[1] == Offer([0.75], 1.0, 1.0)
    assert all(found[k] == Offer([0.5, 0.25, 0.125], 1.0, 0.5) for k in range(2, 8))
    assert costmodel.offers(rows[1:2]) == {}
    assert costmodel.mean_offer([found[1], found[7]]) == Offer([0.625, 0.125, 0.0625], 1.0, 0.75)


def test_free_drafts_make_longer_ones_pay():
    """Were the drafter charged for every step, plain decoding would look best."""
    found = costs({4: 0.0115}, {4: 0.006}, {1: 0.010})
    local = LocalBackend(FakeLLM())
    for length, rows in ((0, {1: 0.010}), (3, {4: 0.0115})):
        local.policy(length).verify.preset(rows)
    local.policy(3).draft.preset({4: 0.006})
    arms = [Arm(local, 0), Arm(local, 3)]
    spec = row(3, 58, 44, [0.3, 0.1, 0.02])
    rows = [
        r | {"dataset": "s", "concurrency": 1, "speedup": speedup}
        for r, speedup in ((row(0, 0, 0, []), 1.0), (spec, 1.1))
    ]
    (choice,) = costmodel.choice_rows(costmodel.prediction_rows(rows, arms))
    assert (choice["predicted_k"], choice["share_of_best"]) == (3, 1.0)
    assert costmodel.predicted_speedup(Offer([0.3, 0.1, 0.02]), 3, found) < 1.0 < choice["predicted"]


@pytest.mark.parametrize(("longest", "lengths"), [(1, [0, 1]), (7, [0, 1, 3, 5, 7]), (8, [0, 1, 3, 5, 7, 8])])
def test_the_scan_reaches_the_longest(longest, lengths):
    assert tuning.scan_lengths(longest) == lengths


def tuned(**fields):
    base = {"candidate": tuning.Candidate("dflash", {"method": "dflash"}, 3), "concurrency": 1}
    base["offers"] = dict.fromkeys(range(4), Offer([0.6, 0.3, 0.1]))
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
