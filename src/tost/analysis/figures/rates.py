"""The compression figure."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from tost.analysis.figures._style import LABEL, MARKERS, colour, finish, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from tost.analysis.rates import CodingRates, Measure, RateCurve
    from tost.analysis.records import Place

_PLACES: dict[str, str] = {
    "attention": "behind the attention",
    "output": "behind the block",
    "input": "in front of the attention",
}
_CHANGES: dict[tuple[str, str], str] = {
    ("input", "attention"): "what the attention does to it (below 0: compresses)",
    ("attention", "output"): "what the MLP does to it",
}


def draw_rates(result: CodingRates) -> Figure:
    """Draw R_c^var after the attention and after the block, and by how much each half of a block changes it.

    Below them R and R_c, and Delta R, after the attention. Lines are means, bands go from the lower to the upper
    quartile of the samples.
    """
    there = [place for place in _PLACES if any(curve.place == place for curve in result.curves)]
    shown: list[Place] = there[:2]  # type: ignore[assignment]
    steps = result.steps()
    lines = 3 if steps else 2
    figure = new_figure(11.2, 4.3 * lines)
    grid = figure.subplots(lines, 2, squeeze=False)
    for axes, place in zip(grid[0], shown, strict=False):
        _draw_measure(axes, result, place, "variational")
        finish(axes, title=_PLACES[place], x="layer", y=r"$R_c^{\,\mathrm{var}}$ (nats)")
        axes.set_ylim(bottom=0)
    for axes in grid[0][len(shown) :]:
        axes.set_visible(False)
    for axes, step in zip_longest(grid[1] if steps else (), steps):
        _draw_change(axes, result, step)
    _draw_both(grid[-1][0], result, shown[0])
    _draw_measure(grid[-1][1], result, shown[0], "reduction")
    finish(grid[-1][1], title=_PLACES[shown[0]], x="layer", y=r"$\Delta R = R - R_c$ (nats)")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False, fontsize=LABEL)
    samples = len(result.curves[0].values["variational"])
    figure.supxlabel(f"line: mean; band: middle half of {samples} samples", fontsize=10, color="0.35")
    return figure


def _draw_measure(axes: Axes, result: CodingRates, place: Place, measure: Measure) -> None:
    _draw_pairs(axes, {pair: result.curve(*pair, place) for pair in result.pairs()}, measure)


def _draw_change(axes: Axes, result: CodingRates, step: tuple[Place, Place] | None) -> None:
    """By how much one half of every block changes R_c^var; below the line it compresses."""
    if step is None:
        axes.set_visible(False)
        return
    axes.axhline(0, color="0.2", linewidth=0.8)
    _draw_pairs(axes, {pair: result.change(*pair, *step) for pair in result.pairs()}, "variational")
    finish(axes, title=_CHANGES[step], x="layer", y=r"change of $R_c^{\,\mathrm{var}}$ (nats)")


def _draw_pairs(axes: Axes, curves: dict[tuple[str, str], RateCurve], measure: Measure) -> None:
    for index, ((source, split), curve) in enumerate(curves.items()):
        control = source == "control"
        style = {"color": "0.45" if control else colour(index), "linestyle": "--" if control else "-"}
        _draw_line(axes, curve, measure, f"{source}, {split}", MARKERS[index % len(MARKERS)], style)


def _draw_both(axes: Axes, result: CodingRates, place: Place) -> None:
    """R and R_c of the same samples; where memberships are nearly uniform they lie on top of each other."""
    source, split = next(((a, b) for a, b in result.pairs() if b == "validation" and a != "control"), result.pairs()[0])
    curve = result.curve(source, split, place)
    _draw_line(axes, curve, "rate", "$R$, all tokens", "s", {"color": colour(4), "linewidth": 4, "alpha": 0.8})
    _draw_line(axes, curve, "compression", "$R_c$, by group", "o", {"color": colour(2), "linestyle": "--"})
    finish(axes, title=f"{_PLACES[place]} ({source}, {split})", x="layer", y="rate (nats)")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=LABEL, loc="lower left")


def _draw_line(axes: Axes, curve: RateCurve, measure: Measure, label: str, marker: str, style: dict[str, Any]) -> None:
    lower, _, upper = curve.quartiles(measure).tolist()
    axes.fill_between(curve.layers, lower, upper, color=style["color"], alpha=0.16, linewidth=0)
    axes.plot(curve.layers, curve.mean(measure).tolist(), label=label, marker=marker, markersize=5, **style)
    step = max(1, len(curve.layers) // 12)
    axes.set_xticks(curve.layers[::step])
