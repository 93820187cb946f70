"""Line charts as SVG inside the page: coloured by its style sheet, so that they follow light, dark and paper."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from tost.report.html import text

COLOURS = 6
"""Different looks of lines; the style sheet has as many colours, and each has a marker of its own."""

WIDTH, HEIGHT = 460, 290
LEFT, RIGHT, TOP, BOTTOM = 58, 22, 30, 46
_MOST_POINTS = 240
_LEAST = 1e-300  # what is smaller has no place on a logarithmic axis
_MARKERS = (
    '<circle cx="{x}" cy="{y}" r="3.5"/>',
    '<rect x="{x}" y="{y}" width="6.4" height="6.4" transform="translate(-3.2 -3.2)"/>',
    '<path d="M{x} {y}m0 -4.4l4 7.2h-8z"/>',
    '<path d="M{x} {y}m0 -4.6l4.6 4.6l-4.6 4.6l-4.6 -4.6z"/>',
    '<path d="M{x} {y}m0 4.4l4 -7.2h-8z"/>',
    '<path d="M{x} {y}m-3.6 -3.6l7.2 7.2m0 -7.2l-7.2 7.2" class="cross"/>',
)


@dataclass(frozen=True)
class Series:
    """A line.

    Attributes:
        label: What it shows.
        points: ``(x, y)``, finite, in the order of x.
        look: Number of its colour and marker.
        kind: ``"marked"`` for few points that each count, ``"thin"`` for a stream of them, ``"dashed"`` for something
            to compare with.
    """

    label: str
    points: Sequence[tuple[float, float]]
    look: int
    kind: Literal["marked", "thin", "dashed"] = "marked"


@dataclass(frozen=True)
class Axis:
    """What an axis shows.

    Attributes:
        label: Its name and unit.
        log: Whether equal factors are equally far apart.
        whole: Whether there is nothing between whole numbers.
        write: How its numbers are written.
    """

    label: str
    log: bool = False
    whole: bool = False
    write: Callable[[float], str] = lambda value: f"{value:,.6g}"


def thinned(points: Sequence[tuple[float, float]], most: int = _MOST_POINTS) -> list[tuple[float, float]]:
    """Return at most so many points: the means of stretches of equal numbers of points."""
    if len(points) <= most:
        return list(points)
    edges = [round(i * len(points) / most) for i in range(most + 1)]
    stretches = [points[a:b] for a, b in pairwise(edges)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in stretches]


def line_chart(series: Sequence[Series], *, title: str, x: Axis, y: Axis, note: str = "") -> str:
    """Return a figure: the chart with its legend, as HTML; nothing if there is no point to draw.

    Args:
        series: The lines.
        title: What is shown.
        x: The horizontal axis.
        y: The vertical one.
        note: Sentence below it.
    """
    drawn = [Series(line.label, _fit(line.points, x, y), line.look % COLOURS, line.kind) for line in series]
    drawn = [line for line in drawn if line.points]
    if not drawn:
        return ""
    across = _Scale([point[0] for line in drawn for point in line.points], x, LEFT, WIDTH - RIGHT, tight=True)
    up = _Scale([point[1] for line in drawn for point in line.points], y, HEIGHT - BOTTOM, TOP)
    parts = [*_grid(across, up), *(_draw(line, across, up) for line in drawn)]
    described = "; ".join(_describe(line, y) for line in drawn)
    legend = "".join(f"<li>{_swatch(line)}{text(line.label)}</li>" for line in drawn)
    return (
        f'<figure class="chart"><figcaption>{text(title)}</figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{text(f"{title}. {described}.")}">'
        f"{''.join(parts)}</svg>"
        f'<ul class="legend">{legend}</ul>' + (f"<p>{text(note)}</p>" if note else "") + "</figure>"
    )


def _fit(points: Sequence[tuple[float, float]], x: Axis, y: Axis) -> list[tuple[float, float]]:
    """Return the points that have a place on the axes, thinned out."""

    def has_place(value: float, axis: Axis) -> bool:
        return math.isfinite(value) and (value > _LEAST or not axis.log)

    return thinned([(a, b) for a, b in points if has_place(a, x) and has_place(b, y)])


class _Scale:
    """From values to places on the page; `tight` leaves no room at the ends."""

    def __init__(self, values: Sequence[float], axis: Axis, start: float, end: float, *, tight: bool = False) -> None:
        self.axis, self.start, self.end = axis, start, end
        low, high = self._to(min(values)), self._to(max(values))
        room = (high - low) or abs(low) * 0.1 or 1.0
        margin = 0.0 if tight and high > low else 0.06 * room
        self.low, self.high = low - margin, high + margin
        # Where only a few places were measured, these are the numbers that a reader looks for.
        self.places = sorted(set(values)) if tight and len(set(values)) <= 6 else []

    def _to(self, value: float) -> float:
        return math.log10(value) if self.axis.log else value

    def __call__(self, value: float) -> float:
        return self.start + (self._to(value) - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        if not self.axis.log:
            return _even_ticks(self.low, self.high, whole=self.axis.whole)
        if self.places:
            return self.places
        stride = max(1, math.ceil((self.high - self.low) / 6))
        decades = range(math.floor(self.low), math.ceil(self.high) + 1, stride)
        steps = (1,) if self.high - self.low > 2.5 else (1, 3) if self.high - self.low > 1.2 else (1, 2, 5)
        found = [step * 10.0**decade for decade in decades for step in steps]
        inside = [value for value in found if self.low <= math.log10(value) <= self.high]
        return inside if len(inside) >= 2 else [10**self.low, 10**self.high]


def _even_ticks(low: float, high: float, *, whole: bool = False, wanted: int = 6) -> list[float]:
    rough = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(rough)) if rough > 0 else 1.0
    step = next((power * factor for factor in (1, 2, 2.5, 5) if power * factor >= rough), power * 10)
    step = max(1.0, math.ceil(step)) if whole else step
    first = math.ceil(low / step - 1e-9)
    found = [(first + i) * step for i in range(wanted * 2 + 2)]
    return [0.0 if abs(value) < step * 1e-9 else value for value in found if value <= high + step * 1e-9]


def _grid(across: _Scale, up: _Scale) -> list[str]:
    parts = []
    for value in up.ticks():
        height = f"{up(value):.1f}"
        parts.append(f'<path class="grid" d="M{LEFT} {height}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="end" x="{LEFT - 6}" y="{height}" dy="4">{text(up.axis.write(value))}</text>')
    last = -math.inf
    for value in across.ticks():
        place = across(value)
        if place - last >= 44:  # a number that would run into the one before is left out
            written = text(across.axis.write(value))
            parts.append(f'<text class="middle" x="{place:.1f}" y="{HEIGHT - BOTTOM + 18}">{written}</text>')
            last = place
    parts.append(f'<path class="axis" d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="middle" x="{middle}" y="{HEIGHT - 8}">{text(across.axis.label)}</text>')
    parts.append(f'<text x="2" y="14">{text(up.axis.label)}</text>')
    return parts


def _draw(line: Series, across: _Scale, up: _Scale) -> str:
    places = [(f"{across(a):.1f}", f"{up(b):.1f}") for a, b in line.points]
    path = f'<path class="line" d="M{"L".join(f"{a} {b}" for a, b in places)}"/>'
    marks = ""
    if line.kind != "thin" and len(places) <= 40:
        marks = "".join(_MARKERS[line.look].format(x=a, y=b) for a, b in places)
    return f'<g class="s{line.look} {line.kind}">{path}{marks}</g>'


def _swatch(line: Series) -> str:
    mark = "" if line.kind == "thin" else _MARKERS[line.look].format(x=14, y=6)
    inside = f'<g class="s{line.look} {line.kind}"><path class="line" d="M1 6H27"/>{mark}</g>'
    return f'<svg viewBox="0 0 28 12" width="28" height="12" aria-hidden="true">{inside}</svg>'


def _describe(line: Series, y: Axis) -> str:
    (_, first), (_, last) = line.points[0], line.points[-1]
    low, high = min(b for _, b in line.points), max(b for _, b in line.points)
    return (
        f"{line.label}: from {y.write(first)} to {y.write(last)}, between {y.write(low)} and {y.write(high)}, "
        f"{len(line.points)} points"
    )
