"""The picture of a comparison of mixers: steps per second, memory, and each mixer alone, by number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tost.bench.lra.run import LraRow, Work
from tost.bench.ops.plot import draw_line, image_of, log_scales, require_matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_lra"]

# Label, colour, marker and line by mixer. The Okabe-Ito palette stays distinct for colour-blind readers; it has eight
# colours, so relatives share one and differ in their lines. The markers carry the same information without colour.
_STYLE: dict[str, tuple[str, str, str, str]] = {
    "tssa": ("TSSA", "#D55E00", "o", "-"),
    "softmax": ("softmax", "#000000", "D", "-"),
    "reformer": ("Reformer", "#999999", "X", "--"),
    "bigbird": ("BigBird", "#999999", "P", "-"),
    "linformer": ("Linformer", "#E69F00", "s", "-"),
    "linear": ("Linear Transformer", "#0072B2", "^", "-"),
    "performer": ("Performer", "#56B4E9", "v", "-"),
    "nystrom": ("Nystromformer", "#CC79A7", "<", "-"),
    "s4": ("S4", "#009E73", ">", "-"),
    "s4d": ("S4D", "#009E73", "*", "--"),
}


def _steps_per_second(row: LraRow) -> float | None:
    return 1 / row.seconds.median if row.seconds else None


def _megabytes(row: LraRow) -> float | None:
    return row.peak_bytes / 1e6 if row.peak_bytes else None


def _milliseconds(row: LraRow) -> float | None:
    return 1e3 * row.seconds.median if row.seconds else None


_PANELS: tuple[tuple[str, Work, Callable[[LraRow], float | None]], ...] = (
    ("training steps per second", Work.STEP, _steps_per_second),
    ("peak memory of a step, MB", Work.STEP, _megabytes),
    ("mixer alone, forward, ms", Work.FWD, _milliseconds),
    ("mixer alone, forward and backward, ms", Work.FWD_BWD, _milliseconds),
)


def draw_lra(rows: Sequence[LraRow], *, caption: str, image_format: str = "svg") -> bytes:
    """Draw a measurement, one panel per quantity; both axes are logarithmic.

    Args:
        rows: The measurement.
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

    with matplotlib.rc_context({"svg.hashsalt": "tost", "font.size": 10}):
        figure = Figure(figsize=(10.0, 7.6), layout="constrained")
        grid = list(figure.subplots(2, 2, squeeze=False).flat)
        for axes, (title, work, value) in zip(grid, _PANELS, strict=True):
            _draw_panel(axes, title, [row for row in rows if row.case.work is work], value)
        handles, labels = grid[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=5, frameon=False)
        figure.supxlabel(f"tokens\n{caption} | medians", fontsize=9)
        return image_of(figure, image_format)


def _draw_panel(axes: Axes, title: str, rows: Sequence[LraRow], value: Callable[[LraRow], float | None]) -> None:
    for name, style in _STYLE.items():
        known = [(row.case.tokens, value(row)) for row in rows if row.mixer == name]
        if points := sorted((tokens, number) for tokens, number in known if number is not None):
            draw_line(axes, points, style, ours=name == "tssa")
    axes.set_title(title, fontsize=10)
    log_scales(axes, sorted({row.case.tokens for row in rows}))
