"""Maps over the patches of images: pictures that all of them share, and membership maps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from tost.analysis.records import Batch, LayerRecord, at_rest, attention_layers, capture, choose, run_batch
from tost.analysis.result import Result, entropy, grid_rows, span
from tost.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = 6
"""Images whose maps are kept, by default."""
CELL = 1.3
MOST_HEADS = 12


@dataclass(frozen=True, kw_only=True)
class ImageMaps(Result):
    """Maps of L layers with H heads each: what the results of all analyses of images have in common.

    Attributes:
        layers: Numbers of the layers.
        depth: How many layers of the kind the model has.
        maps: Those of the first images, ``[S, L, H, rows, columns]``.
        pixels: The first images in [0, 1], ``[S, 3, height, width]``.
        images: Number of images.
    """

    not_stored: ClassVar[tuple[str, ...]] = ("pixels",)
    is_photographic: ClassVar[bool] = True
    layers: tuple[int, ...]
    depth: int
    maps: Tensor = field(repr=False)
    pixels: Tensor = field(repr=False)
    images: int

    def draw(self, pictures: Mapping[str, Sequence[Any]], margins: tuple[float, float], **limits: float) -> Figure:
        """Draw images in rows; the photograph, named pictures made from it, and the map of every head in columns.

        Args:
            pictures: Of every image, by title.
            margins: Room beside and above the pictures in inches.
            limits: Ends of the scale of all maps; by default each map has its own.
        """
        from tost.analysis import plots

        maps = self.maps[:, 0, :MOST_HEADS]
        columns = {"image": list(map(_photograph, self.pixels)), **pictures}
        columns |= {f"head {head}": list(maps[:, head].numpy()) for head in range(maps.shape[1])}
        figure = plots.new_figure(CELL * len(columns) + margins[0], CELL * len(maps) + margins[1])
        grid = figure.subplots(len(maps), len(columns), squeeze=False)
        for column, (title, shown) in enumerate(columns.items()):
            is_map = title.startswith("head")
            grid[0, column].set_title(title, fontsize=plots.LABEL)
            for cell, picture in zip(grid[:, column], shown, strict=True):
                drawn = cell.imshow(
                    picture, cmap=plots.SEQUENTIAL, interpolation="nearest", **(limits if is_map else {})
                )
                cell.set_axis_off()
        if limits:
            label = f"membership (uniform: {1 / self.maps.shape[2]:.3f})"
            place = {"location": "right", "shrink": 0.6, "pad": 0.01, "extend": "both"}
            plots.add_color_bar(figure, drawn, grid[:, 1 + len(pictures) :], label, **place)
            plots.add_head_legend(figure, maps.shape[1])
        return figure


def _photograph(pixels: Tensor) -> Any:
    return pixels.permute(1, 2, 0).float().clamp(0, 1).numpy()


def _enlarged(grid: Any, like: Any) -> Any:
    """Repeat the patches of a grid up to the size of an image; the last ones may be cut off."""
    height, width = like.shape[:2]
    tall, wide = -(-height // grid.shape[0]), -(-width // grid.shape[1])
    return grid.repeat(tall, axis=0).repeat(wide, axis=1)[:height, :width]


def masked(pixels: Tensor, mask: Tensor) -> Any:
    """Return a photograph in which what a mask leaves out is faded."""
    photograph = _photograph(pixels)
    inside = _enlarged(mask.float().numpy()[..., None], photograph)
    return photograph * inside + (0.8 + 0.2 * photograph.mean(axis=2, keepdims=True)) * (1 - inside)


@dataclass(frozen=True, kw_only=True)
class MembershipMaps(ImageMaps):
    """Memberships of image patches; the maps add up to 1 over the heads.

    Attributes:
        entropy: Mean entropy of a patch's membership by layer over all images, ``[L]``; 1 is uniform.
    """

    name: ClassVar[str] = "membership-maps"
    entropy: Tensor

    def at(self, layer: int) -> MembershipMaps:
        """Return the same for one layer only.

        Raises:
            ConfigError: The layer was not measured.
        """
        layer = layer % self.depth
        if layer not in self.layers:
            raise ConfigError(f"layer {layer} is not among {', '.join(map(str, self.layers))}.")
        i = self.layers.index(layer)
        return replace(self, layers=(layer,), maps=self.maps[:, i : i + 1], entropy=self.entropy[i : i + 1])

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per layer."""
        return grid_rows({"layer": self.layers}, {"entropy": self.entropy})

    def summary(self) -> dict[str, Any]:
        """Return the entropy."""
        label = "entropy of memberships, least and most of a layer (1 = uniform)"
        return {"images": self.images, label: span(self.entropy)}

    def figure(self) -> Figure:
        """Draw one layer: the photograph, hard clusters and every head.

        It is the one nearest to three quarters of the depth, where the paper's pictures come from.
        """
        from tost.analysis import plots

        wanted = round(0.75 * (self.depth - 1))
        one = self.at(min(self.layers, key=lambda layer: abs(layer - wanted)))
        maps = one.maps[:, 0]
        low, high = maps.flatten().quantile(maps.new_tensor([0.01, 0.99])).tolist()  # a few would dim the others
        colors = np.array([plots.rgb(head) for head in range(maps.shape[1])], dtype=np.float32)
        clusters = []
        for pixels, each in zip(one.pixels, maps, strict=True):
            photograph = _photograph(pixels)
            tint = _enlarged(colors[each.argmax(dim=0).numpy()], photograph)
            clusters.append(0.45 * photograph.mean(axis=2, keepdims=True) + 0.55 * tint)
        figure = one.draw({"largest head": clusters}, (1.0, 1.2), vmin=low, vmax=high)
        title = (
            f"Memberships in layer {one.layers[0]} (of 0 to {one.depth - 1}), entropy {one.entropy[0]:.4f} (uniform: 1)"
        )
        figure.suptitle(title, fontsize=plots.TITLE)
        return figure


