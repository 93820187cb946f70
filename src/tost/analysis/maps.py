"""Maps over the patches of images: collect them batch by batch, and compare them with the foreground."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from tost.analysis.foreground import agreement, foreground_by_border
from tost.analysis.records import Batch
from tost.analysis.result import Result
from tost.errors import ConfigError

SHOWN = 6
"""Images whose maps are kept, by default."""


def to_display(images: Tensor) -> Tensor:
    """Return images ``[S, channels, height, width]`` of any range as colours in [0, 1], each by its own range."""
    low, high = (images.flatten(1).aminmax(dim=1)[i].view(-1, 1, 1, 1) for i in (0, 1))
    scaled = (images - low) / (high - low).clamp_min(1e-12)
    return scaled.expand(-1, 3, -1, -1) if images.shape[1] == 1 else scaled[:, :3]


@dataclass(frozen=True, kw_only=True)
class ImageMaps(Result):
    """Maps of L layers with H heads each: what the results of all analyses of images have in common.

    Attributes:
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
    maps: Tensor = field(repr=False)
    pixels: Tensor = field(repr=False)
    foreground: Tensor = field(repr=False)
    area: Tensor
    overlap: Tensor
    images: int
    compared: int


def collect_maps(
    batches: Iterable[Batch],
    look: Callable[[Batch, Tensor], Tensor],
    *,
    pixels: Tensor | None = None,
    foreground: Tensor | None = None,
    shown: int = SHOWN,
) -> ImageMaps:
    """Collect the maps of images and compare them with the foreground.

    Args:
        batches: Batches of images.
        look: Returns the maps of a batch with the given images, ``[B, L, H, rows, columns]``, on the CPU.
        pixels: All images in [0, 1], ``[S, 3, height, width]``; None for what a batch has as ``"pixels"``, or for the
            inputs, each stretched to [0, 1].
        foreground: Foreground of all images, bool ``[S, rows, columns]``; None for an estimate from the pixels.
        shown: Maps of so many images are kept. The numbers are over all.

    Raises:
        ConfigError: There are no batches, or they hold something else than images.
    """
    maps, displayed, masks, areas, overlaps = [], [], [], [], []
    seen = 0
    for batch in batches:
        images = batch if isinstance(batch, Tensor) else batch.get("inputs")
        if not isinstance(images, Tensor) or images.dim() != 4:
            raise ConfigError("maps need images [B, channels, height, width]; use text_memberships for texts.")
        found = look(batch, images)
        place = slice(seen, seen + len(images))
        given = None if isinstance(batch, Tensor) else batch.get("pixels")
        display = pixels[place] if pixels is not None else to_display(images) if given is None else given
        grid = (found.shape[-2], found.shape[-1])
        mask = foreground_by_border(display, grid) if foreground is None else foreground[place]
        for each, truth in zip(found, mask, strict=True):
            compared = [agreement(heads.flatten(1), truth.flatten()) for heads in each]
            if pairs := [pair for pair in compared if pair is not None]:
                areas.append(torch.stack([area for area, _ in pairs]))
                overlaps.append(torch.stack([overlap for _, overlap in pairs]))
        room = max(shown - seen, 0)
        maps.append(found[:room].clone())
        displayed.append(display[:room].cpu())
        masks.append(mask[:room].cpu())
        seen += len(images)
    if seen == 0:
        raise ConfigError("there are no samples to look at; give at least one batch.")
    nothing = torch.zeros(maps[0].shape[1:3], dtype=torch.float64)
    return ImageMaps(
        maps=torch.cat(maps),
        pixels=torch.cat(displayed),
        foreground=torch.cat(masks),
        area=torch.stack(areas).mean(dim=0) if areas else nothing,
        overlap=torch.stack(overlaps).mean(dim=0) if overlaps else nothing,
        images=seen,
        compared=len(areas),
    )
