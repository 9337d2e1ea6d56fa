"""The published HumanEval run of Qwen3.5-9B as a check of the metric code: from its counters follow its figures."""

from __future__ import annotations

from itertools import pairwise

import pytest

from paceline.bench import counters, sections
from paceline.bench.survival import article
from paceline.speculation.stats import SpecDecodeStats

DRAFTS, LENGTH, DRAFTED, ACCEPTED = 381, 15, 5715, 2261
FIRST, FIFTH, LAST = 0.8583, 0.5144, 0.1181  # survival at positions 0, 4 and 14
SPEEDUP = 3.92  # mean of its three sets


def blocks() -> list[int]:
    """A number of accepted tokens per draft with the published survival at 0, 4 and 14 and the published sum."""
    survivors = [round(DRAFTS * share) for share in article()]
    for position in (1, 2, 3, 5, 6, 7, 8, 9, 10, 11, 12, 13) * 20:
        missing = ACCEPTED - sum(survivors)
        if missing == 0:
            break
        after = survivors[position] + (1 if missing > 0 else -1)
        if survivors[position - 1] >= after >= survivors[position + 1]:
            survivors[position] = after
    assert sum(survivors) == ACCEPTED
    alive = [DRAFTS, *survivors, 0]
    return [kept for kept, (a, b) in enumerate(pairwise(alive)) for _ in range(a - b)]


@pytest.fixture
def run() -> dict[str, object]:
    stats = SpecDecodeStats()
    for accepted in blocks():
        stats.observe(LENGTH, accepted, accepted + 1)
    return stats.as_dict()


def check(spec):
    assert (spec["num_drafts"], spec["num_draft_tokens"], spec["num_accepted_tokens"]) == (DRAFTS, DRAFTED, ACCEPTED)
    assert f"{spec['acceptance_rate']:.2%}" == "39.56%"
    assert f"{spec['acceptance_length']:.2f}" == "6.93"
    survival = spec["per_position_acceptance_rates"]
    assert [f"{survival[i]:.2%}" for i in (0, 4, 14)] == [f"{share:.2%}" for share in (FIRST, FIFTH, LAST)]
    assert 1 + sum(survival) == pytest.approx(spec["acceptance_length"])
    assert f"{spec['fully_rejected_rate']:.0%}" == "14%"
    assert f"{spec['fully_accepted_rate']:.0%}" == "12%"


def test_the_engines_counters(run):
    check(run)


def test_a_servers_counters(run):
    """The same from what vLLM's /metrics would have told."""
    survivors = [round(DRAFTS * share) for share in run["per_position_acceptance_rates"]]
    lines = [f"vllm:spec_decode_num_drafts_total {DRAFTS}", f"vllm:spec_decode_num_draft_tokens_total {DRAFTED}"]
    lines += [f"vllm:spec_decode_num_accepted_tokens_total {ACCEPTED}"]
    lines += [
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{i}"}} {n}' for i, n in enumerate(survivors)
    ]
    found = counters.from_metrics({}, counters.parse("\n".join(lines)))
    assert found is not None
    check(found.as_dict())


def test_the_reports_tables(run):
    row = {
        "dataset": "humaneval",
        "num_speculative_tokens": LENGTH,
        "concurrency": 1,
        "arm": f"k = {LENGTH}",
        "spec_decode": run,
        "output_tok_s": 1.0,
        "output_speedup": None,
        "speedup": SPEEDUP,
        "decode_tok_s": 1.0,
        "mean_tpot_ms": 1.0,
        "mean_ttft_ms": 1.0,
        "identical": True,
        "repeats": 1,
        "spread": {},
        "failed": 0,
        "completed": 1,
        "warnings": [],
    }
    found = {s.title: s for s in sections.sections(sections.Study({}, [row]))}
    assert found["Acceptance"].rows == [
        ["humaneval", "15", "381", "5,715", "2,261", "39.56%", "6.93", "14%", "12%"],
    ]
    shares = found["Accepted tokens per block"].rows[0]
    assert (shares[2], shares[17]) == ("14.2%", "11.8%")
    assert found["Cost per token"].rows[0][3] == "74%"  # 1 - 1 / 3.92


def test_the_synthetic_profile_is_near_it():
    """Between the three published points it is geometric, which gives 6.88."""
    survival = article()
    assert len(survival) == LENGTH
    assert 1 + sum(survival) == pytest.approx(6.93, abs=0.06)
