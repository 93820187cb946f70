"""Colors, fonts and axes of all pictures. They stay distinct for color-blind readers; marks and labels repeat them."""

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
    from numpy.typing import NDArray

# The Okabe-Ito palette, the darker ones first; more than eight heads repeat it.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
SEQUENTIAL = "cividis"
MARKERS = ("o", "s", "^", "D", "v", "P")
TITLE, LABEL, TICK = 12, 11, 10
DPI = 130
_MOST_POINTS = 240


def color(index: int) -> str:
    """Return the color of a head or a line."""
    return PALETTE[index % len(PALETTE)]


def marker(index: int) -> str:
    """Return the mark of a head or a line."""
    return MARKERS[index % len(MARKERS)]


def rgb(index: int) -> tuple[float, float, float]:
    """Return the same as three numbers in [0, 1]."""
    return to_rgb(color(index))


def depth_color(position: int, count: int) -> Any:
    """Return a color for one of several ordered lines, dark to light but never too light to see."""
    return matplotlib.colormaps[SEQUENTIAL](0.0 if count < 2 else 0.9 * position / (count - 1))


class _Shown(Figure):
    """A figure that notebooks show, whether or not pyplot was imported."""

    def _repr_png_(self) -> bytes:
        return encode(self, "png")


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure, sizes in inches, which arranges its parts by itself."""
    return _Shown(figsize=(width, height), layout="constrained")


def panels(count: int, columns: int, width: float, height: float, extra: float = 0.5) -> tuple[Figure, list[Axes]]:
    """Return a figure with panels in rows, and these; sizes of a panel and room for a title in inches."""
    columns = min(count, columns)
    rows = -(-count // columns)
    figure = new_figure(max(width * columns, 6.4), height * rows + extra)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for unused in axes[count:]:
        unused.set_visible(False)
    return figure, axes[:count]


def add_color_bar(figure: Figure, picture: ScalarMappable, axes: Any, label: str, **options: Any) -> None:
    """Add a labelled color bar for some panels."""
    figure.colorbar(picture, ax=axes, aspect=30, **options).set_label(label, fontsize=LABEL)


def add_head_legend(figure: Figure, heads: int) -> None:
    """Add the colors of the heads below the panels."""
    handles = [Patch(color=color(head), label=f"head {head}") for head in range(heads)]
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


def log_tokens(axes: Axes, side: str = "x") -> None:
    """Make the axis x or y one of numbers of tokens in powers of 2."""
    getattr(axes, f"set_{side}scale")("log", base=2)
    getattr(axes, f"{side}axis").set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def draw_panels(tables: NDArray[Any], titles: Sequence[str], label: str, *, height: float) -> tuple[Figure, list[Axes]]:
    """Draw tables of numbers from 0 to 1, one panel of this height for each."""
    figure, axes = panels(len(tables), 4, 2.4, height)
    for one, table, title in zip(axes, tables, titles, strict=True):
        picture = one.imshow(table, cmap=SEQUENTIAL, vmin=0, vmax=1, aspect="auto")
        one.set_title(title, fontsize=TICK)
        one.tick_params(length=0)
    add_color_bar(figure, picture, axes, label, shrink=0.9)
    return figure, axes


def draw_table(axes: Axes, title: str, table: NDArray[Any], rows: Sequence[str], top: float | None = None) -> None:
    """Draw a table of layers and heads in colors, with the numbers where there is room.

    With `top` the colors go from 0 to it, or further if they must; otherwise from the least to the most.
    """
    low, high = (table.min(), table.max()) if top is None else (0.0, max(top, table.max()))
    axes.imshow(table, cmap=SEQUENTIAL, aspect="auto", interpolation="nearest", vmin=low, vmax=high)
    axes.set_title(title, fontsize=LABEL)
    axes.set_xlabel("head", fontsize=LABEL)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(labelsize=TICK)
    if table.shape[1] <= 8:
        for (row, column), value in np.ndenumerate(table):
            text = f"{value:.2f}" if abs(value) < 9.95 else f"{value:.0f}"
            shade = "black" if value > (low + high) / 2 else "white"
            axes.text(column, row, text, ha="center", va="center", color=shade, fontsize=8)


class Line(NamedTuple):
    """A line of a chart: points that count one by one (marked), or a stream of them that is averaged (thin)."""

    label: str
    points: Sequence[tuple[float, float]]
    color: int
    thin: bool = False


def draw_lines(
    lines: Sequence[Line], *, title: str, x: str, y: str, log_x: bool = False, log_y: bool = False
) -> Figure | None:
    """Draw lines over common axes; None if no point has a place on them.

    Args:
        lines: The lines; those without points are left out.
        title: Text above the picture.
        x: Label of the horizontal axis, of numbers of tokens if it is logarithmic, otherwise of whole numbers.
        y: Label of the vertical axis.
        log_x: Logarithmic horizontal axis.
        log_y: Logarithmic vertical axis.
    """
    figure = new_figure(5.2, 3.2)
    axes = figure.subplots()
    for line in lines:
        points = np.array(line.points, dtype=float).reshape(-1, 2)
        points = points[np.isfinite(points).all(axis=1)]
        points = points[((points > 0) | [not log_x, not log_y]).all(axis=1)]
        if not len(points):
            continue
        if line.thin:
            points = np.array([part.mean(axis=0) for part in np.array_split(points, min(len(points), _MOST_POINTS))])
        look = {"linewidth": 1, "alpha": 0.7} if line.thin else {"marker": marker(line.color)}
        axes.plot(*points.T, label=line.label, color=color(line.color), **look)
    if not axes.lines:
        return None
    if log_x:
        log_tokens(axes)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if log_y:
        axes.set_yscale("log")
    finish(axes, title=title, x=x, y=y)
    axes.legend(frameon=False, fontsize=TICK)
    return figure


def encode(figure: Figure, image_format: str) -> bytes:
    """Return the content of an image file; as SVG, the same bytes for the same figure."""
    buffer = io.BytesIO()
    metadata = {"Date": None} if image_format == "svg" else None
    with matplotlib.rc_context({"svg.hashsalt": "tost", "svg.fonttype": "path"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # of a script that the font does not have
        figure.savefig(buffer, format=image_format, dpi=DPI, metadata=metadata)
    return buffer.getvalue()
