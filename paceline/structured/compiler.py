"""Grammars of a model: compiled once, bounded in size and time, shared by the requests that use them."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from paceline.errors import QueueFullError
from paceline.sampling_params import SamplingParams
from paceline.structured.constraint import GrammarConstraint
from paceline.structured.marker import Marker
from paceline.structured.params import StructuredOutputsError, StructuredOutputsParams
from paceline.structured.source import grammar_source
from paceline.structured.vocabulary import Vocabulary
from paceline.tokenizer import Tokenizer
from paceline.values import shown

log = logging.getLogger(__name__)

CACHED_GRAMMARS = 64
COMPILE_SECONDS = 10.0
# A compiler cannot be stopped. Those that nobody waits for any more count too, so that a flood of hostile grammars
# takes neither all cores nor all memory.
MAX_COMPILING = 4
THREAD_NAME = "paceline-grammar"
YIELD_AFTER = 1.0  # seconds; then the thread gets a processor only where the steps leave one
LATE = 15  # its niceness from then on
FRESH_SECONDS = 0.5  # of a processor: a step may wait this long for a matcher that shares nothing with others
# The compiler descends into chains of rules and references: some thousands of them overflow an ordinary stack, which
# would end the process. The stack is address space until it is used.
STACK_BYTES = 256 << 20
# Lexer states hold one entry per distinct position in a counted repetition; each takes 1 to 2 kB and stays with the
# cached grammar. llguidance's default, 250,000, lets one hostile request take half a gigabyte.
MAX_LEXER_STATES = 100_000

_stack_size = threading.Lock()


class CompiledGrammar:
    """A grammar with its model's vocabulary. `matcher` objects share what the lexer learns. spent: one of them met a
    limit, and this grammar takes too long to be compiled again between two steps; the next request needs a new one."""

    def __init__(self, source: str, vocabulary: Vocabulary, prototype: Any, seconds: float = 0.0) -> None:
        """seconds: of a processor, that it took to compile."""
        self.vocabulary = vocabulary
        self.spent = False
        self._seconds = seconds
        self._source = source
        self._prototype = prototype
        self._lock = threading.Lock()
        self._newlines: np.ndarray | None = None

    def matcher(self) -> Any:
        """A matcher at the beginning."""
        with self._lock:
            return self._prototype.deep_copy()

    def fresh_matcher(self) -> Any:
        """A matcher at the beginning that shares nothing: what others learnt may have used up its limits. Called
        between two steps; where compiling takes long, it is one that shares, after all."""
        with self._lock:
            if self._seconds > FRESH_SECONDS:
                self.spent = True
                return self._prototype.deep_copy()
            self._prototype = new_matcher(self._source, self.vocabulary)
            return self._prototype.deep_copy()

    def mask(self, matcher: Any) -> np.ndarray | None:
        """int32 [words] of the ids that may follow; None when the matcher fails."""
        mask = np.zeros(self.vocabulary.native_words, np.int32)
        try:
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        except ValueError:
            return None
        if matcher.is_error():
            return None
        return mask if self.vocabulary.inside is None else mask[: self.vocabulary.words] & self.vocabulary.inside

    @property
    def newlines(self) -> np.ndarray:
        if self._newlines is None:
            self._newlines = self.vocabulary.newlines()
        return self._newlines


class GrammarCompiler:
    """Compiles for one model; thread-safe. The vocabulary is handed over when a grammar first asks for it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._vocabulary: Vocabulary | None = None
        self._lock = threading.Lock()
        self._grammars: OrderedDict[str, CompiledGrammar] = OrderedDict()
        self._places = threading.BoundedSemaphore(MAX_COMPILING)
        self._markers: dict[str, Marker] = {}

    @property
    def vocabulary(self) -> Vocabulary:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(self._tokenizer, self._vocab_size)
            return self._vocabulary

    def compile(self, params: StructuredOutputsParams) -> CompiledGrammar:
        """The grammar, from the cache if it was asked for before. Takes at most some ten seconds, as many again where
        others are being compiled, and may be called beside a running engine. Raises StructuredOutputsError, which names
        the field, for what does not compile, and QueueFullError where others take too long."""
        vocabulary = self.vocabulary
        try:
            source = grammar_source(params)
        except (ValueError, RecursionError) as error:
            raise _refused(params, str(error)) from None
        with self._lock:
            known = self._known(source)
            if known is not None:
                self._grammars.move_to_end(source)
                return known
        grammar = self._build(params, source, vocabulary)
        with self._lock:
            self._grammars[source] = grammar
            while len(self._grammars) > CACHED_GRAMMARS:
                self._grammars.popitem(last=False)
        return grammar

    def knows(self, params: StructuredOutputsParams) -> bool:
        """Whether `compile` has it in its cache, so that it takes no time."""
        if self._vocabulary is None:
            return False
        try:
            source = grammar_source(params)
        except (ValueError, RecursionError):
            return False
        with self._lock:
            return self._known(source) is not None

    def _known(self, source: str) -> CompiledGrammar | None:
        found = self._grammars.get(source)
        return None if found is None or found.spent else found

    def prepare(self, params: Iterable[SamplingParams]) -> None:
        """Compile what these requests will need. Raises as `compile` does."""
        for asked in {p.structured_outputs for p in params if p.structured_outputs is not None}:
            assert isinstance(asked, StructuredOutputsParams)
            self.compile(asked)

    def constraint(self, params: SamplingParams, prompt_token_ids: Sequence[int]) -> GrammarConstraint | None:
        """The state of one new sequence; None if its parameters ask for no grammar. Raises as `compile` does."""
        asked = params.structured_outputs
        if asked is None:
            return None
        assert isinstance(asked, StructuredOutputsParams)
        marker = self._marker(asked.reasoning_end, prompt_token_ids)
        return GrammarConstraint(
            self.compile(asked),
            marker=marker,
            opening=None if marker is None else self._single_token(asked.reasoning_start),
            ignore_eos=params.ignore_eos,
            min_tokens=params.min_tokens,
            stop_token_ids=tuple(params.stop_token_ids or ()),
        )

    def _marker(self, text: str | None, prompt_token_ids: Sequence[int]) -> Marker | None:
        if text is None:
            return None
        tail = self._tokenizer.decode(list(prompt_token_ids[-64:]), skip_special_tokens=False)
        if tail.rstrip().endswith(text):
            return None
        vocabulary = self.vocabulary
        with self._lock:
            if len(self._markers) >= CACHED_GRAMMARS:
                self._markers.clear()
            return self._markers.setdefault(text, Marker(text, vocabulary))

    def _single_token(self, text: str | None) -> int | None:
        token = None if text is None else self._tokenizer.backend.token_to_id(text)
        return token if token is not None and token < self._vocab_size else None

    def _build(self, params: StructuredOutputsParams, source: str, vocabulary: Vocabulary) -> CompiledGrammar:
        outcome: list[CompiledGrammar | str] = []

        def work() -> None:
            begin = time.thread_time()
            matcher = new_matcher(source, vocabulary)
            seconds = time.thread_time() - begin
            if matcher.is_error():
                outcome.append(matcher.get_error())
                return
            grammar = CompiledGrammar(source, vocabulary, matcher, seconds)
            if grammar.mask(matcher) is None:  # also warms up the lexer
                outcome.append(matcher.get_error() or "no token can begin the output")
                return
            log.debug("grammar of %d characters: %.3f s", len(source), seconds)
            outcome.append(grammar)

        def guarded() -> None:
            try:
                work()
            except BaseException as error:  # a panic of the compiler is no Exception
                outcome.append(f"{type(error).__name__}: {error}")
            finally:
                self._places.release()

        if not self._places.acquire(timeout=COMPILE_SECONDS):
            raise QueueFullError(
                f"structured_outputs: {MAX_COMPILING} other grammars are still being compiled; try again later"
            )
        try:
            in_time = _in_time(guarded, COMPILE_SECONDS)
        except RuntimeError as error:  # no thread can be started
            self._places.release()
            raise QueueFullError(f"structured_outputs: {error}; try again later") from None
        if not in_time:
            raise _refused(params, f"not compiled within {COMPILE_SECONDS:.0f} s")
        if isinstance(outcome[0], str):
            raise _refused(params, outcome[0])
        return outcome[0]


