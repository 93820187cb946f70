"""The pictures of attention layers side by side: time with its roofline, and memory, both axes logarithmic."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tost.bench.attention.cases import PAPER_DEPTH, Figure
from tost.bench.attention.run import AttentionRow
from tost.bench.ops.plot import draw_line, image_of, log_scales, require_matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_attention", "figure_title"]

# Label, colour, marker and line by contender. The Okabe-Ito palette stays distinct for colour-blind readers; markers
# and dashes carry the same information without colour.
_STYLE: dict[str, tuple[str, str, str, str]] = {
    "tost": ("ToST", "#D55E00", "o", "-"),
    "vit-sdpa": ("ViT, fused kernel", "#000000", "D", "-"),
    "vit-textbook": ("ViT, textbook", "#0072B2", "s", "--"),
    "crate": ("CRATE", "#CC79A7", "^", "-."),
    "xcit": ("XCiT", "#009E73", "P", "-"),
    "gpt2-sdpa": ("GPT-2, fused kernel", "#000000", "D", "-"),
    "gpt2-textbook": ("GPT-2, textbook", "#0072B2", "s", "--"),
}
_AXES = {"tokens": "tokens n", "width": "model width d"}


def figure_title(rows: Sequence[AttentionRow]) -> str:
    """Say what the rows of one figure and pass have in common, in a few words."""
    point = rows[0].point
    step = "forward and backward" if point.training else "forward"
    causal = "causal " if point.figure is Figure.CAUSAL else ""
    what = f"{point.depth} {causal}attention {'layer' if point.depth == 1 else 'layers'}"
    if point.whole:
        what = f"Whole models of {point.depth} layers"
    elif point.figure.published and point.depth != PAPER_DEPTH:
        what += f" ({PAPER_DEPTH} in the paper)"
    size = f"n={point.tokens:,}" if point.figure.axis == "width" else f"d={point.width:,}"
    return f"{what}, {size}, K={point.heads}, {step}"


def draw_attention(rows: Sequence[AttentionRow], *, caption: str, image_format: str = "svg") -> bytes:
    """Draw one figure: a line of panels per pass, time on the left and peak memory on the right.

    Args:
        rows: The measurement of one figure.
        caption: Line below the picture: the machine.
        image_format: Any format that matplotlib writes, such as ``svg`` or ``png``.

    Returns:
        The content of the image file; as ``svg``, the same bytes for the same rows.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    require_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure as Picture

    passes = sorted({row.point.training for row in rows})
    with matplotlib.rc_context({"svg.hashsalt": "tost", "font.size": 11}):
        picture = Picture(figsize=(10.5, 4.0 * len(passes) + 1.3), layout="constrained")
        grid = picture.subplots(len(passes), 2, squeeze=False)
        for line, training in zip(grid, passes, strict=True):
            chosen = [row for row in rows if row.point.training is training]
            title = figure_title(chosen)
            _draw_panel(line[0], f"{title}\ntime in ms", chosen, _milliseconds)
            _draw_bounds(line[0], chosen)
            _draw_panel(line[1], f"{title}\npeak memory in MB", chosen, _megabytes)
            for axes in line:
                log_scales(axes, sorted({row.point.position for row in chosen}))
        handles, labels = grid[0][0].get_legend_handles_labels()
        picture.legend(handles, labels, loc="outside upper center", ncols=min(6, len(labels)), frameon=False)
        picture.supxlabel("\n".join([_AXES[rows[0].point.figure.axis], *_remarks(rows), caption]), fontsize=9)
        return image_of(picture, image_format)


def _remarks(rows: Sequence[AttentionRow]) -> list[str]:
    """Name the points that are not in the picture, with the reason."""
    absent = [
        f"{_STYLE[row.point.contender][0]} at {row.point.position:,}{' with backward' * row.point.training}, {row.note}"
        for row in rows
        if row.note
    ]
    return textwrap.wrap(f"not measured: {'; '.join(absent)}", 150) if absent else []


def _milliseconds(row: AttentionRow) -> float | None:
    return 1e3 * row.seconds.median if row.seconds else None


def _megabytes(row: AttentionRow) -> float | None:
    return row.peak_bytes / 1e6 if row.peak_bytes else None


def _lines(
    rows: Sequence[AttentionRow], value: Callable[[AttentionRow], float | None]
) -> dict[str, list[tuple[int, float]]]:
    """Return sizes and values by contender, in the usual order; those without a value are left out."""
    lines = {}
    for name in _STYLE:
        known = [(row.point.position, value(row)) for row in rows if row.point.contender == name]
        if points := sorted((size, number) for size, number in known if number is not None):
            lines[name] = points
    return lines


def _draw_panel(
    axes: Axes, title: str, rows: Sequence[AttentionRow], value: Callable[[AttentionRow], float | None]
) -> None:
    for name, points in _lines(rows, value).items():
        draw_line(axes, points, _STYLE[name], ours=name == "tost")
    axes.set_title(title, fontsize=11)


def _draw_bounds(axes: Axes, rows: Sequence[AttentionRow]) -> None:
    """Draw the least time that the machine allows, below each line: the gap is the distance to the roofline."""
    label: str | None = "roofline of each"
    for name, points in _lines(rows, lambda row: 1e3 * row.bound_seconds if row.seconds else None).items():
        color = _STYLE[name][1]
        sizes, numbers = zip(*points, strict=True)
        axes.plot(sizes, numbers, label=label, color=color, linestyle=":", linewidth=1.3, zorder=1)
        label = None
