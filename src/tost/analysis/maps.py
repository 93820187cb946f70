"""Maps over the patches of images: membership maps, and how well any map agrees with the foreground of a photograph."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
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
_BINS = 64


@dataclass(frozen=True, kw_only=True)
class ImageMaps(Result):
    """Maps of L layers with H heads each: what the results of all analyses of images have in common.

    Attributes:
        layers: Numbers of the layers.
        depth: How many layers of the kind the model has.
        maps: Those of the first images, ``[S, L, H, rows, columns]``.
        pixels: The first images in [0, 1], ``[S, 3, height, width]``.
        foreground: Their foreground, bool ``[S, rows, columns]``; an estimate unless it was given.
        area: Mean probability that a foreground patch has more of a head than a background patch, ``[L, H]``, over all
            images: 1 if the head is the foreground, 0 if it is the background, 1/2 if the two are unrelated.
        overlap: Mean intersection over union of the patches whose largest map is the head's, and the foreground,
            ``[L, H]``, over all images.
        images: Number of images.
        compared: Number of those that have both foreground and background.
    """

    not_stored: ClassVar[tuple[str, ...]] = ("pixels",)
    is_photographic: ClassVar[bool] = True
    layers: tuple[int, ...]
    depth: int
    maps: Tensor = field(repr=False)
    pixels: Tensor = field(repr=False)
    foreground: Tensor = field(repr=False)
    area: Tensor
    overlap: Tensor
    images: int
    compared: int

    def draw(self, pictures: Mapping[str, Sequence[Any]], margins: tuple[float, float], **limits: float) -> Figure:
        """Draw images in rows; the photograph, named pictures made from it, and the map of every head in columns.

        Args:
            pictures: Of every image, by title.
            margins: Room beside and above the pictures in inches.
            limits: Ends of the scale of all maps; by default each map has its own.
        """
        from tost.analysis import plots

        maps = self.maps[:, 0, :MOST_HEADS]
        best = self.area[0].argmax()
        columns = {"image": list(map(_photograph, self.pixels)), **pictures}
        columns |= {f"head {head}": list(maps[:, head].numpy()) for head in range(maps.shape[1])}
        figure = plots.new_figure(CELL * len(columns) + margins[0], CELL * len(maps) + margins[1])
        grid = figure.subplots(len(maps), len(columns), squeeze=False)
        for column, (title, shown) in enumerate(columns.items()):
            is_map = title.startswith("head")
            weight = "bold" if title == f"head {best}" else "normal"
            grid[0, column].set_title(title, fontsize=plots.LABEL, fontweight=weight)
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
        parts = {key: getattr(self, key)[i : i + 1] for key in ("entropy", "area", "overlap")}
        return replace(self, layers=(layer,), maps=self.maps[:, i : i + 1], **parts)

    def best_heads(self) -> list[tuple[int, int, float, float]]:
        """Return for every layer: its number, the head most like the foreground, that head's area and overlap."""
        heads = self.area.argmax(dim=1).tolist()
        values = zip(self.layers, heads, self.area.tolist(), self.overlap.tolist(), strict=True)
        return [(layer, head, area[head], overlap[head]) for layer, head, area, overlap in values]

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per layer and head."""
        values = {"entropy": self.entropy, "foreground_area": self.area, "foreground_overlap": self.overlap}
        return grid_rows({"layer": self.layers, "head": range(self.area.shape[1])}, values)

    def summary(self) -> dict[str, Any]:
        """Return the entropy and the head that is most like the foreground."""
        layer, head, area, overlap = max(self.best_heads(), key=lambda best: best[2])
        return {
            "images": self.images,
            "entropy of memberships, least and most of a layer (1 = uniform)": span(self.entropy),
            f"foreground agreement: head {head} of layer {layer}, area under the curve (chance 0.5)": round(area, 4),
            f"foreground agreement: head {head} of layer {layer}, overlap (IoU)": round(overlap, 4),
        }

    def figure(self) -> Figure:
        """Draw one layer: the photograph, hard clusters, the foreground and every head.

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
        pictures = {"largest head": clusters, "foreground": list(map(masked, one.pixels, one.foreground))}
        figure = one.draw(pictures, (1.0, 1.4), vmin=low, vmax=high)
        layer, head, area, _ = one.best_heads()[0]
        figure.suptitle(
            f"Memberships in layer {layer} (of 0 to {one.depth - 1}), entropy {one.entropy[0]:.4f} (uniform: 1)\n"
            f"head {head} agrees best with the foreground: {area:.2f} (chance: 0.5)",
            fontsize=plots.TITLE,
        )
        return figure


