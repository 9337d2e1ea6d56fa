"""Prompt lookup first, a neural drafter else: whichever has been worth more for the request.

Lookup costs nothing and is right where a text repeats itself; a drafter costs a pass and is right more often. Where
lookup finds something, the expected tokens of both are compared, by the running acceptance of each in this request (and
in others, at first), with the drafter's own time counted against it. Lookup's guesses are scored when the drafter was
asked, too. While the drafter rests, because it does not pay, lookup goes on alone.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Hashable, Sequence

import numpy as np

from paceline.sampling import DraftProbs, SamplerMode
from paceline.speculation.drafting import Drafter, Proposal, SequenceView
from paceline.speculation.ngram import NgramProposer, Scores

RETRY = 16  # drafts by lookup in a row after which the drafter is asked once, to know what it is worth now
ASSUMED_SHARE = 0.1  # of a step that the drafter takes, until it was timed
TIMES = 15  # steps whose median counts


class HybridProposer:
    """In mode "rejection" the text depends on the drafts, so the clock and other requests are kept out of the choice
    there."""

    asks = True

    def __init__(self, lookup: NgramProposer, drafter: Drafter, sampler: SamplerMode = "coupled") -> None:
        self.name = f"ngram or {drafter.name}"
        self.lookup = lookup
        self.drafter = drafter
        self.taps = drafter.taps
        self.max_drafts = drafter.max_drafts
        self.trained_drafts = getattr(drafter, "trained_drafts", drafter.max_drafts)
        self.confident = bool(getattr(drafter, "confident", False))
        self.sampler = sampler
        self.tree_budget = getattr(drafter, "tree_budget", None)
        self.window = 0
        self.chosen = {"ngram": 0, drafter.name: 0}  # drafts by source
        self._scores = Scores(sampler)  # of the drafter
        self._found: set[Hashable] = set()  # whose turn is lookup's
        self._in_a_row: dict[Hashable, int] = {}
        self._shares: deque[float] = deque(maxlen=TIMES)
        self._begin: float | None = None
        self._spent = 0.0

    @property
    def context_rows(self) -> int:
        """Of the drafter's last turn."""
        return int(getattr(self.drafter, "context_rows", 0))

    def cache_bytes(self, blocks: int, max_num_seqs: int) -> int:
        return self.drafter.cache_bytes(blocks, max_num_seqs)

    def bind(self, blocks: int, max_num_seqs: int) -> None:
        self.drafter.bind(blocks, max_num_seqs)
        self.window = self.drafter.window

    def find(self, sequences: Sequence[SequenceView], rooms: Sequence[int], able: Sequence[bool]) -> list[list[float]]:
        """See `Finder`."""
        self._time_step()
        self._found.clear()
        if not any(rooms):
            return [[] for _ in sequences]
        out = []
        survivals = self.lookup.find(sequences, rooms, able)
        for sequence, room, ok, survival in zip(sequences, rooms, able, survivals, strict=True):
            self._scores.settle(sequence)
            if survival and (not ok or self._prefers_lookup(sequence.request_id, survival, room)):
                self._found.add(sequence.request_id)
                out.append(survival)
            else:
                out.append([])
        return out

    def propose(self, sequences: Sequence[SequenceView], limits: Sequence[int]) -> Proposal:
        neural = [0 if s.request_id in self._found else limit for s, limit in zip(sequences, limits, strict=True)]
        made = Proposal([[] for _ in sequences])
        if any(neural):
            begin = time.perf_counter()
            made = self.drafter.propose(sequences, neural)
            self._spent = time.perf_counter() - begin
        drafts = []
        for i, (sequence, limit) in enumerate(zip(sequences, limits, strict=True)):
            name = sequence.request_id
            drafts.append(made.drafts[i] if neural[i] or not limit else self.lookup.guess(sequence, limit))
            if not limit:
                continue
            if neural[i]:
                self._scores.expect(sequence, list(made.drafts[i]))
            self._in_a_row[name] = 0 if neural[i] else self._in_a_row.get(name, 0) + 1
            self.chosen[self.drafter.name if neural[i] else "ngram"] += 1
        confidence = made.confidence
        if confidence is not None:  # what lookup found is verified whole
            confidence = [row if neural[i] else [1.0] * len(drafts[i]) for i, row in enumerate(confidence)]
        probs = with_certain(made.probs, drafts, [n > 0 for n in neural])
        return Proposal(drafts, probs, confidence, made.trees)  # made.trees has none where lookup was preferred

    def _prefers_lookup(self, name: Hashable, survival: Sequence[float], limit: int) -> bool:
        if self._in_a_row.get(name, 0) >= RETRY:
            return False
        timed = self._shares and self.sampler != "rejection"
        share = statistics.median(self._shares) if timed else ASSUMED_SHARE
        drafter = 1.0 + sum(self._scores.survival(name, limit))
        return 1.0 + sum(survival) >= drafter * (1.0 - share)

    def _time_step(self) -> None:
        """The drafter's share of the last step, which lasted until now."""
        now = time.perf_counter()
        if self._begin is not None and self._spent:
            self._shares.append(min(0.9, self._spent / max(now - self._begin, 1e-9)))
        self._begin, self._spent = now, 0.0

    def observe(self, items: Sequence[tuple[SequenceView, int, np.ndarray]]) -> None:
        self.drafter.observe(items)

    def finish(self, sequence: SequenceView) -> None:
        name = sequence.request_id
        self._scores.forget(name)
        self._in_a_row.pop(name, None)
        self._found.discard(name)
        self.lookup.finish(sequence)
        self.drafter.finish(sequence)


def with_certain(probs: DraftProbs | None, drafts: Sequence[Sequence[int]], drawn: Sequence[bool]) -> DraftProbs | None:
    """Distributions of all drafts, in order, given those of the sequences that were `drawn`; the other drafts are
    certain."""
    if probs is None or all(ok or not row for ok, row in zip(drawn, drafts, strict=True)):
        return probs
    count, width = sum(map(len, drafts)), probs.probs.shape[1]
    values = np.zeros((count, width), np.float32)
    ids = None if probs.ids is None else np.empty((count, width), np.int32)
    at = source = 0
    for ok, row in zip(drawn, drafts, strict=True):
        for token in row:
            if ok:
                values[at] = probs.probs[source]
                if ids is not None and probs.ids is not None:
                    ids[at] = probs.ids[source if len(probs.ids) > 1 else 0]
                source += 1
            elif ids is None:
                values[at, token] = 1.0
            else:
                assert probs.ids is not None
                ids[at] = probs.ids[0]
                place = np.flatnonzero(ids[at] == token)
                column = int(place[0]) if len(place) else 0
                ids[at, column] = token
                values[at, column] = 1.0
            at += 1
    return DraftProbs(values, ids)
