"""A sequence in the engine: one choice of one request, and everything that is known of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from paceline.outputs import CompletionOutput, FinishReason
from paceline.sampling import SamplingState, TokenLogprobs
from paceline.sampling_params import SamplingParams
from paceline.speculation.stats import SpecDecodeStats
from paceline.stopping import StopChecker


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
    fixed_drafts: bool = True  # always draft max_drafts, instead of as many as pay
    blocks: np.ndarray | None = None
    num_computed: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    stats: SpecDecodeStats = field(default_factory=SpecDecodeStats)
    admitted: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    aborted: bool = False

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_prefill(self) -> bool:
        """Prompt rows are missing from the cache, so nothing can be drafted yet."""
        return self.num_computed < self.num_prompt_tokens

    @property
    def most_tokens(self) -> int:
        """Prompt and output at their longest: the cache rows that admission reserves."""
        return len(self.token_ids) + self.stopper.remaining

    @property
    def draft_room(self) -> int:
        """Drafts that can still be delivered: the last token is always the target's own."""
        return max(0, min(self.max_drafts, self.stopper.remaining - 1))

    @property
    def finish_reason(self) -> FinishReason | None:
        return "abort" if self.aborted else self.stopper.finish_reason

    def output(self) -> CompletionOutput:
        """This choice as a client sees it."""
        wanted = self.params.logprobs is not None
        return CompletionOutput(
            index=self.choice,
            text=self.stopper.text,
            token_ids=self.token_ids[self.num_prompt_tokens :],
            cumulative_logprob=sum(p.logprob for p in self.logprobs) if wanted else None,
            logprobs=list(self.logprobs) if wanted else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stopper.stop_reason,
            seed=self.state.seed,
        )
