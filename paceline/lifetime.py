"""The end of an `LLM`: what it holds is let go, and who uses it afterwards is told so."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any, Self

from paceline.errors import EngineDeadError, EngineError
from paceline.interrupts import uninterrupted
from paceline.other_members import LLM_MEMBERS, absent

if TYPE_CHECKING:
    from paceline.engine_thread import EngineThread
    from paceline.llm import LLM

# What holds memory or threads, or leads to what does. Every call needs one of them.
_HELD = ("engine", "grammars", "model", "tokenizer", "_costs", "_drafter", "_timing")


class Closable:
    """`close`, `with`, and what is said of attributes that there are not, or no longer."""

    _closed = False
    _save_costs: weakref.finalize[[Any], Any]
    _served_by: weakref.ref[EngineThread] | None = None  # the thread of an AsyncLLM

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def close(self: LLM) -> None:  # type: ignore[misc]
        """End what runs and free weights, caches and threads; further calls do nothing, other uses raise an
        EngineDeadError. Waits for a call that another thread makes. Threads are shared with models that are still open.

        Raises EngineError while an AsyncLLM serves from this model, or out of a step of it.
        """
        thread = None if self._served_by is None else self._served_by()
        if thread is not None and thread.runs:
            raise EngineError("close: an AsyncLLM runs this model; close that first")
        with self._lock, uninterrupted:
            if self._closed:
                return
            if self.engine._stepping:
                raise EngineError("close: a step is running; close the model when it is over")
            for request in {id(request): request for request in self._streamed.values()}.values():
                if not request.finished:
                    request.cut_off = True
                    request.deltas.clear()  # else the last of them would pass for the end
                    self._abort([request])
            self._save_costs()
            self._closed = True
            for name in _HELD:
                delattr(self, name)
        gc.collect()  # engine and scheduler know each other

    def __enter__(self) -> Self:
        if self._closed:
            raise _gone()
        return self

    def __exit__(self: LLM, *_: object) -> None:  # type: ignore[misc]
        self.close()

    if not TYPE_CHECKING:  # else every name would be right

        def __getattr__(self, name: str) -> Any:
            if name in _HELD and self._closed:
                raise _gone()
            raise AttributeError(absent("LLM", name, LLM_MEMBERS), name=name, obj=self)


def _gone() -> EngineDeadError:
    return EngineDeadError("this LLM was closed; open the model again: LLM(...)")
