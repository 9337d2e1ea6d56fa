"""The report's content, once for all formats: titles, a sentence, a table, and a plot where one says more."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from paceline.bench import charts
from paceline.bench.costmodel import choice_rows
from paceline.bench.report import arm_label, warning_lines
from paceline.bench.summary import summary_rows

MEAN = "mean"
Row = dict[str, Any]


@dataclass(slots=True)
class Study:
    """Everything a report is made of. facts: label -> value, shown first. rounds: from `profile`; predictions: from
    `costmodel`. price: per hour of this machine, in any currency. synthetic: acceptance or weights are not real."""

    facts: dict[str, str]
    rows: list[Row]
    rounds: list[Row] = field(default_factory=list)
    predictions: list[Row] = field(default_factory=list)
    price: float | None = None
    synthetic: bool = False

    def as_dict(self) -> dict[str, Any]:
        """The JSON report."""
        return {
            "facts": self.facts,
            "synthetic": self.synthetic,
            "price_per_hour": self.price,
            "results": self.rows,
            "rounds": self.rounds,
            "predictions": self.predictions,
            "choices": choice_rows(self.predictions),
        }


@dataclass(slots=True)
class Section:
    title: str
    text: str
    header: list[str]
    rows: list[list[str]]
    svg: str = ""


def sections(study: Study) -> list[Section]:
    """In reading order; a section whose figures were not measured is left out."""
    makers: Sequence[Callable[[Study], Section | None]] = (
        _summary,
        _speedup,
        _concurrency,
        _cost,
        _acceptance,
        _survival,
        _conditional,
        _accepted,
        _rounds,
        _lengths,
        _choices,
        _warnings,
    )
    return [section for make in makers if (section := make(study)) is not None]


def _first(study: Study) -> list[Row]:
    low = min((row["concurrency"] for row in study.rows), default=1)
    return [row for row in study.rows if row["concurrency"] == low]


def _names(rows: Sequence[Row], key: str) -> list[str]:
    return list(dict.fromkeys(arm_label(row) if key == "arm" else str(row[key]) for row in rows))


def _drafting(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["spec_decode"]["num_drafts"]]


def _summary(study: Study) -> Section | None:
    rows = summary_rows(study.rows, study.predictions)
    return Section("In short", "", ["", ""], rows) if rows else None


def _speedup(study: Study) -> Section | None:
    rows = _first(study)
    sets, arms = _names(rows, "dataset"), _names(rows, "arm")
    ratio = "speedup" if rows and rows[0]["concurrency"] == 1 else "output_speedup"
    cell = {(row["dataset"], arm_label(row)): row for row in rows}
    columns = []
    for arm in arms:
        values = [cell[s, arm][ratio] if (s, arm) in cell else None for s in sets]
        columns.append((_k(arm), [*values, _mean(values)] if len(sets) > 1 else values))
    groups = [_short(s) for s in sets] + ([MEAN] if len(sets) > 1 else [])
    table = [
        [
            _short(row["dataset"]),
            arm_label(row),
            _n(row["decode_tok_s" if ratio == "speedup" else "output_tok_s"], ".1f"),
            _n(row[ratio], ".2f"),
            _range(row, ratio),
            _n(row["mean_tpot_ms"], ".2f"),
            _n(row["mean_ttft_ms"], ".0f"),
            {None: "-", True: "yes", False: "NO"}[row["identical"]],
        ]
        for row in rows
    ]
    for arm, (_, values) in zip(arms, columns, strict=True):
        if len(sets) > 1:
            table.append([MEAN, arm, "", _n(values[-1], ".2f"), "", "", "", ""])
    drawn = [i for i, (_, values) in enumerate(columns) if any(v is not None for v in values)]
    shown = [columns[i] for i in drawn]
    svg = charts.bars(groups, shown, unit="x plain", line=1.0, show=".2f", colours=drawn) if drawn else ""
    repeats = rows[0]["repeats"] if rows else 0
    speed = "Decoding speed" if ratio == "speedup" else "Throughput of all requests together, prompts included,"
    return Section(
        "Speed-up per set",
        f"{speed} against plain decoding at concurrency {rows[0]['concurrency'] if rows else 1}; "
        + (f"medians of {repeats} interleaved repeats, and their range." if repeats > 1 else "one repeat."),
        ["set", "k", "tok/s", "speed-up", "range", "TPOT ms", "TTFT ms", "same outputs"],
        table,
        svg,
    )


def _concurrency(study: Study) -> Section | None:
    levels = sorted({row["concurrency"] for row in study.rows})
    if len(levels) < 2:
        return None
    rows = study.rows
    table = [
        [
            _short(row["dataset"]),
            str(row["concurrency"]),
            arm_label(row),
            _n(row["output_tok_s"], ".1f"),
            _n(row["output_speedup"], ".2f"),
            _range(row, "output_speedup"),
            _n(row["decode_tok_s"], ".1f"),
            _n(row["mean_ttft_ms"], ".0f"),
            {None: "-", True: "yes", False: "NO"}[row["identical"]],
        ]
        for row in rows
    ]
    series, colours = [], []
    for i, arm in enumerate(_names(rows, "arm")):
        mine = [row for row in rows if arm_label(row) == arm and row["num_speculative_tokens"] != 0]
        values = [_mean([r["output_speedup"] for r in mine if r["concurrency"] == c]) for c in levels]
        if sum(v is not None for v in values) > 1:
            series.append((_k(arm), values))
            colours.append(i)
    label = "requests at once"
    svg = charts.lines(levels, series, unit="x plain", x_label=label, line=1.0, log_x=True, colours=colours)
    return Section(
        "Speed-up against concurrency",
        "Throughput of all requests together, prompts included, against plain decoding at the same concurrency; the "
        "plot shows the mean of the sets. The more requests share a pass, the less there is to gain.",
        ["set", "at once", "k", "all tok/s", "ratio", "range", "each tok/s", "TTFT ms", "same outputs"],
        table,
        svg if series else "",
    )


def _cost(study: Study) -> Section | None:
    rows = [row for row in study.rows if row["output_tok_s"] is not None]
    if not rows:
        return None
    header = ["set", "at once", "k", "cost per token saved"]
    header += ["per million tokens"] if study.price is not None else []
    table = []
    for row in rows:
        ratio = row["speedup"] if row["concurrency"] == 1 else row["output_speedup"]
        line = [
            _short(row["dataset"]),
            str(row["concurrency"]),
            arm_label(row),
            _n(1 - 1 / ratio if ratio else None, ".0%"),
        ]
        if study.price is not None:
            line.append(_n(study.price / 3600 / row["output_tok_s"] * 1e6, ".3f"))
        table.append(line)
    return Section(
        "Cost per token",
        "1 - 1 / speed-up: of decoding with one request at a time, of the throughput with several."
        + (
            f" Per million output tokens at {study.price:g} per hour of this machine, from the throughput: prompts "
            "included."
            if study.price is not None
            else ""
        ),
        header,
        table,
    )


def _acceptance(study: Study) -> Section | None:
    rows = _drafting(_first(study))
    if not rows:
        return None
    keys = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    table = []
    for row in rows:
        spec = row["spec_decode"]
        table.append(
            [
                _short(row["dataset"]),
                arm_label(row),
                *(f"{spec[key]:,}" for key in keys),
                _n(spec["acceptance_rate"], ".2%"),
                _n(spec["acceptance_length"], ".2f"),
                _n(spec["fully_rejected_rate"], ".0%"),
                _n(spec["fully_accepted_rate"], ".0%"),
            ]
        )
    return Section(
        "Acceptance",
        "Counted before a stop or length limit cuts a block. Length: tokens per pass that had drafts, the model's own "
        "included.",
        ["set", "k", "drafts", "drafted", "accepted", "rate", "length", "all rejected", "all accepted"],
        table,
    )


def _longest(study: Study) -> list[tuple[str, Row]]:
    """(name, row) of the longest fixed drafts of each set; with several such arms, each by its own name."""
    rows = [r for r in _drafting(_first(study)) if isinstance(r["num_speculative_tokens"], int | None)]
    most: dict[str, int] = {}
    for row in rows:
        most[row["dataset"]] = max(most.get(row["dataset"], 1), _slots(row))
    rows = [row for row in rows if _slots(row) == most[row["dataset"]]]
    several, sets = len(_names(rows, "arm")) > 1, len(_names(rows, "dataset")) > 1
    names = []
    for row in rows:
        parts = [_short(row["dataset"])] if sets or not several else []
        names.append(", ".join([*parts, _k(arm_label(row))] if several else parts))
    return list(zip(names, rows, strict=True))


def _colours(study: Study, rows: Sequence[Row]) -> list[int]:
    """Of one set: its arms', as in the other plots; of several: 0, 1, ..."""
    if len(_names(rows, "dataset")) > 1 or len(_names(rows, "arm")) == 1:
        return list(range(len(rows)))
    arms = _names(_first(study), "arm")
    return [arms.index(arm_label(row)) for row in rows]


