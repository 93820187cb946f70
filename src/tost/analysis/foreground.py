"""A simple estimate of the foreground of a photograph, and how well a map agrees with it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BINS = 64


def otsu(values: Tensor) -> float:
    """Return the threshold that splits numbers into the two groups with the least variance within (Otsu's rule).

    Args:
        values: Any shape.
    """
    flat = values.flatten().double()
    low, high = flat.min().item(), flat.max().item()
    if high <= low:
        return high
    counts = torch.histc(flat, bins=BINS, min=low, max=high)
    centres = low + (torch.arange(BINS, dtype=torch.float64) + 0.5) * (high - low) / BINS
    below, above = counts.cumsum(0), counts.sum() - counts.cumsum(0)
    weighted = (counts * centres).cumsum(0)
    mean_below = weighted / below.clamp_min(1)
    mean_above = (weighted[-1] - weighted) / above.clamp_min(1)
    between = below * above * (mean_below - mean_above).square()
    best = int(between.argmax())
    return low + (best + 1) * (high - low) / BINS


def foreground_by_border(pixels: Tensor, grid: tuple[int, int]) -> Tensor:
    """Estimate which patches of photographs show the subject: those that do not look like the edge of the picture.

    The mean colours of the patches on the edge have a mean and a covariance. A patch is foreground if the Mahalanobis
    distance of its mean colour from them is above Otsu's threshold for the image. It uses neither the model
    nor a notion of objects: a subject that is cut off by the edge, or has the colours of the background, is missed.

    Args:
        pixels: Images in [0, 1], ``[S, 3, height, width]``.
        grid: Rows and columns of the patches.

    Returns:
        bool ``[S, rows, columns]``; all False where the whole image has one colour.
    """
    colours = F.adaptive_avg_pool2d(pixels.double(), grid).flatten(2).mT  # [S, N, 3]
    edge = torch.ones(grid, dtype=torch.bool)
    edge[1:-1, 1:-1] = False
    border = colours[:, edge.flatten()]
    mean = border.mean(dim=1, keepdim=True)
    apart = border - mean
    covariance = apart.mT @ apart / border.shape[1] + 1e-4 * torch.eye(colours.shape[-1], dtype=torch.float64)
    away = colours - mean
    distance = (away * torch.linalg.solve(covariance, away.mT).mT).sum(-1).clamp_min(0).sqrt()
    masks = [row > otsu(row) for row in distance]
    return torch.stack(masks).unflatten(1, grid)  # type: ignore[no-untyped-call]


def agreement(maps: Tensor, truth: Tensor) -> tuple[Tensor, Tensor] | None:
    """Compare the maps of all heads with a foreground.

    Args:
        maps: Memberships of patches, ``[H, N]``.
        truth: Foreground, bool ``[N]``.

    Returns:
        By head, float64 ``[H]`` each: the area under the ROC curve of the map as a score for the foreground (the
        probability that a foreground patch has more of it than a background patch, ties counting half), and the
        intersection over union of the patches whose largest membership is the head's, and the foreground. None if all
        patches or no patch are foreground.
    """
    if truth.all() or not truth.any():
        return None
    inside, outside = maps[:, truth].unsqueeze(-1), maps[:, ~truth].unsqueeze(-2)
    area = (inside > outside).double().mean((1, 2)) + 0.5 * (inside == outside).double().mean((1, 2))
    hard = F.one_hot(maps.argmax(dim=0), len(maps)).bool().mT
    both, either = (hard & truth).sum(dim=1), (hard | truth).sum(dim=1)
    return area, both / either.clamp_min(1).double()
