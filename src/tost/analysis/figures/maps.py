"""Grids of maps over photographs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tost.analysis.figures._style import LABEL, SEQUENTIAL, TITLE, add_colour_bar, add_head_legend, new_figure, rgb

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage
    from numpy.typing import NDArray
    from torch import Tensor

    from tost.analysis.class_attention import ClassAttentionMaps
    from tost.analysis.maps import ImageMaps
    from tost.analysis.memberships import MembershipMaps

CELL = 1.55
MOST_HEADS = 12


def draw_memberships(result: MembershipMaps) -> Figure:
    """Draw one layer: images in rows; photograph, hard clusters, foreground guess and every head in columns.

    It is the one at three quarters of the depth, where the paper's pictures come from, or the nearest that there is.
    """
    wanted = round(0.75 * (result.depth - 1))
    result = result.at(min(result.layers, key=lambda layer: abs(layer - wanted)))
    maps = result.maps[:, 0]  # [S, H, rows, columns]
    low, high = maps.flatten().quantile(maps.new_tensor([0.01, 0.99])).tolist()  # a few patches would dim the others
    best = result.best_heads()[0]

    def leading(row: int, photograph: NDArray[np.float32]) -> list[NDArray[np.float32]]:
        return [_overlay(photograph, maps[row]), _masked(photograph, result.foreground[row])]

    names = ("largest head", "foreground")
    figure, grid, picture = _draw_grid(result, names, leading, (1.0, 1.6), bold=best[1], vmin=low, vmax=high)
    label = f"membership (uniform: {1 / maps.shape[1]:.3f})"
    add_colour_bar(figure, picture, grid[:, 3:], label, location="right", shrink=0.6, pad=0.01, extend="both")
    add_head_legend(figure, min(maps.shape[1], MOST_HEADS))
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
    mean = maps.mean(dim=1)
    kept = keep_mass(mean.flatten(1), MASS).view(mean.shape)
    best = int(result.area[0].argmax())

    def leading(row: int, photograph: NDArray[np.float32]) -> list[NDArray[np.float32]]:
        return [_masked(photograph, kept[row]), mean[row].numpy()]

    names = (f"{MASS:.0%} of the mean", "mean of heads")
    figure, _, _ = _draw_grid(result, names, leading, (0.0, 0.9), bold=best)
    figure.suptitle(
        f"Where the class token looks in {result.names[0]}; each map from its least (dark) to its most (light)\n"
        f"head {best} agrees best with the foreground: {result.area[0, best]:.2f} (chance: 0.5)",
        fontsize=TITLE,
    )
    return figure


def _draw_grid(
    result: ImageMaps,
    names: tuple[str, str],
    leading: Callable[[int, NDArray[np.float32]], list[NDArray[np.float32]]],
    margins: tuple[float, float],
    *,
    bold: int,
    **limits: float,
) -> tuple[Figure, NDArray[np.object_], AxesImage]:
    """Draw images in rows; the photograph, two named pictures made from it, and the map of every head in columns."""
    maps = result.maps[:, 0, :MOST_HEADS]
    titles = ["image", *names, *(f"head {head}" for head in range(maps.shape[1]))]
    figure = new_figure(CELL * len(titles) + margins[0], CELL * len(maps) + margins[1])
    grid = figure.subplots(len(maps), len(titles), squeeze=False)
    for row, axes in enumerate(grid):
        photograph = result.pixels[row].permute(1, 2, 0).float().clamp(0, 1).numpy()
        pictures = [photograph, *leading(row, photograph), *maps[row].numpy()]
        for column, (cell, picture) in enumerate(zip(axes, pictures, strict=True)):
            drawn = cell.imshow(picture, cmap=SEQUENTIAL, interpolation="nearest", **(limits if column > 2 else {}))
            cell.set_xticks([])
            cell.set_yticks([])
            cell.spines[:].set_visible(False)
            if row == 0:
                cell.set_title(titles[column], fontsize=LABEL, fontweight="bold" if column - 3 == bold else "normal")
    return figure, grid, drawn


def _enlarged(grid: NDArray[np.float32], like: NDArray[np.float32]) -> NDArray[np.float32]:
    """Repeat the patches of a grid up to the size of an image; the last ones may be cut off."""
    height, width = like.shape[:2]
    tall, wide = -(-height // grid.shape[0]), -(-width // grid.shape[1])
    return np.repeat(np.repeat(grid, tall, axis=0), wide, axis=1)[:height, :width]


def _overlay(photograph: NDArray[np.float32], maps: Tensor) -> NDArray[np.float32]:
    """Tint every patch in the colour of its largest head."""
    colours = np.array([rgb(head) for head in range(maps.shape[0])], dtype=np.float32)
    tint = _enlarged(colours[maps.argmax(dim=0).numpy()], photograph)
    grey = photograph.mean(axis=2, keepdims=True)
    return 0.45 * grey + 0.55 * tint


def _masked(photograph: NDArray[np.float32], mask: Tensor) -> NDArray[np.float32]:
    """Fade what a mask leaves out."""
    inside = _enlarged(mask.float().numpy()[..., None], photograph)
    outside = 0.8 + 0.2 * photograph.mean(axis=2, keepdims=True)
    return photograph * inside + outside * (1 - inside)