def _slots(row: Row) -> int:
    return len(row["spec_decode"]["per_position_acceptance_rates"])


def _positions(study: Study, key: str, title: str, text: str) -> Section | None:
    found = [(name, row) for name, row in _longest(study) if row["spec_decode"][key]]
    if not found:
        return None
    most = max(len(row["spec_decode"][key]) for _, row in found)
    series = [
        (name, [*row["spec_decode"][key], *[None] * (most - len(row["spec_decode"][key]))]) for name, row in found
    ]
    table = [
        [_short(row["dataset"]), arm_label(row), *(_n(v, ".1%") for v in values)]
        for (_, row), (_, values) in zip(found, series, strict=True)
    ]
    colours = _colours(study, [row for _, row in found])
    svg = charts.lines(list(range(most)), series, unit="share", x_label="position in the block", colours=colours)
    return Section(title, text, ["set", "k", *map(str, range(most))], table, svg)


def _survival(study: Study) -> Section | None:
    return _positions(
        study,
        "per_position_acceptance_rates",
        "Survival per position",
        "Share of drafts accepted up to and including each position, 0 being the first; of the longest fixed drafts.",
    )


def _conditional(study: Study) -> Section | None:
    return _positions(
        study,
        "conditional_acceptance_rates",
        "Conditional acceptance per position",
        "The same among drafts that were accepted up to the position before.",
    )


