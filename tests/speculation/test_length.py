"""The draft length follows costs and acceptance."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.speculation.acceptance import FORGET, Acceptance, Trust
from paceline.speculation.allotment import best_lengths, most_gain
from paceline.speculation.cost_table import CostCurve, CostTable, Pace, rising
from paceline.speculation.length import (
    DRAFT_SHARE,
    FOLLOW_SHARE,
    GIVE_UP_AFTER,
    KEEP,
    LIKE,
    PROBE_SHARE,
    WARM_UP,
    DraftLengthPolicy,
)


def table(times: dict[int, float]) -> CostTable:
    costs = CostTable()
    for rows, seconds in times.items():
        costs.observe(rows, 100 * seconds)  # the first does not count
        costs.observe(rows, seconds)
    return costs


def test_cost_is_the_median_so_that_one_interrupted_pass_does_not_count() -> None:
    costs = CostTable()
    for seconds in (70.0, 1.0, 1.1, 50.0, 0.9, 1.0):
        costs.observe(4, seconds)
    assert costs.seconds(4) == 1.0


def test_the_first_pass_of_a_size_does_not_count() -> None:
    costs = CostTable()
    costs.observe(4, 70.0)
    assert not costs.known
    costs.observe(4, 2.0)
    assert costs.seconds(4) == 2.0


def test_unknown_sizes_are_interpolated_and_extended() -> None:
    costs = table({2: 2.0, 6: 4.0})
    assert costs.seconds(4) == pytest.approx(3.0)
    assert costs.seconds(1) < 2.0
    assert costs.seconds(12) > 4.0


def test_survival_is_the_product_of_what_was_seen() -> None:
    own = Acceptance()
    for _ in range(2000):
        own.observe(3, 3)
        own.observe(3, 1)
    first, second, third = own.survival(3)
    assert first == pytest.approx(1.0, abs=0.01)
    assert second == pytest.approx(0.5, abs=0.01)
    assert third == pytest.approx(0.5, abs=0.01)


def test_a_new_request_starts_from_the_others() -> None:
    others = Acceptance()
    for _ in range(500):
        others.observe(4, 0)
    assert Acceptance().survival(1, others)[0] < 0.05


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=40), st.integers(1, 12))
def test_survival_never_rises_and_stays_a_probability(drafts: list[tuple[int, int]], length: int) -> None:
    own = Acceptance()
    for drafted, accepted in drafts:
        own.observe(drafted, min(drafted, accepted), 0.97)
    survival = own.survival(length, Acceptance())
    assert all(0 <= s <= 1 for s in survival)
    assert all(a >= b for a, b in itertools.pairwise([1.0, *survival]))


@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(0, 3))
def test_lengths_are_the_best_of_all(seed: int, requests: int, other_rows: int) -> None:
    rng = random.Random(seed)
    survivals, found = [], [rng.random() < 0.4 for _ in range(requests)]
    for _ in range(requests):
        survivals.append(sorted((rng.random() for _ in range(rng.randint(0, 3))), reverse=True))
    costs = table({rows: 1.0 + rng.random() * rows for rows in range(1, 20)})
    prices = [rng.random() for _ in range(10)]

    def draft(tokens: int) -> float:
        return prices[tokens]

    def rate(lengths: tuple[int, ...]) -> float:
        expected = requests + other_rows + sum(sum(s[:k]) for s, k in zip(survivals, lengths, strict=True))
        rows = requests + other_rows + sum(lengths)
        made = sum(k for k, free in zip(lengths, found, strict=True) if not free)
        return expected / ((draft(made) if made else 0.0) + costs.seconds(rows))

    lengths, gain = best_lengths(survivals, costs, draft, other_rows, found)
    every = itertools.product(*(range(len(s) + 1) for s in survivals))
    if any(found) and not all(found):  # drafts are admitted by survival alone: free ones may come too late
        assert rate(tuple(lengths)) >= rate((0,) * requests)
    else:
        assert rate(tuple(lengths)) == pytest.approx(max(map(rate, every)))
    assert gain == pytest.approx(rate(tuple(lengths)) / rate((0,) * requests))


def test_drafts_at_hand_are_used_while_the_drafter_rests() -> None:
    policy = hopeless()
    policy.verify = table({rows: 1.0 + 0.1 * rows for rows in range(1, 60)})
    policy.worthwhile = False
    assert policy.choose([5, 6, 7], [4, 3, 2], 0, [[0.9, 0.8, 0.7, 0.01], [], [0.02, 0.01]]) == [3, 0, 0]


def test_drafts_at_hand_do_not_keep_a_hopeless_drafter_awake() -> None:
    policy = hopeless()
    policy.verify = table({rows: 1.0 + 0.9 * rows for rows in range(1, 60)})
    for _ in range(3000):
        lengths = policy.choose([5, 6], [2, 4], 0, [[0.99, 0.98], []])
        assert lengths[0] == 2 or not any(lengths)
    assert not policy.worthwhile


@pytest.mark.parametrize("kept", [0.4, 0.85])
def test_plain_decoding_that_is_faster_by_itself_is_found_out(kept: float) -> None:
    """Weights that just fit the caches do not any more beside a drafter's: a plain step among drafted ones is slow."""
    policy, draw, warm = DraftLengthPolicy(), random.Random(3), 0
    survival = [kept**j for j in range(1, 8)]
    spent = tokens = 0.0
    for step in range(12_000):
        if not policy.worthwhile:
            policy.reconsider(1)
        (length,) = policy.choose([1], [7])
        verify = (3.3 + 0.9 * max(0.0, 1.0 - warm / 12) + 0.3 * length) * draw.uniform(0.95, 1.2)
        policy.observe_step(1 + length, length, verify)
        if length:
            policy.draft.observe(1 + length, 0.7)
            accepted = next((j for j in range(length) if draw.random() > kept), length)
            policy.observe(1, length, accepted)
        warm = 0 if length else warm + 1
        if step >= 4000:
            spent += verify + (0.7 if length else 0.0)
            tokens += 1.0 + sum(survival[:length])
    best = max(
        (1.0 + sum(survival[:k])) / (1.075 * ((4.2 if k else 3.3) + 0.3 * k) + (0.7 if k else 0.0)) for k in range(8)
    )
    assert tokens / spent > 0.95 * best


