"""Plots as inline SVG: grouped or stacked bars, and lines. No script, no font, no file from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 52, 16, 28, 64
COLOURS = ("#3b6fb6", "#d9822b", "#3a9a6a", "#b8453f", "#7a5ea8", "#6b7280", "#c2a33a", "#2f8f9d", "#9c5b8e")

Series = tuple[str, Sequence[float | None]]


def bars(
    groups: Sequence[str],
    series: Sequence[Series],
    *,
    unit: str,
    stacked: bool = False,
    line: float | None = None,
    show: str = ".3g",
    colours: Sequence[int] = (),
) -> str:
    """series: (name, a value per group). line: a value to mark across, such as 1 for a speed-up. show: the format of
    values. colours: the number of each series' colour, so that one name has one colour in several plots; else 0, 1, ...
    """
    colours = colours or range(len(series))
    values = [[v or 0.0 for v in column] for _, column in series]
    sums = [sum(column[i] for column in values) for i in range(len(groups))]
    top = max([*(sums if stacked else (v for column in values for v in column)), line or 0.0, 1e-9])
    axis = _Axis(0.0, top)
    body = axis.grid(unit) + axis.mark(line)
    room = (WIDTH - LEFT - RIGHT) / max(1, len(groups))
    inner = room * 0.8
    for i, group in enumerate(groups):
        left = LEFT + room * i + room * 0.1
        base = 0.0
        for j, column in enumerate(values):
            width = inner if stacked else inner / len(series)
            x = left if stacked else left + width * j
            low, high = (base, base + column[i]) if stacked else (0.0, column[i])
            base = high
            title = f"{group}, {series[j][0]}: {column[i]:{show}} {unit}"
            if series[j][1][i] is not None:
                place = f'x="{x:.1f}" y="{axis.y(high):.1f}" width="{max(1.0, width - 1.5):.1f}"'
                height = f'height="{max(0.0, axis.y(low) - axis.y(high)):.1f}"'
                body += f'<rect {place} {height} fill="{_colour(colours[j])}"><title>{escape(title)}</title></rect>'
                if not stacked and width >= 22:
                    body += _text(x + width / 2, axis.y(high) - 3, f"{column[i]:{show}}", "middle", "value")
        body += _text(left + inner / 2, HEIGHT - BOTTOM + 16, group, "middle")
    return _frame(body + _legend([name for name, _ in series], colours))


def lines(
    x: Sequence[float],
    series: Sequence[Series],
    *,
    unit: str,
    x_label: str,
    line: float | None = None,
    dashed: Sequence[str] = (),
    log_x: bool = False,
    colours: Sequence[int] = (),
) -> str:
    """series: (name, a value per x, None where there is none). dashed: names drawn as a model, without points; a name
    that appears both ways has one colour. colours: as in `bars`, of the names that are not dashed."""
    known = [v for _, column in series for v in column if v is not None]
    top = max([*known, line or 0.0, 1e-9])
    axis = _Axis(0.0, 1.0, room=1.0) if unit == "share" and top <= 1.0 else _Axis(0.0, top)
    body = axis.grid(unit) + axis.mark(line)
    place = [math.log2(v) for v in x] if log_x else list(x)
    span = (max(place) - min(place)) or 1.0
    at = [LEFT + 20 + (WIDTH - LEFT - RIGHT - 40) * (v - min(place)) / span for v in place]
    for position, value in zip(at, x, strict=True):
        body += _text(position, HEIGHT - BOTTOM + 16, f"{value:g}", "middle")
    body += _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - BOTTOM + 31, x_label, "middle")
    model = set(dashed)
    measured = [name for name, _ in series if name not in model]
    colours = colours or range(len(measured))
    for name, column in series:
        colour = _colour(colours[measured.index(name.removesuffix(" predicted"))])
        points = [(a, axis.y(v)) for a, v in zip(at, column, strict=True) if v is not None]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        dash = ' stroke-dasharray="5 4"' if name in model else ""
        body += f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>'
        if name not in model:
            for (px, py), v in zip(points, (v for v in column if v is not None), strict=True):
                title = f"<title>{escape(name)}: {v:.3g}</title>"
                body += f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3.5" fill="{colour}">{title}</circle>'
    return _frame(body + _legend(measured, colours, "dashed: predicted" if model else ""))


class _Axis:
    """A vertical axis from `low` to at least `high`, with round ticks."""

    def __init__(self, low: float, high: float, room: float = 1.04) -> None:
        raw = (high - low) / 4
        unit = 10.0 ** math.floor(math.log10(raw))
        self.step = next(m * unit for m in (1, 2, 2.5, 5, 10) if m * unit >= raw * 0.999)
        self.low, self.high = low, low + self.step * math.ceil((high - low) * room / self.step)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * (value - self.low) / (self.high - self.low)

    def grid(self, unit: str) -> str:
        out = ""
        for i in range(round((self.high - self.low) / self.step) + 1):
            value = self.low + i * self.step
            y = self.y(value)
            out += f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>'
            out += _text(LEFT - 6, y + 4, f"{value:g}", "end")
        return out + _text(6, 12, unit, "start")

    def mark(self, value: float | None) -> str:
        if value is None:
            return ""
        y = self.y(value)
        return f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="mark"/>'


def _legend(names: Sequence[str], colours: Sequence[int], remark: str = "") -> str:
    out, x = "", float(LEFT)
    for name, colour in zip(names, colours, strict=True):
        out += f'<rect x="{x:.1f}" y="{HEIGHT - 20}" width="10" height="10" fill="{_colour(colour)}"/>'
        out += _text(x + 14, HEIGHT - 11, name, "start")
        x += 26 + 6.6 * len(name)
    return out + (_text(x, HEIGHT - 11, remark, "start") if remark else "")


def _text(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    attribute = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{attribute}>{escape(text)}</text>'


def _colour(i: int) -> str:
    return COLOURS[i % len(COLOURS)]


def _frame(body: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" xmlns="http://www.w3.org/2000/svg">{body}</svg>'
