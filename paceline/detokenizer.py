"""Token ids -> text while they are generated: only text that later tokens cannot change."""

from __future__ import annotations

import codecs

from paceline.tokenizer import EACH_BYTE, Tokenizer

# Tokens that the windowed path holds back at most while they do not form text, so that a push stays O(1).
_MAX_HELD = 16


class IncrementalDetokenizer:
    """Streams one sequence. The pushes and `finish` joined are `tokenizer.decode` of all the ids.

    With a byte-level tokenizer (GPT-2, Llama 3, Qwen, SmolLM) and with one in SentencePiece's style (Llama 2,
    Mistral, Gemma) this holds for every sequence of ids, invalid UTF-8 included: tokens are bytes, and an
    incremental decoder replaces what is malformed exactly as the whole decode does. Other tokenizers decode a
    short window of tokens at a time; there it holds while the text is valid UTF-8.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._pieces: list[str] = []
        make = codecs.getincrementaldecoder("utf-8")
        self._bytes = None
        self._strips = False  # a space off the front of what comes next
        if tokenizer.byte_level:
            self._bytes = make("replace")
        elif tokenizer.sentencepiece:
            self._bytes, self._strips = make(EACH_BYTE), tokenizer.strips_space
        # windowed path: ids whose text is out (context for spacing), then ids that are held back
        self._context: list[int] = []
        self._held: list[int] = []

    @property
    def text(self) -> str:
        """All text so far, without what is held back."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def push(self, token_id: int) -> str:
        """Text that became certain with this token; "" while inside a UTF-8 sequence or for a skipped special
        token.
        """
        if token_id in self._skipped:
            return ""
        if self._bytes is not None:
            return self._emit(self._bytes.decode(self._tokenizer.token_bytes(token_id)))
        self._held.append(token_id)
        text = self._window_text()
        if text.endswith("\ufffd") and len(self._held) < _MAX_HELD:
            return ""
        return self._release(text)

    def finish(self) -> str:
        """The rest: an unfinished UTF-8 sequence comes out as U+FFFD. Nothing may be pushed afterwards."""
        if self._bytes is not None:
            return self._emit(self._bytes.decode(b"", final=True))
        return self._release(self._window_text()) if self._held else ""

    def _window_text(self) -> str:
        before = self._tokenizer.decode(self._context, skip_special_tokens=False)
        return self._tokenizer.decode(self._context + self._held, skip_special_tokens=False)[len(before) :]

    def _release(self, text: str) -> str:
        self._context, self._held = self._held, []
        return self._emit(text)

    def _emit(self, text: str) -> str:
        if text and self._strips:
            self._strips, text = False, text.removeprefix(" ")
        if text:
            self._pieces.append(text)
        return text