@pytest.mark.parametrize("kept", [0.0, 0.6])
def test_choosing_is_left_out_where_nothing_has_changed(kept: float) -> None:
    policy, calls = DraftLengthPolicy(), 0
    policy.verify = table({rows: 1.0 + 0.1 * rows for rows in range(1, 9)})
    for i in range(1000):
        policy.observe(0, 1, i % 10 < 10 * kept)

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return best_lengths(*args, **kwargs)

    with patch("paceline.speculation.length.best_lengths", counted):
        for _ in range(800):
            policy.choose([1], [7])
    assert 800 / KEEP <= calls < 4 * 800 / KEEP
    if kept:
        assert policy.choose([1], [7])[0] > policy.choose([1], [1])[0], "another limit: it is chosen anew"


@given(st.lists(st.floats(0.0, 1.0), min_size=60, max_size=60), st.integers(0, 2**32))
def test_a_choice_that_is_kept_is_hardly_worse_than_a_new_one(chances: list[float], seed: int) -> None:
    """However acceptance changes: as long as no draft's survival has moved by more than LIKE, the rates of all lengths
    have moved by as much."""
    draw, policy = random.Random(seed), DraftLengthPolicy()
    policy.verify = table({rows: 1.0 + 0.2 * rows for rows in range(1, 9)})
    own = Acceptance()
    prices = [policy.verify.seconds(1 + n) + (DRAFT_SHARE * policy.verify.seconds(1) if n else 0.0) for n in range(8)]
    unexplored = {name: 0.0 for name in ("EXPLORE_SHARE", "NEW_SHARE", "PROBE_SHARE")}
    with patch.multiple("paceline.speculation.length", **unexplored):
        for chance in chances:
            survival = own.survival(7, policy.overall) if own.tries else policy.overall.survival(7)
            (length,) = policy.choose([1], [7])
            if not policy.worthwhile:
                break
            kept = list(itertools.accumulate(survival, initial=1.0))
            least = max((tokens - n * LIKE) / price for n, (tokens, price) in enumerate(zip(kept, prices, strict=True)))
            follow = 1.0 if length else 1.0 + FOLLOW_SHARE  # drafts are made for so much less than plain steps bring
            assert (kept[length] + length * LIKE) / prices[length] * (1.0 + FOLLOW_SHARE) * follow >= least
            accepted = next((j for j in range(length) if draw.random() > chance), length)
            policy.observe(1, length, accepted)
            if length:
                own.observe(length, accepted, FORGET)


