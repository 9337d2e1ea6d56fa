"""Progress on standard error, and only where a person is looking: on a pipe or in a file there is none."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.progress import Progress, TaskID


@contextmanager
def step_progress(description: str, total: int) -> Iterator[Callable[[str], None]]:
    """A bar of `total` steps; the block calls what it is given after each step, with a word on that step."""
    if not sys.stderr.isatty():
        yield lambda _label: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("[dim]{task.fields[label]}"),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task(description, total=total, label="")
        yield lambda label: bar.update(task, advance=1, label=label)


@contextmanager
def download_progress() -> Iterator[Callable[[str, int, int | None], None]]:
    """A bar for transfers: the block passes on `(what, bytes so far, bytes in all or None)` as they arrive.

    The bar appears with the first call, so that a model which is on disk already shows nothing.
    """
    if not sys.stderr.isatty():
        yield lambda _what, _done, _total: None
        return
    state = _Transfers()
    try:
        yield state.update
    finally:
        state.stop()


class _Transfers:
    """A rich progress display, made late: importing rich costs 50 ms that a start from disk need not pay."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def update(self, what: str, done: int, total: int | None) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                console=Console(stderr=True),
            )
            self._bar.start()
        if what not in self._tasks:
            self._tasks[what] = self._bar.add_task(what, total=total)
        self._bar.update(self._tasks[what], completed=done, total=total)

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
