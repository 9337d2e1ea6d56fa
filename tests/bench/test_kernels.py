from __future__ import annotations

import io
import sys
import types

import pytest
from rich.console import Console

from paceline.bench import kernels
from paceline.bench.kernels import SETTLING_PASSES, KernelSamples, settle, summarise

ROW_KEYS = ["rows", "ms", "weight_gbs", "bandwidth_share", "floor_ms", "vs_floor", "vs_one_row"]


def test_medians_floors_and_ratios_by_hand():
    samples = KernelSamples(
        bandwidth=[50.0, 10.0, 60.0],
        peak=[400.0, 500.0, 100.0],
        seconds={1: [0.005, 0.004, 0.009], 8: [0.006]},
    )
    result = summarise(samples, {1: (200e6, 0.2e9), 8: (200e6, 2.4e9)}, isa="avx512", threads=2)
    assert list(result) == ["read_bandwidth_gbs", "peak_gflops", "isa", "threads", "rows"]
    assert (result["read_bandwidth_gbs"], result["peak_gflops"]) == (50.0, 400.0)
    one, eight = result["rows"]
    assert list(one) == ROW_KEYS
    # 200 MB at 50 GB/s are 4 ms, 0.2 GFLOP at 400 GFLOP/s half a millisecond: memory bound.
    assert one == pytest.approx(
        {
            "rows": 1,
            "ms": 5.0,
            "weight_gbs": 40.0,
            "bandwidth_share": 0.8,
            "floor_ms": 4.0,
            "vs_floor": 1.25,
            "vs_one_row": 1.0,
        }
    )
    # 2.4 GFLOP at 400 GFLOP/s are 6 ms: arithmetic bound.
    assert (eight["floor_ms"], eight["vs_floor"], eight["vs_one_row"]) == pytest.approx((6.0, 1.0, 1.2))


def test_without_a_one_row_pass_there_is_no_ratio_to_it():
    samples = KernelSamples(bandwidth=[50.0], peak=[400.0], seconds={4: [0.005]})
    (row,) = summarise(samples, {4: (1e6, 1e6)}, isa="avx2", threads=1)["rows"]
    assert row["vs_one_row"] is None


@pytest.fixture
def native(monkeypatch):
    """A native module whose measurements are scripted and written down."""
    log = []
    speeds = iter([40.0, 45.0, 50.0] * 9)
    module = types.ModuleType("paceline._native")
    module.measure_read_bandwidth = lambda pool, size, isa: log.append(("read", pool, size, isa)) or next(speeds)
    module.measure_peak = lambda pool, isa, f32, weights: log.append(("peak", pool, isa, f32, weights)) or 300.0
    monkeypatch.setitem(sys.modules, "paceline._native", module)
    monkeypatch.setattr("paceline._native", module, raising=False)
    module.log = log
    return module


def test_each_repeat_measures_everything_once(llm, native, monkeypatch):
    passes = []
    monkeypatch.setattr(
        llm,
        "time_forward",
        lambda rows, context: passes.append((rows, context)) or rows * 1e-3,
        raising=False,
    )
    told = []
    result = kernels.measure(llm, [1, 8], repeats=3, on_step=told.append)
    # what a repeat begins with runs twice untimed first: the read loop drove the weights out of the caches
    assert [rows for rows, _ in passes] == [*(1, 8), *(1, 1, 1, 8), *(8, 8, 8, 1), *(1, 1, 1, 8)]
    assert {context for _, context in passes} == {128}
    assert native.log == [("read", "pool", 2 << 30, "avx512"), ("peak", "pool", "avx512", False, "bfloat16")] * 3
    assert len(told) == 3 * kernels.steps_per_repeat([1, 8])
    assert result["read_bandwidth_gbs"] == 45.0
    assert [row["ms"] for row in result["rows"]] == pytest.approx([1.0, 8.0])


@pytest.mark.parametrize("stored", ["int8", "int4", "bfloat16"])
def test_weights_are_measured_against_the_products_of_their_type(llm, native, monkeypatch, stored):
    monkeypatch.setattr(llm.model, "weight_type", stored)
    kernels.measure(llm, [1], repeats=1)
    assert native.log[1] == ("peak", "pool", "avx512", False, stored)


def test_table(llm, native):
    console = Console(file=io.StringIO(), width=100)
    console.print(kernels.kernel_table(kernels.measure(llm, [1, 2, 4], repeats=1)))
    text = console.file.getvalue()
    assert "reads 40.0 GB/s" in text
    assert text.count("│ ") >= 3


@pytest.mark.parametrize(
    ("seconds", "runs"),
    [([7.0, 4.7, 3.8, 3.1, 3.05, 2.0], 5), ([2.0, 2.1, 1.0], 2), ([2.0**-i for i in range(40)], SETTLING_PASSES + 1)],
)
def test_passes_run_untimed_until_they_are_no_longer_faster(seconds, runs):
    left = list(seconds)
    settle(lambda: left.pop(0))
    assert len(seconds) - len(left) == runs
