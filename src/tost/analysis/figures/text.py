"""Pictures of texts: memberships along a text, and what the state remembers of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter

from tost.analysis.figures import _style as style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor

    from tost.analysis.memberships import TextMemberships
    from tost.analysis.memory import StateMemory
    from tost.analysis.reach import GatedMemory

WIDTH = 84
MOST_ROWS = 9
_FONT: dict[str, Any] = {"fontsize": 10, "family": "DejaVu Sans Mono"}
_PICTURES = {"\n": "↵", "\t": "→", "\r": "↵", " ": " "}


def _layout(tokens: tuple[str, ...]) -> list[tuple[int, int, int, str]]:
    """Return index, row, column and text of every token that fits, in rows of `WIDTH` characters."""
    found, row, column = [], 0, 0
    for index, token in enumerate(tokens):
        text = "".join(_PICTURES.get(letter, letter if letter.isprintable() else "·") for letter in token) or "·"
        if column + len(text) > WIDTH and column > 0:
            row, column = row + 1, 0
        if row >= MOST_ROWS:
            break
        found.append((index, row, column, text))
        column += len(text)
        if token.endswith("\n"):
            row, column = row + 1, 0
    return found


def draw_text_memberships(result: TextMemberships) -> Figure:
    """Draw the beginning of the text, each token in the colour of its largest head; first, middle and last layer.

    The stronger a colour, the further the membership is from uniform, by the scale of each layer.
    """
    count = len(result.layers)
    shown = sorted({0, count // 2, count - 1})
    places = _layout(result.tokens)
    rows = max(row for _, row, _, _ in places) + 1
    width = max(48, *(column + len(text) for _, _, column, text in places))
    figure = style.new_figure(0.15 * width, len(shown) * (0.27 * rows + 0.5) + 0.9)
    for axes, i in zip(figure.subplots(len(shown), 1, squeeze=False)[:, 0], shown, strict=True):
        pi = result.pi[i]
        heads = pi.argmax(dim=-1).tolist()
        excess = pi.amax(dim=-1) - 1 / pi.shape[-1]
        strength = (excess / excess.quantile(0.95).clamp_min(1e-12)).clamp(0, 1).tolist()
        for index, row, column, text in places:
            shade = 0.08 + 0.72 * strength[index]
            face = tuple(1 - shade * (1 - part) for part in style.rgb(heads[index]))
            axes.add_patch(Rectangle((column, row), len(text), 0.92, facecolor=face, edgecolor="none"))
            ink = "black" if sum(face) > 1.35 else "white"
            for offset, letter in enumerate(text):
                axes.text(column + offset + 0.5, row + 0.5, letter, ha="center", va="center", color=ink, **_FONT)
        axes.set_xlim(0, width)
        axes.set_ylim(rows, 0)
        axes.axis("off")
        title = f"layer {result.layers[i]};  entropy {result.entropy[i]:.4f} (1 = uniform)"
        axes.set_title(title, fontsize=style.LABEL, loc="left")
    style.add_head_legend(figure, result.pi.shape[-1])
    figure.suptitle("Which head each token belongs to most; strong colours: far from uniform", fontsize=style.TITLE)
    return figure


def draw_memory(result: StateMemory) -> Figure:
    """Draw what the last tokens hold of the state, the fate of single tokens, and the half-lives of all heads."""
    figure = style.new_figure(11.2, 8.8)
    grid = figure.subplots(2, 2)
    _draw_recent(grid[0, 0], result, result.mass, "mass")
    _draw_recent(grid[0, 1], result, result.squares, "weighted squares")
    _draw_traces(grid[1, 0], result)
    _draw_half_lives(grid[1, 1], result)
    figure.suptitle(
        f"What the state remembers of {result.length} tokens ({'with' if result.forgets else 'without'} forgetting, "
        f"{result.samples} texts)",
        fontsize=style.TITLE,
    )
    return figure


def _draw_recent(axes: Axes, result: StateMemory, shares: Tensor, what: str) -> None:
    count = len(result.layers)
    for i, layer in enumerate(result.layers):
        for head in range(shares.shape[1]):
            label = f"layer {layer}" if head == 0 and i in (0, count // 2, count - 1) else None
            shade = style.depth_colour(i, count)
            axes.plot(result.recent, shares[i, head].numpy(), color=shade, linewidth=1.2, label=label)
    equal = [count_ / result.length for count_ in result.recent]
    axes.plot(result.recent, equal, color="0.45", linestyle=":", linewidth=2, label="all tokens alike")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    title = f"{what}: share of the last tokens, at the end"
    style.finish(axes, title=title, x="last tokens", y=f"share of the state's {what}")
    axes.set_ylim(0, 1.02)
    axes.legend(frameon=False, fontsize=style.TICK)


def _draw_traces(axes: Axes, result: StateMemory) -> None:
    """Tokens in the head that forgets fastest and in the one that forgets slowest."""
    order = result.half_life.flatten().argsort()
    heads = result.mass.shape[1]
    picked = [(int(order[0]), "-"), (int(order[-1]), "--")]
    times = np.array(result.times)
    for index, (mark, marker) in enumerate(zip(result.marks, style.MARKERS, strict=False)):
        for flat, line in picked:
            i, head = divmod(flat, heads)
            share = result.trace[i, head, index].numpy()
            there = (times >= mark) & (share > 0)
            look: dict[str, Any] = {"color": style.colour(index), "marker": marker, "markersize": 3.5, "linewidth": 1.3}
            name = f"token {mark}, head {head} of layer {result.layers[i]}"
            axes.plot(times[there], share[there], line, label=name, **look)
    axes.set_yscale("log")
    axes.set_ylim(bottom=max(axes.get_ylim()[0], 1e-6), top=1.5)
    style.finish(axes, title="what becomes of single tokens", x="position (tokens seen)", y="share of the state's mass")
    axes.legend(frameon=False, fontsize=8.5)


def _draw_half_lives(axes: Axes, result: StateMemory) -> None:
    heads = result.mass.shape[1]
    for head in range(heads):
        values, marker = result.half_life[:, head].numpy(), style.MARKERS[head % len(style.MARKERS)]
        look: dict[str, Any] = {"color": style.colour(head), "marker": marker, "markersize": 5, "linewidth": 1}
        axes.plot(result.layers, values, label=f"head {head}", **look)
    axes.axhline(result.length / 2, color="0.45", linestyle=":", linewidth=2, label="all tokens alike")
    axes.xaxis.set_major_locator(FixedLocator(list(result.layers)))
    axes.set_ylim(bottom=0)
    style.finish(axes, title="half of the state is the last so many tokens", x="layer", y="tokens")
    axes.legend(frameon=False, fontsize=8.5, ncols=2 if heads > 4 else 1)


def draw_reach(result: GatedMemory) -> Figure:
    """Draw how far back the channels of every layer reach, sorted, and how much of them a token replaces."""
    figure = style.new_figure(11.2, 4.6)
    left, right = figure.subplots(1, 2)
    count = len(result.layers)
    shares = np.linspace(0, 1, result.reach.shape[1])
    for i, layer in enumerate(result.layers):
        look: dict[str, Any] = {"color": style.depth_colour(i, count), "linewidth": 1.6, "label": f"layer {layer}"}
        left.plot(shares, result.reach[i].sort().values.numpy(), **look)
        right.plot(shares, result.written[i].sort().values.numpy(), **look)
    left.axhline(result.length, color="0.45", linestyle=":", linewidth=2, label="the text")
    left.set_yscale("log", base=2)
    left.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    where = "share of the channels, sorted"
    style.finish(left, title="last tokens that hold half of the mean", x=where, y="tokens")
    style.finish(right, title="what a token replaces of the mean", x=where, y="mean of z")
    right.set_ylim(0, 1.02)
    left.legend(frameon=False, fontsize=style.TICK)
    figure.suptitle(
        f"What gated means remember of {result.length} tokens ({result.samples} texts)", fontsize=style.TITLE
    )
    return figure
