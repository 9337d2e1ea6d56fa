"""`paceline bench accuracy`: HumanEval pass@1 and GSM8K exact match, with and without drafts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli import options as opt
from paceline.cli.arms import Opened, open_lengths, open_servers, open_specs, parse_arm
from paceline.errors import PacelineError


def accuracy(
    context: typer.Context,
    model: opt.ModelOption = opt.DEFAULT_MODEL,
    tasks: Annotated[
        str, typer.Option("--tasks", "--dataset", "-d", metavar="TASKS", help="humaneval, gsm8k, or both.")
    ] = "humaneval,gsm8k",
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit", "--num-prompts", min=1, metavar="N", help="The first N problems of each. Default: all."
        ),
    ] = None,
    output_len: Annotated[
        int, typer.Option("--output-len", min=1, metavar="N", help="At most N tokens an answer.")
    ] = 512,
    num_speculative_tokens: Annotated[
        str,
        typer.Option(
            "--num-speculative-tokens",
            "-k",
            metavar="KS",
            help="Draft lengths, one arm each: 0 for plain decoding, fixed numbers, auto for the length that is "
            "chosen at each step.",
            rich_help_panel=opt.SPECULATION_PANEL,
        ),
    ] = "0,auto",
    speculative_config: opt.SpeculativeConfigOption = None,
    concurrency: Annotated[
        int, typer.Option("--concurrency", "-c", min=1, metavar="N", help="Problems that are answered at once.")
    ] = 8,
    base_url: Annotated[
        list[str] | None,
        typer.Option("--base-url", metavar="URL", help="Ask an OpenAI-compatible server instead; several times: each."),
    ] = None,
    arm: Annotated[
        list[str] | None,
        typer.Option("--arm", metavar="JSON", help="Configurations to compare in place of -k, as in `paceline bench`."),
    ] = None,
    temperature: opt.TemperatureOption = 0.0,
    seed: opt.RaceSeedOption = None,
    dtype: opt.DtypeOption = "auto",
    quantization: opt.QuantizationOption = opt.DEFAULT_QUANTIZATION,
    kv_cache_dtype: opt.KVCacheDtypeOption = opt.DEFAULT_KV_CACHE_DTYPE,
    threads: opt.ThreadsOption = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Write the scores as JSON.", rich_help_panel=opt.OUTPUT_PANEL
        ),
    ] = None,
    save_outputs: Annotated[
        Path | None,
        typer.Option(
            "--save-outputs",
            metavar="FILE",
            help="Write every answer, what was taken from it and the verdict, one JSON line each.",
            rich_help_panel=opt.OUTPUT_PANEL,
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print the scores as JSON instead of a table.", rich_help_panel=opt.OUTPUT_PANEL),
    ] = False,
) -> None:
    """Score a model's answers: HumanEval pass@1 and GSM8K exact match, one answer per problem.

    Arms of one engine must give the same tokens, so speculation cannot change a score; both are shown.

    HumanEval RUNS CODE THAT THE MODEL WROTE: without network, writing or other processes, with hard limits.
    """
    if temperature > 0 and seed is None:
        raise typer.BadParameter("a temperature above 0 needs a seed", param_hint="--seed")
    lengths = opt.parse_lengths(num_speculative_tokens, "--num-speculative-tokens")
    config = opt.parse_speculative_config(speculative_config)
    engine = opt.EngineOptions(
        model, dtype, threads, None, config, any(lengths), quantization, max(32, concurrency), kv_cache_dtype
    )
    specs = [parse_arm(text, engine) for text in arm or ()]
    own_lengths = opt.given(context, "num_speculative_tokens")
    if specs and (base_url or own_lengths):
        raise typer.BadParameter("names its arms itself; drop -k and --base-url, or --arm", param_hint="--arm")
    params = opt.sampling_params(temperature=temperature, seed=seed, max_tokens=output_len)
    from paceline.bench import report, sandbox
    from paceline.bench.datasets import DatasetError, load_dataset
    from paceline.bench.runner import measure, steps
    from paceline.bench.tasks import load_task, sample_rows, score_rows
    from paceline.cli.engine import note
    from paceline.cli.progress import step_progress

    for path, option in ((output, "--output"), (save_outputs, "--save-outputs")):
        if path is not None:
            report.check_writable(path, option)
    with note("Fetching problems ..."):
        try:
            chosen = [load_task(name.strip()) for name in tasks.split(",")]
        except DatasetError as error:
            raise typer.BadParameter(str(error), param_hint="--tasks") from None
        problems = {task.name: load_dataset(task.name, limit) for task in chosen}
    if specs:
        opened = open_specs(specs)
    elif base_url:
        named = opt.given(context, "model")
        opened = open_servers(base_url, model if named else None, lengths if own_lengths else None)
    else:
        opened = open_lengths(engine, lengths)
    rows: list[dict[str, Any]] = []
    samples: list[dict[str, Any]] = []
    for task in chosen:
        prompts = problems[task.name]
        with step_progress(f"Answering {task.name}", steps(prompts, len(opened.arms), concurrency, 1)) as advance:
            found = measure(task.name, prompts, opened.arms, params, concurrency=concurrency, on_step=advance)
        with step_progress(f"Judging {task.name}", len(prompts) * len(opened.arms)) as advance:
            rows += score_rows(task, found, advance)
        samples += sample_rows(task, found)
    if output is not None:
        report.write_json(output, rows)
    if save_outputs is not None:
        report.write_jsonl(save_outputs, samples)
    if as_json:
        print(json.dumps(rows))
    else:
        print(*opened.lines, sep="\n")
        _show(rows)
        if "humaneval" in problems:
            print(f"Programs ran in {sandbox.describe()}.")
    _fail_on(rows, opened)


def _show(rows: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from paceline.bench.report import SAME, arm_label

    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        caption="same: token ids equal those of the first arm.",
        caption_justify="left",
    )
    for heading in ("task", "metric", "k", "score", "±", "solved", "verdicts", "cut", "same"):
        left = heading in ("task", "metric", "verdicts", "same")
        table.add_column(heading, justify="left" if left else "right", no_wrap=heading != "verdicts")
    previous = None
    for row in rows:
        table.add_row(
            "" if row["task"] == previous else row["task"],
            "" if row["task"] == previous else row["metric"],
            arm_label(row),
            f"{row['score']:.1%}",
            "-" if row["stderr"] is None else f"{row['stderr']:.1%}",
            f"{row['correct']} of {row['total']}",
            ", ".join(f"{name} {count}" for name, count in row["verdicts"].items()),
            str(row["cut"]),
            SAME[row["identical"]],
        )
        previous = row["task"]
    Console(highlight=False).print(table)


def _fail_on(rows: list[dict[str, Any]], opened: Opened) -> None:
    """Requests that failed, or arms of one engine that disagree, must not pass for a score in a script."""
    from paceline.bench.figures import reference_arm

    failed = sum(row["verdicts"].get("request failed", 0) for row in rows)
    if failed:
        raise PacelineError(f"{opt.count(failed, 'request')} failed; --save-outputs FILE shows why")
    reference = opened.arms[reference_arm(opened.arms)].name
    differing = [row for row in rows if row["identical"] is False]
    bugs = [row for row in differing if opened.must_agree(row["arm"], reference)]
    if bugs:
        where = ", ".join(f"{row['task']} {row['arm']}" for row in bugs)
        raise PacelineError(f"outputs differ between arms ({where}). This is a bug; please report it")
    for row in differing:
        print(f"Warning: {row['task']}: answers of {row['arm']} differ from those of {reference}", file=sys.stderr)
