"""Which drafts a step makes or verifies: those that maximise expected committed tokens per second. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul

from paceline.speculation.cost_table import KNOTS, Costs


def _by_survival(survivals: Sequence[Sequence[float]]) -> list[tuple[float, int, int]]:
    """All drafts as (-survival, request, position), those that are most likely to be kept first."""
    return sorted((-s, i, j) for i, row in enumerate(survivals) for j, s in enumerate(row))


def _allot(drafts: Sequence[tuple[float, int, int]], requests: int) -> list[int]:
    """How many of these drafts each request has."""
    lengths = [0] * requests
    for _, i, _ in drafts:
        lengths[i] += 1
    return lengths


def best_lengths(
    survivals: Sequence[Sequence[float]],
    verify: Costs,
    draft: Callable[[int], float],
    other_rows: int = 0,
    found: Sequence[bool] = (),
    margin: float = 0.0,
) -> tuple[list[int], float]:
    """Draft lengths, one per request, that maximise expected committed tokens per second of the whole step, and how
    many times those of a plain step that is.

    survivals[i][j]: chance that draft j + 1 of request i is kept (never rising in j); its length is the most that may
    be drafted. draft: tokens drafted by all -> seconds, apart from the pass that verifies them. other_rows: rows of the
    pass that belong to others, prompts for the most part; each counts as a committed token, since it has to be computed
    once whatever the drafts do. found: requests whose drafts are at hand and take no time. Draft tokens are admitted in
    order of their survival, as many as make the ratio largest. margin: what it takes beyond the ratio of a plain step
    for drafts to be made at all, as a share of it.
    """
    rows = len(survivals) + other_rows
    order = _by_survival(survivals)
    plain = rows / verify.seconds(rows)
    best, best_rate = 0, (1.0 + margin) * plain
    expected, drawn = float(rows), 0
    for n, (negative, i, _) in enumerate(order, 1):
        expected -= negative
        drawn += not (found and found[i])
        rate = expected / ((draft(drawn) if drawn else 0.0) + verify.seconds(rows + n))
        if rate > best_rate:
            best, best_rate = n, rate
    return _allot(order[:best], len(survivals)), best_rate / plain if best else 1.0


def most_gain(rows: int, drafts: int, verify: Costs) -> float:
    """How many times as many tokens per second as a plain step of `rows` rows one with at most so many drafts could
    bring, were all of them right and made in no time. At least 1."""
    # costs are linear between knots, so that the rate is largest at one of them or at an end
    sizes = [knot for knot in KNOTS if rows < knot < rows + drafts]
    best = max(size / verify.seconds(size) for size in (rows, *sizes, rows + drafts))
    return best * verify.seconds(rows) / rows


def likeliest(survivals: Sequence[Sequence[float]], drafts: int) -> tuple[list[int], float]:
    """Draft lengths of so many drafts in all, those most likely to be kept, and how many will be on average."""
    order = _by_survival(survivals)[:drafts]
    return _allot(order, len(survivals)), -sum(negative for negative, _, _ in order)


def survivals_of(chances: Sequence[Sequence[float]], trust: float = 1.0) -> list[list[float]]:
    """Chance of each draft that it is kept together with those before it. trust: how many of the drafts that such
    chances promised came."""
    return [[min(1.0, trust * s) for s in accumulate(row, mul)] for row in chances]


def slot_worths(survival: Sequence[float], token_seconds: float, row_seconds: float) -> list[float]:
    """Seconds that each draft of a block saves: what a committed token takes, as likely as the draft is kept, less what
    its row costs; a draft for which that is too much is not verified, and saves nothing."""
    return [max(0.0, s * token_seconds - row_seconds) for s in survival]


def admitted(
    survivals: Sequence[Sequence[float]], verify: Costs, draft_seconds: float, other_rows: int = 0
) -> list[int]:
    """How many of the drafts of each request to verify, now that they are made and their chances known.

    survivals[i][j]: chance that draft j + 1 of request i is kept together with those before it, or that node of its
    tree, in the order in which nodes would be added. Maximises expected committed tokens over (draft_seconds + seconds
    of the pass): Algorithm 1 of DSpark (arXiv 2607.05147) without its early stop, which only sampling with the
    drafter's own noise needs. other_rows: as for `best_lengths`.
    """
    rows = len(survivals) + other_rows
    order = _by_survival(survivals)
    expected, best, best_rate = float(rows), 0, rows / (draft_seconds + verify.seconds(rows))
    for n, (negative, _, _) in enumerate(order, 1):
        expected -= negative
        rate = expected / (draft_seconds + verify.seconds(rows + n))
        if rate > best_rate:
            best, best_rate = n, rate
    return _allot(order[:best], len(survivals))
