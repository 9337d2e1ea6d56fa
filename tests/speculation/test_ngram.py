from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.speculation.ngram import NgramIndex, NgramProposer

TEXTS = st.lists(st.integers(0, 3), max_size=60)
SIZES = st.tuples(st.integers(1, 4), st.integers(0, 3)).map(lambda s: (s[0], s[0] + s[1]))


def slow_proposal(text: list[int], sizes: tuple[int, int], count: int) -> list[int]:
    """The definition, by scanning: longest n first, most recent occurrence, continued into itself."""
    for n in range(min(sizes[1], len(text) - 1), sizes[0] - 1, -1):
        for start in range(len(text) - n - 1, -1, -1):
            if text[start : start + n] == text[-n:]:
                grown = list(text)
                for i in range(count):
                    grown.append(grown[start + n + i])
                return grown[len(text) :]
    return []


@given(TEXTS, SIZES, st.integers(0, 12), st.lists(st.integers(1, 7), max_size=10))
def test_proposals_equal_the_definition(text, sizes, count, cuts):
    index = NgramIndex(*sizes)
    at = 0
    for cut in [*cuts, len(text)]:  # fed in pieces
        index.extend(text[at : at + cut])
        at += cut
        known = text[:at]
        assert index.tokens == known
        assert index.propose(count) == slow_proposal(known, sizes, count)


@given(TEXTS, TEXTS, SIZES, st.integers(0, 60))
def test_truncation_leaves_no_trace(text, tail, sizes, keep):
    keep = min(keep, len(text))
    index, fresh = NgramIndex(*sizes), NgramIndex(*sizes)
    index.extend(text)
    index.truncate(keep)
    fresh.extend(text[:keep])
    assert vars(index) == vars(fresh)
    for token in tail:
        index.extend([token])
        fresh.extend([token])
        assert index.propose(5) == fresh.propose(5)


def test_large_token_ids_do_not_collide():
    big = 2**31
    index = NgramIndex(2, 2)
    index.extend([1, big, 7, 0, 1 + big])
    assert index.propose(3) == []
    index.extend([1, big])
    assert index.propose(3) == [7, 0, 1 + big]


def test_a_loop_is_continued_to_the_full_length():
    index = NgramIndex(2, 4)
    index.extend([9, 1, 2, 3, 1, 2, 3, 1])
    assert index.propose(7) == [2, 3, 1, 2, 3, 1, 2]


def test_the_longest_match_wins_over_a_more_recent_one():
    index = NgramIndex(1, 3)
    index.extend([1, 2, 3, 50, 9, 3, 60, 1, 2, 3])
    assert index.propose(2) == [50, 9]


@pytest.mark.parametrize(("low", "high"), [(0, 3), (3, 2), (-1, -1)])
def test_sizes_are_checked(low, high):
    with pytest.raises(ValueError, match="min_n"):
        NgramIndex(low, high)


@pytest.mark.parametrize("length", [-1, 4])
def test_truncation_is_checked(length):
    index = NgramIndex(1, 2)
    index.extend([1, 2, 3])
    with pytest.raises(ValueError, match="length"):
        index.truncate(length)


@dataclass
class Request:
    request_id: str
    token_ids: list[int] = field(default_factory=list)


def test_requests_have_their_own_state():
    proposer = NgramProposer(2, 3, 7)
    a, b = Request("a", [1, 2, 3, 1, 2]), Request("b", [1, 2, 4, 1, 2])
    assert proposer.guess(a, 1) == [3]
    assert proposer.guess(b, 1) == [4]
    a.token_ids += [3, 1]
    assert proposer.guess(a, 2) == [2, 3]
    del a.token_ids[5:]  # cut by a stop, or preempted
    assert proposer.guess(a, 1) == [3]
    proposer.finish(a)
    proposer.finish(a)
    a.token_ids = [5, 5, 5]
    assert proposer.guess(a, 2) == [5, 5]
    assert proposer.guess(b, 0) == []


def test_an_index_catches_up_with_its_request():
    proposer = NgramProposer(2, 2, 7)
    request = Request("r", [1, 2])
    assert proposer.guess(request, 3) == []
    request.token_ids += [3, 1, 2]
    assert proposer.guess(request, 1) == [3]


def test_guesses_are_scored_whether_or_not_they_were_used():
    text = Request("t", [1, 2, 3, 9, 1, 2, 3])
    proposer = NgramProposer(2, 3, 4)
    (first,) = proposer.find([text], [4], [True])
    assert len(first) == 4 and proposer.propose([text], [2]).drafts == [[9, 1]]
    for _ in range(30):
        text.token_ids += [9, 1, 2, 3]  # all of it came true
        (now,) = proposer.find([text], [4], [True])
    assert now[-1] > 0.8 > first[-1]
    new = Request("u", [5, 6, 5, 6])
    assert proposer.find([new], [4], [True])[0][-1] > 0.8, "another request starts from what these showed"
    for i in range(60):
        new.token_ids += [100 + i, 5, 6]
        (now,) = proposer.find([new], [4], [True])
    assert now[0] < 0.2
    proposer.finish(new)
    assert proposer.find([Request("w", [1, 2, 3])], [4], [True]) == [[]]


def test_in_mode_rejection_requests_do_not_learn_from_each_other():
    proposer = NgramProposer(2, 3, 4, "rejection")
    text, other = Request("t", [1, 2, 3, 9, 1, 2, 3]), Request("u", [1, 2, 3, 9, 1, 2, 3])
    before = proposer.find([other], [4], [True])
    proposer.finish(other)
    for _ in range(30):
        text.token_ids += [9, 1, 2, 3]
        proposer.find([text], [4], [True])
    assert proposer.find([other], [4], [True]) == before
