"""The command tree. Modules imported here stay light: a command imports the engine when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.cli.bench import bench_app
from paceline.cli.chat import chat
from paceline.cli.demo import demo
from paceline.cli.drafters import drafters
from paceline.cli.generate import generate
from paceline.cli.hints import Command, Group
from paceline.cli.models import convert, info, pull
from paceline.cli.quantised import evaluate, quantize
from paceline.cli.serve import serve
from paceline.cli.tune import tune
from paceline.errors import PacelineError

app = typer.Typer(
    name="paceline",
    cls=Group,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

GENERATING = "Generate"
MODELS = "Models"
MEASURING = "Measure and train"

app.command(rich_help_panel=GENERATING, cls=Command)(generate)
app.command(rich_help_panel=GENERATING, cls=Command)(chat)
app.command(rich_help_panel=GENERATING, cls=Command)(demo)
app.command(rich_help_panel=GENERATING, cls=Command)(serve)
app.command(rich_help_panel=MODELS, cls=Command)(pull)
app.command(rich_help_panel=MODELS, cls=Command)(convert)
app.command(rich_help_panel=MODELS, cls=Command)(quantize)
app.command(rich_help_panel=MODELS, cls=Command)(info)
app.command(rich_help_panel=MODELS, cls=Command)(drafters)
app.add_typer(bench_app, name="bench", rich_help_panel=MEASURING)
app.command("eval", rich_help_panel=MEASURING, cls=Command)(evaluate)
app.command(rich_help_panel=MEASURING, cls=Command)(tune)


@app.command(
    rich_help_panel=MEASURING,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)
def train(context: typer.Context) -> None:
    """Train a drafter for a model (needs PyTorch: pip install torch), or calibrate one."""
    try:
        from paceline.train.cli import app as train_app

        train_app(args=context.args, prog_name="paceline train")
    except ImportError as error:
        package = (error.name or "").split(".")[0]
        if package in ("", "paceline"):
            raise
        name = "PyTorch" if package == "torch" else f"the package {package!r}"
        raise PacelineError(f"this step of the training needs {name}: pip install {package}") from None


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"paceline {version('paceline')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave."),
    ] = False,
) -> None:
    """Run large language models on CPUs, faster by speculative decoding (mostly 1.4 to 1.7 times with the default
    weights), not one token changed.

    Start with:  paceline demo
    """
