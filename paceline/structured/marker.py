"""The end of reasoning inside a stream of tokens: where a grammar begins.

A token may end with the marker, or end inside it; a token that holds the marker and something behind it would put
unconstrained text into the answer, so such tokens are not allowed at the point where they would do that.
"""

from __future__ import annotations

import numpy as np

from paceline.structured.vocabulary import Vocabulary


class Marker:
    """A marker over a vocabulary. State: number of the marker's bytes that the text so far ends with (the longest)."""

    def __init__(self, text: str, vocabulary: Vocabulary) -> None:
        self.bytes = text.encode()
        self._vocabulary = vocabulary
        self._fallback = _fallback(self.bytes)
        # only a token with the marker's last byte before its own end can reach beyond the marker
        last = self.bytes[-1]
        self._suspects = [(i, t) for i, t in enumerate(vocabulary.tokens) if last in t[:-1]]
        self._masks: dict[int, np.ndarray] = {}

    def advance(self, state: int, token: int) -> int:
        """The state behind one more token; len(bytes) if the marker is complete, which ends the reasoning."""
        for byte in self._vocabulary.tokens[token]:
            if state == len(self.bytes):  # cannot happen to a token that `mask` allows
                return state
            while state and self.bytes[state] != byte:
                state = self._fallback[state]
            state += self.bytes[state] == byte
        return state

    def is_complete(self, state: int) -> bool:
        return state == len(self.bytes)

    def mask(self, state: int) -> np.ndarray:
        """int32 [words]: all ids but ends of sequence and tokens that reach beyond the marker. Not to be written to."""
        known = self._masks.get(state)
        if known is not None:
            return known
        banned, rests, length = set(self._vocabulary.eos_ids), [], state
        while length > 0:
            rests.append(self.bytes[length:])
            length = self._fallback[length]
        for i, token in self._suspects:
            inside = token.find(self.bytes)
            if 0 <= inside < len(token) - len(self.bytes) or any(token.startswith(r) and token != r for r in rests):
                banned.add(i)
        self._masks[state] = ~self._vocabulary.ids_of(banned)
        return self._masks[state]


def _fallback(pattern: bytes) -> list[int]:
    """Knuth, Morris and Pratt: for each length, the longest proper prefix that is also a suffix."""
    table = [0] * (len(pattern) + 1)
    length = 0
    for i in range(1, len(pattern)):
        while length and pattern[i] != pattern[length]:
            length = table[length]
        length += pattern[i] == pattern[length]
        table[i + 1] = length
    return table
