"""`paceline bench`: arms compared on prompt sets; `paceline bench kernels`: passes against their floors."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from paceline.cli import options as opt
from paceline.cli.accuracy import accuracy
from paceline.cli.arms import (
    Opened,
    Plan,
    open_lengths,
    open_random_weights,
    open_servers,
    open_specs,
    parse_arm,
    parse_survival,
)
from paceline.cli.hints import BenchGroup, Command
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.bench.local import LocalBackend

bench_app = typer.Typer(
    cls=BenchGroup,
    invoke_without_command=True,
    help="Measure decoding with and without drafts on prompt sets, arms taken in turns.",
    rich_markup_mode="rich",
)

ARMS_PANEL = "What is compared"
REPEATS = 3
DEFAULT_SEQS = 32  # requests that an engine takes at once unless told otherwise

RandomWeightsOption = Annotated[
    str | None,
    typer.Option(
        "--random-weights",
        metavar="SHAPE",
        help="SYNTHETIC: random weights in the shape of Qwen3-4B, Qwen3-8B, Llama-3.1-8B, ... or of a config.json: "
        "real times at real sizes, made-up text.",
        rich_help_panel=ARMS_PANEL,
    ),
]
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
            help="Prompt sets, with commas between them: humaneval, gsm8k, mt-bench, a ShareGPT file, or a .jsonl file "
            'with rows {"prompt": text}, {"turns": [...]} or {"messages": [...]}.',
        ),
    ] = "humaneval,gsm8k,mt-bench",
    num_prompts: Annotated[
        int, typer.Option("--num-prompts", min=1, metavar="N", help="The first N prompts of each set.")
    ] = 20,
    max_turns: Annotated[
        int,
        typer.Option(
            "--max-turns",
            min=1,
            metavar="N",
            help="Turns of a conversation, each on the model's answer to the one before.",
        ),
    ] = 2,
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
        str | None,
        typer.Option(
            "--num-speculative-tokens",
            "-k",
            metavar="KS",
            help="Draft lengths, one arm each: fixed numbers, 0 for plain decoding (which the speed-up refers to), "
            "auto for the length that is chosen at each step. Default: 0,3,5,7.",
            rich_help_panel=opt.SPECULATION_PANEL,
        ),
    ] = None,
    speculative_config: opt.SpeculativeConfigOption = None,
    concurrency: Annotated[
        str | None,
        typer.Option(
            "--concurrency",
            "-c",
            metavar="NS",
            help="Requests at once, with commas between them. Default: 1, or 1,2,4,8 (above 1 only plain decoding and "
            "the fastest draft length) when -k is not given either.",
        ),
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(
            "--repeats",
            min=1,
            metavar="N",
            help="Runs of everything; medians are shown, with their spread. Default: 3; 2 above concurrency 1 in the "
            "default grid.",
        ),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="All draft lengths at concurrency 1,2,4,8,16,32. Takes long.")
    ] = False,
    base_url: Annotated[
        list[str] | None,
        typer.Option(
            "--base-url",
            metavar="URL",
            help="Measure an OpenAI-compatible server instead; several times: servers against each other, the first "
            "the baseline. -k is sent with the requests (Paceline's own server reads it).",
            rich_help_panel=ARMS_PANEL,
        ),
    ] = None,
    arm: Annotated[
        list[str] | None,
        typer.Option(
            "--arm",
            metavar="JSON",
            help="""A configuration to compare, in place of -k; give it twice or more, the first is the baseline: """
            """'{"label": "lookup", "speculative_config": {"method": "ngram"}, "num_speculative_tokens": 5}', """
            """'{"label": "other", "base_url": "http://localhost:8000"}'.""",
            rich_help_panel=ARMS_PANEL,
        ),
    ] = None,
    random_weights: RandomWeightsOption = None,
    synthetic_acceptance: Annotated[
        str,
        typer.Option(
            "--synthetic-acceptance",
            metavar="SHARES",
            help="With --random-weights: share of drafts accepted up to each position, as 0.86,0.74,...; "
            "article: that of a published run (length 6.9 at k = 15).",
            rich_help_panel=ARMS_PANEL,
        ),
    ] = "article",
    temperature: opt.TemperatureOption = 0.0,
    top_p: opt.TopPOption = 1.0,
    top_k: opt.TopKOption = 0,
    seed: opt.RaceSeedOption = None,
    ignore_eos: opt.IgnoreEosOption = False,
    dtype: opt.DtypeOption = "auto",
    quantization: opt.QuantizationOption = opt.DEFAULT_QUANTIZATION,
    kv_cache_dtype: opt.KVCacheDtypeOption = opt.DEFAULT_KV_CACHE_DTYPE,
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
    report_files: Annotated[
        list[Path] | None,
        typer.Option(
            "--report",
            metavar="FILE",
            help="Write a report with tables and plots: .html (one file, nothing loaded from elsewhere), .md or .json; "
            "may be given several times.",
            rich_help_panel=opt.OUTPUT_PANEL,
        ),
    ] = None,
    price: Annotated[
        float | None,
        typer.Option(
            "--price-per-hour",
            metavar="P",
            help="What an hour of this machine costs: the report then has the price per million tokens.",
            rich_help_panel=opt.OUTPUT_PANEL,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure decoding with and without drafts.

    One request at a time, every prompt is decoded by each arm before the next prompt comes; with several at once, the
    arms take turns at running a whole set. Answers are compared token by token.

    Exit code 1 if an arm's answers differ from plain decoding or a request failed.
    """
    if context.invoked_subcommand is not None:
        _refuse_own_options(context)
        return
    plan = Plan.of(num_speculative_tokens, concurrency, full, grid_by_default=not (arm or base_url))
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
    most = max(DEFAULT_SEQS, *plan.concurrency)
    engine = opt.EngineOptions(
        model, dtype, threads, None, config, any(plan.lengths), quantization, most, kv_cache_dtype
    )
    specs = [parse_arm(text, engine) for text in arm or ()]
    survival = parse_survival(synthetic_acceptance)
    if random_weights and (base_url or specs or opt.given(context, "dataset")):
        raise typer.BadParameter(
            "has prompts of its own and no server; drop --dataset, --base-url and --arm", param_hint="--random-weights"
        )
    if specs and (base_url or num_speculative_tokens is not None or full):
        raise typer.BadParameter("names its arms itself; drop -k, --base-url and --full, or --arm", param_hint="--arm")
    from paceline.bench import costmodel, documents, figures, grid, report
    from paceline.bench.datasets import UnknownDatasetError, load_dataset
    from paceline.cli.engine import note
    from paceline.cli.progress import step_progress

    for path, option in ((output, "--output"), (save_outputs, "--save-outputs")):
        if path is not None:
            report.check_writable(path, option)
    for path in report_files or ():
        documents.check_report(path)
    if price is not None and not 0 < price < 1e9:
        raise typer.BadParameter(f"{price} is no price", param_hint="--price-per-hour")
    names = [] if random_weights else [name.strip() for name in dataset.split(",")]
    with note("Fetching prompts ..."):
        try:
            sets = {name: load_dataset(name, num_prompts, max_turns) for name in names}
        except UnknownDatasetError as error:
            raise typer.BadParameter(str(error), param_hint="--dataset") from None
    if random_weights:
        from paceline.bench.synthetic import NAME, prompts

        sets = {f"{NAME} {random_weights}": prompts(num_prompts)}
        opened = open_random_weights(random_weights, survival, engine, plan.lengths)
    elif specs:
        opened = open_specs(specs)
    elif base_url:
        named = opt.given(context, "model")
        lengths = None if num_speculative_tokens is None and not full else plan.lengths
        opened = open_servers(base_url, model if named else None, lengths)
    else:
        opened = open_lengths(engine, plan.lengths)
    best_only = plan.best_only and any(a.length == 0 for a in opened.arms)
    later = grid.GRID_REPEATS if repeats is None else repeats
    repeats = repeats or REPEATS
    stages = (
        grid.default_grid(opened.arms, plan.concurrency, later)
        if best_only
        else grid.cross(opened.arms, plan.concurrency)
    )
    for line in grid.time_plan(stages, sets, repeats, output_len):
        print(line, file=sys.stderr)
    rows: list[dict[str, Any]] = []
    outputs: list[dict[str, Any]] = []
    interrupted = False
    try:
        with step_progress("Measuring", grid.total_steps(stages, sets, repeats)) as advance:
            for found, new in grid.run_grid(stages, sets, params, repeats, advance):
                rows += new
                outputs += figures.output_rows(found, found.dataset if len(sets) > 1 else None)
                if output is not None:  # on the way, so that a run of minutes that is ended leaves what it measured
                    report.write_json(output, rows)
    except KeyboardInterrupt:
        if not rows:
            raise
        interrupted = True
    if save_outputs is not None:
        report.write_jsonl(save_outputs, outputs)
    if report_files:
        from paceline.bench.study import make_study

        with note("Timing the parts of a round ..."):
            counts = grid.repeats_line(stages, repeats)
            settings = _settings(sum(map(len, sets.values())), output_len, temperature, counts)
            study = make_study(opened.arms, opened.lines, rows, sets, params, settings, price, bool(random_weights))
        for path in report_files:
            documents.write_report(path, study)
    if as_json:
        print(json.dumps(rows))
    else:
        choices = costmodel.choice_rows(costmodel.prediction_rows(rows, opened.arms))
        print(*opened.lines, sep="\n")
        _print_table(report.result_table(rows))
        for line in (*report.choice_lines(rows), *costmodel.choice_lines(choices)):
            print(line)
    for line in report.warning_lines(rows):
        print(f"Warning: {line}", file=sys.stderr)
    _fail_on(rows, opened)
    if interrupted:
        print("Interrupted: this is what was measured whole, prompt set by prompt set", file=sys.stderr)
        raise typer.Exit(130)


