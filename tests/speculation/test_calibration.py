"""Calibration of confidence: what is fitted is what the drafts were made with, and files are read strictly."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import CheckpointError
from paceline.speculation.calibration import (
    CALIBRATION_FILE,
    Calibration,
    calibration_error,
    fit_blocks,
    fit_calibration,
    fit_mix,
    read_calibration,
    write_calibration,
)

TRUE = (2.0, 0.5, 1.0, 3.0)


def blocks(count: int, seed: int = 0) -> list[tuple[list[float], int]]:
    """Drafts whose chance at position k is sigmoid(logit / TRUE[k])."""
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(count):
        logits = rng.normal(1.0, 2.0, len(TRUE))
        kept = rng.random(len(TRUE)) < 1 / (1 + np.exp(-logits / np.array(TRUE)))
        accepted = int(np.argmin(kept)) if not kept.all() else len(TRUE)
        out.append((logits.tolist(), accepted))
    return out


def test_the_temperatures_of_the_data_are_found() -> None:
    fit = fit_calibration(blocks(40_000))
    assert fit.samples == (40_000,) * 4
    assert fit.temperatures[:2] == pytest.approx(TRUE[:2], rel=0.2)
    assert fit.error_after[0] < 0.012 < fit.error_before[0]
    assert all(after <= before + 0.003 for before, after in zip(fit.error_before, fit.error_after, strict=True))
    fresh = blocks(40_000, seed=1)
    logits = np.array([row for row, _ in fresh])
    survived = np.array([[a > k for k in range(4)] for _, a in fresh])
    said = np.cumprod([Calibration(fit.temperatures).chances(row) for row in logits], 1)
    raw = np.cumprod([Calibration().chances(row) for row in logits], 1)
    for k in range(4):
        assert calibration_error(said[:, k], survived[:, k]) < 0.02
    assert calibration_error(raw[:, 0], survived[:, 0]) > 0.04


def test_rare_positions_take_the_temperature_before_them() -> None:
    few = [(row[:2], min(a, 2)) for row, a in blocks(500)] + blocks(10, seed=2)
    fit = fit_calibration(few)
    assert fit.samples == (510, 510, 10, 10)
    assert fit.temperatures[1] == fit.temperatures[2] == fit.temperatures[3]


@pytest.mark.parametrize("data", [[], [([], 0)] * 100, blocks(49)])
def test_too_little_data_is_said(data: list[tuple[list[float], int]]) -> None:
    with pytest.raises(ValueError, match="at least 50"):
        fit_calibration(data)


@settings(deadline=None)
@given(st.lists(st.floats(-40, 40), max_size=9), st.lists(st.floats(0.01, 100), max_size=4))
def test_chances_are_chances(logits: list[float], temperatures: list[float]) -> None:
    chances = Calibration(tuple(temperatures)).chances(logits)
    assert len(chances) == len(logits) and all(0 <= chance <= 1 for chance in chances)
    if temperatures and len(logits) > len(temperatures):
        assert chances[-1] == pytest.approx(1 / (1 + np.exp(-logits[-1] / temperatures[-1])))


def test_a_fit_is_written_and_read(tmp_path) -> None:
    assert read_calibration(tmp_path) == Calibration()
    fit = fit_calibration(blocks(200))
    path = write_calibration(tmp_path, fit, {"model": "x"})
    assert read_calibration(tmp_path).temperatures == fit.temperatures
    content = json.loads(path.read_text())
    assert content["model"] == "x" and len(content["samples"]) == 4
    assert [p.name for p in tmp_path.iterdir()] == [CALIBRATION_FILE]


DAMAGED = ("", "[]", "{", "[" * 50_000, '{"temperatures": null}', '{"temperatures": []}', '{"temperatures": [0]}')
NO_NUMBERS = ('{"temperatures": ["1"]}', '{"temperatures": [true]}', '{"temperatures": [NaN]}', '{"temperatures": 1}')


@pytest.mark.parametrize("text", [*DAMAGED, *NO_NUMBERS, '{"temperatures": [1e999]}'], ids=lambda text: text[:30])
def test_a_damaged_file_is_refused_by_name(tmp_path, text: str) -> None:
    (tmp_path / CALIBRATION_FILE).write_text(text)
    with pytest.raises(CheckpointError, match=CALIBRATION_FILE):
        read_calibration(tmp_path)


def test_a_link_to_nothing_is_refused(tmp_path) -> None:
    (tmp_path / CALIBRATION_FILE).symlink_to(tmp_path / "gone")
    with pytest.raises(CheckpointError, match=CALIBRATION_FILE):
        read_calibration(tmp_path)


def both(count: int, seed: int) -> list[tuple[list[float], list[float], int]]:
    """Drafts whose chance is sigmoid(0.3 head + 0.9 own - 0.2), whatever their position."""
    rng = np.random.default_rng(seed)
    head, own = rng.normal(0.5, 1.5, (count, 4)), rng.normal(1.0, 2.0, (count, 4))
    kept = rng.random((count, 4)) < 1 / (1 + np.exp(-(0.3 * head + 0.9 * own - 0.2)))
    accepted = [int(np.argmin(row)) if not row.all() else 4 for row in kept]
    return list(zip(head.tolist(), own.tolist(), accepted, strict=True))


def test_the_weights_of_head_and_certainty_are_found(tmp_path) -> None:
    data = both(20_000, 0)
    assert fit_mix(data) == pytest.approx((0.3, 0.9, -0.2), abs=0.05)
    fit = fit_blocks(data)
    assert fit.temperatures[0] == pytest.approx(1.0, rel=0.15) and fit.error_after[0] < 0.015
    write_calibration(tmp_path, fit, {})
    calibration = read_calibration(tmp_path)
    assert calibration.mix == fit.mix and calibration.temperatures == fit.temperatures
    fresh = both(20_000, 1)
    said = np.array([calibration.chances(h, o)[0] for h, o, _ in fresh])
    assert calibration_error(said, np.array([a > 0 for *_, a in fresh])) < 0.02


def test_without_a_mix_the_head_alone_speaks() -> None:
    logits, own = [1.0, -2.0], [5.0, 4.0]
    assert Calibration((2.0,)).chances(logits, own) == Calibration((2.0,)).chances(logits)
    wanted = [1 / (1 + math.exp(-x)) for x in own]
    assert Calibration(mix=(0.0, 1.0, 0.0)).chances(logits, own) == pytest.approx(wanted)


def test_data_that_splits_cleanly_gives_finite_weights() -> None:
    data = [([2.0], [3.0], 1)] * 60 + [([-2.0], [-3.0], 0)] * 60
    assert all(np.isfinite(fit_mix(data)))


@pytest.mark.parametrize("mix", [3, [1, 2], [1, 2, "x"], [1, 2, 1e9], {}])
def test_a_damaged_mix_is_refused(tmp_path, mix) -> None:
    (tmp_path / CALIBRATION_FILE).write_text(json.dumps({"temperatures": [1.0], "mix": mix}))
    with pytest.raises(CheckpointError, match="mix = "):
        read_calibration(tmp_path)