def collect_maps(
    batches: Iterable[Batch],
    measure: Callable[[Batch, Tensor], Tensor],
    *,
    shown: int = SHOWN,
) -> dict[str, Any]:
    """Collect the maps of images.

    Args:
        batches: Batches of images.
        measure: Returns the maps of a batch with the given images, ``[B, L, H, rows, columns]``, on the CPU.
        shown: Maps of so many images are kept. The numbers are over all.

    Returns:
        Attributes of `ImageMaps`.

    Raises:
        ConfigError: There are no batches, or they hold something else than images.
    """
    maps, displayed = [], []
    seen = 0
    for batch in batches:
        images = batch if isinstance(batch, Tensor) else batch.get("inputs")
        if not isinstance(images, Tensor) or images.dim() != 4:
            raise ConfigError("maps need images [B, channels, height, width]; use text_memberships for texts.")
        each = measure(batch, images)
        given = None if isinstance(batch, Tensor) else batch.get("pixels")
        display = _to_display(images) if given is None else given
        room = max(shown - seen, 0)
        maps.append(each[:room].clone())
        displayed.append(display[:room].cpu())
        seen += len(images)
    if seen == 0:
        raise ConfigError("there are no samples to look at; give at least one batch.")
    return {"maps": torch.cat(maps), "pixels": torch.cat(displayed), "images": seen}


def _to_display(images: Tensor) -> Tensor:
    """Return images ``[S, channels, height, width]`` of any range as colors in [0, 1], each by its own range."""
    low, high = (images.flatten(1).aminmax(dim=1)[i].view(-1, 1, 1, 1) for i in (0, 1))
    scaled = (images - low) / (high - low).clamp_min(1e-12)
    return scaled.expand(-1, 3, -1, -1) if images.shape[1] == 1 else scaled[:, :3]


def membership_maps(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    layers: Sequence[int] | None = None,
    shown: int = SHOWN,
) -> MembershipMaps:
    """Measure the memberships of image patches.

    Args:
        model: An image model with TSSA layers.
        batches: Images, normalized as the model needs them. The same in [0, 1], to be drawn, are what a batch has
            as ``"pixels"``; by default the inputs, each stretched to [0, 1].
        layers: Which layers; None for all.
        shown: Maps of so many images are kept. The numbers are over all.

    Raises:
        ConfigError: The model has no TSSA layers or works on something else than images.

    Example:
        >>> import torch, tost, tost.analysis
        >>> model = tost.create_model("tost_mini")
        >>> tost.analysis.membership_maps(model, [torch.randn(4, 3, 32, 32)]).maps.shape
        torch.Size([4, 6, 4, 8, 8])
    """
    depth = len(attention_layers(model))
    chosen = choose(layers, depth)
    spread = torch.zeros(len(chosen), dtype=torch.float64)
    maps: dict[int, Tensor] = {}

    def visit(record: LayerRecord) -> None:
        pi = record.membership()
        side = math.isqrt(pi.shape[1])
        if record.grid is None and side * side != pi.shape[1]:
            raise ConfigError(f"{pi.shape[1]} tokens form no square, and the model has no attribute for their grid.")
        maps[record.layer.index] = pi.mT.unflatten(2, record.grid or (side, side)).cpu()  # type: ignore[no-untyped-call]

    def measure(batch: Batch, images: Tensor) -> Tensor:
        run_batch(model, batch)
        each = torch.stack([maps[index] for index in chosen], dim=1)
        spread.add_(entropy(each.double(), dim=2).flatten(2).mean(dim=2).sum(dim=0))
        return each

    with at_rest(model), capture(model, chosen, visit=visit):
        shared = collect_maps(batches, measure, shown=shown)
    return MembershipMaps(layers=tuple(chosen), depth=depth, entropy=spread / shared["images"], **shared)
