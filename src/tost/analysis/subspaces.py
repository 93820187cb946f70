"""Subspace coherence: how much the learned subspaces of a layer's heads overlap."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tost.analysis.records import select_layers
from tost.analysis.result import Result, grid_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class SubspaceCoherence(Result):
    """Inner products of the directions of all heads, each of unit length: ``G = [U_1 ... U_K]^T [U_1 ... U_K]``.

    Attributes:
        layers: Numbers of the layers.
        blocks: Mean of abs(G) in every block of heads, ``[L, K, K]``; in a diagonal block without the diagonal.
        between: Mean of abs(G) over directions of different heads, ``[L]``.
        within: Mean of abs(G) over different directions of the same head, ``[L]``.
        mutual: Largest abs(G) of two directions of different heads, ``[L]``: the mutual coherence.
        random: What `between` is for random directions of this width, ``sqrt(2 / (pi d))``.
        sample: G of a few directions of every head, drawn at random, ``[L, K m, K m]``, for the picture.
        directions: m, how many of every head.
    """

    name: ClassVar[str] = "subspaces"
    is_photographic: ClassVar[bool] = True
    layers: tuple[int, ...]
    blocks: Tensor = field(repr=False)
    between: Tensor
    within: Tensor
    mutual: Tensor
    random: float
    sample: Tensor = field(repr=False)
    directions: int

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per layer."""
        random = torch.full_like(self.between, self.random)
        values = {"between": self.between, "within": self.within, "mutual_coherence": self.mutual, "random": random}
        return grid_rows({"layer": self.layers}, values)

    def summary(self) -> dict[str, Any]:
        """Return how coherent directions of different heads are, beside random ones."""
        return {
            "mean |cosine| of directions of different heads, all layers": round(self.between.mean().item(), 4),
            "the same for random directions": round(self.random, 4),
            "mutual coherence, most of a layer": round(self.mutual.max().item(), 4),
        }

    def figure(self) -> Figure:
        """Draw the inner products of a few directions of every head, one panel per layer."""
        from tost.analysis import plots

        figure, panels = plots.panels(len(self.layers), 4, 2.4, 2.6)
        size, step = self.sample.shape[-1], self.directions
        centers = [step * head + (step - 1) / 2 for head in range(size // step)]
        names = [str(head) for head in range(size // step)]
        for i, axes in enumerate(panels):
            picture = axes.imshow(self.sample[i].abs().numpy(), cmap=plots.SEQUENTIAL, vmin=0, vmax=1)
            for edge in range(step, size, step):
                axes.axhline(edge - 0.5, color="white", linewidth=0.6)
                axes.axvline(edge - 0.5, color="white", linewidth=0.6)
            axes.set_xticks(centers, names)
            axes.set_yticks(centers, names)
            axes.tick_params(length=0)
            title = f"layer {self.layers[i]}: mean {self.between[i]:.3f}\nmost {self.mutual[i]:.2f}"
            axes.set_title(title, fontsize=plots.TICK)
        plots.add_color_bar(figure, picture, panels, "|cosine| between directions", shrink=0.8)
        figure.suptitle(
            f"Subspaces: {step} directions of every head;  mean |cosine| between heads "
            f"{self.between.mean():.3f}, random {self.random:.3f}",
            fontsize=plots.TITLE,
        )
        return figure


def coherence_of(u: Tensor) -> Tensor:
    """Return the inner products of normalized directions.

    Args:
        u: Bases, ``[K, d, p]``.

    Returns:
        G, ``[K, p, K, p]``, float64.
    """
    K, _, p = u.shape
    directions = F.normalize(u.double(), dim=1).movedim(1, 2).flatten(0, 1)  # [K p, d]
    return (directions @ directions.mT).view(K, p, K, p)


def subspace_coherence(
    model: nn.Module, samples: object = None, *, layers: Sequence[int] | None = None, directions: int = 4, seed: int = 0
) -> SubspaceCoherence:
    """Measure how coherent the subspaces of each layer are. Looks at the weights only.

    Args:
        model: Any model with TSSA layers.
        samples: Not used, like the samples of any analysis of the weights.
        layers: Which layers; None for all.
        directions: How many directions of every head go into the picture, as in the paper.
        seed: Decides which.

    Raises:
        ConfigError: The model has no TSSA layers.

    Example:
        >>> import tost, tost.analysis
        >>> found = tost.analysis.subspace_coherence(tost.create_model("tost_mini"))
        >>> found.blocks.shape, found.sample.shape
        (torch.Size([6, 4, 4]), torch.Size([6, 16, 16]))
    """
    chosen = select_layers(model, layers)
    generator = torch.Generator().manual_seed(seed)
    found = []
    for layer in chosen:
        gram = coherence_of(layer.subspaces().cpu())
        K, p = gram.shape[:2]
        size = gram.abs().permute(0, 2, 1, 3)  # [K, K, p, p]
        same = torch.eye(K, dtype=torch.bool)
        means = size.mean((2, 3))
        # The diagonal of a diagonal block is 1 by construction.
        own = (size.sum((2, 3)).diagonal() - p) / max(p * (p - 1), 1)
        means[same] = own
        nothing = torch.zeros((), dtype=torch.float64)
        between, mutual = (means[~same].mean(), size[~same].max()) if K > 1 else (nothing, nothing)
        count = min(directions, p)
        picked = torch.stack([torch.randperm(p, generator=generator)[:count] + head * p for head in range(K)]).flatten()
        found.append((means, between, own.mean(), mutual, gram.view(K * p, K * p)[picked][:, picked]))
    blocks, between, within, mutual, sample = map(torch.stack, zip(*found, strict=True))
    indices, first = tuple(layer.index for layer in chosen), chosen[0].attention
    random, shown = math.sqrt(2 / (math.pi * first.embed_dim)), min(directions, first.head_dim)
    return SubspaceCoherence(indices, blocks, between, within, mutual, random, sample, shown)