def test_plain_steps_are_tried_less_where_they_are_far_from_being_best() -> None:
    tried = []
    for slope in (0.36, 0.05):  # of the cost of rows: drafts gain little, or much
        policy, count = DraftLengthPolicy(), 0
        policy.verify = table({rows: 1.0 + slope * rows for rows in range(1, 9)})
        policy.draft = table({rows: 0.0 for rows in range(1, 9)})
        for i in range(1000):
            policy.observe(0, 3, 3 if i % 10 < 6 else 0)
        for _ in range(20_000):
            count += policy.choose([1], [3]) == [0]
        tried.append(count)
    assert tried[0] > 3 * tried[1] > 0


def hopeless() -> DraftLengthPolicy:
    policy = DraftLengthPolicy()
    policy.verify = table({rows: 1.0 + 0.005 * rows for rows in range(1, 60)})
    policy.draft = table({rows: 0.1 for rows in range(1, 60)})
    for _ in range(3000):
        policy.observe(1, 4, 0)
    return policy


@pytest.mark.parametrize("requests", [1, 2])
def test_hopeless_drafts_stop_and_probes_cost_a_small_share_of_the_time(requests: int) -> None:
    policy, spent, plain = hopeless(), 0.0, 0.0
    lengths = [policy.choose(range(2, 2 + requests), [4] * requests) for _ in range(3000)]
    for chosen in lengths:
        probe = sum(chosen)
        assert probe in (0, 2 * requests), "all of them are probed in one step"
        plain += policy.verify.seconds(requests)
        if probe:
            spent += policy.verify.seconds(requests + probe) + 0.1 - policy.verify.seconds(requests)
    assert 0.5 * PROBE_SHARE < spent / plain < 1.1 * PROBE_SHARE


@pytest.mark.parametrize(("requests", "drafted"), [(1, True), (2, True), (4, False)])
def test_several_requests_need_more_than_costs_promise(requests: int, drafted: bool) -> None:
    """A gain of a tenth on paper: taken for one request or two, not for more, which share passes for prompts."""
    kept = 0.5
    price = (1.0 + kept) / 1.1 - 1.0
    survivals = [[kept] for _ in range(requests)]
    verify = table({rows: 1.0 + (rows - requests) * price / requests for rows in range(1, 20)})
    policy = DraftLengthPolicy()
    policy.verify, policy.draft = verify, table({rows: 0.0 for rows in range(1, 20)})
    assert best_lengths(survivals, verify, lambda _: 0.0)[1] == pytest.approx(1.1, rel=0.02)
    for _ in range(2000):
        policy.observe(0, 1, 0)
        policy.observe(0, 1, 1)
    lengths = policy.choose(range(1, requests + 1), [1] * requests)
    assert any(lengths) is drafted


@given(st.lists(st.lists(st.floats(0.0, 1.0), max_size=4), min_size=1, max_size=4), st.floats(0.0, 1.0))
def test_a_margin_never_adds_drafts_and_is_met_by_those_that_are_made(rows: list[list[float]], margin: float) -> None:
    survivals = [sorted(row, reverse=True) for row in rows]
    verify = table({n: 1.0 + 0.1 * n for n in range(1, 40)})
    free, gain = best_lengths(survivals, verify, lambda n: 0.1)
    kept, held = best_lengths(survivals, verify, lambda n: 0.1, margin=margin)
    assert kept in (free, [0] * len(rows))
    assert held == (gain if any(kept) else 1.0)
    assert not any(kept) or held > 1.0 + margin


