"""The `paceline` command; `main` is the console entry point. A command imports what is heavy when it runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence

EXIT_ERROR = 1
EXIT_INTERRUPTED = 130


def run(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code.

    0 success; 1 an error that the message explains, or a check that failed; 2 wrong usage; 130 interrupted.
    No traceback is shown for what a user can cause: a `PacelineError`, Ctrl-C or a closed pipe.
    """
    from paceline.errors import PacelineError

    try:
        _tolerate_any_character()
        from paceline.cli.app import app

        app(args=None if argv is None else list(argv), prog_name="paceline")
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else EXIT_ERROR * (leaving.code is not None)
        if code == EXIT_INTERRUPTED and sys.stderr.isatty():
            print(file=sys.stderr)  # the shell's prompt starts on a line of its own
        return code
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


def main() -> None:
    """Console entry point: `run` on the process arguments, then leave with its code."""
    sys.exit(run())


def _tolerate_any_character() -> None:
    """A terminal or pipe with a narrow encoding must not end an answer that holds one unusual character."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")
