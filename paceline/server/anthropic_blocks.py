"""Content blocks of an Anthropic message, built from the parts of an output as they come, and a stream's events."""

from __future__ import annotations

from typing import Any

from paceline.parsing.deltas import ChatDelta, ToolCallDelta
from paceline.server.anthropic_input import arguments_of
from paceline.server.transport import named_event


class Blocks:
    """`blocks`: as they are once `end` was called. Thinking has no signature: nothing here would check one."""

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._open = False
        self._text: list[str] = []

    def add(self, part: ChatDelta) -> bytes:
        """Events of one part."""
        if part.reasoning:
            return self._add_text("thinking", part.reasoning)
        if part.content:
            return self._add_text("text", part.content)
        return b"".join(map(self._add_call, part.tool_calls))

    def end(self) -> bytes:
        """The last block's end."""
        if not self._open:
            return b""
        self._open = False
        block, text = self.blocks[-1], "".join(self._text)
        events = b""
        if block["type"] == "tool_use":
            block["input"] = arguments_of(text)
        else:
            block[block["type"]] = text
        if block["type"] == "thinking":
            events = self._delta({"type": "signature_delta", "signature": ""})
        return events + named_event({"type": "content_block_stop", "index": len(self.blocks) - 1})

    def _add_text(self, kind: str, text: str) -> bytes:
        events = b""
        if not self._open or self.blocks[-1]["type"] != kind:
            more = {"signature": ""} if kind == "thinking" else {}
            events = self.end() + self._begin({"type": kind, kind: "", **more})
        self._text.append(text)
        return events + self._delta({"type": f"{kind}_delta", kind: text})

    def _add_call(self, piece: ToolCallDelta) -> bytes:
        events = b""
        if piece.name is not None:
            events = self.end() + self._begin({"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}})
        if piece.arguments:
            self._text.append(piece.arguments)
            events += self._delta({"type": "input_json_delta", "partial_json": piece.arguments})
        return events

    def _begin(self, block: dict[str, Any]) -> bytes:
        self.blocks.append(block)
        self._open, self._text = True, []
        return named_event({"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return named_event({"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta})
