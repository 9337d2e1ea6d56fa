"""Prompt lookup and a drafter side by side: who is asked, and how their drafts are described."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from paceline.sampling import DraftProbs
from paceline.speculation.drafting import Proposal
from paceline.speculation.hybrid import RETRY, HybridProposer, with_certain
from paceline.speculation.ngram import NgramProposer


@dataclass
class Text:
    request_id: int
    token_ids: list[int]
    state: Any = None
    blocks: Any = None


@dataclass
class Drafter:
    """Drafts what it is told to."""

    says: list[int] = field(default_factory=list)
    name: str = "drafter"
    taps: tuple[int, ...] = (1,)
    max_drafts: int = 4
    window: int = 9
    asked: int = 0
    seen: list[Any] = field(default_factory=list)
    ended: list[Any] = field(default_factory=list)

    def cache_bytes(self, blocks: int, max_num_seqs: int) -> int:
        return 3 * blocks

    def bind(self, blocks: int, max_num_seqs: int) -> None:
        self.window = 5

    def propose(self, sequences: Any, limits: Any) -> Proposal:
        self.asked += sum(limit > 0 for limit in limits)
        return Proposal([self.says[:limit] if limit else [] for limit in limits])

    def observe(self, items: Any) -> None:
        self.seen += items

    def finish(self, sequence: Any) -> None:
        self.ended.append(sequence)


def hybrid(drafter: Drafter) -> HybridProposer:
    return HybridProposer(NgramProposer(2, 3, 4), drafter)


def loop(proposer: HybridProposer, drafter: Drafter, steps: int, *, repeats: bool) -> None:
    """A text in which lookup always finds something: what comes next is that, or something new that the drafter
    knows."""
    text = Text(1, [1, 2, 3, 1, 2, 3, 1, 2])
    rng = np.random.default_rng(0)
    for _ in range(steps):
        came = [3, 1, 2, 3] if repeats else rng.integers(10, 10_000, 4).tolist()
        drafter.says = [9, 9, 9, 9] if repeats else came
        (survival,) = proposer.find([text], [4], [True])
        (drafts,) = proposer.propose([text], [len(survival) or 4]).drafts
        kept = next((j for j, (a, b) in enumerate(zip(drafts, came, strict=False)) if a != b), len(drafts))
        text.token_ids += [*came[:kept], came[kept] if kept < len(came) else 7]
        text.token_ids += [1, 2, 3, 1, 2]  # lookup finds something again


def test_the_source_that_is_worth_more_is_asked() -> None:
    drafter = Drafter()
    proposer = hybrid(drafter)
    loop(proposer, drafter, 100, repeats=True)
    assert proposer.chosen["ngram"] > 80 and drafter.asked >= 100 // (RETRY + 1) - 1, "and the other now and then"
    drafter = Drafter()
    proposer = hybrid(drafter)
    loop(proposer, drafter, 100, repeats=False)
    assert proposer.chosen["drafter"] > 80


def test_without_a_match_the_drafter_is_asked() -> None:
    drafter = Drafter([5, 6, 7, 8])
    proposer = hybrid(drafter)
    texts = [Text(1, [1, 2, 3]), Text(2, [4, 5, 6])]
    assert proposer.find(texts, [2, 2], [True, True]) == [[], []]
    assert proposer.propose(texts, [2, 0]).drafts == [[5, 6], []]
    assert drafter.asked == 1


def test_the_rest_of_the_protocol_goes_to_both() -> None:
    drafter = Drafter()
    proposer = hybrid(drafter)
    assert proposer.cache_bytes(4, 2) == 12
    proposer.bind(4, 2)
    assert proposer.window == 5 and proposer.taps == (1,)
    text = Text(1, [1, 2, 1, 2])
    assert proposer.find([text], [3], [True]) != [[]]
    proposer.propose([text], [3])
    proposer.observe([(text, 0, np.zeros((1, 1)))])
    proposer.finish(text)
    assert len(drafter.seen) == 1 and drafter.ended == [text]
    assert not any((proposer._scores, proposer._in_a_row, proposer._found))
    assert not any((proposer.lookup._indexes, proposer.lookup.scores))


@pytest.mark.parametrize("kind", ["dense", "shared ids", "own ids"])
def test_certain_drafts_among_drawn_ones(kind: str) -> None:
    rng = np.random.default_rng(0)
    width, vocab = 4, 4 if kind == "dense" else 10
    drawn = rng.random((3, width)).astype(np.float32)
    ids = {"dense": None, "shared ids": np.array([[1, 3, 5, 7]], np.int32)}.get(
        kind, np.array([[0, 1, 2, 3], [2, 4, 6, 8], [5, 6, 7, 9]], np.int32)
    )
    drafts = [[0, 1], [3, 2, 3], [1]]
    out = with_certain(DraftProbs(drawn, ids), drafts, [True, False, True])
    assert out is not None and out.probs.shape == (6, width)

    def dense(probs: np.ndarray, ids: np.ndarray | None) -> np.ndarray:
        row = np.zeros(vocab, np.float32)
        row[np.arange(width) if ids is None else ids] = probs
        return row

    def of(values: DraftProbs, row: int) -> np.ndarray:
        each = values.ids if values.ids is None else values.ids[row if len(values.ids) > 1 else 0]
        assert each is None or len(set(each.tolist())) == width
        return dense(values.probs[row], each)

    before = DraftProbs(drawn, ids)
    for row, source in ((0, 0), (1, 1), (5, 2)):
        np.testing.assert_array_equal(of(out, row), of(before, source))
    for row, token in ((2, 3), (3, 2), (4, 3)):
        np.testing.assert_array_equal(of(out, row), np.eye(vocab, dtype=np.float32)[token])


def test_distributions_of_one_kind_alone_stay_as_they_are() -> None:
    probs = DraftProbs(np.ones((1, 2), np.float32))
    assert with_certain(None, [[1]], [False]) is None
    assert with_certain(probs, [[1], []], [True, False]) is probs