def collect_maps(
    batches: Iterable[Batch],
    measure: Callable[[Batch, Tensor], Tensor],
    *,
    foreground: Tensor | None = None,
    shown: int = SHOWN,
) -> dict[str, Any]:
    """Collect the maps of images and compare them with the foreground.

    Args:
        batches: Batches of images.
        measure: Returns the maps of a batch with the given images, ``[B, L, H, rows, columns]``, on the CPU.
        foreground: Foreground of all images, bool ``[S, rows, columns]``; None for an estimate from the pixels.
        shown: Maps of so many images are kept. The numbers are over all.

    Returns:
        Attributes of `ImageMaps`.

    Raises:
        ConfigError: There are no batches, or they hold something else than images.
    """
    maps, displayed, masks, scores = [], [], [], []
    seen = 0
    for batch in batches:
        images = batch if isinstance(batch, Tensor) else batch.get("inputs")
        if not isinstance(images, Tensor) or images.dim() != 4:
            raise ConfigError("maps need images [B, channels, height, width]; use text_memberships for texts.")
        each = measure(batch, images)
        given = None if isinstance(batch, Tensor) else batch.get("pixels")
        display = _to_display(images) if given is None else given
        grid = (each.shape[-2], each.shape[-1])
        mask = foreground_by_border(display, grid) if foreground is None else foreground[seen : seen + len(images)]
        for layers, truth in zip(each, mask, strict=True):
            if truth.any() and not truth.all():
                pairs = [agreement(heads.flatten(1), truth.flatten()) for heads in layers]
                scores.append(torch.stack([torch.stack(pair) for pair in pairs], dim=1))  # [2, L, H]
        room = max(shown - seen, 0)
        maps.append(each[:room].clone())
        displayed.append(display[:room].cpu())
        masks.append(mask[:room].cpu())
        seen += len(images)
    if seen == 0:
        raise ConfigError("there are no samples to look at; give at least one batch.")
    none = torch.zeros(2, *maps[0].shape[1:3], dtype=torch.float64)
    area, overlap = torch.stack(scores).mean(dim=0) if scores else none
    pictures = {"maps": torch.cat(maps), "pixels": torch.cat(displayed), "foreground": torch.cat(masks)}
    return {**pictures, "area": area, "overlap": overlap, "images": seen, "compared": len(scores)}


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
    foreground: Tensor | None = None,
    shown: int = SHOWN,
) -> MembershipMaps:
    """Measure the memberships of image patches.

    Args:
        model: An image model with TSSA layers.
        batches: Images, normalized as the model needs them. The same in [0, 1], to be drawn and to find the foreground
            in, are what a batch has as ``"pixels"``; by default the inputs, each stretched to [0, 1].
        layers: Which layers; None for all.
        foreground: Which patches are foreground, bool ``[S, rows, columns]``; None for an estimate, see
            `foreground_by_border`.
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
        pi = record.share()
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
        shared = collect_maps(batches, measure, foreground=foreground, shown=shown)
    return MembershipMaps(layers=tuple(chosen), depth=depth, entropy=spread / shared["images"], **shared)


def otsu(values: Tensor) -> float:
    """Return the threshold that splits numbers into the two groups with the least variance within (Otsu's rule)."""
    flat = values.flatten().double()
    low, high = flat.min().item(), flat.max().item()
    if high <= low:
        return high
    counts = torch.histc(flat, bins=_BINS, min=low, max=high)
    centers = low + (torch.arange(_BINS, dtype=torch.float64) + 0.5) * (high - low) / _BINS
    below, weighted = counts.cumsum(0), (counts * centers).cumsum(0)
    above = counts.sum() - below
    apart = weighted / below.clamp_min(1) - (weighted[-1] - weighted) / above.clamp_min(1)
    return low + (int((below * above * apart.square()).argmax()) + 1) * (high - low) / _BINS


def foreground_by_border(pixels: Tensor, grid: tuple[int, int]) -> Tensor:
    """Estimate which patches of photographs show the subject: those that do not look like the edge of the picture.

    The mean colors of the patches on the edge have a mean and a covariance. A patch is foreground if the Mahalanobis
    distance of its mean color from them is above Otsu's threshold for the image. It uses neither the model
    nor a notion of objects: a subject that is cut off by the edge, or has the colors of the background, is missed.

    Args:
        pixels: Images in [0, 1], ``[S, 3, height, width]``.
        grid: Rows and columns of the patches.

    Returns:
        bool ``[S, rows, columns]``; all False where the whole image has one color.
    """
    colors = F.adaptive_avg_pool2d(pixels.double(), grid).flatten(2).mT  # [S, N, 3]
    edge = torch.ones(grid, dtype=torch.bool)
    edge[1:-1, 1:-1] = False
    border = colors[:, edge.flatten()]
    mean = border.mean(dim=1, keepdim=True)
    apart, away = border - mean, colors - mean
    covariance = apart.mT @ apart / border.shape[1] + 1e-4 * torch.eye(colors.shape[-1], dtype=torch.float64)
    distance = (away * torch.linalg.solve(covariance, away.mT).mT).sum(-1).clamp_min(0).sqrt()
    return torch.stack([row > otsu(row) for row in distance]).unflatten(1, grid)  # type: ignore[no-untyped-call]


def agreement(maps: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    """Compare the maps of all heads with a foreground.

    Args:
        maps: Memberships of patches, ``[H, N]``.
        truth: Foreground, bool ``[N]``; some patches are, some are not.

    Returns:
        By head, float64 ``[H]`` each: the area under the ROC curve of the map as a score for the foreground (the
        probability that a foreground patch has more of it than a background patch, ties counting half), and the
        intersection over union of the patches whose largest membership is the head's, and the foreground.
    """
    inside, outside = maps[:, truth].unsqueeze(-1), maps[:, ~truth].unsqueeze(-2)
    area = (inside > outside).double().mean((1, 2)) + 0.5 * (inside == outside).double().mean((1, 2))
    hard = F.one_hot(maps.argmax(dim=0), len(maps)).bool().mT
    both, either = (hard & truth).sum(dim=1), (hard | truth).sum(dim=1)
    return area, both / either.clamp_min(1).double()
