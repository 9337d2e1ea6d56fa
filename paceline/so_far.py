"""A request as it was when a piece of its stream was made: what vLLM's users read of every piece."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.outputs import CompletionOutput, Kept, StreamDelta
from paceline.sampling_params import RequestOutputKind

if TYPE_CHECKING:
    from paceline.llm import _Request as Request
    from paceline.request import Sequence


@dataclass(slots=True)
class SoFar:
    """Sizes alone: ids, log-probabilities and shown text only grow, so that a piece costs next to nothing until
    somebody asks what came before it, from whichever thread."""

    request: Request
    sequence: Sequence
    num_tokens: int
    num_characters: int

    @classmethod
    def now(cls, request: Request, sequence: Sequence) -> SoFar:
        """On the thread that runs the steps, behind the one that made the piece."""
        return cls(request, sequence, sequence.num_output_tokens, sequence.stopper.num_shown)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def prompt(self) -> str | None:
        return self.request.prompt

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.request.ids

    def kept(self, delta: StreamDelta) -> Kept:
        """The same for a copy of the piece, without the request."""
        outputs = self.outputs(delta)
        whole = delta.output is not None and outputs is delta.output.outputs
        return Kept(self.request_id, self.prompt, self.prompt_token_ids, None if whole else outputs)

    def outputs(self, delta: StreamDelta) -> list[CompletionOutput]:
        """`delta.outputs`: see there."""
        choice = self.sequence
        if choice.params.output_kind is RequestOutputKind.DELTA:
            text, ids, logprobs = delta.text, delta.token_ids, delta.logprobs
        elif delta.output is not None:
            return delta.output.outputs
        else:
            text, logprobs = choice.stopper.text[: self.num_characters], None
            first = choice.num_prompt_tokens
            ids = choice.token_ids[first : first + self.num_tokens]
            if choice.params.logprobs is not None:
                logprobs = choice.first_shown_logprobs(self.num_tokens)
        total = sum((p.logprob for p in choice.logprobs[: self.num_tokens]), 0.0)
        return [
            CompletionOutput(
                index=delta.index,
                text=text,
                token_ids=ids,
                cumulative_logprob=None if choice.params.logprobs is None else total,
                logprobs=logprobs,
                finish_reason=delta.finish_reason,
                stop_reason=delta.stop_reason,
                seed=choice.state.seed,
            )
        ]
