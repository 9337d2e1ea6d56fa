"""`paceline drafters`: which published drafter belongs to which model."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer

from paceline.cli import options as opt


def drafters(
    target: Annotated[
        str | None, typer.Argument(metavar="TEXT", help="Only pairs whose names hold this text.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the list as JSON.", rich_help_panel=opt.OUTPUT_PANEL)
    ] = False,
) -> None:
    """List models and the drafters that are published for them.

    Use one with:  --model MODEL --speculative-config '{"method": METHOD, "model": DRAFTER}'
    """
    rows = [row for row in known_pairs() if target is None or _mentions(row, target)]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    width = max((len(row["drafter"] or "") for row in rows), default=0)
    previous = None
    for row in rows:
        if row["target"] != previous:
            print(row["target"])
        previous = row["target"]
        notes = [f"{row['draft_tokens']} drafts"] if row["draft_tokens"] else []
        notes += [row["note"]] if row["note"] else []
        notes += [] if row["runs_here"] else ["not in this version"]
        drafter = row["drafter"] or "(in a collection)"
        print(f"    {drafter:<{width}}  {row['method']:<8} {', '.join(notes)}".rstrip())


def known_pairs() -> list[dict[str, Any]]:
    """Shipped pairs, then the published ones; `runs_here` says whether this version can run a pair."""
    from paceline.known_drafters import KNOWN_DRAFTERS

    return [asdict(pair) | {"runs_here": False} for pair in KNOWN_DRAFTERS]


def _mentions(row: dict[str, Any], text: str) -> bool:
    return text.lower() in f"{row['target']} {row['drafter']} {row['method']}".lower()
