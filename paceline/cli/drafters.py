"""`paceline drafters`: which published drafter belongs to which model."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer

from paceline.cli import options as opt


def drafters(
    target: Annotated[str | None, typer.Argument(metavar="TEXT", help="Only pairs whose names hold this text.")] = None,
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
    for target in dict.fromkeys(row["target"] for row in rows):
        print(target)
        for row in rows:
            if row["target"] == target:
                drafts = f"{row['draft_tokens']} drafts" if row["draft_tokens"] else ""
                notes = ", ".join(filter(None, [drafts, row["note"], "*" if row["runs_here"] else ""]))
                print(f"    {row['drafter'] or '(in a collection)':<{width}}  {row['method']:<8} {notes}".rstrip())
    print("* this version runs the pair")


def known_pairs() -> list[dict[str, Any]]:
    """The published pairs; `runs_here` says whether this version has the target's family and the draft method."""
    from paceline.known_drafters import KNOWN_DRAFTERS
    from paceline.models.target import FAMILIES
    from paceline.speculation.config import METHODS

    return [
        asdict(pair) | {"runs_here": pair.family in FAMILIES and pair.method in METHODS and bool(pair.drafter)}
        for pair in KNOWN_DRAFTERS
    ]


def _mentions(row: dict[str, Any], text: str) -> bool:
    return text.lower() in f"{row['target']} {row['drafter']} {row['method']}".lower()