@pytest.mark.parametrize(("decoding", "drafted"), [(1, True), (2, True), (4, False)])
def test_the_margin_is_that_of_all_that_decode(decoding: int, drafted: bool) -> None:
    """Lookup finds something for one of them, which brings 1.1 times the tokens per second."""
    policy = DraftLengthPolicy()
    price = (decoding + 0.9) / decoding / 1.1 - 1.0
    policy.verify = table({rows: 1.0 + price * (rows - decoding) for rows in range(decoding, 20)})
    policy.worthwhile = False
    assert any(policy.choose([1], [1], decoding - 1, [[0.9]], decoding)) is drafted


@given(st.lists(st.tuples(st.integers(1, 600), st.floats(0.1, 9)), max_size=9), st.integers(1, 40), st.integers(1, 90))
def test_the_most_that_drafts_could_bring_is_what_certain_ones_do(
    times: list[tuple[int, float]], rows: int, drafts: int
) -> None:
    costs = CostCurve(Pace())
    for size, seconds in times * 2:
        costs.observe(size, seconds)
    every = [1.0, *((rows + n) / rows * costs.seconds(rows) / costs.seconds(rows + n) for n in range(1, drafts + 1))]
    assert most_gain(rows, drafts, costs) == pytest.approx(max(every))
    _, gain = best_lengths([[1.0] * drafts] + [[]] * (rows - 1), costs, lambda _: 0.0)
    assert most_gain(rows, drafts, costs) == pytest.approx(gain)


@given(st.lists(st.tuples(st.floats(0.0, 7.0), st.floats(0.0, 7.0)), max_size=60))
def test_trust_is_between_what_came_and_what_was_promised(drafts: list[tuple[float, float]]) -> None:
    trust = Trust()
    for promised, kept in drafts:
        trust.observe(promised, kept)
    survival = [0.9, 0.5, 0.1]
    trusted = trust.of(survival)
    assert all(0.0 <= t <= s for t, s in zip(trusted, survival, strict=True))
    if all(kept >= promised for promised, kept in drafts):
        assert trusted == survival
    for _ in range(20_000):
        trust.forgive()
    assert trust.of(survival) == pytest.approx(survival, rel=1e-3)


def test_drafts_that_keep_less_than_they_promise_are_not_made_any_more() -> None:
    """Lookup says 0.9, and half of them come."""
    policy, draw, late = DraftLengthPolicy(), random.Random(2), 0
    policy.verify = table({rows: 1.0 + 0.7 * (rows - 1) for rows in range(1, 9)})
    policy.worthwhile = False
    for step in range(300):
        (length,) = policy.choose([1], [1], 0, [[0.9]])
        policy.settle(1, length, int(length and draw.random() < 0.5))
        late += length * (step >= 100)
    assert late < 20


def test_nobody_looks_for_drafts_where_none_could_pay_or_none_has() -> None:
    policy = DraftLengthPolicy()
    policy.verify = table({rows: float(rows) for rows in range(1, 60)})
    assert not policy.looks(8, 56), "twice the rows take twice as long"
    policy.verify = table({rows: 1.0 + 0.1 * rows for rows in range(1, 60)})
    assert policy.looks(2, 14)
    policy.worthwhile = False
    looked = [policy.looks(2, 14) for _ in range(5000)]
    assert 0 < sum(looked) < 500 and any(looked[2500:]), "less and less, but again and again"
    policy.worthwhile = True
    assert policy.looks(2, 14)


def test_where_even_better_drafts_would_not_pay_there_are_none_and_the_drafter_rests() -> None:
    policy = hopeless()
    policy.verify = table({rows: float(rows) for rows in range(1, 60)})
    assert policy.worthwhile
    assert not any(sum(policy.choose(range(2, 20), [4] * 18)) for _ in range(3000))
    assert not policy.worthwhile
    policy.verify = table({rows: 1.0 + 0.001 * rows for rows in range(1, 60)})
    policy.reconsider(18)
    assert not policy.worthwhile, "as many as before: it does not look at every step"
    policy.reconsider(2)
    assert policy.worthwhile, "far fewer: it looks at once"


