from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.speculation.stats import SpecDecodeStats

KEYS = [
    "num_drafts",
    "num_draft_tokens",
    "num_accepted_tokens",
    "num_delivered_tokens",
    "acceptance_rate",
    "acceptance_length",
    "per_position_acceptance_rates",
    "conditional_acceptance_rates",
    "fully_rejected_rate",
    "fully_accepted_rate",
]


@st.composite
def steps(draw):
    drafted = draw(st.integers(0, 8))
    accepted = draw(st.integers(0, drafted))
    return drafted, accepted, draw(st.integers(0, accepted + 1))


def observed(all_steps) -> SpecDecodeStats:
    stats = SpecDecodeStats()
    for step in all_steps:
        stats.observe(*step)
    return stats


def test_the_worked_example_of_the_field():
    """HumanEval, k = 15: 381 drafts, 5,715 draft tokens, 2,261 accepted are 39.56 % and length 6.93; 14 % of the blocks
    fully rejected, 12 % fully accepted, survival 85.83 % at position 0 and 11.81 % at 14."""
    stats = SpecDecodeStats()
    counts = {0: 54, 15: 45}  # 85.83 % survive position 0, 11.81 % all fifteen
    rest = 381 - 54 - 45
    left = 2261 - 15 * 45
    low = left // rest
    counts[low] = counts.get(low, 0) + rest - (left - low * rest)
    counts[low + 1] = counts.get(low + 1, 0) + left - low * rest
    for accepted, times in counts.items():
        for _ in range(times):
            stats.observe(15, accepted, accepted + 1)
    d = stats.as_dict()
    assert (d["num_drafts"], d["num_draft_tokens"], d["num_accepted_tokens"]) == (381, 5715, 2261)
    assert f"{100 * d['acceptance_rate']:.2f}" == "39.56"
    assert f"{d['acceptance_length']:.2f}" == "6.93"
    assert f"{100 * d['per_position_acceptance_rates'][0]:.2f}" == "85.83"
    assert f"{100 * d['per_position_acceptance_rates'][14]:.2f}" == "11.81"
    assert round(100 * d["fully_rejected_rate"]) == 14 and round(100 * d["fully_accepted_rate"]) == 12


@given(st.lists(steps(), max_size=40))
def test_identities(all_steps):
    stats = observed(all_steps)
    d = stats.as_dict()
    drafts = [s for s in all_steps if s[0] > 0]
    assert list(d) == KEYS
    assert d["num_drafts"] == len(drafts)
    assert d["num_draft_tokens"] == sum(s[0] for s in drafts)
    assert d["num_accepted_tokens"] == sum(s[1] for s in drafts)
    assert d["num_delivered_tokens"] == sum(s[2] for s in all_steps)
    rates = d["per_position_acceptance_rates"]
    assert d["acceptance_length"] == pytest.approx(1 + sum(rates))
    assert all(0 <= b <= a <= 1 for a, b in zip([1.0, *rates], rates, strict=False))
    assert len(rates) == max((s[0] for s in drafts), default=0)
    survival = 1.0
    for conditional, rate in zip(d["conditional_acceptance_rates"], rates, strict=True):
        survival *= conditional
        assert survival == pytest.approx(rate)
    if drafts:
        assert d["acceptance_rate"] == pytest.approx(d["num_accepted_tokens"] / d["num_draft_tokens"])
        assert d["fully_rejected_rate"] == pytest.approx(sum(s[1] == 0 for s in drafts) / len(drafts))
        assert d["fully_accepted_rate"] == pytest.approx(sum(s[1] == s[0] for s in drafts) / len(drafts))
    assert json.loads(json.dumps(d, allow_nan=False)) == d


@given(st.lists(st.lists(steps(), max_size=10), max_size=5))
def test_merged_counters_equal_those_of_all_steps(groups):
    parts = [observed(group) for group in groups]
    merged = SpecDecodeStats.total(parts)
    assert merged.as_dict() == observed([s for group in groups for s in group]).as_dict()
    assert [p.as_dict() for p in parts] == [observed(g).as_dict() for g in groups]  # parts stay as they are


def test_nothing_observed_divides_nothing():
    d = SpecDecodeStats().as_dict()
    assert d["acceptance_length"] == 1.0 and d["acceptance_rate"] == 0.0
    assert d["per_position_acceptance_rates"] == []
    assert "Accepted throughput: 0.00 tokens/s" in SpecDecodeStats().log_line(0.0)


def test_steps_without_drafts_are_not_drafts():
    stats = observed([(0, 0, 1), (0, 0, 0), (4, 0, 1)])
    assert stats.num_drafts == 1 and stats.num_delivered_tokens == 2
    assert stats.as_dict()["fully_rejected_rate"] == 1.0


def test_drafts_that_were_at_hand_are_counted_apart():
    stats = observed([(3, 1, 2)])
    for drafted in (0, 2, 2):  # nothing drafted is no draft, whatever was at hand
        stats.observe(drafted, 0, 1, found=True)
    before = stats.copy()
    assert (stats.num_drafts, stats.num_found_drafts) == (3, 2)
    stats.merge(before)
    assert stats.num_found_drafts == 4 and stats.since(before).num_found_drafts == 2


def test_accepted_tokens_behind_a_stop_are_counted_apart():
    """[d1, d2, EOS, d4, d5] accepted: five count as accepted, three are delivered, two were cut."""
    stats = observed([(5, 5, 3)])
    assert (stats.num_accepted_tokens, stats.num_delivered_tokens, stats.num_cut_tokens) == (5, 3, 2)
    assert stats.as_dict()["fully_accepted_rate"] == 1.0


@pytest.mark.parametrize("step", [(3, 4, 1), (3, -1, 0), (0, 1, 1), (3, 2, 4), (3, 2, -1), (-1, 0, 0)])
def test_impossible_steps_are_refused(step):
    stats = SpecDecodeStats()
    with pytest.raises(ValueError, match="num_"):
        stats.observe(*step)
    assert stats == SpecDecodeStats()


def test_the_log_line_is_vllms():
    stats = observed([(3, 3, 4), (3, 1, 2), (3, 0, 1), (3, 2, 3)])
    line = stats.log_line(2.0)
    assert line == (
        "SpecDecoding metrics: Mean acceptance length: 2.50, Accepted throughput: 3.00 tokens/s, "
        "Drafted throughput: 6.00 tokens/s, Accepted: 6 tokens, Drafted: 12 tokens, "
        "Per-position acceptance rate: 0.750, 0.500, 0.250, Avg Draft acceptance rate: 50.0%"
    )
    number = r"\d+\.\d\d"
    assert re.fullmatch(
        rf"SpecDecoding metrics: Mean acceptance length: {number}, Accepted throughput: {number} tokens/s, "
        rf"Drafted throughput: {number} tokens/s, Accepted: \d+ tokens, Drafted: \d+ tokens, "
        r"Per-position acceptance rate: (\d\.\d{3}, )*\d\.\d{3}, Avg Draft acceptance rate: \d+\.\d%",
        line,
    )
