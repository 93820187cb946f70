"""Colours, fonts and axes that all pictures share."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable

# The Okabe-Ito palette, the darker ones first; more than eight heads repeat it.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
SEQUENTIAL = "cividis"
MARKERS = ("o", "s", "^", "D", "v", "P")
TITLE, LABEL, TICK = 12, 11, 10


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
