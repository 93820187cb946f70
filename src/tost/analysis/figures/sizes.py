"""A quantity over the size of what it takes, one point per contender."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping

import matplotlib
from matplotlib.ticker import FuncFormatter, NullLocator

from tost.analysis.figures import _style as style

_LETTERS_PER_INCH = 8  # of a title beside the legend


def draw_sizes(
    points: Mapping[str, tuple[int, float, tuple[float, float]]], *, title: str, x: str, y: str, width: float = 8.0
) -> bytes:
    """Draw points with error bars over a logarithmic axis that begins with 0.

    Args:
        points: Size, value and the ends of the error bar, by name.
        title: Text above the picture.
        x: Label of the sizes.
        y: Label of the values.
        width: Width in inches.

    Returns:
        The content of an SVG file, the same bytes for the same points.
    """
    with matplotlib.rc_context({"svg.hashsalt": "tost", "svg.fonttype": "path"}):
        figure = style.new_figure(width, 0.6 * width)
        axes = figure.subplots()
        for index, (name, (size, value, (low, high))) in enumerate(points.items()):
            marker = style.MARKERS[index % len(style.MARKERS)]
            ends = [[value - low], [high - value]]
            axes.errorbar(
                [size],
                [value],
                yerr=ends,
                marker=marker,
                color=style.colour(index),
                capsize=3,
                linestyle="",
                label=name,
            )
        sizes = [size for size, *_ in points.values() if size > 0] or [1]
        axes.set_xscale("symlog", base=2, linthresh=min(sizes) / 2)
        powers = range(min(sizes).bit_length() - 1, max(sizes).bit_length() + 1)
        axes.set_xticks([0, *(2**power for power in powers)])
        axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:,.0f}"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.tick_params(axis="x", rotation=30)
        style.finish(axes, title=textwrap.fill(title, round(_LETTERS_PER_INCH * width)), x=x, y=y)
        axes.legend(frameon=False, fontsize=style.TICK, loc="center left", bbox_to_anchor=(1.0, 0.5))
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()