def is_compiling() -> bool:
    """Whether a compiler runs in this process, for somebody or for nobody any more. It cannot be stopped: whoever wants
    to end the process does not wait for it."""
    return any(thread.name == THREAD_NAME for thread in threading.enumerate())


def new_matcher(source: str, vocabulary: Vocabulary) -> Any:
    """A matcher, perhaps in an error state."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
    return LLMatcher(vocabulary.native, source, log_level=0, limits=limits)


def _in_time(work: Callable[[], None], seconds: float) -> bool:
    """Run `work` on a thread with a deep stack; False if it goes on for longer, to its own end. What takes long gives
    way to other threads."""
    with _stack_size:
        before = threading.stack_size(STACK_BYTES)
        try:
            # no daemon: the interpreter must not end under a compiler that calls back into it
            thread = threading.Thread(target=work, name=THREAD_NAME)
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join(min(YIELD_AFTER, seconds))
    if thread.is_alive():
        if sys.platform == "linux" and thread.native_id:  # where a thread has a priority of its own
            with suppress(OSError):  # it has just ended, or a sandbox forbids it
                os.setpriority(os.PRIO_PROCESS, thread.native_id, LATE)
        thread.join(max(0.0, seconds - YIELD_AFTER))
    return not thread.is_alive()


def _refused(params: StructuredOutputsParams, reason: str) -> StructuredOutputsError:
    field = params.kind
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    message = " ".join(lines)
    message = message if len(message) <= 400 else message[:400] + "..."
    return StructuredOutputsError(
        f"structured_outputs.{field}={shown(getattr(params, field))}: the grammar cannot be compiled: {message}"
    )
