"""From completions to figures: the RESULT rows, the IDS rows, and a table for the terminal.

Definitions (also in docs/bench.md): `decode_tok_s` = tokens after the first / time from first token to last,
both summed over prompts; `output_tok_s` = all tokens / time from request to last token; `speedup` = ratio of
`decode_tok_s` to the arm that drafts nothing; `identical` = all completions equal those of the reference arm.
"""

from __future__ import annotations

import json
import statistics
from typing import TYPE_CHECKING, Any

from paceline.errors import PacelineError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from rich.table import Table

    from paceline.bench.runner import Completion

RESULT_KEYS = (
    "dataset",
    "num_speculative_tokens",
    "concurrency",
    "completed",
    "failed",
    "output_tokens",
    "output_tok_s",
    "decode_tok_s",
    "mean_tpot_ms",
    "mean_ttft_ms",
    "speedup",
    "identical",
    "spec_decode",
)
WHOLE_NAME = 12  # characters of a set's name that a table always shows in one line


def result_rows(
    dataset: str, completions: Sequence[Sequence[Completion]], concurrency: int = 1
) -> list[dict[str, Any]]:
    """One RESULT row per arm of `completions` ([prompt][arm], arms in one order)."""
    arms = [completion.num_speculative_tokens for completion in completions[0]]
    columns = [[row[arm] for row in completions] for arm in range(len(arms))]
    reference = arms.index(0) if 0 in arms else 0
    rows = [_arm_row(dataset, arm, concurrency, column) for arm, column in zip(arms, columns, strict=True)]
    baseline = rows[reference]["decode_tok_s"] if 0 in arms else None
    for row, column in zip(rows, columns, strict=True):
        if baseline and row["decode_tok_s"]:
            row["speedup"] = row["decode_tok_s"] / baseline
        if len(arms) > 1:
            row["identical"] = all(
                mine.same_output(theirs) for mine, theirs in zip(column, columns[reference], strict=True)
            )
    return rows


def _arm_row(dataset: str, arm: int, concurrency: int, column: list[Completion]) -> dict[str, Any]:
    from paceline.speculation.stats import SpecDecodeStats

    good = [completion for completion in column if completion.error is None]
    several = [completion for completion in good if len(completion.token_ids) > 1 and completion.decode_s > 0]
    tokens = sum(len(completion.token_ids) for completion in good)
    stats = SpecDecodeStats.total(c.stats for c in good if c.stats is not None)
    values = (
        dataset,
        arm,
        concurrency,
        len(good),
        len(column) - len(good),
        tokens,
        _ratio(tokens, sum(completion.wall_s for completion in good)),
        _ratio(
            sum(len(completion.token_ids) - 1 for completion in several),
            sum(completion.decode_s for completion in several),
        ),
        _mean(1e3 * completion.decode_s / (len(completion.token_ids) - 1) for completion in several),
        _mean(1e3 * completion.ttft_s for completion in good),
        None,
        None,
        stats.as_dict(),
    )
    return dict(zip(RESULT_KEYS, values, strict=True))


def output_rows(completions: Sequence[Sequence[Completion]], dataset: str | None = None) -> Iterable[dict[str, Any]]:
    """IDS rows, prompt by prompt; logprobs as hex floats so that equality means equality of bits.

    A row carries the prompt's other keys; where one has the name of a field of ours, ours stands. `dataset`
    is added when given (a run over several sets), `error` where the request failed.
    """
    for row in completions:
        for completion in row:
            fields: dict[str, Any] = {
                "index": completion.prompt.index,
                "num_speculative_tokens": completion.num_speculative_tokens,
                "token_ids": completion.token_ids,
                "logprobs": [value.hex() for value in completion.logprobs or ()],
                "finish_reason": completion.finish_reason,
            }
            if dataset is not None:
                fields["dataset"] = dataset
            if completion.error is not None:
                fields["error"] = completion.error
            yield {**completion.prompt.extra, **fields}


def result_table(rows: Sequence[dict[str, Any]]) -> Table:
    """The RESULT rows for a terminal of 80 columns or more."""
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
        drafted = bool(spec["num_drafts"])
        table.add_row(
            "" if row["dataset"] == previous else name,
            str(row["num_speculative_tokens"]),
            f"{row['completed']}" + (f" of {row['completed'] + row['failed']}" if row["failed"] else ""),
            str(row["output_tokens"]),
            _show(row["decode_tok_s"], ".1f"),
            _show(row["mean_tpot_ms"], ".2f"),
            _show(row["mean_ttft_ms"], ".0f"),
            _show(row["speedup"], ".2f", "x"),
            _show(spec["acceptance_length"] if drafted else None, ".2f"),
            _show(spec["acceptance_rate"] if drafted else None, ".1%"),
            {None: "-", True: "yes", False: "[bold red]NO[/]"}[row["identical"]],
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
    _write(path, json.dumps(value, indent=2) + "\n")


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """One JSON object a line, whole or not at all."""
    _write(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def _write(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    try:
        if not path.is_file() and path.exists():  # a device or pipe, such as /dev/stdout
            path.write_text(text, encoding="utf-8")
            return
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise PacelineError(f"cannot write {path}: {error.strerror or error}") from None


def _ratio(amount: float, seconds: float) -> float | None:
    return amount / seconds if seconds > 0 else None


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.fmean(found) if found else None


def _show(value: float | None, spec: str, unit: str = "") -> str:
    return "-" if value is None else format(value, spec) + unit