def test_a_drafter_that_earns_less_than_following_costs_rests() -> None:
    """Five requests whose drafts gain less than the margin, and better ones little more."""
    policy, steps, draw = DraftLengthPolicy(), 0, random.Random(5)
    policy.verify = table({rows: 8.0 + 0.1 * rows + 0.009 * rows * rows for rows in range(1, 60)})
    policy.draft = table({rows: 1.0 for rows in range(1, 60)})
    for i in range(1000):
        policy.observe(1, 1, i % 2)
    assert policy.choose([1], [7])[0] > 0, "alone it pays"
    while policy.worthwhile and steps < 1000:
        policy.choose(range(1, 6), [7] * 5)
        steps += 1
    assert 8 < steps < 1000
    awake, away = 0, 0
    for _ in range(20_000):
        if policy.worthwhile:
            for request, length in enumerate(policy.choose(range(1, 6), [7] * 5), 1):
                policy.observe(request, length, next((j for j in range(length) if draw.random() < 0.5), length))
            awake += 1
        else:
            policy.reconsider(5)
            away += 1
    assert 0 < awake < 0.15 * away, "it looks again, and rests longer each time"
    for _ in range(2):
        if not policy.worthwhile:
            policy.reconsider(1)
    assert policy.worthwhile, "with one request it pays again"


@pytest.mark.parametrize("wrong", [{2: 6.0, 4: 12.0, 8: 24.0}, {1: 9.0, 2: 9.0, 4: 9.0, 8: 9.0}, {}])
@pytest.mark.parametrize("requests", [1, 2])
def test_costs_that_were_learned_in_a_bad_moment_are_found_out(wrong: dict[int, float], requests: int) -> None:
    """And the looking costs little once it is known what is best."""
    draw, policy = random.Random(1), DraftLengthPolicy()
    policy.verify.preset({1: 6.0} | wrong if wrong else {})
    policy.draft.preset({2: 1.0, 4: 1.0, 8: 1.2} if wrong else {})
    for _ in range(500):
        policy.observe(-1, 7, 7 if draw.random() < 0.4 else draw.randint(0, 3))

    def true(rows: int) -> float:
        return 6.0 + 0.25 * rows

    names, limits = list(range(requests)), [7] * requests
    survival = policy.overall.survival(7)

    def rate(length: int) -> float:
        rows = requests * (1 + length)
        seconds = true(rows) + (1.0 + 0.02 * rows if length else 0.0)
        return requests * (1.0 + sum(survival[:length])) / seconds

    spent, tokens = 0.0, 0.0
    for step in range(14_000):
        if not policy.worthwhile:
            policy.reconsider(requests)
        chosen = policy.choose(names, limits)
        rows, drafts = requests + sum(chosen), sum(chosen)
        seconds = true(rows) * draw.uniform(0.9, 1.3)
        drafting = (1.0 + 0.02 * (drafts + sum(map(bool, chosen)))) * draw.uniform(0.9, 1.3) if drafts else 0.0
        policy.verify.observe(rows, seconds)
        if drafts:
            policy.draft.observe(drafts + sum(map(bool, chosen)), drafting)
        if step >= 10_000:
            spent += true(rows) + (1.0 + 0.02 * (drafts + requests) if drafts else 0.0)
            tokens += requests + sum(sum(survival[:length]) for length in chosen)
    assert tokens / spent > 0.97 * max(rate(length) for length in range(8))


@pytest.mark.parametrize("row", [0.02, 0.3, 0.45, 0.8])
@pytest.mark.parametrize("kept", [0.4, 0.7])
def test_costs_of_which_nothing_is_known_are_known_soon(row: float, kept: float) -> None:
    """row: seconds of one, in passes of one row. Within 400 steps, the first ones and what they try included."""
    draw, policy, spent, tokens = random.Random(4), DraftLengthPolicy(), 0.0, 0.0
    for _ in range(300):
        policy.observe(0, 7, next((j for j in range(7) if draw.random() > kept), 7))
    survival = [kept**j for j in range(1, 8)]

    def step(length: int) -> tuple[float, float]:
        return 1.0 + row * length, (0.2 + 0.012 * length if length else 0.0)

    for _ in range(400):
        if not policy.worthwhile:
            policy.reconsider(1)
        (length,) = policy.choose([1], [7])
        verify, draft = step(length)
        policy.observe_step(1 + length, length, verify * draw.uniform(0.95, 1.1))
        if length:
            policy.observe_draft(1 + length, 1, draft * draw.uniform(0.95, 1.1))
            policy.observe(1, length, next((j for j in range(length) if draw.random() > kept), length))
        spent += verify + draft
        tokens += 1.0 + sum(survival[:length])
    best = max((1.0 + sum(survival[:length])) / sum(step(length)) for length in range(8))
    assert tokens / spent > 0.93 * best


