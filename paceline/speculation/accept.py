"""The rule that keeps or drops drafts, and what a step commits."""

from __future__ import annotations

from collections.abc import Sequence


def accept(drafts: Sequence[int], target_tokens: Sequence[int]) -> int:
    """Number of drafts kept: the length of the longest prefix of drafts that equals the target's tokens.

    target_tokens: what the target chose in the verify pass, one per row: entry 0 follows the last committed token,
    entry j follows draft j. It has len(drafts) + 1 entries.

    With a = accept(drafts, target_tokens), a step commits target_tokens[: a + 1]: the a accepted drafts and one token
    more, the target's correction of draft a + 1 or, if all were kept, the bonus. So a step commits at least one token.
    The caches then hold the rows of the anchor and of drafts 1..a; the last committed token is the next anchor, whose
    row the next pass computes. Rows of rejected drafts are dropped. Tokens behind a stop or length limit are cut
    afterwards (paceline.stopping), and what was cut is not committed.

    >>> accept([5, 6, 7], [5, 6, 9, 1])
    2
    """
    if len(target_tokens) != len(drafts) + 1:
        raise ValueError(
            f"target_tokens: {len(target_tokens)} tokens for {len(drafts)} drafts, expected {len(drafts) + 1}"
        )
    kept = 0
    for draft in drafts:
        if draft != target_tokens[kept]:
            break
        kept += 1
    return kept
