"""Prompt lookup: the continuation of an earlier occurrence of the last few tokens is the guess.

Method: apoorvumang/prompt-lookup-decoding, vLLM's `ngram`. The longest suffix of prompt_lookup_max down to
prompt_lookup_min tokens that occurred before is looked up, and what followed is proposed. Two details differ from vLLM,
both measured on 900 answers of SmolLM2-135M-Instruct (first 256 tokens, 7 drafts, n = 2 to 4; tokens per pass over all
passes): the most recent occurrence is used, not the earliest (1.666 instead of 1.651), and a guess that reaches the end
of the text goes on into itself, as LZ77 copies do, so that a loop of any period is continued to the full draft length
(1.678). n = 5 alone, vLLM's default, gives 1.398.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from paceline.sampling import SamplerMode
from paceline.speculation.acceptance import FORGET, PRIOR_FORGET, Acceptance
from paceline.speculation.drafting import Proposal, SequenceView

_TOKEN_BITS = 32  # an n-gram is one integer: its token ids side by side


class NgramIndex:
    """Where each n-gram of a growing text occurred last before: constant time per token and per look-up.

    For every position and every n, `previous` holds the end of the most recent earlier occurrence of the n-gram that
    ends there. That makes the look-up an array access, and lets `truncate` undo in the same time.
    """

    def __init__(self, min_n: int, max_n: int) -> None:
        if not 1 <= min_n <= max_n:
            raise ValueError(f"min_n={min_n}, max_n={max_n}: expected 1 <= min_n <= max_n")
        self.min_n = min_n
        self.max_n = max_n
        self.tokens: list[int] = []
        sizes = range(min_n, max_n + 1)
        self._latest: list[dict[int, int]] = [{} for _ in sizes]  # n-gram -> its last end position
        self._previous: list[list[int]] = [[] for _ in sizes]  # end position -> the end before it, or -1

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        text, min_n = self.tokens, self.min_n
        keep = (1 << _TOKEN_BITS * self.max_n) - 1
        masks = [(1 << _TOKEN_BITS * (min_n + i)) - 1 for i in range(len(self._latest))]
        window = self._window(len(text))
        for token in tokens:
            end = len(text)
            text.append(token)
            window = (window << _TOKEN_BITS | token) & keep
            for i, mask in enumerate(masks):
                previous = self._previous[i]
                if end + 1 < min_n + i:
                    previous.append(-1)
                    continue
                latest = self._latest[i]
                gram = window & mask
                previous.append(latest.get(gram, -1))
                latest[gram] = end

    def truncate(self, length: int) -> None:
        """Forget everything after the first `length` tokens."""
        if not 0 <= length <= len(self.tokens):
            raise ValueError(f"length={length}: expected 0 to {len(self.tokens)}")
        while len(self.tokens) > length:
            end = len(self.tokens) - 1
            window = self._window(end + 1)
            for i, latest in enumerate(self._latest):
                before = self._previous[i].pop()
                n = self.min_n + i
                if end + 1 < n:
                    continue
                gram = window & ((1 << _TOKEN_BITS * n) - 1)
                if before < 0:
                    del latest[gram]
                else:
                    latest[gram] = before
            self.tokens.pop()

    def match(self) -> int:
        """Length of the text up to and including the most recent earlier occurrence of the longest known suffix; 0 if
        no suffix of min_n or more tokens occurred before."""
        for previous in reversed(self._previous):
            if previous and previous[-1] >= 0:
                return previous[-1] + 1
        return 0

    def propose(self, max_drafts: int) -> list[int]:
        """The max_drafts tokens that followed the match, copied on into themselves beyond the end of the text."""
        start = self.match()
        if start == 0 or max_drafts <= 0:
            return []
        found = self.tokens[start : start + max_drafts]
        period = len(found)  # = distance to the end of the text if that is shorter than the draft
        return [found[i % period] for i in range(max_drafts)] if period < max_drafts else found

    def _window(self, length: int) -> int:
        """The max_n tokens before position `length` as one integer."""
        window = 0
        for token in self.tokens[max(0, length - self.max_n) : length]:
            window = window << _TOKEN_BITS | token
        return window


class Scores:
    """How good one source's guesses have been: each is kept until the text has gone on, used or not.

    In mode "rejection" the text depends on the drafts, so a request does not learn from others there.
    """

    def __init__(self, sampler: SamplerMode) -> None:
        self._prior = None if sampler == "rejection" else Acceptance()
        self._own: dict[Hashable, Acceptance] = {}
        self._guessed: dict[Hashable, tuple[int, list[int]]] = {}  # length of the text then, and the guess

    def expect(self, sequence: SequenceView, guess: list[int]) -> None:
        """This is guessed to follow the sequence's text."""
        self._guessed[sequence.request_id] = (len(sequence.token_ids), guess)

    def expected(self, sequence: SequenceView) -> list[int]:
        """What is guessed to follow its text as it is now; [] if nothing."""
        length, guess = self._guessed.get(sequence.request_id, (-1, []))
        return guess if length == len(sequence.token_ids) else []

    def settle(self, sequence: SequenceView) -> None:
        """What became of the last guess, from the tokens committed since."""
        length, guess = self._guessed.pop(sequence.request_id, (0, []))
        came = sequence.token_ids[length : length + len(guess)]
        kept = next((j for j, (a, b) in enumerate(zip(guess, came, strict=False)) if a != b), None)
        tested, right = (len(came), len(came)) if kept is None else (len(guess), kept)
        if tested:
            if self._prior is not None:
                self._prior.observe(tested, right, PRIOR_FORGET)
            self._own.setdefault(sequence.request_id, Acceptance()).observe(tested, right, FORGET)

    def survival(self, name: Hashable, length: int) -> list[float]:
        """Chance of each of `length` guesses for a request that it is kept together with those before it."""
        return self._own.get(name, Acceptance()).survival(length, self._prior)

    def forget(self, name: Hashable) -> None:
        self._own.pop(name, None)
        self._guessed.pop(name, None)

    def __len__(self) -> int:
        """Requests that something is kept of."""
        return len(self._own.keys() | self._guessed.keys())


