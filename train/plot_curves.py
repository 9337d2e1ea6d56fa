"""Learning curves of runs (``curve.jsonl`` of ``paceline train fit``) as a small SVG: tokens seen -> acceptance length.

    python train/plot_curves.py OUT.svg NAME=RUN/curve.jsonl ...

Needs matplotlib. A table of the points, and where a straight line in log(tokens) through the second half of each curve
leads, goes to standard output.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

from paceline.train import journal


def read(path: Path) -> list[dict[str, Any]]:
    """The points of a curve that have seen tokens; of a step that was measured twice, the last one."""
    points = {p["step"]: p for p in journal.read(path)}
    return [points[s] for s in sorted(points)]


def extrapolate(points: list[dict[str, Any]], domain: str, factor: float) -> float | None:
    """Length after ``factor`` times the tokens, by least squares of length over log(tokens) of the second half."""
    used = [p for p in points if p["tokens"]][len(points) // 2 :]
    if len(used) < 3:
        return None
    x = [math.log(p["tokens"]) for p in used]
    y = [p["length"][domain] for p in used]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)
    return mean_y + slope * (math.log(factor * used[-1]["tokens"]) - mean_x)


def main(out: Path, named: list[str]) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    curves = {name: read(Path(path)) for name, _, path in (n.partition("=") for n in named)}
    domains = [d for d in next(iter(curves.values()))[0]["length"] if d != "mean"]
    figure, axes = plt.subplots(1, len(domains), figsize=(3.2 * len(domains), 2.8), layout="constrained", squeeze=False)
    for axis, domain in zip(axes[0], domains, strict=True):
        for name, points in curves.items():
            x = [p["tokens"] / 1e6 for p in points]
            axis.plot(x, [p["length"][domain] for p in points], marker=".", label=name)
        axis.set(title=domain, xlabel="labels seen, millions", ylabel="acceptance length")
        axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=7)
    figure.savefig(out)
    for name, points in curves.items():
        print(f"| {name}: step | labels | " + " | ".join(domains) + " | mean |")
        print("|---" * (3 + len(domains)) + "|")
        for p in points:
            lengths = " | ".join(f"{p['length'][d]:.2f}" for d in (*domains, "mean"))
            print(f"| {p['step']} | {p['tokens']:,} | {lengths} |")
        for factor in (10, 100):
            found = {d: extrapolate(points, d, factor) for d in domains}
            print(f"x{factor}: " + ", ".join(f"{d} {v:.2f}" if v else f"{d} ?" for d, v in found.items()))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
