"""What a report says first: the fastest drafts, what they cost and bring, and whether the text stayed the same."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.bench.costmodel import choice_rows
from paceline.bench.report import arm_label, warning_lines


def summary_rows(rows: Sequence[Mapping[str, Any]], predictions: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """(label, text) pairs about the lowest concurrency that was measured, and about all outputs."""
    low = min((row["concurrency"] for row in rows), default=1)
    ratio = "speedup" if low == 1 else "output_speedup"
    by_arm: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["concurrency"] == low and row["num_speculative_tokens"] != 0 and row[ratio] is not None:
            by_arm.setdefault(arm_label(dict(row)), []).append(row)
    found = []
    if by_arm:
        arm = max(by_arm, key=lambda name: statistics.fmean(row[ratio] for row in by_arm[name]))
        mine = by_arm[arm]
        mean = statistics.fmean(row[ratio] for row in mine)
        each = ", ".join(f"{row['dataset'].rpartition('/')[2]} {row[ratio]:.2f}x" for row in mine)
        name = f"k = {arm}" if arm.isdigit() else arm
        found.append(["fastest on average", f"{name}: {mean:.2f}x ({each})" if len(mine) > 1 else f"{name}: {each}"])
        lengths = [row["spec_decode"]["acceptance_length"] for row in mine if row["spec_decode"]["num_drafts"]]
        if lengths and None not in lengths:
            found.append(["tokens per pass", f"{statistics.fmean(lengths):.2f}, of passes with drafts"])
    compared = [row for row in rows if row["identical"] is not None]
    if compared:
        differing = sum(row["identical"] is False for row in compared)
        same = "the same token ids in every arm, repeat and concurrency"
        found.append(["outputs", f"DIFFER in {differing} of {len(compared)} rows" if differing else same])
    choices = choice_rows(predictions)
    if choices:
        worst = min(choice["share_of_best"] for choice in choices)
        found.append(
            ["cost model", f"the length that it predicts reaches at least {worst:.2f} of the fastest measured"]
        )
    warnings = len(warning_lines([dict(row) for row in rows]))
    if warnings:
        found.append(["warnings", f"{warnings}, listed at the end: what must not be concluded from these figures"])
    return found
