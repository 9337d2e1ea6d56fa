"""Ctrl-C between steps, never inside one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any


class Uninterrupted:
    """While entered, SIGINT waits: a half-done step would leave requests half-committed.

    A step takes milliseconds, so the user does not notice. The signal is delivered to its own handler on the way out.
    Only the main thread receives signals; elsewhere, and when entered again inside, this does nothing. `prepared` is
    for loops that enter many times.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._prepared = 0
        self._previous: Any = None
        self._pending: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._depth += 1
        if self._depth == 1 and not self._prepared:
            self._install()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._depth -= 1
        if self._depth == 0:
            if not self._prepared:
                self._restore()
            else:
                self._deliver(self._previous)

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Inside, the handler is in place already, so that entering and leaving are cheap; a signal that comes outside
        a block that is entered is delivered at once. Nothing that runs inside may change the handler."""
        if threading.current_thread() is not threading.main_thread() or self._depth:
            yield
            return
        self._prepared += 1
        if self._prepared == 1:
            self._install()
        try:
            yield
        finally:
            self._prepared -= 1
            if not self._prepared:
                self._restore()

    def _install(self) -> None:
        previous = signal.getsignal(signal.SIGINT)
        if callable(previous):
            self._pending = None
            self._previous = previous
            signal.signal(signal.SIGINT, self._hold)

    def _restore(self) -> None:
        if self._previous is not None:
            previous, self._previous = self._previous, None
            signal.signal(signal.SIGINT, previous)
            self._deliver(previous)

    def _deliver(self, handler: Any) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            handler(*pending)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if self._depth:
            self._pending = (number, frame)
        else:
            self._previous(number, frame)


uninterrupted = Uninterrupted()
