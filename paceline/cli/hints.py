"""Commands that know what other engines call an option: a wrong name is answered with the one that stands for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer.core

from paceline.cli.other_options import COMMANDS, OPTIONS


def _hint(option: str, command: Any) -> str:
    """What to use instead in this command; empty: nothing is known."""
    wanted, remedy = OPTIONS.get(option, ((), ""))
    own = {spelled for parameter in command.params for spelled in parameter.opts}
    found = next((name for name in wanted if name in own), "")
    return f"use {found}" if found else remedy.format(command=command.name)


def _explain(error: Exception, command: Any) -> None:
    """Add the hint to an error about an option that there is not, or about a model that is no argument here."""
    said = str(getattr(error, "message", ""))
    if said.startswith("Got unexpected extra argument") and any("--model" in p.opts for p in command.params):
        error.message = f"{said}; the model is an option: --model MODEL"  # type: ignore[attr-defined]
        return
    option = str(getattr(error, "option_name", ""))
    hint = _hint(option, command) if hasattr(error, "possibilities") else ""
    if hint:
        error.message = f"No such option: {option}; {hint}"  # type: ignore[attr-defined]
        error.possibilities = None  # type: ignore[attr-defined]


def _check_short(command: Any, ctx: Any, args: list[str]) -> None:
    """Short options of several letters, as llama.cpp has them, are refused by name: they would be read as a short
    option of ours and its value, "-ngl" as "-n gl"."""
    own = {spelled for parameter in command.params for spelled in parameter.opts}
    for argument in args:
        if argument == "--":
            break
        option = argument.split("=")[0]
        if option in OPTIONS and option not in own and not option.startswith("--") and len(option) > 2:
            ctx.fail(f"No such option: {option}; {_hint(option, command)}")


class Command(typer.core.TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _check_short(self, ctx, args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            _explain(error, self)
            raise


class Group(typer.core.TyperGroup):
    """known: names of commands that others use -> ours."""

    known: Mapping[str, str] = COMMANDS

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0].startswith("-"):  # else they are a command's
            _check_short(self, ctx, args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            _explain(error, self)
            raise

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in self.known and args[0] not in self.commands:
            ctx.fail(f"No such command {args[0]!r}; use {self.known[args[0]]!r}")
        return super().resolve_command(ctx, args)


class BenchGroup(Group):
    known = {  # noqa: RUF012 (of the class, never changed)
        "latency": "paceline bench --concurrency 1",
        "serve": "paceline bench --base-url URL",
        "throughput": "paceline bench --concurrency N",
    }
