"""Colours, fonts and axes that all pictures share."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable

# The Okabe-Ito palette, the darker ones first; more than eight heads repeat it.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
SEQUENTIAL = "cividis"
MARKERS = ("o", "s", "^", "D", "v", "P")
TITLE, LABEL, TICK = 12, 11, 10
_MOST_POINTS = 240


def colour(index: int) -> str:
    """Return the colour of a head or a line."""
    return PALETTE[index % len(PALETTE)]


def rgb(index: int) -> tuple[float, float, float]:
    """Return the same as three numbers in [0, 1]."""
    return to_rgb(colour(index))


def depth_colour(position: int, count: int) -> Any:
    """Return a colour for one of several ordered lines, dark to light but never too light to see."""
    from matplotlib import colormaps

    return colormaps[SEQUENTIAL](0.0 if count < 2 else 0.9 * position / (count - 1))


class _Shown(Figure):
    """A figure that notebooks show, whether or not pyplot was imported."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure, sizes in inches, which arranges its parts by itself."""
    return _Shown(figsize=(width, height), layout="constrained")


def add_colour_bar(figure: Figure, picture: ScalarMappable, panels: Any, label: str, **options: Any) -> None:
    """Add a labelled colour bar for some panels."""
    figure.colorbar(picture, ax=panels, aspect=30, **options).set_label(label, fontsize=LABEL)


def add_head_legend(figure: Figure, heads: int) -> None:
    """Add the colours of the heads below the panels."""
    handles = [Patch(color=colour(head), label=f"head {head}") for head in range(heads)]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(heads, 8), frameon=False, fontsize=LABEL)


def finish(axes: Axes, *, title: str = "", x: str = "", y: str = "") -> None:
    """Label axes and remove clutter."""
    axes.set_title(title, fontsize=TITLE)
    axes.set_xlabel(x, fontsize=LABEL)
    axes.set_ylabel(y, fontsize=LABEL)
    axes.tick_params(labelsize=TICK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.92", zorder=0)
    axes.set_axisbelow(True)


class Line(NamedTuple):
    """A line of a chart: points that count one by one (marked), or a stream of them that is averaged (thin)."""

    label: str
    points: Sequence[tuple[float, float]]
    colour: int
    thin: bool = False


def draw_lines(
    lines: Sequence[Line], *, title: str, x: str, y: str, log_x: bool = False, log_y: bool = False, whole: bool = False
) -> Figure | None:
    """Draw lines over common axes; None if no point has a place on them.

    Args:
        lines: The lines; those without points are left out.
        title: Text above the picture.
        x: Label of the horizontal axis.
        y: Label of the vertical axis.
        log_x: Logarithmic horizontal axis.
        log_y: Logarithmic vertical axis.
        whole: The horizontal axis has whole numbers only.
    """
    figure = new_figure(6.0, 4.0)
    axes = figure.subplots()
    for line in lines:
        points = np.array(line.points, dtype=float).reshape(-1, 2)
        fits = np.isfinite(points).all(axis=1)
        for column, log in enumerate((log_x, log_y)):
            fits &= (points[:, column] > 0) | (not log)
        if not fits.any():
            continue
        points = points[fits]
        if line.thin:
            points = np.array([part.mean(axis=0) for part in np.array_split(points, min(len(points), _MOST_POINTS))])
        look = {"linewidth": 1, "alpha": 0.7} if line.thin else {"marker": MARKERS[line.colour % len(MARKERS)]}
        axes.plot(*points.T, label=line.label, color=colour(line.colour), **look)
    if not axes.lines:
        return None
    if log_x:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    elif whole:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if log_y:
        axes.set_yscale("log")
    finish(axes, title=title, x=x, y=y)
    axes.legend(frameon=False, fontsize=TICK)
    return figure


def svg(figure: Figure) -> bytes:
    """Return a figure as SVG, the same bytes for the same figure."""
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "tost", "svg.fonttype": "path"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # of a script that the font does not have
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()
