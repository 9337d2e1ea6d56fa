"""The RESULT rows for a terminal, and files that are written whole or not at all."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from paceline.errors import PacelineError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from rich.table import Table

SAME = {None: "-", True: "yes", False: "[bold red]NO[/]"}
WHOLE_NAME = 12  # characters of a set's name that a table always shows in one line


def result_table(rows: Sequence[dict[str, Any]]) -> Table:
    """The RESULT rows for a terminal of 80 columns or more."""
    return _serial_table(rows) if all(row["concurrency"] == 1 for row in rows) else _concurrent_table(rows)


def _concurrent_table(rows: Sequence[dict[str, Any]]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(
        box=box.SIMPLE_HEAD,
        padding=0,
        caption="c: requests at once. k: draft length. all: tokens per second of all requests together, each: of one "
        "while it is decoded; x: ratios to k = 0. TPOT, TTFT: ms per token after the first, ms to the first. length: "
        "tokens per pass that had drafts. rate: share of drafts accepted. same: outputs equal those of k = 0.",
        caption_justify="left",
    )
    names = [row["dataset"].rpartition("/")[2] for row in rows]
    table.add_column("set", overflow="fold", no_wrap=max(map(len, names), default=0) <= WHOLE_NAME)
    for heading in ("c", "k", "all", "x", "each", "x", "TPOT", "TTFT", "length", "rate"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("same", no_wrap=True)
    previous: tuple[Any, ...] = ()
    for row, name in zip(rows, names, strict=True):
        place = row["dataset"], row["concurrency"]
        if previous and previous != place:
            table.add_section()
        spec = row["spec_decode"]
        length = spec["acceptance_length"] if spec["num_drafts"] else None
        rate = spec["acceptance_rate"] if spec["num_draft_tokens"] else None
        table.add_row(
            "" if previous == place else name,
            "" if previous == place else str(row["concurrency"]),
            arm_label(row),
            _show(row["output_tok_s"], ".1f"),
            _show(row["output_speedup"], ".2f"),
            _show(row["decode_tok_s"], ".1f"),
            _show(row["speedup"], ".2f"),
            _show(row["mean_tpot_ms"], ".1f"),
            _show(row["mean_ttft_ms"], ".0f"),
            _show(length, ".2f"),
            _show(rate, ".0%"),
            SAME[row["identical"]],
        )
        previous = place
    return table


def arm_label(row: dict[str, Any]) -> str:
    """What a table shows under k: the draft length, or the name of an arm that has one."""
    length = row["num_speculative_tokens"]
    own = row.get("arm", "")
    return own if own and own not in (f"k = {length}", length) else str(length)


def warning_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What to know before quoting the figures, a line each."""
    out = []
    for row in rows:
        where = f"{row['dataset']}, concurrency {row['concurrency']}, {row['arm']}"
        if row["failed"]:
            out.append(f"{where}: {row['failed']} of {row['completed'] + row['failed']} requests failed")
        out += [f"{where}: {warning}" for warning in row["warnings"]]
    return out


def choice_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """How often an adaptive arm chose each draft length: `humaneval, concurrency 1: 0 in 12 %, 4 in 60 %, ...`."""
    out = []
    for row in rows:
        chosen = row["chosen_draft_lengths"]
        if chosen:
            total = sum(chosen.values())
            shares = ", ".join(f"{k} in {n / total:.0%}" for k, n in chosen.items())
            out.append(f"{row['dataset']}, concurrency {row['concurrency']}, drafts of {row['arm']}: {shares}")
    return out


def _serial_table(rows: Sequence[dict[str, Any]]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(
        box=box.SIMPLE_HEAD,
        padding=0,  # with a rate of 100.0% a wider table would not fit 80 columns
        caption="k: draft length. tok/s: decoding speed. TPOT, TTFT: ms per token after the first, ms to the first. "
        "length: tokens per pass that had drafts. rate: share of drafts accepted. same: outputs equal those of k = 0.",
        caption_justify="left",
    )
    names = [row["dataset"].rpartition("/")[2] for row in rows]
    table.add_column("set", overflow="fold", no_wrap=max(map(len, names), default=0) <= WHOLE_NAME)
    for heading in ("k", "done", "tokens", "tok/s", "TPOT", "TTFT", "speed-up", "length", "rate"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("same", no_wrap=True)
    previous = None
    for row, name in zip(rows, names, strict=True):
        if previous not in (None, row["dataset"]):
            table.add_section()
        spec = row["spec_decode"]
        length = spec["acceptance_length"] if spec["num_drafts"] else None
        rate = spec["acceptance_rate"] if spec["num_draft_tokens"] else None
        table.add_row(
            "" if row["dataset"] == previous else name,
            arm_label(row),
            f"{row['completed']}" + (f" of {row['completed'] + row['failed']}" if row["failed"] else ""),
            str(row["output_tokens"]),
            _show(row["decode_tok_s"], ".1f"),
            _show(row["mean_tpot_ms"], ".2f"),
            _show(row["mean_ttft_ms"], ".0f"),
            _show(row["speedup"], ".2f", "x"),
            _show(length, ".2f"),
            _show(rate, ".1%"),
            SAME[row["identical"]],
        )
        previous = row["dataset"]
    return table


def check_writable(path: Path, option: str) -> None:
    """Refuse a path that cannot be written before minutes of measuring, not after."""
    if path.is_dir():
        raise PacelineError(f"{option} {path}: is a folder; name a file")
    if not path.parent.is_dir():
        raise PacelineError(f"{option} {path}: there is no folder {path.parent}; make it first")


def write_json(path: Path, value: Any) -> None:
    """Write `value` whole or not at all."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """One JSON object a line, whole or not at all."""
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    part = path.with_name(path.name + ".part")
    try:
        if not path.is_file() and path.exists():  # a device or pipe, such as /dev/stdout
            path.write_text(text, encoding="utf-8")
            return
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise PacelineError(f"cannot write {path}: {error.strerror or error}") from None


def _show(value: float | None, spec: str, unit: str = "") -> str:
    return "-" if value is None else format(value, spec) + unit
