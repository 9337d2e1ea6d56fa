"""Ctrl-C between steps, never inside one."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Uninterrupted:
    """While entered, SIGINT waits: a half-done step would leave requests half-committed.

    A step takes milliseconds, so the user does not notice. The signal is delivered to its own handler on the way out.
    Only the main thread receives signals; elsewhere, and when entered again inside, this does nothing.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._previous: Any = None
        self._pending: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._depth += 1
        if self._depth == 1:
            previous = signal.getsignal(signal.SIGINT)
            if callable(previous):
                self._pending = None
                self._previous = previous
                signal.signal(signal.SIGINT, self._hold)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._depth -= 1
        if self._depth == 0 and self._previous is not None:
            previous, self._previous = self._previous, None
            signal.signal(signal.SIGINT, previous)
            pending, self._pending = self._pending, None
            if pending is not None:
                previous(*pending)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        self._pending = (number, frame)


uninterrupted = Uninterrupted()