def _settings(prompts: int, output_len: int, temperature: float, repeats: str) -> str:
    drawn = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    return (
        f"{opt.count(prompts, 'prompt')}, at most {opt.count(output_len, 'token')} an answer, {drawn}, "
        f"{repeats}, arms interleaved"
    )


def _fail_on(rows: list[dict[str, Any]], opened: Opened) -> None:
    """A benchmark whose outputs differ, or that could not run, must not pass for a good one in a script."""
    from paceline.bench.figures import reference_arm

    failed = sum(row["failed"] for row in rows)
    if failed:
        first = next(w for row in rows if row["failed"] for w in row["warnings"]).removeprefix("a request failed: ")
        raise PacelineError(f"{opt.count(failed, 'request')} failed; the first: {first}")
    reference = opened.arms[reference_arm(opened.arms)].name
    differing = [row for row in rows if row["identical"] is False]
    bugs = [row for row in differing if opened.must_agree(row["arm"], reference)]
    where = ", ".join(dict.fromkeys(f"{row['dataset']} {row['arm']}" for row in bugs or differing))
    if bugs:
        raise PacelineError(f"outputs differ between arms ({where}). This is a bug; please report it")
    if differing:
        print(f"Warning: outputs differ from those of {reference} ({where})", file=sys.stderr)


