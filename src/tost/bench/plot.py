"""Pictures of measurements: lines by size on logarithmic axes, one panel per quantity.

Colours are those of the Okabe-Ito palette, which stay distinct for colour-blind readers; markers and dashes carry the
same information without colour.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from tost.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

_WIDE_SCALE = 300  # a scale that spans more than this shows powers of ten only


class Style(NamedTuple):
    """Label, colour, marker and dashes of a contender."""

    label: str
    color: str
    marker: str = ""
    dashes: str = "-"


@dataclass(frozen=True, kw_only=True)
class Line:
    """One contender in one panel.

    Attributes:
        style: How it is drawn.
        points: Sizes and values, ascending.
        quartiles: Lower and upper ends of error bars, if any.
        bold: Thick and in front, for the subject of the comparison.
        end: Text at the last point.
    """

    style: Style
    points: Sequence[tuple[int, float]]
    quartiles: Sequence[tuple[float, float]] = ()
    bold: bool = False
    end: str = ""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One pair of axes.

    Attributes:
        title: Line above it.
        lines: What is drawn.
        sizes: Ticks of the horizontal axis.
        level: Label of a dashed line at 1; empty for none.
        unit: Suffix of the numbers of the vertical axis.
    """

    title: str
    lines: Sequence[Line]
    sizes: Sequence[int]
    level: str = ""
    unit: str = ""


def require_matplotlib() -> None:
    """Fail before anything is measured if pictures could not be drawn later.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "writing a report draws a plot, which needs matplotlib, and it is not installed; "
            "run `pip install 'tost-transformer[analysis]'`, or leave out --out and use --json."
        )


def draw(panels: Sequence[Panel], *, below: Sequence[str], beside: str = "") -> bytes:
    """Draw panels in two columns with one legend, as SVG; the same bytes for the same panels.

    Args:
        panels: What to draw.
        below: Lines below the picture: the horizontal axis, remarks, the machine.
        beside: Label of all vertical axes.
    """
    import matplotlib
    from matplotlib.figure import Figure

    columns = min(2, max(1, len(panels)))
    rows = max(1, -(-len(panels) // columns))
    with matplotlib.rc_context({"svg.hashsalt": "tost", "font.size": 10}):
        figure = Figure(figsize=(5.0 * columns, 3.4 * rows + 1.0), layout="constrained")
        grid = list(figure.subplots(rows, columns, squeeze=False).flat)
        handles: dict[str, Artist] = {}
        for axes, panel in zip(grid, panels, strict=False):
            _draw_panel(axes, panel)
            handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True)) | handles
        for axes in grid[len(panels) :]:
            axes.set_visible(False)
        figure.legend(list(handles.values()), list(handles), loc="outside upper center", ncols=4, frameon=False)
        figure.supxlabel("\n".join(below), fontsize=9)
        figure.supylabel(beside, fontsize=10)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})  # a date would make every file different
    return buffer.getvalue()


def _draw_panel(axes: Axes, panel: Panel) -> None:
    if panel.level:
        axes.axhline(1, color="0.45", linestyle="--", linewidth=1.2, label=panel.level)
    for line in panel.lines:
        sizes, values = zip(*line.points, strict=True)
        ends = [
            (value - lower, upper - value)
            for value, (lower, upper) in zip(values, line.quartiles, strict=bool(line.quartiles))
        ]
        label, color, marker, dashes = line.style
        look: dict[str, Any] = {"color": color, "linestyle": dashes, "marker": marker, "markersize": 5, "capsize": 2}
        look |= {"linewidth": 2.6, "zorder": 3} if line.bold else {"linewidth": 1.5, "zorder": 2}
        axes.errorbar(sizes, values, yerr=[*zip(*ends, strict=True)] or None, label=label, **look)
        if line.end:
            box = {
                "facecolor": "white",
                "edgecolor": "none",
                "pad": 1,
            }  # keeps a dashed line from striking the text out
            place: dict[str, Any] = {"xytext": (8, 0), "textcoords": "offset points", "va": "center"}
            axes.annotate(line.end, line.points[-1], fontsize=9, color=color, bbox=box, **place)
    axes.set_title(panel.title, fontsize=10)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    if any(line.end for line in panel.lines):
        axes.margins(x=0.12)  # room for the texts at the ends
    low, high = axes.get_ylim()
    steps = (1,) if high / low > _WIDE_SCALE else (1, 2, 5)
    shown = [step * 10.0**power for power in range(-6, 9) for step in steps if low <= step * 10.0**power <= high]
    axes.set_yticks(shown, [f"{tick:,g}{panel.unit}" for tick in shown])
    axes.minorticks_off()
    axes.set_xticks(panel.sizes, [f"{size:,}" for size in panel.sizes], rotation=30 if len(panel.sizes) > 4 else 0)
    axes.grid(axis="y", color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