@pytest.mark.parametrize("slow", [3.0, 30.0])
def test_a_slow_start_puts_no_drafter_to_rest(slow: float) -> None:
    """The first steps of a process, and the first drafts: they are slow for reasons that pass."""
    draw = random.Random(3)
    policy = DraftLengthPolicy()
    drafts = 0
    for step in range(400):
        (length,) = policy.choose([1], [7])
        early = slow if step < WARM_UP or (length and drafts < 2) else 1.0
        drafts += bool(length)
        if length:
            policy.observe_draft(1 + length, 1, 0.2 * early * draw.uniform(0.95, 1.1))
            accepted = next((n for n in range(length) if draw.random() > 0.7), length)
            policy.observe(1, length, accepted)
        policy.observe_step(1 + length, length, (1.0 + 0.1 * length) * (slow if step < WARM_UP else 1.0))
        assert policy.worthwhile
    assert policy.draft.seconds(4) < 0.4 and policy.verify.seconds(4) < 1.6
    assert drafts > 300


def test_bad_experience_fades() -> None:
    """Requests that drafted badly are not held against others for ever."""
    policy = hopeless()
    policy.verify = table({rows: 1.0 + rows for rows in range(1, 60)})
    for _ in range(GIVE_UP_AFTER):
        policy.choose([2], [4])
    assert not policy.worthwhile
    steps = 0
    while not policy.worthwhile and steps < 50_000:
        policy.reconsider(1)
        steps += 1
    assert 500 < steps < 50_000


@given(st.integers(1, 40), st.integers(1, 8), st.floats(0.0, 1.0))
def test_what_drafting_saves_is_what_the_costs_say(rows: int, limit: int, kept: float) -> None:
    policy = DraftLengthPolicy()
    policy.verify = table({n: 1.0 + 0.1 * n for n in range(1, 60)})
    for i in range(500):
        policy.observe(1, 1, i % 100 < kept * 100)
    saved = policy.saved(rows, limit)
    assert 0 <= saved < policy.verify.seconds(rows)
    if kept == 0.0:
        assert saved == 0
    if kept == 1.0 and rows == 1:
        assert saved > 0
    if saved:  # a drafter catches up for drafts that are then made
        assert any(policy.choose(list(range(2, rows + 2)), [limit] * rows))


def test_a_probe_finds_drafts_that_have_become_good() -> None:
    policy = hopeless()
    chosen = []
    for _ in range(3000):
        chosen += policy.choose([1], [4])
        policy.observe(1, chosen[-1], chosen[-1])
    assert chosen[0] == 0 and chosen[-1] == 4


def test_rows_of_others_make_drafts_dearer() -> None:
    """A pass that is full of prompt rows already computes rather than waits for memory."""
    policy = DraftLengthPolicy()
    for _ in range(200):
        policy.observe(1, 4, 2)
    assert policy.choose([1], [4])[0] > 0
    assert policy.choose([1], [4], 512) == [0]


