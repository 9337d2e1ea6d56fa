"""The `paceline` command; `main` is the console entry point. A command imports what is heavy when it runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

EXIT_ERROR = 1
EXIT_INTERRUPTED = 130


def run(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code.

    0 success; 1 an error that the message explains, or a check that failed; 2 wrong usage; 130 interrupted.
    No traceback is shown for what a user can cause: a `PacelineError`, Ctrl-C, a closed pipe or a full disk.
    """
    from paceline.errors import PacelineError

    try:
        _tolerate_any_character()
        try:
            return _run_app(argv)
        finally:
            sys.stdout.flush()  # what is left of the output fails here, not while the interpreter shuts down
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return EXIT_ERROR
    except OSError as error:
        _drop_output()
        if not isinstance(error, BrokenPipeError):  # whoever closed the pipe knows
            what = "standard output" if error.filename is None else error.filename
            print(f"paceline: {what}: {error.strerror or error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _run_app(argv: Sequence[str] | None) -> int:
    from paceline.cli.app import app

    try:
        app(args=None if argv is None else list(argv), prog_name="paceline")
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else EXIT_ERROR * (leaving.code is not None)
        if code == EXIT_INTERRUPTED and sys.stderr.isatty():
            print(file=sys.stderr)  # the shell's prompt starts on a line of its own
        return code
    return 0


def main() -> None:
    """Console entry point: `run` on the process arguments, then leave with its code."""
    sys.exit(run())


def _drop_output() -> None:
    """Let the interpreter's last flush go nowhere: standard output cannot be written, and that has been said."""
    try:
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _tolerate_any_character() -> None:
    """A terminal or pipe with a narrow encoding must not end an answer that holds one unusual character."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")
