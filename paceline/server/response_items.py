"""Output items of a response, built from the parts of an output as they come, with the events that tell of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.parsing.deltas import ChatDelta, ToolCallDelta
from paceline.server.service import new_id

Event = Callable[..., bytes]


def silent(kind: str, **fields: Any) -> bytes:
    """For a whole answer, which has no events."""
    return b""


class Items:
    """`items`: as they are once `end` was called. What comes in turns (text, a call, text) makes several items."""

    def __init__(self, event: Event = silent) -> None:
        self.items: list[dict[str, Any]] = []
        self._event = event
        self._kind = ""  # of the open item
        self._text: list[str] = []

    def add(self, part: ChatDelta) -> bytes:
        """Events of one part."""
        if part.reasoning:
            return self._add_text("reasoning", part.reasoning)
        if part.content:
            return self._add_text("message", part.content)
        return b"".join(map(self._add_call, part.tool_calls))

    def end(self, cut: bool, calls: bool = False) -> bytes:
        """The last events. cut: the output was ended by a limit, so the last item is incomplete. An output without
        anything has an empty message, unless it was to be calls."""
        begun = b"" if self.items or calls else self._open("message")
        return begun + self._close("incomplete" if cut else "completed")

    # ---- items

    def _add_text(self, kind: str, text: str) -> bytes:
        events = b"" if self._kind == kind else self._close() + self._open(kind)
        self._text.append(text)
        name = "output_text" if kind == "message" else "reasoning_text"
        more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        return events + self._event(f"response.{name}.delta", **self._place(), content_index=0, delta=text, **more)

    def _add_call(self, piece: ToolCallDelta) -> bytes:
        events = b"" if piece.name is None else self._close() + self._open("function_call", piece)
        if piece.arguments:
            self._text.append(piece.arguments)
            name = "response.function_call_arguments.delta"
            events += self._event(name, **self._place(), delta=piece.arguments)
        return events

    def _open(self, kind: str, call: ToolCallDelta | None = None) -> bytes:
        self._kind, self._text = kind, []
        item: dict[str, Any] = {"id": new_id(_PREFIX[kind]), "type": kind, "status": "in_progress"}
        if call is not None:
            item |= {"call_id": call.id, "name": call.name, "arguments": ""}
        elif kind == "message":
            item |= {"role": "assistant", "content": []}
        else:
            item |= {"summary": [], "content": []}
        self.items.append(item)
        events = self._event("response.output_item.added", output_index=len(self.items) - 1, item=dict(item))
        if call is None:
            part = _part(kind, "")
            events += self._event("response.content_part.added", **self._place(), content_index=0, part=part)
        return events

    def _close(self, status: str = "completed") -> bytes:
        if not self._kind:
            return b""
        item, text, place = self.items[-1], "".join(self._text), self._place()
        item["status"] = status
        if self._kind == "function_call":
            item["arguments"] = text
            events = self._event("response.function_call_arguments.done", **place, name=item["name"], arguments=text)
        else:
            part = _part(self._kind, text)
            item["content"] = [part]
            place |= {"content_index": 0}
            name = "output_text" if self._kind == "message" else "reasoning_text"
            more: dict[str, Any] = {"logprobs": []} if self._kind == "message" else {}
            events = self._event(f"response.{name}.done", **place, text=text, **more)
            events += self._event("response.content_part.done", **place, part=part)
        self._kind = ""
        return events + self._event("response.output_item.done", output_index=len(self.items) - 1, item=dict(item))

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}


_PREFIX = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
