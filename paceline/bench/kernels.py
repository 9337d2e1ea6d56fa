"""`paceline bench kernels`: whole forward passes of a few rows against what memory and arithmetic allow.

Floor of a pass = max(bytes / read bandwidth, operations / peak); bytes: weights, K/V read. The peak is that of the
instructions that multiply the weights: of byte dot products for quantised ones (of what stands in for them with AVX2),
with which attention is counted too.
Bandwidth, peak and every row count are measured once in each repeat, so that a machine whose speed drifts is
compared with itself; the figures are medians over the repeats.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rich.table import Table

    from paceline.llm import LLM

READ_BYTES = 2 << 30
CONTEXT = 128
SETTLING_PASSES = 12  # at most
SETTLED = 0.97


@dataclass(slots=True)
class KernelSamples:
    """What the repeats measured: GB/s, GFLOP/s, and seconds per row count."""

    bandwidth: list[float] = field(default_factory=list)
    peak: list[float] = field(default_factory=list)
    seconds: dict[int, list[float]] = field(default_factory=dict)


def steps_per_repeat(rows: Sequence[int]) -> int:
    """How often `measure` reports progress in one repeat."""
    return len(rows) + 2


def measure(
    llm: LLM,
    rows: Sequence[int],
    repeats: int,
    *,
    context: int = CONTEXT,
    on_step: Callable[[str], None] = lambda _label: None,
) -> dict[str, Any]:
    """Measure forward passes of each number of rows; returns the object that `--output` writes."""
    import paceline._native as _native

    model = llm.model
    samples = KernelSamples(seconds={count: [] for count in rows})
    for count in rows:
        llm.time_forward(count, context)
    for repeat in range(repeats):
        samples.bandwidth.append(_native.measure_read_bandwidth(model.pool, READ_BYTES, model.isa))
        on_step("read bandwidth")
        samples.peak.append(_native.measure_peak(model.pool, model.isa, model.f32, weights=model.weight_type))
        on_step("arithmetic peak")
        order = list(rows) if repeat % 2 == 0 else list(reversed(rows))
        settle(partial(llm.time_forward, order[0], context))
        for count in order:
            samples.seconds[count].append(llm.time_forward(count, context))
            on_step(f"{count} rows")
    costs = {count: llm.pass_cost(count, context) for count in rows}
    return summarise(samples, costs, isa=model.isa, threads=model.threads)


def settle(run: Callable[[], float]) -> None:
    """Untimed passes until one is hardly faster than the one before. The read loop drives the weights out of a large
    third-level cache, and they come back pass by pass: the first one may take three times as long as the eighth."""
    before = run()
    for _ in range(SETTLING_PASSES):
        seconds = run()
        if seconds > SETTLED * before:
            return
        before = seconds


def summarise(
    samples: KernelSamples, costs: Mapping[int, tuple[float, float]], *, isa: str, threads: int
) -> dict[str, Any]:
    """Medians, floors and ratios. `costs`: row count -> (bytes, floating-point operations) of one pass."""
    bandwidth = statistics.median(samples.bandwidth)
    peak = statistics.median(samples.peak)
    one_row = statistics.median(samples.seconds[1]) if 1 in samples.seconds else None
    rows = []
    for count, seconds in samples.seconds.items():
        median = statistics.median(seconds)
        volume, operations = costs[count]
        floor = max(volume / (bandwidth * 1e9), operations / (peak * 1e9))
        reached = volume / median / 1e9
        rows.append(
            {
                "rows": count,
                "ms": 1e3 * median,
                "weight_gbs": reached,
                "bandwidth_share": reached / bandwidth,
                "floor_ms": 1e3 * floor,
                "vs_floor": median / floor,
                "vs_one_row": None if one_row is None else median / one_row,
            }
        )
    return {
        "read_bandwidth_gbs": bandwidth,
        "peak_gflops": peak,
        "isa": isa,
        "threads": threads,
        "rows": rows,
    }


def kernel_table(result: dict[str, Any]) -> Table:
    """The result for a terminal."""
    from rich.table import Table

    threads = f"{result['threads']} thread{'s' * (result['threads'] != 1)}"
    table = Table(
        title=f"{result['isa']}, {threads}: reads {result['read_bandwidth_gbs']:.1f} GB/s, "
        f"computes {result['peak_gflops']:.0f} GFLOP/s",
        title_justify="left",
    )
    for heading in ("rows", "ms", "GB/s", "of bandwidth", "floor ms", "x floor", "x one row"):
        table.add_column(heading, justify="right")
    for row in result["rows"]:
        ratio = row["vs_one_row"]
        table.add_row(
            str(row["rows"]),
            f"{row['ms']:.2f}",
            f"{row['weight_gbs']:.1f}",
            f"{row['bandwidth_share']:.0%}",
            f"{row['floor_ms']:.2f}",
            f"{row['vs_floor']:.2f}",
            "-" if ratio is None else f"{ratio:.2f}",
        )
    return table
