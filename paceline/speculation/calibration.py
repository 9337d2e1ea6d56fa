"""Calibration of confidence: what the head says and how sure the drafter is of its token, and per-position
temperatures, all fitted on what became of drafts.

Method (DSpark, arXiv 2607.05147, "sequential temperature scaling"): position by position from the left, the temperature
is the one under which the running product of the chances says best how often a draft survives to that position, by
expected calibration error. Before that, a logistic regression weighs the head's logit and that of the slot's likeliest
token (`mix`): the head has to guess from the hidden state what the logits show. `paceline train calibrate` fits both
and writes a sidecar that is read with the drafter.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from paceline._native import calibrated
from paceline.errors import CheckpointError
from paceline.values import as_number, shown

CALIBRATION_FILE = "confidence_calibration.json"
BINS = 15
MIX_STEPS = 25
GRID = np.round(np.geomspace(0.2, 5.0, 97), 4)  # holds 1, which leaves the chances as they are


@dataclass(frozen=True, slots=True)
class Calibration:
    """temperatures[k] divides the confidence logit of draft k + 1; positions beyond the last one take its value.

    mix: weights of the head's logit and of the likeliest token's, and a constant; None: the head's logit alone.
    """

    temperatures: tuple[float, ...] = ()
    mix: tuple[float, float, float] | None = None

    def chances(self, logits: Sequence[float], own: Sequence[float] = ()) -> list[float]:
        """Chance of each draft of a block to be kept if those before it are, from the head's logits and those of the
        slots' likeliest tokens; without the latter (drafters that have none), from the head's alone."""
        return calibrated(logits, own, self.mix if own else None, self.temperatures)


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted calibration and how it did on its data: expected calibration error of survival, position by position."""

    temperatures: tuple[float, ...]
    samples: tuple[int, ...]  # drafts that reached each position
    error_before: tuple[float, ...]
    error_after: tuple[float, ...]
    mix: tuple[float, float, float] | None = None


def mixed(mix: tuple[float, float, float], logits: np.ndarray, own: np.ndarray) -> np.ndarray:
    """float64 [n]: the logits of chances by both."""
    return mix[0] * np.asarray(logits, np.float64) + mix[1] * np.asarray(own, np.float64) + mix[2]


def _sigmoid(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return 1.0 / (1.0 + np.exp(-x))


def calibration_error(chances: np.ndarray, happened: np.ndarray, bins: int = BINS) -> float:
    """Expected calibration error: mean gap of said and seen frequency over bins of equal width, by their size."""
    if not len(chances):
        return 0.0
    index = np.minimum((chances * bins).astype(np.int64), bins - 1)
    count = np.bincount(index, minlength=bins)
    said = np.bincount(index, chances, bins)
    seen = np.bincount(index, happened.astype(np.float64), bins)
    filled = count > 0
    return float(np.abs(said[filled] - seen[filled]).sum() / len(chances))


def fit_calibration(blocks: Sequence[tuple[Sequence[float], int]], *, least: int = 50) -> Fit:
    """Temperatures from drafts that were verified whole: (confidence logits, number accepted) of each.

    A position that fewer than `least` drafts had takes the temperature of the one before it. Raises ValueError where
    there is nothing to fit.
    """
    longest = max((len(logits) for logits, _ in blocks), default=0)
    first = sum(len(logits) > 0 for logits, _ in blocks)
    if first < least:
        raise ValueError(f"{first} drafts were verified; at least {least} are needed to fit a calibration")
    temperatures: list[float] = []
    samples, before, after = [], [], []
    said = np.ones(len(blocks))  # product of the calibrated chances so far
    raw = np.ones(len(blocks))
    for position in range(longest):
        has = np.array([len(logits) > position for logits, _ in blocks])
        values = np.array([float(b[0][position]) if ok else 0.0 for b, ok in zip(blocks, has, strict=True)])
        happened = np.array([accepted > position for _, accepted in blocks])
        samples.append(int(has.sum()))
        if samples[-1] >= least:
            errors = [calibration_error((said * _sigmoid(values / t))[has], happened[has]) for t in GRID]
            best = min(errors)  # of several that do as well, the one that changes least
            temperatures.append(float(min(GRID[np.array(errors) <= best + 1e-12], key=lambda t: abs(np.log(t)))))
        else:
            temperatures.append(temperatures[-1])
        said = said * _sigmoid(values / temperatures[-1])
        raw = raw * _sigmoid(values)
        before.append(calibration_error(raw[has], happened[has]))
        after.append(calibration_error(said[has], happened[has]))
    return Fit(tuple(temperatures), tuple(samples), tuple(before), tuple(after))


def fit_mix(blocks: Sequence[tuple[Sequence[float], Sequence[float], int]]) -> tuple[float, float, float]:
    """Weights by logistic regression over drafts that were put to the test: (logits of the head, of the likeliest
    tokens, number accepted) of each block. Newton's method with a small ridge."""
    rows, kept = [], []
    for logits, own, accepted in blocks:
        for j, (said, sure) in enumerate(zip(logits, own, strict=True)):
            if j <= accepted:
                rows.append((said, sure, 1.0))
                kept.append(float(j < accepted))
    x, y, weights = np.array(rows).reshape(-1, 3), np.array(kept), np.zeros(3)
    ridge = 1e-2 * np.eye(3)
    for _ in range(MIX_STEPS):
        chances = _sigmoid(x @ weights)
        gradient = x.T @ (chances - y) + ridge @ weights
        weights = weights - np.linalg.solve((x.T * (chances * (1.0 - chances))) @ x + ridge, gradient)
    return float(weights[0]), float(weights[1]), float(weights[2])


def fit_blocks(blocks: Sequence[tuple[Sequence[float], Sequence[float], int]]) -> Fit:
    """The mix, then temperatures on top of it. Raises ValueError where there is nothing to fit."""
    mix = fit_mix(blocks)
    both = [(mixed(mix, np.array(said), np.array(own)).tolist(), accepted) for said, own, accepted in blocks]
    return replace(fit_calibration(both), mix=mix)


def write_calibration(folder: Path, fit: Fit, about: dict[str, Any]) -> Path:
    """Write the sidecar beside a drafter's config.json; `about` says what it was fitted on."""
    path = folder / CALIBRATION_FILE
    staging = path.with_suffix(".tmp")
    staging.write_text(json.dumps({**asdict(fit), **about}, indent=2) + "\n")
    os.replace(staging, path)
    return path


def read_calibration(folder: Path) -> Calibration:
    """The sidecar of a drafter folder; none is no calibration. Raises CheckpointError for a damaged one."""
    path = folder / CALIBRATION_FILE
    if not os.path.lexists(path):
        return Calibration()
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); fit it again or remove it") from None
    found = content.get("temperatures") if isinstance(content, dict) else None
    numbers = [as_number(t) for t in found] if isinstance(found, list) else []
    if not numbers or not all(t is not None and 0.01 <= t <= 100 for t in numbers):
        raise CheckpointError(
            f"{path}: temperatures = {shown(found)}: must list numbers from 0.01 to 100; fit it again or remove it"
        )
    mix = content.get("mix")
    if mix is None:
        return Calibration(tuple(t for t in numbers if t is not None))
    weights = [as_number(w) for w in mix] if isinstance(mix, list) else []
    if len(weights) != 3 or not all(w is not None and abs(w) <= 100 for w in weights):
        raise CheckpointError(
            f"{path}: mix = {shown(mix)}: must list three numbers from -100 to 100; fit it again or remove it"
        )
    a, b, c = (w for w in weights if w is not None)
    return Calibration(tuple(t for t in numbers if t is not None), (a, b, c))