@given(st.lists(st.tuples(st.floats(0.1, 9), st.integers(1, 15)), max_size=12))
def test_smoothed_costs_rise_and_are_the_nearest_that_do(points: list[tuple[float, int]]) -> None:
    values, weights = [v for v, _ in points], [w for _, w in points]
    fitted = rising(values, weights)
    assert all(a <= b for a, b in itertools.pairwise(fitted)) and len(fitted) == len(values)

    def miss(other: list[float]) -> float:
        return sum(w * abs(v - o) for v, w, o in zip(values, weights, other, strict=True))

    others = [list(itertools.accumulate(values, max)), [*itertools.accumulate(values[::-1], min)][::-1]]
    others += [[value] * len(values) for value in values]
    others += [[f if f <= value else value for f in fitted] for value in values]
    assert all(miss(fitted) <= miss(other) + 1e-9 for other in others)
    if all(a < b for a, b in itertools.pairwise(values)):
        assert fitted == values


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("slow", [1.2, 2.0, 4.0])
def test_sizes_measured_in_a_slow_moment_are_comparable(seed: int, slow: float) -> None:
    draw, pace = random.Random(seed), Pace()
    verify, draft = CostCurve(pace), CostCurve(pace)
    for step in range(1200):
        now = slow if 300 <= step < 900 else 1.0
        rows = draw.choice([1, 2, 4] if step < 600 else [4, 8, 12])  # 8 and 12 for the first time in the slow moment
        verify.observe(rows, now * (10.0 + rows))
        draft.observe(rows, now * 0.1 * (10.0 + rows))
    for rows in (1, 2, 4, 6, 8, 10, 12):
        assert verify.seconds(rows) / verify.seconds(4) == pytest.approx((10.0 + rows) / 14.0, rel=0.08)
        assert verify.seconds(rows) / draft.seconds(rows) == pytest.approx(10.0, rel=0.15)


@pytest.mark.parametrize("seed", range(4))
def test_a_batch_of_one_size_is_not_taken_for_a_slow_machine(seed: int) -> None:
    """32 rows were believed to take half as long as they do, and since they look cheap, nothing else runs."""
    draw, costs = random.Random(seed), CostCurve(Pace())
    costs.preset({1: 2.9, 2: 3.4, 4: 4.9, 8: 7.6, 16: 12.2, 32: 12.5})
    for _ in range(6):
        for _ in range(20):
            costs.observe(16, 12.0 * draw.uniform(0.9, 1.2))
        for _ in range(40):
            costs.observe(draw.choice([31, 32, 33]), 21.0 * draw.uniform(0.9, 1.2))
    assert costs.seconds(32) > 1.5 * costs.seconds(16)


@given(st.lists(st.floats(0.0, 1.0), min_size=5, max_size=5), st.integers(0, 2**32))
def test_any_curve_is_learned_whatever_the_pace(slopes: list[float], seed: int) -> None:
    """Slopes of the logarithm of seconds over that of rows, between nothing and as much; batches of one size in turns,
    on a machine whose pace wanders."""
    draw, costs, pace = random.Random(seed), CostCurve(Pace()), 0.0
    sizes = [1, 2, 4, 8, 16, 32]
    times = itertools.accumulate((2.0**slope for slope in slopes), lambda a, b: a * b, initial=3.0)
    true = dict(zip(sizes, times, strict=True))
    for turn in range(120):
        rows = sizes[turn % 6] if turn < 12 else draw.choice(sizes)
        for _ in range(20):
            pace = 0.99 * pace + draw.gauss(0.0, 0.01)
            costs.observe(rows, true[rows] * math.exp(pace + draw.gauss(0.0, 0.05)))
    for a, b in itertools.pairwise(sizes):
        assert costs.seconds(b) / costs.seconds(a) == pytest.approx(true[b] / true[a], rel=0.15)


def test_beyond_what_was_seen_a_row_takes_no_longer_than_within() -> None:
    costs = CostCurve(Pace())
    for _ in range(40):
        for rows in (1, 2, 4, 8):
            costs.observe(rows, 1.0 * rows)
    for rows in range(8, 513):
        assert costs.seconds(rows) <= costs.seconds(8) * rows / 8 * (1 + 1e-9)
    assert costs.seconds(32) > 2.0 * costs.seconds(8), "and not much less: the curve goes on as it went"


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("noise", [0.0, 0.1, 0.3])
def test_noise_does_not_carry_costs_away(seed: int, noise: float) -> None:
    """Steps differ by chance and the machine by moments; what is learned stays near what holds on average."""
    draw, pace, now = random.Random(seed), Pace(), 1.0
    costs = CostCurve(pace)
    for step in range(3000):
        if step % 50 == 0:
            now = draw.uniform(0.7, 1.6)
        rows = draw.randint(8, 16) if step % 400 < 200 else 8
        costs.observe(rows, now * (10.0 + rows) * (1.0 + draw.expovariate(1.0) * noise))
    for rows in (8, 10, 12, 14, 16):
        assert costs.seconds(rows) / costs.seconds(8) == pytest.approx((10.0 + rows) / 18.0, rel=0.25)


