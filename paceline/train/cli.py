"""``paceline train``: prompts to evaluated drafters. PyTorch is imported when a command that needs it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,  # `paceline` itself has it
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train a DFlash drafter for a model (with PyTorch: features, fit, adapt, export, eval), or calibrate one.",
)

Dtype = Literal["bfloat16", "float32"]
ModelOption = Annotated[
    str, typer.Option("--model", "-m", metavar="MODEL", help="Target: a known name, folder, .gguf or hub id.")
]
DtypeOption = Annotated[Dtype, typer.Option("--dtype", help="Arithmetic of matrix products.")]
DeviceOption = Annotated[str, typer.Option("--device", help="PyTorch device, such as cpu or cuda.")]
PromptsOption = Annotated[Path | None, typer.Option("--prompts", metavar="FILE", help="Prompts, JSON lines.")]


@app.command()
def prompts(
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="File to write (.gz: compressed).")],
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="At most this many.")] = None,
    without: Annotated[list[str] | None, typer.Option("--without", help="Leave a source out; repeatable.")] = None,
    source_file: Annotated[
        list[str] | None, typer.Option("--source-file", metavar="NAME=PATH", help="Use your copy of a source.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Order and choice of forms.")] = 0,
) -> None:
    """Build training prompts from public sources (code, math, chat), balanced in every prefix."""
    from paceline.train import corpus

    corpus.build_prompts(out, limit=limit, without=without or [], source_files=source_file or [], seed=seed)


@app.command()
def regenerate(
    prompts: Annotated[Path, typer.Option("--prompts", metavar="FILE", help="Prompts, JSON lines.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Answers; goes on where it stopped.")],
    model: ModelOption = "smollm2-135m",
    dtype: DtypeOption = "bfloat16",
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=2, help="Longest answer.")] = 256,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0: greedy.")] = 0.0,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="The first so many prompts.")] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Prompts answered together.")] = 256,
    seed: Annotated[int, typer.Option("--seed", help="For temperatures above 0.")] = 0,
) -> None:
    """Let the target answer the prompts itself, with this engine."""
    from paceline.train import corpus

    corpus.answer_prompts(
        model,
        prompts,
        out,
        dtype=dtype,
        max_tokens=max_tokens,
        temperature=temperature,
        limit=limit,
        batch=batch,
        seed=seed,
    )


@app.command()
def features(
    answers: Annotated[Path, typer.Option("--answers", metavar="FILE", help="Answers, JSON lines.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Feature folder; goes on where it stopped.")],
    model: ModelOption = "smollm2-135m",
    prompts: PromptsOption = None,
    taps: Annotated[
        str, typer.Option("--taps", metavar="LIST", help="Target layers, such as 1,8,15,21,27. Default: five, spread.")
    ] = "",
    max_prompt: Annotated[int, typer.Option("--max-prompt", min=1, help="Drop longer prompts (tokens).")] = 384,
    max_answer: Annotated[int, typer.Option("--max-answer", min=2, help="Cut longer answers (tokens).")] = 256,
    trim_loops: Annotated[
        bool, typer.Option("--trim-loops/--keep-loops", help="Cut answers that end in a loop after its second round.")
    ] = True,
    dtype: DtypeOption = "bfloat16",
    device: DeviceOption = "cpu",
    batch_tokens: Annotated[int, typer.Option("--batch-tokens", min=16, help="Tokens per forward pass.")] = 2048,
    threads: Annotated[int | None, typer.Option("--threads", min=1, help="Of the engine. Default: all cores.")] = None,
) -> None:
    """Run the target over its answers once and keep the tapped hidden states on disk.

    On a CPU this is the engine's own target; several processes may share a folder. Size:
    (taps + 1) x hidden size x 2 bytes per token.
    """
    from paceline.train import workflow

    workflow.extract_features(
        model,
        answers,
        out,
        prompts=prompts,
        taps=taps,
        max_prompt=max_prompt,
        max_answer=max_answer,
        trim_loops=trim_loops,
        dtype=dtype,
        device=device,
        batch_tokens=batch_tokens,
        threads=threads,
    )


@app.command()
def fit(
    features: Annotated[Path, typer.Option("--features", metavar="DIR", help="What `train features` wrote.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Run folder; goes on where it stopped.")],
    steps: Annotated[int, typer.Option("--steps", min=1, help="Length of the schedule.")],
    model: ModelOption = "smollm2-135m",
    layers: Annotated[int, typer.Option("--layers", min=1, help="Drafter layers.")] = 2,
    block_size: Annotated[int, typer.Option("--block-size", min=2, help="Anchor and drafts of a block.")] = 8,
    block_sizes: Annotated[
        str, typer.Option("--block-sizes", metavar="LIST", help="Draw a block length for each step, such as 6,6,8.")
    ] = "",
    head_rows: Annotated[
        int, typer.Option("--head-rows", min=0, help="Most frequent tokens that can be drafted; 0: all.")
    ] = 8192,
    mask_token: Annotated[
        int | None, typer.Option("--mask-token", min=0, help="Reserved token id. Default: an unused special token.")
    ] = None,
    init_from: Annotated[
        Path | None, typer.Option("--init-from", metavar="DIR", help="Start from the weights of this drafter.")
    ] = None,
    from_target: Annotated[
        bool, typer.Option("--from-target", help="Start from the target's last layers instead of random weights.")
    ] = False,
    markov_rank: Annotated[
        int, typer.Option("--markov-rank", min=0, help="DSpark: add a Markov head of this rank; 0: none.")
    ] = 0,
    confidence: Annotated[bool, typer.Option("--confidence", help="DSpark: add a confidence head.")] = False,
    anchor_first: Annotated[
        bool | None,
        typer.Option("--anchor-first/--fill-in", help="Slots of the block. Default: of --init-from, else fill-in."),
    ] = None,
    conv_kernel: Annotated[
        int, typer.Option("--conv-kernel", min=0, help="DFlash 2: add convolutions over so many rows; 0: none.")
    ] = 0,
    conv_group: Annotated[
        int, typer.Option("--conv-group", min=1, help="Channels that share what a row changes of a kernel.")
    ] = 16,
    selector_rank: Annotated[
        int, typer.Option("--selector-rank", min=0, help="DFlash 2: add a candidate selector of this rank; 0: none.")
    ] = 0,
    selector_top_k: Annotated[int, typer.Option("--selector-top-k", min=1, help="Candidates of a slot.")] = 16,
    freeze: Annotated[
        Literal["", "backbone"],
        typer.Option("--freeze", help="backbone: train the heads of DSpark or the parts of DFlash 2 alone."),
    ] = "",
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Sequences per step.")] = 16,
    anchors: Annotated[int, typer.Option("--anchors", min=1, help="Blocks per sequence.")] = 32,
    optimizer: Annotated[Literal["muon", "adamw"], typer.Option("--optimizer")] = "muon",
    lr: Annotated[
        float, typer.Option("--lr", min=0.0, help="AdamW rate (with Muon: of norms, heads, convolutions).")
    ] = 2e-3,
    muon_lr: Annotated[float, typer.Option("--muon-lr", min=0.0, help="Muon rate (matrices).")] = 0.02,
    schedule: Annotated[Literal["wsd", "cosine"], typer.Option("--schedule")] = "wsd",
    warmup: Annotated[int, typer.Option("--warmup", min=1, help="Steps; at most a tenth of --steps counts.")] = 40,
    decay: Annotated[float, typer.Option("--decay", min=0.0, max=1.0, help="Share of a WSD run that decays.")] = 0.3,
    weighting: Annotated[
        Literal["dpace", "decay", "uniform"], typer.Option("--weighting", help="Of slots; decay: exponential.")
    ] = "dpace",
    alpha: Annotated[float, typer.Option("--alpha", min=0.0, max=1.0, help="Of D-PACE.")] = 0.5,
    gamma: Annotated[float, typer.Option("--gamma", min=0.01, help="Of exponential weights.")] = 4.0,
    loss: Annotated[
        str, typer.Option("--loss", help="Weights: ce (answer's token), kl and tv (target's distribution).")
    ] = "ce=0.5,kl=0.5",
    dtype: DtypeOption = "bfloat16",
    device: DeviceOption = "cpu",
    workers: Annotated[int, typer.Option("--workers", min=1, help="Threads that each take a part of a batch.")] = 1,
    seed: Annotated[int, typer.Option("--seed", help="Weights, data order and anchors.")] = 0,
    checkpoint_every: Annotated[int, typer.Option("--checkpoint-every", min=1, help="Steps.")] = 100,
    until: Annotated[int | None, typer.Option("--until", min=1, help="Stop here; run again to go on.")] = None,
    new_data: Annotated[
        bool, typer.Option("--new-data", help="Going on: draw from shards that came since the start, too.")
    ] = False,
    held_out: Annotated[
        Path | None, typer.Option("--held-out", metavar="DIR", help="Features to measure acceptance on.")
    ] = None,
    hold_every: Annotated[
        int, typer.Option("--hold-every", min=0, help="Never train on every so many-th prompt id; 0: train on all.")
    ] = 50,
    eval_every: Annotated[int, typer.Option("--eval-every", min=1, help="Steps, at checkpoints.")] = 100,
) -> None:
    """Train. Run the same command again after an interruption: it goes on to the same result.

    Under torchrun, the processes share each batch.
    """
    from paceline.train import runs
    from paceline.train.fit import FitConfig
    from paceline.train.loss import LossConfig, parse_loss
    from paceline.train.options import parse_block_sizes
    from paceline.train.schedule import Schedule

    config = FitConfig(
        schedule=Schedule(steps, schedule, warmup, decay),
        batch_size=batch_size,
        anchors=anchors,
        block_sizes=parse_block_sizes(block_sizes),
        lr=lr,
        muon_lr=muon_lr,
        optimizer=optimizer,
        seed=seed,
        compute_dtype=dtype,
        workers=workers,
        checkpoint_every=checkpoint_every,
        loss=LossConfig(weighting=weighting, alpha=alpha, gamma=gamma, **parse_loss(loss)),
        freeze=freeze,
    )
    start = runs.Start(
        layers=layers,
        block_size=block_size,
        head_rows=head_rows,
        mask_token=mask_token,
        init_from=init_from,
        from_target=from_target,
        markov_rank=markov_rank,
        confidence=confidence,
        anchor_first=anchor_first,
        conv_kernel=conv_kernel,
        conv_group=conv_group,
        selector_rank=selector_rank,
        selector_top_k=selector_top_k,
    )
    runs.fit_drafter(
        model,
        features,
        out,
        config,
        start,
        device=device,
        until=until,
        new_data=new_data,
        held_out=held_out,
        hold_every=hold_every,
        eval_every=eval_every,
    )


@app.command()
def export(
    run: Annotated[Path, typer.Option("--run", metavar="DIR", help="Run folder of `train fit`.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Folder to write.")],
    dtype: DtypeOption = "bfloat16",
) -> None:
    """Write the newest checkpoint of a run as a drafter folder with its list of head rows."""
    from paceline.train import workflow

    workflow.export_run(run, out, dtype=dtype)


@app.command()
def adapt(
    prompts: Annotated[Path, typer.Option("--prompts", metavar="FILE", help="Your prompts, JSON lines.")],
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="Folder to work in; goes on where it stopped.")
    ],
    model: ModelOption = "smollm2-135m",
    drafter: Annotated[
        Path | None, typer.Option("--drafter", metavar="DIR", help="Go on from this one. Default: the one that ships.")
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=2, help="Longest answer.")] = 192,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Of training.")] = 400,
    muon_lr: Annotated[float, typer.Option("--muon-lr", min=0.0, help="Peak rate of the matrices.")] = 0.008,
    hold_every: Annotated[int, typer.Option("--hold-every", min=2, help="Measure on every so many-th prompt.")] = 10,
    dtype: DtypeOption = "bfloat16",
    device: DeviceOption = "cpu",
    workers: Annotated[int, typer.Option("--workers", min=1, help="Threads that each take a part of a batch.")] = 2,
    seed: Annotated[int, typer.Option("--seed", help="Data order and blocks.")] = 0,
) -> None:
    """Fit a drafter to your own prompts, and measure what that gains on some that were kept out."""
    from paceline.train import adapt as adapting

    adapting.adapt(
        model,
        prompts,
        out,
        drafter=drafter,
        max_tokens=max_tokens,
        steps=steps,
        muon_lr=muon_lr,
        hold_every=hold_every,
        dtype=dtype,
        device=device,
        workers=workers,
        seed=seed,
    )


@app.command("eval")
def evaluate(
    drafter: Annotated[Path, typer.Option("--drafter", metavar="DIR", help="Exported drafter.")],
    answers: Annotated[Path, typer.Option("--answers", metavar="FILE", help="The target's greedy answers, held out.")],
    model: ModelOption = "smollm2-135m",
    prompts: PromptsOption = None,
    drafts: Annotated[int | None, typer.Option("--drafts", min=1, help="Per round. Default: block size - 1.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=2, help="Of each answer.")] = 128,
    dtype: DtypeOption = "float32",
    full_head: Annotated[bool, typer.Option("--full-head", help="Draft from all rows, not the listed ones.")] = False,
    json_out: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the figures.")] = None,
) -> None:
    """Acceptance length and survival by domain, on answers the drafter has not seen."""
    from paceline.train import workflow

    workflow.evaluate_drafter(
        model,
        drafter,
        answers,
        prompts=prompts,
        drafts=drafts,
        max_tokens=max_tokens,
        dtype=dtype,
        full_head=full_head,
        json_out=json_out,
    )


@app.command()
def calibrate(
    drafter: Annotated[str, typer.Option("--drafter", metavar="DIR", help="DSpark drafter with a confidence head.")],
    prompts: Annotated[Path, typer.Option("--prompts", metavar="FILE", help="Prompts, JSON lines.")],
    model: ModelOption = "smollm2-135m",
    limit: Annotated[int, typer.Option("--limit", min=1, help="The first so many prompts.")] = 64,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=2, help="Of each answer.")] = 128,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0: greedy.")] = 0.0,
    dtype: DtypeOption = "bfloat16",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="DIR", help="Folder for the sidecar. Default: the drafter's.")
    ] = None,
) -> None:
    """Fit a DSpark drafter's confidence to what this engine keeps of its drafts; needs no PyTorch."""
    from paceline.train import calibrate as step

    step.calibrate(
        model,
        drafter,
        prompts,
        limit=limit,
        max_tokens=max_tokens,
        temperature=temperature,
        dtype=dtype,
        out=out,
    )
