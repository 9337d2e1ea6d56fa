from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.speculation.accept import accept

TOKENS = st.integers(0, 3)


@given(st.lists(TOKENS, max_size=12), st.data())
def test_the_longest_equal_prefix_is_kept(drafts, data):
    target = data.draw(st.lists(TOKENS, min_size=len(drafts) + 1, max_size=len(drafts) + 1))
    kept = accept(drafts, target)
    assert target[:kept] == drafts[:kept]
    assert kept == len(drafts) or drafts[kept] != target[kept]


@given(st.lists(TOKENS, min_size=1, max_size=60), st.lists(st.lists(TOKENS, max_size=6), min_size=60, max_size=60))
def test_any_drafts_give_the_plain_text(text, guesses):
    """A target that continues `text` commits exactly it, whatever is proposed."""
    committed: list[int] = []
    for drafts in guesses:
        if len(committed) >= len(text):
            break
        at = len(committed)
        target = [
            text[at + j] if at + j < len(text) and committed[:at] + drafts[:j] == text[: at + j] else 9
            for j in range(len(drafts) + 1)
        ]
        step = target[: accept(drafts, target) + 1]
        assert len(step) >= 1
        committed += step
    assert committed[: len(text)] == text[: len(committed)]


def test_a_later_match_does_not_count():
    assert accept([1, 2, 3], [1, 9, 3, 4]) == 1
    assert accept([], [7]) == 0
    assert accept([1, 2], [1, 2, 5]) == 2


@pytest.mark.parametrize("target", [[], [1, 2], [1, 2, 3, 4]])
def test_the_target_has_one_token_more(target):
    with pytest.raises(ValueError, match="target_tokens"):
        accept([1, 2], target)