def accepted_shares(spec: dict[str, Any]) -> list[float]:
    """Share of drafts of which 0, 1, ... tokens were accepted."""
    alive = [1.0, *spec["per_position_acceptance_rates"], 0.0]
    return [a - b for a, b in pairwise(alive)]


def _accepted(study: Study) -> Section | None:
    rows = _longest(study)
    most = max((_slots(row) for _, row in rows), default=0)
    rows = [(name, row) for name, row in rows if _slots(row) == most]
    if not rows or not most:
        return None
    shares = [(name, accepted_shares(row["spec_decode"])) for name, row in rows]
    table = [
        [
            _short(row["dataset"]),
            arm_label(row),
            *(_n(v, ".1%") for v in values),
            _n(row["spec_decode"]["fully_rejected_rate"], ".1%"),
            _n(row["spec_decode"]["fully_accepted_rate"], ".1%"),
        ]
        for (_, row), (_, values) in zip(rows, shares, strict=True)
    ]
    groups = [str(i) for i in range(most + 1)]
    percent = [(name, [100 * v for v in values]) for name, values in shares]
    return Section(
        "Accepted tokens per block",
        f"How many of a block's drafts were kept, of the longest fixed drafts ({most} tokens): none is a block fully "
        "rejected.",
        ["set", "k", *groups, "fully rejected", "fully accepted"],
        table,
        charts.bars(groups, percent, unit="% of blocks", colours=_colours(study, [row for _, row in rows])),
    )


