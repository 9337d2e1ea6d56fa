"""`paceline bench`: arms compared on prompt sets; `paceline bench kernels`: passes against their floors."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli import options as opt
from paceline.errors import PacelineError

bench_app = typer.Typer(
    invoke_without_command=True,
    help="Measure decoding with and without drafts on prompt sets, arms taken in turns.",
    rich_markup_mode="rich",
)

OutputOption = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="Write the figures as JSON to this file.",
        rich_help_panel=opt.OUTPUT_PANEL,
    ),
]
JsonOption = Annotated[
    bool,
    typer.Option("--json", help="Print the figures as JSON instead of a table.", rich_help_panel=opt.OUTPUT_PANEL),
]


@bench_app.callback()
def bench(
    context: typer.Context,
    model: opt.ModelOption = opt.DEFAULT_MODEL,
    dataset: Annotated[
        str,
        typer.Option(
            "--dataset",
            "-d",
            metavar="SETS",
            help="Prompt sets, with commas between them: humaneval, gsm8k, mt-bench (first turns), "
            'or a .jsonl file with rows {"prompt": text} or {"messages": [...]}.',
        ),
    ] = "humaneval,gsm8k,mt-bench",
    num_prompts: Annotated[
        int, typer.Option("--num-prompts", min=1, metavar="N", help="The first N prompts of each set.")
    ] = 20,
    output_len: Annotated[
        int,
        typer.Option(
            "--output-len",
            min=1,
            metavar="N",
            help="At most N new tokens; the model may end earlier (see --ignore-eos).",
        ),
    ] = 128,
    num_speculative_tokens: Annotated[
        str,
        typer.Option(
            "--num-speculative-tokens",
            "-k",
            metavar="KS",
            help="Draft lengths, one arm each, fixed; 0 is plain decoding, which the speed-up refers to.",
            rich_help_panel=opt.SPECULATION_PANEL,
        ),
    ] = "0,7",
    speculative_config: opt.SpeculativeConfigOption = None,
    concurrency: Annotated[
        int, typer.Option("--concurrency", metavar="N", help="Requests at once; this version measures one.")
    ] = 1,
    temperature: opt.TemperatureOption = 0.0,
    top_p: opt.TopPOption = 1.0,
    top_k: opt.TopKOption = 0,
    seed: opt.RaceSeedOption = None,
    ignore_eos: opt.IgnoreEosOption = False,
    dtype: opt.DtypeOption = "auto",
    quantization: opt.QuantizationOption = "none",
    threads: opt.ThreadsOption = None,
    output: OutputOption = None,
    save_outputs: Annotated[
        Path | None,
        typer.Option(
            "--save-outputs",
            metavar="FILE",
            help="Write every answer's token ids and logprobs (hex floats), one JSON line per prompt "
            "and arm; logprobs then also count in the comparison.",
            rich_help_panel=opt.OUTPUT_PANEL,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure decoding with and without drafts.

    Every prompt is decoded by each arm before the next prompt comes, and answers are compared token by token.

    Exit code 1 if an arm's answers differ from plain decoding or a request failed.
    """
    if context.invoked_subcommand is not None:
        _refuse_own_options(context)
        return
    if concurrency != 1:
        raise typer.BadParameter(
            f"{concurrency} is not supported; this version measures one request at a time",
            param_hint="--concurrency",
        )
    arms = opt.parse_ints(num_speculative_tokens, "--num-speculative-tokens", least=0)
    config = opt.parse_speculative_config(speculative_config)
    if temperature > 0 and seed is None:
        raise typer.BadParameter(
            "a temperature above 0 needs a seed, or the arms would draw different texts", param_hint="--seed"
        )
    params = opt.sampling_params(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        max_tokens=output_len,
        ignore_eos=ignore_eos,
        logprobs=None if save_outputs is None else 0,
    )
    from paceline.bench import report
    from paceline.bench.datasets import UnknownDatasetError, load_dataset
    from paceline.bench.runner import run_arms
    from paceline.cli.engine import note, note_long_drafts, open_llm, summary
    from paceline.cli.progress import step_progress

    for path, option in ((output, "--output"), (save_outputs, "--save-outputs")):
        if path is not None:
            report.check_writable(path, option)
    with note("Fetching prompts ..."):
        names = [name.strip() for name in dataset.split(",")]
        try:
            sets = {name: load_dataset(name, num_prompts) for name in names}
        except UnknownDatasetError as error:
            raise typer.BadParameter(str(error), param_hint="--dataset") from None
    llm = open_llm(opt.EngineOptions(model, dtype, threads, None, config, any(arms), quantization))
    note_long_drafts(llm, max(arms))
    rows: list[dict[str, Any]] = []
    outputs: list[dict[str, Any]] = []
    with step_progress("Measuring", len(arms) * sum(map(len, sets.values()))) as advance:
        for name, prompts in sets.items():
            completions = run_arms(llm, prompts, arms, params, partial(_label, advance, name))
            rows += report.result_rows(name, completions)
            outputs += report.output_rows(completions, name if len(sets) > 1 else None)
    if output is not None:
        report.write_json(output, rows)
    if save_outputs is not None:
        report.write_jsonl(save_outputs, outputs)
    if as_json:
        print(json.dumps(rows))
    else:
        print(summary(llm, arms))
        _print_table(report.result_table(rows))
    _fail_on(rows, outputs)


