"""Prompt lookup first, a neural drafter else: whichever has been worth more for the request.

Lookup costs nothing and is right where a text repeats itself; a drafter costs a pass and is right more often. Where
lookup finds something, the expected tokens of both are compared, by the running acceptance of each in this request (and
in others, at first), with the drafter's own time counted against it. What lookup would have guessed is also scored when
the drafter was asked, against the tokens that were committed.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.sampling import DraftProbs, SamplerMode
from paceline.speculation.drafting import Drafter, Proposal, SequenceView
from paceline.speculation.length import FORGET, Acceptance
from paceline.speculation.ngram import NgramProposer

RETRY = 16  # drafts by lookup in a row after which the drafter is asked once, to know what it is worth now
ASSUMED_SHARE = 0.1  # of a step that the drafter takes, until it was timed
TIMES = 15  # steps whose median counts


@dataclass(slots=True)
class _Source:
    """Running acceptance of one source of drafts."""

    own: dict[Hashable, Acceptance] = field(default_factory=dict)
    overall: Acceptance = field(default_factory=Acceptance)

    def observe(self, name: Hashable, drafted: int, accepted: int) -> None:
        self.overall.observe(drafted, accepted, 0.999)
        self.own.setdefault(name, Acceptance()).observe(drafted, accepted, FORGET)

    def expected(self, name: Hashable, length: int, *, alone: bool) -> float:
        """Tokens of a step that drafts `length` of them, the target's own included. alone: whatever other requests
        showed."""
        own = self.own.get(name, Acceptance())
        return 1.0 + sum(own.survival(length, None if alone else self.overall))


@dataclass(slots=True)
class _Last:
    """What was drafted for a sequence at `position`, to be scored once its tokens are known."""

    position: int
    guess: list[int]  # of lookup, used or not
    drafts: list[int]  # of the drafter, if it was asked


class HybridProposer:
    """In mode "rejection" the text depends on the drafts, so the clock and other requests are kept out of the choice
    there."""

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
        self._sources = {"ngram": _Source(), drafter.name: _Source()}
        self._last: dict[Hashable, _Last] = {}
        self._in_a_row: dict[Hashable, int] = {}
        self._shares: deque[float] = deque(maxlen=TIMES)
        self._begin: float | None = None
        self._spent = 0.0

    def cache_bytes(self, blocks: int, max_num_seqs: int) -> int:
        return self.drafter.cache_bytes(blocks, max_num_seqs)

    def bind(self, blocks: int, max_num_seqs: int) -> None:
        self.drafter.bind(blocks, max_num_seqs)
        self.window = self.drafter.window

    def propose(self, sequences: Sequence[SequenceView], limits: Sequence[int]) -> Proposal:
        self._time_step()
        guesses, neural = [], []
        for sequence, limit in zip(sequences, limits, strict=True):
            self._score(sequence)
            guess = self.lookup.guess(sequence, limit) if limit else []
            guesses.append(guess)
            neural.append(0 if not limit or self._prefers_lookup(sequence.request_id, guess, limit) else limit)
        made = Proposal([[] for _ in sequences])
        if any(neural):
            begin = time.perf_counter()
            made = self.drafter.propose(sequences, neural)
            self._spent = time.perf_counter() - begin
        drafts = []
        for i, (sequence, limit) in enumerate(zip(sequences, limits, strict=True)):
            drafts.append(made.drafts[i] if neural[i] else guesses[i])
            if not limit:
                continue
            name = sequence.request_id
            self._last[name] = _Last(len(sequence.token_ids), guesses[i], list(made.drafts[i]))
            self._in_a_row[name] = 0 if neural[i] else self._in_a_row.get(name, 0) + 1
            self.chosen[self.drafter.name if neural[i] else "ngram"] += 1
        confidence = made.confidence
        if confidence is not None:  # what lookup found is verified whole
            confidence = [row if neural[i] else [1.0] * len(drafts[i]) for i, row in enumerate(confidence)]
        probs = with_certain(made.probs, drafts, [n > 0 for n in neural])
        return Proposal(drafts, probs, confidence, made.trees)  # made.trees has none where lookup was preferred

    def _prefers_lookup(self, name: Hashable, guess: list[int], limit: int) -> bool:
        if not guess:
            return False
        if self._in_a_row.get(name, 0) >= RETRY:
            return False
        alone = self.sampler == "rejection"
        share = statistics.median(self._shares) if self._shares and not alone else ASSUMED_SHARE
        lookup = self._sources["ngram"].expected(name, len(guess), alone=alone)
        return lookup >= self._sources[self.drafter.name].expected(name, limit, alone=alone) * (1.0 - share)

    def _score(self, sequence: SequenceView) -> None:
        """What became of the last drafts, from the tokens committed since."""
        last = self._last.pop(sequence.request_id, None)
        if last is None:
            return
        came = sequence.token_ids[last.position :]
        for source, guess in (("ngram", last.guess), (self.drafter.name, last.drafts)):
            kept = next((j for j, (a, b) in enumerate(zip(guess, came, strict=False)) if a != b), None)
            tested = min(len(guess), len(came)) if kept is None else len(guess)
            if tested:
                self._sources[source].observe(sequence.request_id, tested, tested if kept is None else kept)

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
        for source in self._sources.values():
            source.own.pop(name, None)
        self._last.pop(name, None)
        self._in_a_row.pop(name, None)
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
