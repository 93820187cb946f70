"""Tables of colours and curves: subspaces, gains, heads, flattening."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.ticker import MaxNLocator, NullLocator

from tost.analysis.figures import _style as style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor

    from tost.analysis.gains import Gains
    from tost.analysis.heads import Flattening, HeadUsage
    from tost.analysis.subspaces import SubspaceCoherence

COLUMNS = 4


def _panels(count: int, side: float, extra: float) -> tuple[Figure, list[Axes]]:
    """Return a figure with so many square panels, at most `COLUMNS` in a row."""
    columns = min(count, COLUMNS)
    rows = -(-count // columns)
    figure = style.new_figure(max(side * columns + 1.0, 6.4), side * rows + extra)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for panel in panels[count:]:
        panel.set_visible(False)
    return figure, panels[:count]


def _label(axes: Axes, title: str, x: str, y: str, size: int) -> None:
    axes.set_title(title, fontsize=size)
    axes.set_xlabel(x, fontsize=size)
    axes.set_ylabel(y, fontsize=size)


def draw_subspaces(result: SubspaceCoherence) -> Figure:
    """Draw the inner products of a few directions of every head, one panel per layer."""
    figure, panels = _panels(len(result.layers), 2.7, 0.8)
    size, step = result.sample.shape[-1], result.directions
    for i, axes in enumerate(panels):
        picture = axes.imshow(result.sample[i].abs().numpy(), cmap=style.SEQUENTIAL, vmin=0, vmax=1)
        for edge in range(step, size, step):
            axes.axhline(edge - 0.5, color="white", linewidth=0.6)
            axes.axvline(edge - 0.5, color="white", linewidth=0.6)
        centres = [step * head + (step - 1) / 2 for head in range(size // step)]
        names = [str(head) for head in range(len(centres))]
        axes.set_xticks(centres, names, fontsize=style.TICK)
        axes.set_yticks(centres, names, fontsize=style.TICK)
        axes.tick_params(length=0)
        title = f"layer {result.layers[i]}: mean {result.between[i]:.3f}, most {result.mutual[i]:.2f}"
        _label(axes, title, "head", "head", style.TICK)
    style.add_colour_bar(figure, picture, panels, "|cosine| between directions", shrink=0.8)
    figure.suptitle(
        f"Subspaces: {step} directions of every head;  mean |cosine| between heads "
        f"{result.between.mean():.3f}, random {result.random:.3f}",
        fontsize=style.TITLE,
    )
    return figure


def draw_gains(result: Gains) -> Figure:
    """Draw D, sorted within each head, one panel per layer."""
    figure, panels = _panels(len(result.layers), 2.6, 0.8)
    for i, axes in enumerate(panels):
        ordered = result.mean[i].sort(dim=-1).values
        picture = axes.imshow(ordered.numpy(), cmap=style.SEQUENTIAL, vmin=0, vmax=1, aspect="auto")
        title = f"layer {result.layers[i]}: {result.suppressed()[i].mean():.0%} above ½"
        _label(axes, title, "direction, sorted", "head", style.TICK)
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(min(8, ordered.shape[0]), integer=True))
    style.add_colour_bar(figure, picture, panels, "D:  0 kept   …   1 suppressed", shrink=0.8)
    figure.suptitle("D = 1 / (1 + second moment), by layer, head and direction", fontsize=style.TITLE)
    return figure


def draw_heads(result: HeadUsage) -> Figure:
    """Draw usage, hard share, temperature and rank of every head, and the entropy by layer."""
    heads = result.usage.shape[1]
    tables = {
        f"usage (equal: {1 / heads:.3g})": (result.usage, 2 / heads),
        "share of tokens with it as largest": (result.hard, 2 / heads),
        "temperature": (result.temperature, None),
        f"effective rank (of {result.head_dim})": (result.rank, result.head_dim),
    }
    figure = style.new_figure(11.0, max(6.4, 0.6 * len(result.layers) + 2.4))
    grid = list(figure.subplots(2, 3).flat)
    grid[5].set_visible(False)
    for axes, (title, (values, top)) in zip(grid[:4], tables.items(), strict=True):
        _draw_table(axes, title, values, result.layers, top)
    axes = grid[4]
    axes.plot(result.entropy.numpy(), range(len(result.layers)), marker="o", color=style.colour(0))
    axes.set_yticks(range(len(result.layers)), [str(layer) for layer in result.layers])
    axes.invert_yaxis()
    style.finish(axes, title="entropy (1 = uniform)", x="mean of a token's membership", y="layer")
    axes.ticklabel_format(axis="x", useOffset=False)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    figure.suptitle(f"The heads, over {result.samples} samples", fontsize=style.TITLE)
    return figure


def _draw_table(axes: Axes, title: str, values: Tensor, layers: tuple[int, ...], top: float | None) -> None:
    """Draw a table of layers and heads in colours, with the numbers where there is room.

    With `top` the colours go from 0 to it, or further if they must; otherwise from the least to the most.
    """
    table = values.numpy()
    low, high = (table.min(), table.max()) if top is None else (0.0, max(top, table.max()))
    axes.imshow(table, cmap=style.SEQUENTIAL, aspect="auto", interpolation="nearest", vmin=low, vmax=high)
    _label(axes, title, "head", "layer", style.LABEL)
    columns = range(0, table.shape[1], 1 if table.shape[1] <= 8 else 2)
    axes.set_xticks(columns, [str(head) for head in columns], fontsize=style.TICK)
    axes.set_yticks(range(table.shape[0]), [str(layer) for layer in layers], fontsize=style.TICK)
    middle = (low + high) / 2
    for (row, column), value in np.ndenumerate(table):
        if table.shape[1] <= 8:
            text = f"{value:.2f}" if abs(value) < 9.95 else f"{value:.0f}"
            shade = "black" if value > middle else "white"
            axes.text(column, row, text, ha="center", va="center", color=shade, fontsize=8)


def draw_flattening(result: Flattening) -> Figure:
    """Draw the distance from uniform on two log axes, and the entropy, over the number of tokens."""
    figure = style.new_figure(11.0, 4.4)
    left, right = figure.subplots(1, 2)
    unit = "position (tokens seen)" if result.causal else "tokens in the sequence"
    count = len(result.layers)
    for i, layer in enumerate(result.layers):
        line = {"color": style.depth_colour(i, count), "marker": "o", "markersize": 4}
        label = f"layer {layer}" if i in (0, count // 2, count - 1) else None
        left.plot(result.lengths, result.deviation[i].clamp_min(1e-12).numpy(), label=label, **line)
        right.plot(result.lengths, result.entropy[i].numpy(), **line)
    peak = int(result.deviation.mean(dim=0).argmax())  # the first token of a causal layer is a case of its own
    reference = [result.deviation[:, peak].max().item() * result.lengths[peak] / x for x in result.lengths[peak:]]
    if len(reference) > 1:
        left.plot(result.lengths[peak:], reference, color="0.5", linestyle=":", label="falls as 1/tokens")
    left.set_yscale("log")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        ticks = [2**i for i in range(0, 40, 2) if result.lengths[0] <= 2**i <= result.lengths[-1]]
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.xaxis.set_minor_locator(NullLocator())
    style.finish(left, title="distance from uniform", x=unit, y="largest |π - 1/H| of a token, mean")
    style.finish(right, title="entropy (1 = uniform)", x=unit, y="entropy of a token's membership, mean")
    right.ticklabel_format(axis="y", useOffset=False)
    left.legend(frameon=False, fontsize=style.TICK)
    scaled = "energies times the number of tokens" if result.count_scaled else "normalized energies"
    figure.suptitle(f"Memberships and length ({scaled}, {result.samples} samples)", fontsize=style.TITLE)
    return figure