class NgramProposer:
    """Prompt lookup over prompt and output of each sequence, as a drafter of the step loop. An index follows its
    sequence's text by itself: it takes in what is new, and forgets what was cut off.

    Every guess is scored against the tokens that came, whether or not it was used: a guess costs nothing, so what one
    is worth is always known.
    """

    name = "ngram"
    taps: tuple[int, ...] = ()
    window = 0
    asks = False

    def __init__(
        self, prompt_lookup_min: int, prompt_lookup_max: int, max_drafts: int, sampler: SamplerMode = "coupled"
    ) -> None:
        self.max_drafts = max_drafts
        self._sizes = (prompt_lookup_min, prompt_lookup_max)
        NgramIndex(*self._sizes)  # checks them
        self._indexes: dict[Hashable, NgramIndex] = {}
        self.scores = Scores(sampler)

    def cache_bytes(self, blocks: int, max_num_seqs: int) -> int:
        return 0

    def bind(self, blocks: int, max_num_seqs: int) -> None:
        """Nothing to prepare."""

    def find(self, sequences: Sequence[SequenceView], rooms: Sequence[int], able: Sequence[bool]) -> list[list[float]]:
        """See `Finder`."""
        if not any(rooms):  # what was guessed is settled when it is asked again
            return [[] for _ in sequences]
        out = []
        for sequence, room in zip(sequences, rooms, strict=True):
            self.scores.settle(sequence)
            guess = self.guess(sequence, room) if room else []  # no index for those that do not draft
            if guess:
                self.scores.expect(sequence, guess)
            out.append(self.scores.survival(sequence.request_id, len(guess)))
        return out

    def propose(self, sequences: Sequence[SequenceView], limits: Sequence[int]) -> Proposal:
        return Proposal([self.guess(s, limit) for s, limit in zip(sequences, limits, strict=True)])

    def guess(self, sequence: SequenceView, max_drafts: int) -> list[int]:
        """At most max_drafts guesses of the tokens after sequence.token_ids; [] if nothing like them came before."""
        known = self.scores.expected(sequence)
        if len(known) >= max_drafts:
            return known[:max_drafts]
        return self._synchronised(sequence).propose(max_drafts)

    def observe(self, items: Sequence[tuple[SequenceView, int, np.ndarray]]) -> None:
        """The index follows token_ids by itself."""

    def finish(self, sequence: SequenceView) -> None:
        """The sequence ended: drop its index. Unknown sequences are ignored."""
        self._indexes.pop(sequence.request_id, None)
        self.scores.forget(sequence.request_id)

    def _synchronised(self, sequence: SequenceView) -> NgramIndex:
        index = self._indexes.get(sequence.request_id)
        if index is None:
            index = self._indexes[sequence.request_id] = NgramIndex(*self._sizes)
        text = sequence.token_ids
        if len(index) > len(text):
            index.truncate(len(text))
        if len(index) < len(text):
            index.extend(text[len(index) :])
        return index
