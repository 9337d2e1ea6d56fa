"""What a grammar lets one sequence say: masks for the rows of a pass, and a state that follows committed tokens.

The engine's cycle, once per pass: `prepare` trims the drafts to what the grammar can follow and works out one mask per
row; `masks` hands these out when the logits are there; `commit` (called by the stop checker) takes the committed tokens
one by one. Between two passes the state is that of the committed tokens alone, so a sequence may lose its cache and be
computed again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from paceline.structured.marker import Marker
from paceline.structured.vocabulary import Vocabulary, allows, is_single

if TYPE_CHECKING:
    from paceline.structured.compiler import CompiledGrammar

log = logging.getLogger(__name__)

Ended = Literal["eos", "complete"]
MAX_GAP = 2  # line ends between the end of reasoning and the document, "\n\n" being one token in most vocabularies


class GrammarConstraint:
    """`drafted`, `kept`: of the last `prepare`, how many drafts came in, and how many of these the grammar allows."""

    def __init__(
        self,
        grammar: CompiledGrammar,
        *,
        marker: Marker | None = None,
        opening: int | None = None,
        ignore_eos: bool = False,
        min_tokens: int = 0,
        stop_token_ids: Sequence[int] = (),
    ) -> None:
        """marker: end of the reasoning that comes first. opening: the token that begins it, if the output may also
        begin with the document. min_tokens: stop ids and ends of sequence are kept out of the first so many tokens,
        unless the grammar leaves nothing else."""
        self.vocabulary: Vocabulary = grammar.vocabulary
        self.failed: str | None = None  # why the grammar cannot go on, although the text is no document
        self.drafted = self.kept = 0
        self._grammar = grammar
        self._matcher: Any = grammar.matcher()
        self._marker = marker
        self._opening = self.vocabulary.ids_of([] if opening is None else [opening])
        self._place = _IN_DOCUMENT if marker is None else 0 if opening is None else _OPEN  # see `_advance`
        self._document: list[int] = []  # committed tokens that the matcher has consumed
        self._count = 0
        self._eos = frozenset(self.vocabulary.eos_ids)
        self._no_eos = ~self.vocabulary.ids_of(self._eos)
        self._ignore_eos = ignore_eos
        self._min_tokens = min_tokens
        self._no_stop = self._no_eos & ~self.vocabulary.ids_of(stop_token_ids)
        self._drafts: list[int] = []
        self._masks: list[np.ndarray] | None = None

    # ---- before the pass

    def prepare(self, drafts: Sequence[int], room: int = 0) -> list[int]:
        """The longest prefix of the drafts that the grammar allows; where it ends in forced tokens, these too, up to
        `room` drafts in all. The drafts that are returned have to be the sequence's rows of the next pass."""
        place, consumed = self._place, 0
        self._masks = []
        kept: list[int] = []
        forced: list[int] = []
        pending = list(drafts)
        self.drafted = self.kept = len(pending)
        while True:
            mask = self._mask(place, len(kept))
            if mask is None:
                cause = self._matcher.get_error() or "no token can follow"
                self._restart()
                consumed = 0
                if kept:  # a draft led to a place that is too hard; the committed text may well be simple
                    kept.pop()
                    break
                mask = self._mask(place, 0)
                if mask is None:
                    self.failed = cause
                    break
            self._masks.append(mask)
            if len(kept) == len(pending):
                if place != _IN_DOCUMENT or forced or not (len(kept) < room and is_single(mask)):
                    break
                forced = [i for i in self._matcher.compute_ff_tokens() if i not in self._eos][: room - len(kept)]
                pending = kept + forced
                if not forced:
                    break
            token = pending[len(kept)]
            if not allows(mask, token) or token in self._eos:
                break
            after = self._advance(place, token)
            consumed += after == _IN_DOCUMENT
            if after is None:
                self._restart()
                consumed = 0
                break
            place = after
            kept.append(token)
            if place == _IN_DOCUMENT and self._matcher.is_stopped():
                self._masks.append(self.vocabulary.everything())  # a row that the end of the document cuts off
                break
        if consumed:
            self._matcher.rollback(consumed)
        self._masks = self._masks[: len(kept) + 1]
        self.kept = min(self.kept, len(kept))
        self._drafts = kept
        return list(kept)

    def masks(self, drafts: Sequence[int]) -> list[np.ndarray]:
        """A bitmask int32 [words] for each of the len(drafts) + 1 rows."""
        if self._masks is None or self._drafts != list(drafts):
            kept = self.prepare(drafts)
            assert kept == list(drafts), "drafts of a pass come from prepare()"
        assert self._masks is not None
        if self.failed is not None:
            return [self.vocabulary.everything()] * (len(drafts) + 1)
        return self._masks

    def draft_mask(self, row: int) -> np.ndarray:
        """The ids that draft number `row` of the last `prepare` could have been without being trimmed."""
        assert self._masks is not None
        return self._masks[row] & self._no_eos

    # ---- after the pass

    def commit(self, token: int) -> Ended | None:
        """Take one committed token. "complete": the document is whole and nothing can follow; "eos": the token ends the
        sequence where the grammar allows it."""
        self._masks = None
        self._count += 1
        if token in self._eos and self._place < 0:
            return "eos"
        after = self._advance(self._place, token)
        if after is None:
            self.failed = self._matcher.get_error() or f"token {token} was not expected"
            return None
        if after == _IN_DOCUMENT:
            self._document.append(token)
        self._place = after
        return "complete" if after == _IN_DOCUMENT and self._matcher.is_stopped() else None

    # ---- places: >= 0 = bytes of the marker that the text ends with; < 0 = behind it

    def _advance(self, place: int, token: int) -> int | None:
        """The place behind one more token, which the matcher has consumed if the place is in the document; None when
        it cannot."""
        if place >= 0:
            assert self._marker is not None
            state = self._marker.advance(place, token)
            return _GAP if self._marker.is_complete(state) else state
        if place == _OPEN and allows(self._opening, token):
            return 0
        if place not in (_IN_DOCUMENT, _OPEN) and not self._matcher.validate_tokens([token]):
            return place - 1
        return _IN_DOCUMENT if self._matcher.consume_token(token) else None

    def _mask(self, place: int, ahead: int) -> np.ndarray | None:
        """The mask at a place that is `ahead` tokens behind the committed ones; None when the grammar fails there."""
        if place >= 0:
            assert self._marker is not None
            return self._without(self._marker.mask(place), self._no_stop, self._count + ahead < self._min_tokens)
        mask = self._grammar.mask(self._matcher)
        if mask is None or not mask.any():
            return None
        if place == _OPEN:
            mask |= self._opening
        elif place != _IN_DOCUMENT and place > _GAP - MAX_GAP:
            mask |= self._grammar.newlines
        mask = self._without(mask, self._no_eos, self._ignore_eos)
        return self._without(mask, self._no_stop, self._count + ahead < self._min_tokens)

    @staticmethod
    def _without(mask: np.ndarray, others: np.ndarray, wanted: bool) -> np.ndarray:
        """Leave ids out, unless no others are allowed."""
        if not wanted:
            return mask
        rest = mask & others
        return rest if rest.any() else mask

    def _restart(self) -> None:
        """A matcher that has met an error never leaves it: begin again with the committed tokens."""
        self._matcher = self._grammar.fresh_matcher()
        if self._document and not self._matcher.consume_tokens(self._document):
            self.failed = self._matcher.get_error()


_GAP = -1  # the marker is complete, the document has not begun; further below: line ends since then
_IN_DOCUMENT = -1000
_OPEN = -2000  # nothing has come yet: the tag that begins the reasoning, or the document