def _label(advance: Callable[[str], None], name: str, step: str) -> None:
    advance(f"{name} {step}")


def _fail_on(rows: list[dict[str, Any]], outputs: list[dict[str, Any]]) -> None:
    """A benchmark whose outputs differ, or that could not run, must not pass for a good one in a script."""
    failed = next((row["error"] for row in outputs if "error" in row), None)
    if failed is not None:
        raise PacelineError(f"{opt.count(sum(row['failed'] for row in rows), 'request')} failed; the first: {failed}")
    differing = [row for row in rows if row["identical"] is False]
    if differing:
        where = ", ".join(f"{row['dataset']} k = {row['num_speculative_tokens']}" for row in differing)
        raise PacelineError(f"outputs differ between arms ({where}). This is a bug; please report it")


@bench_app.command()
def kernels(
    model: opt.ModelOption = opt.DEFAULT_MODEL,
    rows: Annotated[
        str, typer.Option("--rows", metavar="NS", help="Rows (tokens) in a pass, with commas between them.")
    ] = "1,2,4,8,12,16",
    repeats: Annotated[
        int,
        typer.Option("--repeats", min=1, metavar="N", help="Rounds; each measures everything once, medians are shown."),
    ] = 15,
    dtype: opt.DtypeOption = "auto",
    quantization: opt.QuantizationOption = "none",
    threads: opt.ThreadsOption = None,
    output: OutputOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure whole forward passes against the floors that memory and arithmetic set.

    A pass of so many rows at a context of 128 tokens, with the logits of all rows.

    Its floor is the larger of bytes / read bandwidth and operations / peak, both measured in the same rounds.
    """
    counts = opt.parse_ints(rows, "--rows", least=1)
    from paceline.bench import kernels as bench_kernels
    from paceline.bench.report import check_writable, write_json
    from paceline.cli.engine import open_llm
    from paceline.cli.progress import step_progress

    if output is not None:
        check_writable(output, "--output")
    llm = open_llm(opt.EngineOptions(model, dtype, threads, speculation=False, quantization=quantization))
    with step_progress("Measuring", repeats * bench_kernels.steps_per_repeat(counts)) as advance:
        result = bench_kernels.measure(llm, counts, repeats, on_step=advance)
    if output is not None:
        write_json(output, result)
    if as_json:
        print(json.dumps(result))
    else:
        _print_table(bench_kernels.kernel_table(result))


def _print_table(table: Any) -> None:
    from rich.console import Console

    Console(highlight=False).print(table)


def _refuse_own_options(context: typer.Context) -> None:
    """`paceline bench --model m kernels` would ignore `--model` silently: say where it belongs."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = "--" + name.removeprefix("as_").replace("_", "-")
            raise typer.BadParameter(
                f"write it after `{context.invoked_subcommand}`, where it is understood", param_hint=option
            )
