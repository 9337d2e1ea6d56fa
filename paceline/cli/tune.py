"""`paceline tune`: the drafter and draft length that suit your prompts, in a file that generate and serve read."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import options as opt
from paceline.cli.arms import local_backend
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.bench.tuning import Candidate, Tuned

DEFAULT_SEQS = 32
NGRAM_LONGEST = 15


def tune(
    model: opt.ModelOption = opt.DEFAULT_MODEL,
    dataset: Annotated[
        str,
        typer.Option(
            "--dataset",
            "-d",
            metavar="SETS",
            help="Your prompts: a .jsonl file as for `paceline bench`, a ShareGPT file, or known sets.",
        ),
    ] = "humaneval,gsm8k,mt-bench",
    num_prompts: Annotated[
        int, typer.Option("--num-prompts", min=1, metavar="N", help="The first N prompts of each set.")
    ] = 8,
    max_turns: Annotated[int, typer.Option("--max-turns", min=1, metavar="N", help="Turns of a conversation.")] = 2,
    output_len: Annotated[
        int, typer.Option("--output-len", min=2, metavar="N", help="At most N new tokens an answer.")
    ] = 128,
    concurrency: Annotated[
        int, typer.Option("--concurrency", "-c", min=1, metavar="N", help="Requests at once, as you expect them.")
    ] = 1,
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            "--drafter",
            metavar="JSON",
            help="A drafter to try, as a speculative config without num_speculative_tokens; may be given several "
            "times. Default: the drafter that ships for the model, and prompt lookup.",
            rich_help_panel=opt.SPECULATION_PANEL,
        ),
    ] = None,
    repeats: Annotated[int, typer.Option("--repeats", min=1, metavar="N", help="Repeats of the final arms.")] = 3,
    temperature: opt.TemperatureOption = 0.0,
    seed: opt.RaceSeedOption = None,
    dtype: opt.DtypeOption = "auto",
    quantization: opt.QuantizationOption = opt.DEFAULT_QUANTIZATION,
    kv_cache_dtype: opt.KVCacheDtypeOption = opt.DEFAULT_KV_CACHE_DTYPE,
    threads: opt.ThreadsOption = None,
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Where the recommended configuration is written.",
            rich_help_panel=opt.OUTPUT_PANEL,
        ),
    ] = Path("speculative.json"),
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print the recommendation and what was measured as JSON.",
            rich_help_panel=opt.OUTPUT_PANEL,
        ),
    ] = False,
) -> None:
    """Find the drafter and draft length that are fastest on your prompts.

    Writes a speculative config for `generate`, `chat`, `bench` and `serve`: --speculative-config FILE.
    """
    if temperature > 0 and seed is None:
        raise typer.BadParameter("a temperature above 0 needs a seed", param_hint="--seed")
    given = [opt.parse_speculative_config(text) or {} for text in drafter or ()]
    params = opt.sampling_params(temperature=temperature, seed=seed, max_tokens=output_len)
    from paceline.bench import report, tuning
    from paceline.bench.datasets import UnknownDatasetError, load_dataset
    from paceline.bench.runner import steps
    from paceline.cli.engine import note
    from paceline.cli.progress import step_progress

    report.check_writable(output, "--output")
    with note("Fetching prompts ..."):
        try:
            sets = {name.strip(): load_dataset(name.strip(), num_prompts, max_turns) for name in dataset.split(",")}
        except UnknownDatasetError as error:
            raise typer.BadParameter(str(error), param_hint="--dataset") from None
    results: list[Tuned] = []
    configs: list[dict[str, Any] | None] = [*given] if given else [None, {"method": "ngram"}]
    for config in configs:
        engine = opt.EngineOptions(
            model,
            dtype,
            threads,
            speculative_config=config,
            quantization=quantization,
            max_num_seqs=max(DEFAULT_SEQS, concurrency),
            kv_cache_dtype=kv_cache_dtype,
        )
        backend = local_backend(engine)
        candidate = _candidate(backend.llm, config)
        if any(done.candidate.config == candidate.config for done in results):
            continue  # no drafter ships for this model: prompt lookup was the default already
        arms = len(tuning.scan_lengths(candidate.longest)) + 4 * repeats
        total = sum(steps(prompts, arms, concurrency, 1) for prompts in sets.values())
        with step_progress(f"Trying {candidate.name}", total) as advance:
            results.append(
                tuning.tune(candidate, backend, sets, params, concurrency=concurrency, repeats=repeats, on_step=advance)
            )
        del backend  # one engine in memory at a time
    best = max(results, key=lambda tuned: tuned.speedup)
    chosen = recommended(best)
    report.write_json(output, chosen)
    why = tuning.reason(best, results)
    if as_json:
        values = {
            "speculative_config": chosen,
            "why": why,
            "file": str(output),
            "tried": [t.as_dict() for t in results],
        }
        print(json.dumps(values))
    else:
        options = [("--quantization", quantization, "auto"), ("--kv-cache-dtype", kv_cache_dtype, "auto")]
        as_measured = "".join(f" {name} {value}" for name, value, default in options if value != default)
        _show(results, chosen, why, f"{shlex.quote(model)}{as_measured} --speculative-config {output}", output)
    for line in dict.fromkeys(w for tuned in results for w in tuned.warnings):
        print(f"Warning: {line}", file=sys.stderr)
    if not all(tuned.identical for tuned in results):
        raise PacelineError("outputs differ between draft lengths. This is a bug; please report it")


def _candidate(llm: Any, config: dict[str, Any] | None) -> Candidate:
    """The drafter that an engine runs, and how far it is worth going with it."""
    from paceline.bench.tuning import Candidate

    facts = llm.info()
    name = facts["speculation"]
    if name is None:
        raise PacelineError("this model has no drafter")
    full = dict(config or {})
    if config is None:  # what "auto" stands for, the shipped drafter by its method alone
        used = llm.speculative_config
        full["method"] = used.method
        if used.method != "ngram" and used.prompt_lookup_min is not None:
            full |= {"prompt_lookup_min": used.prompt_lookup_min, "prompt_lookup_max": used.prompt_lookup_max}
    full.pop("num_speculative_tokens", None)
    return Candidate(name, full, NGRAM_LONGEST if name == "ngram" else facts["num_speculative_tokens"])


def recommended(best: Tuned) -> dict[str, Any]:
    """The speculative config for what was found; `{"method": "none"}` where plain decoding is as fast."""
    from paceline.bench.tuning import WORTHWHILE

    if best.speedup < WORTHWHILE:
        return dict(opt.NO_DRAFTS)
    return {**best.candidate.config, "num_speculative_tokens": best.most_tokens}


def _show(results: list[Tuned], chosen: dict[str, Any], why: str, use: str, output: Path) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, title="speed-up over plain decoding", title_justify="left")
    for heading in ("drafter", "k", "predicted", "scan", "measured", "range"):
        table.add_column(heading, justify="left" if heading == "drafter" else "right")
    for tuned in results:
        for k in [*tuned.predicted, "auto"]:
            if k in tuned.speedups or k in tuned.scanned:
                low_high = tuned.ranges.get(k)
                table.add_row(
                    tuned.candidate.name if k == 0 else "",
                    str(k),
                    f"{tuned.predicted[k]:.2f}" if isinstance(k, int) else "",
                    f"{tuned.scanned[k]:.2f}" if k in tuned.scanned else "",
                    f"{tuned.speedups[k]:.2f}" if k in tuned.speedups else "",
                    f"{low_high[0]:.2f} to {low_high[1]:.2f}" if low_high else "",
                )
        table.add_section()
    Console(highlight=False).print(table)
    print(why)
    print(f"\nWritten to {output}:  {json.dumps(chosen)}")
    print(f"Use it:  paceline serve {use}")
    print(f'         paceline generate "..." -m {use}')
