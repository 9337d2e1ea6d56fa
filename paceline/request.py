"""A sequence in the engine: one choice of one request, and everything that is known of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from paceline.outputs import CompletionOutput, FinishReason, TokenAlternatives
from paceline.sampling import SamplingState, TokenLogprobs
from paceline.sampling_params import SamplingParams
from paceline.speculation.stats import SpecDecodeStats
from paceline.stopping import StopChecker
from paceline.structured.constraint import GrammarConstraint


@dataclass(slots=True, eq=False)
class Sequence:
    """`token_ids` is prompt plus committed output. Its last entry is the anchor: the only committed token whose row is
    not in the cache yet (`num_computed` rows are)."""

    request_id: int
    choice: int
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    state: SamplingState
    stopper: StopChecker
    max_drafts: int
    arrival: float
    grammar: GrammarConstraint | None = None  # what the output has to match; its state is that of token_ids
    fixed_drafts: bool = True  # always draft max_drafts, instead of as many as pay
    cache_salt: str | None = None  # sequences share cached blocks only with those of the same salt
    group: int = 0  # choices of one request have the same: they wait for the first one's prompt and share it
    order: int = 0  # of arrival in the engine; who came last is preempted first
    block_ids: list[int] = field(default_factory=list)  # of the cache, for rows 0 to 16 * len - 1
    block_keys: list[bytes] = field(default_factory=list)  # names of the contents of full blocks
    state_slot: int | None = None  # of the recurrent states, where the model has any
    snapshot_rows: list[int] = field(default_factory=list)  # after which its state is wanted for the prefix cache
    last_snapshot: bytes | None = None  # key of the one behind generated tokens: the next one replaces it
    num_published: int = 0  # blocks that were offered to other sequences
    num_computed: int = 0
    num_tapped: int = 0  # of the rows computed: those from 0 on that a drafter has seen
    num_cached: int | None = None  # prompt tokens that the cache had when the sequence was first admitted
    num_preemptions: int = 0
    num_catch_ups: int = 0  # times that rows were computed again for a drafter that had rested
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    _shown: list[TokenAlternatives] = field(default_factory=list, repr=False)  # of these, as far as clients saw them
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of its tokens from the second on
    stats: SpecDecodeStats = field(default_factory=SpecDecodeStats)
    admitted: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    aborted: bool = False
    _table: np.ndarray = field(default_factory=lambda: np.empty(8, np.int32), repr=False)

    @property
    def blocks(self) -> np.ndarray | None:
        """block_ids as int32, in place; None for a sequence that holds none."""
        return self._table[: len(self.block_ids)] if self.block_ids else None

    def hold(self, blocks: list[int]) -> None:
        """Append blocks, which the caller took from the pool for this sequence."""
        first, count = len(self.block_ids), len(self.block_ids) + len(blocks)
        if count > len(self._table):
            self._table = np.resize(self._table, max(count, 2 * len(self._table)))
        self._table[first:count] = blocks
        self.block_ids += blocks

    def drop_blocks(self) -> list[int]:
        """Forget the blocks and all that was computed into them; returns them for the pool."""
        blocks, self.block_ids = self.block_ids, []
        self.num_computed = self.num_published = self.num_tapped = 0
        return blocks

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_prefill(self) -> bool:
        """More rows than the anchor's are missing from the cache (of the prompt, or of all after a preemption), so
        nothing can be drafted yet."""
        return self.num_computed < max(self.num_prompt_tokens, len(self.token_ids) - 1)

    @property
    def rows_to_score(self) -> range:
        """Rows of the prompt whose logits are wanted for the log-probabilities of the tokens behind them, and still
        missing. One choice of a request has them for all."""
        if self.params.prompt_logprobs is None or self.choice:
            return range(0)
        return range(len(self.prompt_logprobs), self.num_prompt_tokens - 1)

    @property
    def most_tokens(self) -> int:
        """Prompt and output at their longest."""
        return len(self.token_ids) + self.stopper.remaining

    @property
    def draft_room(self) -> int:
        """Drafts that can still be delivered: the last token is always the target's own."""
        return max(0, min(self.max_drafts, self.stopper.remaining - 1))

    @property
    def finish_reason(self) -> FinishReason | None:
        return "abort" if self.aborted else self.stopper.finish_reason

    def shown_logprobs(self, show: Callable[[TokenLogprobs], TokenAlternatives]) -> list[TokenAlternatives]:
        """Log-probabilities as clients see them; each is made once, in pieces and whole outputs the same."""
        self._shown += map(show, self.logprobs[len(self._shown) :])
        return self._shown

    def first_shown_logprobs(self, count: int) -> list[TokenAlternatives]:
        """Those of the first tokens, of which pieces were made."""
        return self._shown[:count]

    def output(self, show: Callable[[TokenLogprobs], TokenAlternatives]) -> CompletionOutput:
        """This choice as a client sees it. show: see `shown_logprobs`."""
        wanted = self.params.logprobs is not None
        return CompletionOutput(
            index=self.choice,
            text=self.stopper.text,
            token_ids=self.token_ids[self.num_prompt_tokens :],
            cumulative_logprob=sum((p.logprob for p in self.logprobs), 0.0) if wanted else None,
            logprobs=list(self.shown_logprobs(show)) if wanted else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stopper.stop_reason,
            seed=self.state.seed,
        )