def test_presets_are_taken_as_they_are_whatever_was_known() -> None:
    costs = CostCurve(Pace())
    for seconds in (1e-4, 1.0):
        table_ = {rows: seconds * (1.0 + 0.06 * rows) for rows in (1, 2, 4, 8, 16)}
        costs.preset(table_)
        assert costs.medians == pytest.approx(table_)


@pytest.mark.parametrize("seed", range(6))
def test_sizes_that_cost_the_same_do_not_drift_apart(seed: int) -> None:
    """Their order is chance, and the smoothing hides it."""
    draw, costs = random.Random(seed), CostCurve(Pace())
    for _ in range(6000):
        costs.observe(draw.choice([1, 2, 4, 8]), 5.0 * draw.uniform(0.8, 1.5))
    values = list(costs.medians.values())
    assert min(values) > 3.5 and max(values) < min(7.5, 1.3 * min(values))
    for _ in range(800):  # and when it does differ, that is seen soon
        rows = draw.choice([1, 2, 4, 8])
        costs.observe(rows, (5.0 if rows < 8 else 8.0) * draw.uniform(0.8, 1.5))
    assert costs.seconds(8) > 1.3 * costs.seconds(4)


@given(st.dictionaries(st.integers(1, 700), st.floats(1e-4, 10.0), max_size=10), st.integers(1, 900))
def test_costs_are_positive_and_rise(times: dict[int, float], rows: int) -> None:
    costs = CostCurve(Pace())
    for size, seconds in times.items():
        for _ in range(3):
            costs.observe(size, seconds)
    assert 0.0 < costs.seconds(rows) <= costs.seconds(rows + 1) * (1 + 1e-9)
    again = CostCurve(Pace())
    again.preset(costs.medians)
    assert again.medians == pytest.approx(costs.medians)


def test_one_size_measured_in_a_bad_moment_leaves_its_neighbours_alone() -> None:
    costs = table({rows: 10.0 + rows for rows in range(1, 12)} | {4: 40.0})
    assert [costs.seconds(rows) for rows in (3, 5, 6, 11)] == [13.0, 15.0, 16.0, 21.0]
    assert costs.seconds(4) <= 16.0


def test_a_disturbed_size_does_not_mislead() -> None:
    costs = table({rows: 10.0 + rows for rows in range(1, 20)})
    for _ in range(20):
        for rows in (12, 14, 15, 16):
            costs.observe(rows, 10.0 + rows)
    costs.observe(13, 500.0)
    costs.observe(13, 500.0)
    assert costs.seconds(13) < 100


@given(st.dictionaries(st.integers(1, 80), st.floats(0.5, 50), min_size=1, max_size=12), st.integers(1, 600))
def test_a_table_that_was_kept_gives_the_same_costs(times: dict[int, float], rows: int) -> None:
    costs, again = table(times), CostTable()
    again.preset(costs.medians)
    assert again.seconds(rows) > 0
    for _ in range(40):
        for size in times:
            again.observe(size, 7.0)
    assert again.seconds(next(iter(times))) == 7.0, "what is measured now counts"


def test_certain_drafts_are_made_in_full_and_a_limit_is_kept() -> None:
    policy = DraftLengthPolicy()
    policy.verify = table({rows: 1.0 + 0.01 * rows for rows in range(1, 9)})
    for _ in range(100):
        policy.observe(1, 7, 7)
    assert policy.choose([1], [7]) == [7]
    assert policy.choose([1, 2], [3, 0]) == [3, 0]


def test_what_a_request_showed_is_forgotten_with_it() -> None:
    policy = DraftLengthPolicy()
    for _ in range(50):
        policy.observe(1, 2, 2)
    policy.finish(1)
    policy.finish(1)
    assert not len(policy._memory)
