"""Which drafts a step makes or verifies: those that maximise expected committed tokens per second. Pure functions;
the loops over drafts are native (`native/draft_lengths.cpp`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline import _native
from paceline.speculation.cost_table import KNOTS, Costs


def best_lengths(
    survivals: Sequence[Sequence[float]],
    verify: Costs,
    draft: Callable[[int], float] | float,
    other_rows: int = 0,
    found: Sequence[bool] = (),
    margin: float = 0.0,
) -> tuple[list[int], float]:
    """Draft lengths, one per request, that maximise expected committed tokens per second of the whole step, and how
    many times those of a plain step that is.

    survivals[i][j]: chance that draft j + 1 of request i is kept (never rising in j); its length is the most that may
    be drafted. draft: tokens drafted by all -> seconds, or seconds whatever their number, apart from the pass that
    verifies them. other_rows: rows of the pass that belong to others, prompts for the most part; each counts as a
    committed token, since it has to be computed once whatever the drafts do. found: requests whose drafts are at hand
    and take no time. Draft tokens are admitted in order of their survival, as many as make the ratio largest. margin:
    what it takes beyond the ratio of a plain step for drafts to be made at all, as a share of it.
    """
    rows, drafts = len(survivals) + other_rows, sum(map(len, survivals))
    made = drafts if not found else sum(len(row) for row, free in zip(survivals, found, strict=True) if not free)
    prices = [0.0, *map(draft, range(1, made + 1))] if callable(draft) else [draft] * (made + 1)
    return _native.best_lengths(survivals, rows, verify.several(rows, drafts), prices, found, margin)


def most_gain(rows: int, drafts: int, verify: Costs) -> float:
    """How many times as many tokens per second as a plain step of `rows` rows one with at most so many drafts could
    bring, were all of them right and made in no time. At least 1."""
    # costs are linear between knots, so that the rate is largest at one of them or at an end
    sizes = [knot for knot in KNOTS if rows < knot < rows + drafts]
    best = max(size / verify.seconds(size) for size in (rows, *sizes, rows + drafts))
    return best * verify.seconds(rows) / rows


def likeliest(survivals: Sequence[Sequence[float]], drafts: int) -> tuple[list[int], float]:
    """Draft lengths of so many drafts in all, those most likely to be kept, and how many will be on average."""
    return _native.likeliest(survivals, drafts)


def survivals_of(chances: Sequence[Sequence[float]], trust: float = 1.0) -> list[list[float]]:
    """Chance of each draft that it is kept together with those before it. trust: how many of the drafts that such
    chances promised came."""
    return _native.survivals_of(chances, trust)


def slot_worths(
    worths: Sequence[float],
    survivals: Sequence[Sequence[float]],
    verify: Costs,
    token_seconds: float,
    steps: float,
    rows: int,
) -> list[float]:
    """Seconds that each slot of a block saves on average over so many `steps`, from what it was thought to save
    (`worths`; of further slots, what the first block shows) and the drafts of some blocks, beside `rows` rows.

    A draft saves what a committed token takes, as likely as it is kept, less what its row costs more than a pass
    without it, all blocks having as many; a draft for which that is too much is not verified, and saves nothing. Rows
    are priced along the largest convex curve below the costs.
    """
    seconds = verify.several(rows, len(survivals) * max(map(len, survivals)))
    return _native.slot_worths(worths, survivals, seconds, token_seconds, steps)


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
    return _native.admitted(survivals, rows, verify.several(rows, sum(map(len, survivals))), draft_seconds)