PARTS = {
    "draft": "drafting",
    "pass": "verify pass",
    "sampling": "sampling",
    "context": "drafter's context",
    "rest": "the rest",
}


def _rounds(study: Study) -> Section | None:
    if not study.rounds:
        return None
    table = [
        [
            _k(row["arm"]),
            str(row["steps"]),
            *(_n(row[part], ".2f") for part in PARTS),
            _n(sum(row[p] for p in PARTS), ".2f"),
            _n(row.get("floor"), ".2f"),
            _n(row["floor"] / sum(row[p] for p in PARTS) if "floor" in row else None, ".0%"),
        ]
        for row in study.rounds
    ]
    series = [(label, [row[part] for row in study.rounds]) for part, label in PARTS.items()]
    return Section(
        "Where a round's time goes",
        "Milliseconds per step with one request, from a run of its own with clocks around the parts (context: the "
        "target's hidden states into the drafter's cache; the rest: scheduling, stops, text). "
        "Floor: what memory and arithmetic allow the two passes.",
        ["k", "steps", *PARTS.values(), "sum", "floor", "floor / sum"],
        table,
        charts.bars([_k(row["arm"]) for row in study.rounds], series, unit="ms", stacked=True),
    )


def _lengths(study: Study) -> Section | None:
    if not study.predictions:
        return None
    found = study.predictions
    lengths = sorted({row["k"] for row in found})
    series, dashed = [], []
    for name in _names(found, "dataset"):
        mine = {row["k"]: row for row in found if row["dataset"] == name}
        short = _short(name)
        series.append((short, [mine[k]["measured"] if k in mine else None for k in lengths]))
        series.append((f"{short} predicted", [mine[k]["predicted"] if k in mine else None for k in lengths]))
        dashed.append(f"{short} predicted")
    table = [
        [_short(row["dataset"]), str(row["k"]), _n(row["measured"], ".2f"), _n(row["predicted"], ".2f")]
        for row in found
    ]
    return Section(
        "Speed-up against draft length",
        "Measured points, and (1 + sum of survival) / (T_draft + T_verify) from the measured survival and step times.",
        ["set", "k", "measured", "predicted"],
        table,
        charts.lines(lengths, series, unit="x plain", x_label="draft length", line=1.0, dashed=dashed),
    )


def _choices(study: Study) -> Section | None:
    choices = choice_rows(study.predictions)
    if not choices:
        return None
    table = [
        [
            _short(row["dataset"]),
            str(row["predicted_k"]),
            f"{row['measured']:.2f}",
            str(row["best_k"]),
            f"{row['best_measured']:.2f}",
            f"{row['share_of_best']:.2f}",
            str(row["predicted_any_k"]),
        ]
        for row in choices
    ]
    return Section(
        "What the cost model would choose",
        "Of the lengths that were measured, the one with the best prediction; its measured speed against that of the "
        "fastest. The last column is its choice among all lengths.",
        ["set", "predicted best k", "its speed-up", "fastest k", "its speed-up", "share of the fastest", "of all k"],
        table,
    )


def _warnings(study: Study) -> Section | None:
    lines = warning_lines(study.rows)
    return Section("What speaks against these figures", "", ["warning"], [[line] for line in lines]) if lines else None


def _k(arm: str) -> str:
    return f"k = {arm}" if arm.isdigit() else arm


def _short(name: str) -> str:
    return name.rpartition("/")[2]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.fmean(known) if known else None


def _range(row: Row, key: str) -> str:
    low_high = row["spread"].get(key)
    return "-" if low_high is None else f"{low_high[0]:.2f} to {low_high[1]:.2f}"


def _n(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)
