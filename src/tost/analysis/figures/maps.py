"""Grids of maps over photographs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tost.analysis.figures._style import LABEL, SEQUENTIAL, TITLE, add_colour_bar, add_head_legend, new_figure, rgb

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray
    from torch import Tensor

    from tost.analysis.class_attention import ClassAttentionMaps
    from tost.analysis.memberships import MembershipMaps

CELL = 1.55
MOST_HEADS = 12


def draw_memberships(result: MembershipMaps) -> Figure:
    """Draw one layer: images in rows; photograph, hard clusters, foreground guess and every head in columns."""
    maps = result.maps[:, 0]  # [S, H, rows, columns]
    heads = min(maps.shape[1], MOST_HEADS)
    low, high = maps.flatten().quantile(maps.new_tensor([0.01, 0.99])).tolist()  # a few patches would dim the others
    figure = new_figure(CELL * (heads + 3) + 1.0, CELL * len(maps) + 1.6)
    grid = figure.subplots(len(maps), heads + 3, squeeze=False)
    best = result.best_heads()[0]
    titles = ["image", "largest head", "foreground", *(f"head {head}" for head in range(heads))]
    for row, axes in enumerate(grid):
        photograph = _photograph(result.pixels[row])
        _show(axes[0], photograph)
        _show(axes[1], _overlay(photograph, maps[row]))
        _show(axes[2], _masked(photograph, result.foreground[row]))
        for head in range(heads):
            picture = axes[3 + head].imshow(maps[row, head].numpy(), cmap=SEQUENTIAL, vmin=low, vmax=high)
        for column, cell in enumerate(axes):
            _bare(cell, titles[column] if row == 0 else "", bold=column - 3 == best[1])
    label = f"membership (uniform: {1 / maps.shape[1]:.3f})"
    add_colour_bar(figure, picture, grid[:, 3:], label, location="right", shrink=0.6, pad=0.01, extend="both")
    add_head_legend(figure, heads)
    figure.suptitle(
        f"Memberships in layer {result.layers[0]} (of 0 to {result.depth - 1}), entropy {result.entropy[0]:.4f} "
        f"(uniform: 1)\nhead {best[1]} agrees best with the foreground: {best[2]:.2f} (chance: 0.5)",
        fontsize=TITLE,
    )
    return figure


def draw_class_attention(result: ClassAttentionMaps) -> Figure:
    """Draw the first of the layers: images in rows; photograph, mean over heads, and every head in columns."""
    from tost.analysis.class_attention import MASS, keep_mass

    maps = result.maps[:, 0]
    heads = min(maps.shape[1], MOST_HEADS)
    figure = new_figure(CELL * (heads + 3), CELL * len(maps) + 0.9)
    grid = figure.subplots(len(maps), heads + 3, squeeze=False)
    mean = maps.mean(dim=1)
    kept = keep_mass(mean.flatten(1), MASS).view(mean.shape)
    titles = ["image", f"{MASS:.0%} of the mean", "mean of heads", *(f"head {head}" for head in range(heads))]
    best = int(result.area[0].argmax())
    for row, axes in enumerate(grid):
        photograph = _photograph(result.pixels[row])
        _show(axes[0], photograph)
        _show(axes[1], _masked(photograph, kept[row]))
        axes[2].imshow(mean[row].numpy(), cmap=SEQUENTIAL)
        for head in range(heads):
            axes[3 + head].imshow(maps[row, head].numpy(), cmap=SEQUENTIAL)
        for column, cell in enumerate(axes):
            _bare(cell, titles[column] if row == 0 else "", bold=column - 3 == best)
    figure.suptitle(
        f"Where the class token looks in {result.names[0]}; each map from its least (dark) to its most (light)\n"
        f"head {best} agrees best with the foreground: {result.area[0, best]:.2f} (chance: 0.5)",
        fontsize=TITLE,
    )
    return figure


def _photograph(pixels: Tensor) -> NDArray[np.float32]:
    return pixels.permute(1, 2, 0).float().clamp(0, 1).numpy()


def _enlarged(grid: NDArray[np.float32], like: NDArray[np.float32]) -> NDArray[np.float32]:
    """Repeat the patches of a grid up to the size of an image; the last ones may be cut off."""
    height, width = like.shape[:2]
    tall, wide = -(-height // grid.shape[0]), -(-width // grid.shape[1])
    repeated: NDArray[np.float32] = np.repeat(np.repeat(grid, tall, axis=0), wide, axis=1)[:height, :width]
    return repeated


def _overlay(photograph: NDArray[np.float32], maps: Tensor) -> NDArray[np.float32]:
    """Tint every patch in the colour of its largest head."""
    colours = np.array([rgb(head) for head in range(maps.shape[0])], dtype=np.float32)
    tint = _enlarged(colours[maps.argmax(dim=0).numpy()], photograph)
    grey = photograph.mean(axis=2, keepdims=True)
    mixed: NDArray[np.float32] = 0.45 * grey + 0.55 * tint
    return mixed


def _masked(photograph: NDArray[np.float32], mask: Tensor) -> NDArray[np.float32]:
    """Fade what a mask leaves out."""
    inside = _enlarged(mask.float().numpy()[..., None], photograph)
    outside = 0.8 + 0.2 * photograph.mean(axis=2, keepdims=True)
    mixed: NDArray[np.float32] = photograph * inside + outside * (1 - inside)
    return mixed


def _show(axes: Axes, picture: NDArray[np.float32]) -> None:
    axes.imshow(picture, interpolation="nearest")


def _bare(axes: Axes, title: str, *, bold: bool) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    if title:
        axes.set_title(title, fontsize=LABEL, fontweight="bold" if bold else "normal")
    for spine in axes.spines.values():
        spine.set_visible(False)
