"""What a golden case demands, as functions from (expected, observed) to nothing or an AssertionError.

The rules are those of the golden vectors' own README: ids, counts and positions exactly, tensors within a
tolerance, rounds cut short by the end of a run not compared draft by draft.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from .cases import Case

ATOL = RTOL = 1e-4


class Target(Protocol):
    """A target model under test, fp32 weights and activations."""

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """[n, V] float32 logits of every position, from one prefill."""

    def greedy(self, ids: Sequence[int], count: int) -> list[int]:
        """``count`` greedy tokens after ``ids``, decoded one by one through the cache."""

    def hidden_states(self, ids: Sequence[int]) -> list[np.ndarray] | None:
        """[n, H] residual stream per layer; None when the engine offers no taps.

        0 = embedding output, l = output of layer l - 1, the last one after the final norm.
        """


@dataclass(slots=True)
class Round:
    """One observed round of a speculative run."""

    anchor_position: int
    anchor_token: int
    draft_tokens: list[int]
    num_accepted: int
    produced_tokens: list[int]
    verified_draft_tokens: list[int] | None = None
    confidence: list[float] | None = None
    tensors: dict[str, np.ndarray] = field(default_factory=dict)


@dataclass(slots=True)
class Run:
    """One observed speculative run: the new tokens and how each round came to them."""

    output: list[int]
    rounds: list[Round]


class Speculator(Protocol):
    """A target with its drafter under test, fp32 weights and activations."""

    def run(self, prompt: Sequence[int], expected: dict[str, Any]) -> Run:
        """Repeat the run that ``expected`` describes (width, max_new_tokens, stop ids, threshold)."""


def close(name: str, actual: np.ndarray, expected: np.ndarray) -> None:
    """Assert |actual - expected| <= ATOL + RTOL * |expected|, naming the worst element when it is not so."""
    assert actual.shape == expected.shape, f"{name}: shape {actual.shape}, expected {expected.shape}"
    difference = np.abs(actual.astype(np.float64) - expected.astype(np.float64))
    excess = difference - (ATOL + RTOL * np.abs(expected.astype(np.float64)))
    # "not <=" rather than ">": a NaN anywhere has to fail.
    if not np.all(excess <= 0):
        worst = np.unravel_index(np.argmax(np.where(np.isnan(excess), np.inf, excess)), excess.shape)
        where = list(map(int, worst))
        raise AssertionError(f"{name}{where}: {actual[worst]!r}, expected {expected[worst]!r}")


def check_target(case: Case, target: Target) -> None:
    """Prefill logits, greedy ids, and whatever else of the target alone the case holds."""
    for index, prompt in enumerate(case.expected["prompts"]):
        ids, continuation = prompt["ids"], prompt["ar"]
        logits = target.logits(ids)
        _close_if_held(case, f"p{index}.prefill_last_logits", logits[-1])
        _close_if_held(case, f"p{index}.prompt_logits_last8", logits[-8:])
        greedy = target.greedy(ids, len(continuation))
        assert greedy == continuation, f"p{index}: greedy ids differ: {greedy} != {continuation}"
        if f"p{index}.final_logits" in case.tensors:
            _close_if_held(case, f"p{index}.final_logits", target.logits([*ids, *continuation])[-1])
        hidden = target.hidden_states(ids)
        for layer, states in enumerate(hidden or ()):
            _close_if_held(case, f"p{index}.hidden_{layer}", states)


def _close_if_held(case: Case, name: str, actual: np.ndarray) -> None:
    if name in case.tensors:
        close(name, actual, case.tensors[name])


def check_speculation(case: Case, speculator: Speculator) -> None:
    """Every recorded run: output, rounds and the tensors of the dumped rounds."""
    for expected in case.expected["runs"]:
        observed = speculator.run(case.expected["prompts"][expected["prompt"]]["ids"], expected)
        check_run(case, expected, observed)


def check_run(case: Case, expected: dict[str, Any], observed: Run) -> None:
    label = f"p{expected['prompt']}.w{expected['width']}"
    _equal(f"{label}: output", observed.output, expected["output"])
    dumped = expected.get("dumped_rounds", ())
    full = list(full_rounds(expected))
    assert len(observed.rounds) >= len(full), f"{label}: {len(observed.rounds)} rounds, expected {len(full)} or more"
    for index, (want, got) in enumerate(zip(full, observed.rounds, strict=False)):
        where = f"{label}.r{index}"
        for name in ("anchor_position", "anchor_token", "draft_tokens", "num_accepted", "produced_tokens"):
            _equal(f"{where}.{name}", getattr(got, name), want[name])
        if "verified_draft_tokens" in want:
            _equal(f"{where}.verified_draft_tokens", got.verified_draft_tokens, want["verified_draft_tokens"])
        if "confidence" in want:
            assert got.confidence is not None, f"{where}: no confidence was reported"
            close(f"{where}.confidence", np.array(got.confidence), np.array(want["confidence"]))
        if index in dumped:
            _check_round_tensors(case, where, got)


def _equal(name: str, actual: object, expected: object) -> None:
    assert actual == expected, f"{name}: {actual}, expected {expected}"


def full_rounds(expected: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """The rounds before the end of the run shortens the block: from there on drafts may differ.

    The reference drafts up to the last token that may still be produced. Paceline stops one before it, since the
    target gives that one for nothing, so its blocks are shortened one round sooner at most.
    """
    first = expected["rounds"][0]["anchor_position"] if expected["rounds"] else 0
    end = first + expected["max_new_tokens"]
    for each in expected["rounds"]:
        # an anchor-first block of `width` slots has as many drafts, another one less
        if end - 1 - each["anchor_position"] < max(expected["width"], len(each["draft_tokens"]) + 1):
            return
        yield each


def _check_round_tensors(case: Case, where: str, observed: Round) -> None:
    prefix = f"{where}."
    for name, want in case.tensors.items():
        if not name.startswith(prefix):
            continue
        key = name.removeprefix(prefix)
        got = observed.tensors.get(key)
        if key.startswith("selector_"):
            continue  # compared together below: the candidates' order is free
        if got is not None:
            close(name, got, want)
    assert "draft_logits" in observed.tensors, f"{where}: a dumped round needs at least its draft logits"
    candidates = case.tensors.get(f"{prefix}selector_candidates")
    if candidates is not None and "selector_candidates" in observed.tensors:
        _check_selector(case, prefix, observed)


def _check_selector(case: Case, prefix: str, observed: Round) -> None:
    want, got = case.tensors[f"{prefix}selector_candidates"], observed.tensors["selector_candidates"]
    want_order, got_order = np.argsort(want, axis=1), np.argsort(got, axis=1)
    got_sorted = np.take_along_axis(got, got_order, 1).tolist()
    _equal(f"{prefix}selector_candidates", got_sorted, np.take_along_axis(want, want_order, 1).tolist())
    want_scores = np.take_along_axis(case.tensors[f"{prefix}selector_scores"], want_order, 1)
    close(
        f"{prefix}selector_scores",
        np.take_along_axis(observed.tensors["selector_scores"], got_order, 1),
        want_scores,
    )
    path = case.tensors[f"{prefix}selector_path"].tolist()
    _equal(f"{prefix}selector_path", observed.tensors["selector_path"].tolist(), path)
