"""`paceline drafters`: which published drafter belongs to which model."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import options as opt
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.known_drafters import KnownDrafter


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
    if not rows:
        raise PacelineError(f"no known drafter or model mentions {target!r}; `paceline drafters` lists them all")
    if not as_json:
        print("\n".join(_listing(rows)))


def _listing(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The pairs target by target, those that run here first."""
    rows = sorted(rows, key=lambda row: not row["runs_here"])
    width = max(len(_short_name(row)) for row in rows)
    for target in dict.fromkeys(row["target"] for row in rows):
        yield target
        for row in rows:
            if row["target"] == target:
                drafts = f"up to {opt.count(row['draft_tokens'], 'draft')}" if row["draft_tokens"] else ""
                notes = ", ".join(filter(None, [drafts, row["note"]]))
                mark = "*" if row["runs_here"] else " "
                yield f"  {mark} {_short_name(row):<{width}}  {row['method']:<8} {notes}".rstrip()
    yield "* this version runs the pair"


def _short_name(row: dict[str, Any]) -> str:
    """The drafter as people know it: one in this package by its folder's name instead of its path."""
    from paceline.speculation.factory import SHIPPED

    path = Path(row["drafter"] or "")
    if path.parent == SHIPPED:
        return f"built-in {path.name}"
    return row["drafter"] or "(in a collection)"


def known_pairs() -> list[dict[str, Any]]:
    """Drafters in this package, then published ones; `runs_here`: this version has the target's family and method."""
    from paceline.known_drafters import KNOWN_DRAFTERS
    from paceline.models.target import FAMILIES
    from paceline.speculation.config import METHODS

    return [
        asdict(pair) | {"runs_here": pair.family in FAMILIES and pair.method in METHODS and pair.drafter is not None}
        for pair in (*_shipped(), *KNOWN_DRAFTERS)
    ]


def _shipped() -> Iterator[KnownDrafter]:
    """The drafters in this package, from their own configurations."""
    from paceline.known_drafters import KnownDrafter
    from paceline.speculation.factory import SHIPPED

    for path in sorted(SHIPPED.glob("*/config.json")):
        config = json.loads(path.read_text())
        target = config.get("paceline_target", {})
        block = config.get("dflash_config", {}).get("block_size") or config.get("block_size")
        yield KnownDrafter(
            target=target.get("name", path.parent.name),
            drafter=str(path.parent),
            method="dflash",
            family=target.get("model_type", ""),
            draft_tokens=block and block - 1,
            note="part of this package; used by default",
        )


def _mentions(row: dict[str, Any], text: str) -> bool:
    return text.lower() in f"{row['target']} {_short_name(row)} {row['method']}".lower()
