"""What the step loop asks of a source of drafts."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol


class RequestView(Protocol):
    """The part of a request that proposers may read."""

    @property
    def request_id(self) -> Hashable:
        """Names the request (one per choice) between `propose`, `commit` and `finish`."""

    @property
    def token_ids(self) -> Sequence[int]:
        """Prompt and committed output; the last entry is the anchor, whose row the next pass computes."""


class Proposer(Protocol):
    """Guesses the tokens that follow a request. Guesses change the speed, never the text.

    A step is: propose, verify, accept, commit. State may be kept per request; what was proposed and rejected must leave no
    trace in it.
    """

    @property
    def name(self) -> str:
        """The method, as in SpeculativeConfig.method."""

    def propose(self, request: RequestView, max_drafts: int) -> list[int]:
        """At most max_drafts guesses of the tokens after request.token_ids; [] if there is nothing to guess."""

    def commit(self, request: RequestView, tokens: Sequence[int]) -> None:
        """Tokens were appended to request.token_ids (they are its last len(tokens) entries)."""

    def finish(self, request: RequestView) -> None:
        """The request ended, or speculation was switched off for it: drop its state. Unknown requests are ignored."""
