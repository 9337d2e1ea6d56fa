"""Engines on tiny hybrid models, watched by shadows: what the states must be, from committed tokens one at a time."""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline import LLM
from paceline.models.target import TargetModel, state_arguments


class Shadow:
    """A text computed row by row, alone, into a state of its own."""

    def __init__(self, model: TargetModel, blocks: int) -> None:
        self.model, self.states = model, model.new_states(1)
        self.cache = model.new_cache(blocks)
        self.table = np.arange(blocks, dtype=np.int32)[None]
        self.logits = np.empty((1, model.vocab_size), np.float32)
        self.seen: list[int] = []
        self.out = np.empty(self.states.slot_bytes, np.uint8)

    def state(self, tokens: list[int]) -> np.ndarray:
        """The state behind `tokens`, which go on where the last call's ended (else it starts anew)."""
        if self.seen != tokens[: len(self.seen)]:
            self.states.reset(0)
            self.seen = []
        for at in range(len(self.seen), len(tokens)):
            self.model.plan().forward(
                self.cache,
                np.array([at], np.int32),
                np.array([0, 1], np.int32),
                tokens=np.array([tokens[at]], np.int32),
                block_tables=self.table,
                **state_arguments(self.states, [0]),
            )
        self.seen = list(tokens)
        self.states.read(0, self.out)
        return self.out


class StateWatch:
    """After every step of an engine, the state of every running sequence is compared with its shadow's, bit for bit.

    `compared` counts; `stale` allows for sequences whose pass failed, which are restarted by the next step.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm, self.compared, self.snapshots = llm, 0, 0
        self.shadows: dict[int, Shadow] = {}
        step = llm.engine.step

        def checked() -> Any:
            results = step()
            self.check()
            return results

        llm.engine.step = checked  # type: ignore[method-assign]

    def shadow(self, name: int) -> Shadow:
        if name not in self.shadows:
            self.shadows[name] = Shadow(self.llm.model, -(-self.llm.max_model_len // 16))
        return self.shadows[name]

    def check(self) -> None:
        states = self.llm.engine.states
        assert states is not None
        got = np.empty(states.native.slot_bytes, np.uint8)
        for sequence in self.llm.engine.running:
            assert sequence.state_slot is not None
            assert states.rows(sequence.state_slot) == sequence.num_computed
            states.native.read(sequence.state_slot, got)
            want = self.shadow(sequence.request_id).state(sequence.token_ids[: sequence.num_computed])
            assert (got == want).all(), f"request {sequence.request_id} behind {sequence.num_computed} rows"
            self.compared += 1

    def check_snapshots(self, texts: list[list[int]]) -> None:
        """Every snapshot holds what the beginning of one of these texts leads to."""
        from paceline.cache import block_keys

        states = self.llm.engine.states
        assert states is not None
        known = {}
        for text in texts:
            for i, key in enumerate(block_keys([], text, len(text) // 16)):
                known[key] = text[: 16 * (i + 1)]
        got = np.empty(states.native.slot_bytes, np.uint8)
        for key, slot in states._snapshots.items():
            assert states.native.rows(slot) == len(known[key])
            states.native.read(slot, got)
            shadow = Shadow(self.llm.model, -(-self.llm.max_model_len // 16))
            assert (got == shadow.state(known[key])).all()
            self.snapshots += 1
