"""What a draft model's cache holds is known by content."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.speculation.draft_model import BlockContents, Text


def text(tokens: list[int], drafts: list[int] | None = None) -> Text:
    out = Text()
    out.follow(tokens, drafts or [])
    return out


def test_rows_are_valid_as_far_as_text_and_all_before_it_agree() -> None:
    contents, blocks = BlockContents(8), np.array([5, 2, 7, 0], np.int32)
    tokens = list(range(100, 140))
    assert contents.valid_rows(text(tokens), blocks) == 0
    contents.record(text(tokens), blocks, 0, 40)
    assert contents.valid_rows(text(tokens), blocks) == 40
    assert contents.valid_rows(text(tokens[:30]), blocks) == 30
    assert contents.valid_rows(text([*tokens[:35], 7, 8]), blocks) == 35
    assert contents.valid_rows(text([*tokens[:3], 7, *tokens[4:]]), blocks) == 3, "later blocks follow another text"
    assert contents.valid_rows(text([*tokens, 1, 2]), blocks) == 40
    # another sequence shares the first two blocks and takes the third
    other = np.array([5, 2, 3], np.int32)
    assert contents.valid_rows(text([*tokens[:32], 9, 9]), other) == 32
    contents.record(text([*tokens[:32], 9, 9]), np.array([5, 2, 7], np.int32), 32, 34)
    assert contents.valid_rows(text(tokens), blocks) == 32, "its block was written by somebody else"


def test_rows_behind_a_correction_are_void() -> None:
    contents, blocks = BlockContents(2), np.array([0, 1], np.int32)
    contents.record(text([1, 2, 3], [4, 5, 6]), blocks, 0, 6)
    contents.record(text([1, 2, 3, 9]), blocks, 3, 4)
    assert contents.valid_rows(text([1, 2, 3, 9, 5, 6]), blocks) == 4


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.lists(st.integers(0, 3), max_size=20)), max_size=12))
def test_a_text_follows_whatever_happens_to_its_sequence(steps: list[tuple[int, list[int]]]) -> None:
    """Drafts that are refused, tokens that are cut: the arrays are those of a text made afresh."""
    followed, committed = Text(), [1]
    for cut, drafts in steps:
        committed = committed[: max(1, len(committed) - cut)] if cut > 36 else committed
        followed.follow(committed, drafts)
        want = text(committed, drafts)
        count = -(-len(want) // 16)
        assert len(followed) == len(want) == len(committed) + len(drafts)
        assert (followed.blocks(count) == want.blocks(count)).all()
        assert (followed.before(count) == want.before(count)).all()
        committed = [*committed, *drafts[: len(drafts) // 2], 3]


@settings(deadline=None)
@given(st.data())
def test_blocks_that_change_hands_never_seem_right_when_they_are_not(data: st.DataObject) -> None:
    """Against a model that remembers, for each row, the whole text it was computed from."""
    contents, truth = BlockContents(6), {}
    for _ in range(data.draw(st.integers(1, 12))):
        tokens = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=50))
        blocks = np.array(data.draw(st.permutations(range(6)))[: -(-len(tokens) // 16)], np.int32)
        valid = contents.valid_rows(text(tokens), blocks)
        want = 0
        while want < len(tokens) and truth.get((int(blocks[want // 16]), want % 16)) == tokens[: want + 1]:
            want += 1
        assert valid <= want
        start = min(valid, len(tokens) - 1)
        contents.record(text(tokens), blocks, start, len(tokens))
        for row in range(start, len(tokens)):
            truth[int(blocks[row // 16]), row % 16] = tokens[: row + 1]
        assert contents.valid_rows(text(tokens), blocks) == len(tokens)