@bench_app.command(cls=Command)
def kernels(
    context: typer.Context,
    model: opt.ModelOption = opt.DEFAULT_MODEL,
    rows: Annotated[
        str, typer.Option("--rows", metavar="NS", help="Rows (tokens) in a pass, with commas between them.")
    ] = "1,2,4,8,12,16",
    repeats: Annotated[
        int,
        typer.Option("--repeats", min=1, metavar="N", help="Rounds; each measures everything once, medians are shown."),
    ] = 15,
    dtype: opt.DtypeOption = "auto",
    quantization: opt.QuantizationOption = opt.DEFAULT_QUANTIZATION,
    kv_cache_dtype: opt.KVCacheDtypeOption = opt.DEFAULT_KV_CACHE_DTYPE,
    threads: opt.ThreadsOption = None,
    random_weights: RandomWeightsOption = None,
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
    engine = opt.EngineOptions(
        model, dtype, threads, speculation=False, quantization=quantization, kv_cache_dtype=kv_cache_dtype
    )
    if random_weights and opt.given(context, "model"):
        raise typer.BadParameter("stands in place of a model; drop --model", param_hint="--random-weights")
    if random_weights:
        opened = open_random_weights(random_weights, (), engine, (0,))
        llm = cast("LocalBackend", opened.arms[0].backend).llm
        print(opened.lines[0], file=sys.stderr)  # the others are about the drafter
    else:
        llm = open_llm(engine)
    with step_progress("Measuring", repeats * bench_kernels.steps_per_repeat(counts)) as advance:
        result = bench_kernels.measure(llm, counts, repeats, on_step=advance)
    if output is not None:
        write_json(output, result)
    if as_json:
        print(json.dumps(result))
    else:
        _print_table(bench_kernels.kernel_table(result))


bench_app.command(cls=Command)(accuracy)


def _print_table(table: Any) -> None:
    from rich.console import Console

    Console(highlight=False).print(table)


def _refuse_own_options(context: typer.Context) -> None:
    """`paceline bench --model m kernels` would ignore `--model` silently: say where it belongs."""
    for name in context.params:
        if opt.given(context, name):
            option = "--" + name.removeprefix("as_").replace("_", "-")
            raise typer.BadParameter(
                f"write it after `{context.invoked_subcommand}`, where it is understood", param_hint=option
            )
