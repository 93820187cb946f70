"""The picture of a measurement: time relative to the limit, by number of tokens."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tost.bench.ops.cases import Mode, Op
from tost.bench.ops.run import Row
from tost.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw", "draw_line", "image_of", "log_scales", "require_matplotlib"]

# Label, colour and marker by contender. The Okabe-Ito palette stays distinct for colour-blind readers, and the markers
# carry the same information without colour.
_STYLE: dict[str, tuple[str, str, str]] = {
    "tost": ("tost", "#D55E00", "o"),
    "tost-torch": ("tost, plain PyTorch", "#E69F00", "s"),
    "paper eager": ("paper's listing", "#0072B2", "^"),
    "paper compiled": ("paper's listing, compiled", "#56B4E9", "v"),
    "xca": ("cross-covariance (XCA)", "#009E73", "P"),
    "sdpa": ("softmax attention (SDPA)", "#000000", "D"),
}
# Their last points are labelled with the time itself, so that the reader sees how long the ratios last.
_TIMED = ("tost", "sdpa")
_OP_TITLES = {Op.TSSA: "TSSA", Op.CAUSAL_TSSA: "causal TSSA"}
_MODE_TITLES = {Mode.FWD: "forward", Mode.FWD_BWD: "forward + backward"}
_WIDE_SCALE = 300  # a scale that spans more than this shows powers of ten only
_RATIO_TICKS = (0.5, 1, 1.5, 2, 3, 5, 10, 20, 50, 100, 200, 500)


def require_matplotlib() -> None:
    """Fail early, before anything is measured, if the plot cannot be drawn later.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "writing a report draws a plot, which needs matplotlib, and it is not installed; "
            "run `pip install 'tost[analysis]'`, or leave out --out and use --json."
        )


def draw(rows: Sequence[Row], *, caption: str, image_format: str = "svg") -> bytes:
    """Draw the ratios of a measurement, one panel per operator and pass.

    Args:
        rows: The measurement; only single sequences are drawn.
        caption: Line below the picture: the machine.
        image_format: Any format that matplotlib writes, such as ``svg`` or ``png``.

    Returns:
        The content of the image file; as ``svg``, the same bytes for the same rows.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    require_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    panels = _panels(rows)
    columns = min(2, max(1, len(panels)))
    lines = max(1, -(-len(panels) // columns))
    with matplotlib.rc_context({"svg.hashsalt": "tost", "font.size": 10}):
        figure = Figure(figsize=(5.0 * columns, 3.2 * lines + 0.9), layout="constrained")
        grid = list(figure.subplots(lines, columns, squeeze=False).flat)
        for axes, (title, panel) in zip(grid, panels.items(), strict=False):
            _draw_panel(axes, title, panel)
        for axes in grid[len(panels) :]:
            axes.set_visible(False)
        _draw_legend(figure, grid)
        figure.supxlabel(f"tokens\n{caption} | medians and quartiles", fontsize=9)
        figure.supylabel("time relative to the layer's two projections", fontsize=10)
        return image_of(figure, image_format)


def image_of(figure: Figure, image_format: str) -> bytes:
    """Return a figure as the content of an image file, without the time of its making."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=image_format, metadata={"Date": None} if image_format == "svg" else None, dpi=120)
    return buffer.getvalue()


def draw_line(axes: Axes, points: Sequence[tuple[int, float]], style: tuple[str, str, str, str], *, ours: bool) -> None:
    """Draw one contender, ours thick and in front.

    Args:
        axes: The panel.
        points: Sizes and values, ascending.
        style: Label, colour, marker and kind of line.
        ours: Whether the others are compared with it.
    """
    label, color, marker, line = style
    sizes, values = zip(*points, strict=True)
    axes.plot(
        sizes,
        values,
        label=label,
        color=color,
        marker=marker,
        markersize=5,
        linestyle=line,
        linewidth=2.8 if ours else 1.5,
        zorder=3 if ours else 2,
    )


def log_scales(axes: Axes, sizes: Sequence[int]) -> None:
    """Make both axes logarithmic, with the sizes below and plain numbers at the side."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    steps = (1,) if high / low > _WIDE_SCALE else (1, 2, 5)
    shown = [tick for power in range(-6, 9) for step in steps if low <= (tick := step * 10.0**power) <= high]
    axes.set_yticks(shown, [f"{tick:,g}" for tick in shown])
    axes.minorticks_off()
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=30 if len(sizes) > 4 else 0)
    axes.grid(axis="y", color="0.9")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_legend(figure: Figure, grid: Sequence[Axes]) -> None:
    """One legend for all panels, though a contender may be missing in some."""
    handles: dict[str, Artist] = {}
    for axes in grid:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(list(handles.values()), list(handles), loc="outside upper center", ncols=4, frameon=False)


def _panels(rows: Sequence[Row]) -> dict[str, list[Row]]:
    panels: dict[str, list[Row]] = {}
    for row in rows:
        case = row.case
        if case.batch == 1 and row.ratio is not None:
            title = f"{_OP_TITLES[case.op]}, {_MODE_TITLES[case.mode]} (d={case.width}, H={case.heads}, {case.dtype})"
            panels.setdefault(title, []).append(row)
    return panels


def _draw_panel(axes: Axes, title: str, rows: Sequence[Row]) -> None:
    axes.axhline(1, color="0.45", linestyle="--", linewidth=1.2, label="the two projections alone")
    for name, (label, color, marker) in _STYLE.items():
        line = sorted((row for row in rows if row.contender == name), key=lambda row: row.case.tokens)
        if not line:
            continue
        ratios = [row.ratio for row in line if row.ratio is not None]
        medians = [ratio.median for ratio in ratios]
        quartiles = [
            [ratio.median - ratio.lower for ratio in ratios],
            [ratio.upper - ratio.median for ratio in ratios],
        ]
        axes.errorbar(
            [row.case.tokens for row in line],
            medians,
            yerr=quartiles,
            label=label,
            color=color,
            marker=marker,
            markersize=5,
            capsize=2,
            linewidth=2.4 if name == "tost" else 1.4,
        )
        if name in _TIMED and line[-1].seconds is not None:
            _draw_time(axes, line[-1].case.tokens, medians[-1], line[-1].seconds.median, color)
    _draw_scales(axes, title, sorted({row.case.tokens for row in rows}))


def _draw_scales(axes: Axes, title: str, lengths: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.margins(x=0.12)  # room for the times at the ends
    axes.set_xticks(lengths, [f"{count:,}" for count in lengths])
    low, high = axes.get_ylim()
    ticks = [tick for tick in _RATIO_TICKS if low <= tick <= high]
    axes.set_yticks(ticks, [f"{tick:g}x" for tick in ticks])
    axes.minorticks_off()
    axes.set_title(title, fontsize=10)
    axes.grid(axis="y", color="0.9")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_time(axes: Axes, tokens: int, ratio: float, seconds: float, color: str) -> None:
    axes.annotate(
        f"{seconds:.2g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms",
        (tokens, ratio),
        xytext=(8, 0),
        textcoords="offset points",
        va="center",
        fontsize=9,
        color=color,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},  # the dashed line must not strike the text out
    )
