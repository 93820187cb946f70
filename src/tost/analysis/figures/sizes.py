"""A quantity over the size of what it takes, one point per contender."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Mapping

import matplotlib
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

from tost.analysis.figures import _style as style

Points = Mapping[str, tuple[int, float, tuple[float, float]]]
"""Size, value and the ends of the error bar, by name."""

_LETTERS_PER_INCH = 8  # of a title beside the legend
_MOST_COLUMNS = 3


def draw_sizes(panels: Mapping[str, Points], *, title: str, x: str, y: str, width: float = 8.0) -> bytes:
    """Draw points with error bars over a logarithmic axis that begins with 0.

    Args:
        panels: What each panel shows, by its title; a name has the same mark in all of them.
        title: Text above the picture.
        x: Label of the sizes.
        y: Label of the values.
        width: Width in inches of one panel; several panels are half as wide each.

    Returns:
        The content of an SVG file, the same bytes for the same points.
    """
    columns = min(len(panels), _MOST_COLUMNS)
    rows = math.ceil(len(panels) / columns)
    wide, high = (width, 0.6 * width) if len(panels) == 1 else (0.5 * width * columns, 0.45 * width * rows)
    names = list(dict.fromkeys(name for points in panels.values() for name in points))
    sizes = [size for points in panels.values() for size, *_ in points.values() if size > 0] or [1]
    heading = textwrap.fill(title, round(_LETTERS_PER_INCH * wide))
    with matplotlib.rc_context({"svg.hashsalt": "tost", "svg.fonttype": "path"}):
        figure = style.new_figure(wide, high)
        grid = figure.subplots(rows, columns, squeeze=False)
        places = list(grid.flat)
        for axes, (panel, points) in zip(places, panels.items(), strict=False):
            _draw_points(axes, points, names)
            _scale(axes, sizes, every=1 if len(panels) == 1 else 2)
            style.finish(axes, title=heading if len(panels) == 1 else panel, x=x, y=y)
        for axes in places[len(panels) :]:
            axes.set_visible(False)
        if len(panels) == 1:
            places[0].legend(frameon=False, fontsize=style.TICK, loc="center left", bbox_to_anchor=(1.0, 0.5))
        else:
            marks = {
                label: mark for axes in places for mark, label in zip(*axes.get_legend_handles_labels(), strict=True)
            }
            listed = [marks[name] for name in names]
            figure.legend(listed, names, frameon=False, fontsize=style.TICK, loc="outside right center")
            figure.suptitle(heading, fontsize=style.TITLE)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def _draw_points(axes: Axes, points: Points, names: list[str]) -> None:
    for name, (size, value, (low, high)) in points.items():
        index = names.index(name)
        axes.errorbar(
            [size],
            [value],
            yerr=[[value - low], [high - value]],
            marker=style.MARKERS[index % len(style.MARKERS)],
            color=style.colour(index),
            capsize=3,
            linestyle="",
            label=name,
        )


def _scale(axes: Axes, sizes: list[int], every: int) -> None:
    """Make room for 0 and these sizes on the axis, with a label for every so many powers of 2."""
    axes.set_xscale("symlog", base=2, linthresh=min(sizes) / 2)
    powers = range(min(sizes).bit_length() - 1, max(sizes).bit_length() + 1, every)
    axes.set_xticks([0, *(2**power for power in powers)])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.tick_params(axis="x", rotation=30)
