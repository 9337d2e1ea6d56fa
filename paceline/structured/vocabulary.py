"""Our tokenizer as llguidance sees one, and sets of token ids that constraints ask for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from paceline.tokenizer import Tokenizer

WORD = 32  # ids per word of a bitmask


class Vocabulary:
    """Bytes of every id that the model can draw, ends of sequence, and llguidance's prefix tree over them.

    It costs some tenths of a second, so there is one per model. vocab_size: columns of the model's logits; ids without
    text (padding of the head) are never allowed by a grammar.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        from llguidance import LLTokenizer

        self._tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.words = -(-vocab_size // WORD)
        self.tokens = [tokenizer.token_bytes(i) for i in range(vocab_size)]
        self.special_ids = frozenset(i for i in tokenizer.special_ids if i < vocab_size)
        self.eos_ids = tuple(i for i in tokenizer.eos_token_ids if 0 <= i < vocab_size)
        # llguidance wants an end of sequence; a model without one gets an id that can never be drawn
        eos = list(self.eos_ids) or [vocab_size]
        wrapper: Any = _Wrapper(self, eos)
        self.native = LLTokenizer(wrapper, eos_token=eos)
        # ids inside the model's head, where llguidance has one more
        outside = self.native.vocab_size > vocab_size
        self.inside = self.ids_of(range(vocab_size)) if outside else None
        self.native_words = -(-self.native.vocab_size // WORD)

    def encode(self, text: str) -> list[int]:
        """Ids of a text inside a document: those that a grammar forces, whose bytes have to be the text's."""
        if self._tokenizer.sentencepiece:
            ids = self._tokenizer.encode_inside(text)
            if b"".join(map(self._tokenizer.token_bytes, ids)) != text.encode():
                return self.native.greedy_tokenize(text)  # it puts spaces behind special tokens, too
        else:
            ids = self._tokenizer.encode(text, add_special_tokens=False)
        return ids if all(i < self.vocab_size for i in ids) else []

    def ids_of(self, ids: Iterable[int]) -> np.ndarray:
        """A bitmask int32 [words] with the bits of these ids."""
        mask = np.zeros(self.words, np.uint32)
        for i in ids:
            if 0 <= i < self.vocab_size:
                mask[i // WORD] |= np.uint32(1 << i % WORD)
        return mask.view(np.int32)

    def everything(self) -> np.ndarray:
        return np.full(self.words, -1, np.int32)

    def newlines(self) -> np.ndarray:
        """Ids that are one or two line ends and nothing else."""
        return self.ids_of(i for i, t in enumerate(self.tokens) if t in (b"\n", b"\n\n") and i not in self.special_ids)


class _Wrapper:
    """The attributes that `LLTokenizer` reads."""

    is_tokenizer_wrapper = True

    def __init__(self, vocabulary: Vocabulary, eos: Sequence[int]) -> None:
        self.eos_token_id = eos[0]
        self.bos_token_id: int | None = None
        missing = max(eos) + 1 - len(vocabulary.tokens)
        self.tokens = vocabulary.tokens + [b""] * max(0, missing)
        self.special_token_ids = sorted(vocabulary.special_ids | {i for i in eos if i < vocabulary.vocab_size})
        self._vocabulary = vocabulary

    def __call__(self, text: Any) -> list[int]:
        return self._vocabulary.encode(text if isinstance(text, str) else bytes(text).decode("utf-8", "replace"))


def allows(mask: np.ndarray, token: int) -> bool:
    return bool(int(mask[token // WORD]) >> (token % WORD) & 1)


def is_single(mask: np.ndarray) -> bool:
    """Exactly one id is allowed."""
    words = np.flatnonzero(mask)
    return len(words) == 1 and int(mask[words[0]]) & 0xFFFFFFFF & (int(mask[words[0]]) - 1) == 0
