"""Gains D: which directions of a head a layer keeps, and which it suppresses.

TSSA scales direction d of head h by ``D[h, d] = 1 / (1 + moment[h, d])``, the same for all tokens: near 1 where the
group has little energy, near 0 where it has much. The attention subtracts the scaled tokens (before the output
projection), so a direction with D near 0 is kept, and one with D near 1 is suppressed, in proportion to membership.

Where statistics are in blocks of features, the directions of a head are the principal ones of each block, that of the
largest moment first: a block scales tokens along them by ``1 / (1 + eigenvalue)``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from tost.analysis.records import AttentionLayer, Batch, LayerRecord, sum_by_layer
from tost.analysis.result import Result, grid_rows, span
from tost.nn import CausalTSSAttention
from tost.ops._blocks import matrices
from tost.ops._inputs import causal_form
from tost.ops._numerics import zero_padding
from tost.ops.form import Form
from tost.ops.pytorch import causal_moments, group_moments

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Gains(Result):
    """D by layer, head and direction.

    Attributes:
        layers: Numbers of the layers.
        mean: Mean of D over the samples, ``[L, H, D]``; in causal layers over the tokens of each sample, too.
        deviation: Standard deviation of D from sample to sample, ``[L, H, D]``: how much it depends on the data.
        samples: How many samples.
        moments: The statistics behind D: second moments of the groups, ``[L, H, D / g, g, g]`` for blocks of g
            features, mean over the samples; in causal layers those after the last token.
    """

    name: ClassVar[str] = "gains"
    layers: tuple[int, ...]
    mean: Tensor = field(repr=False)
    deviation: Tensor = field(repr=False)
    samples: int
    moments: Tensor = field(repr=False)

    def correlations(self) -> Tensor:
        """Return how the features of a block vary together, ``[L, H, D / g, g, g]`` in [-1, 1]; the diagonal is 1."""
        deviation = self.moments.diagonal(dim1=-2, dim2=-1).sqrt().clamp_min(1e-12)
        return self.moments / (deviation.unsqueeze(-1) * deviation.unsqueeze(-2))

    def suppressed(self, threshold: float = 0.5) -> Tensor:
        """Return the share of directions whose D is above a threshold, ``[L, H]``."""
        return (self.mean > threshold).double().mean(dim=-1)

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per layer, head and direction."""
        heads, directions = map(range, self.mean.shape[1:])
        axes = {"layer": self.layers, "head": heads, "direction": directions}
        return grid_rows(axes, {"gain": self.mean, "deviation": self.deviation})

    def summary(self) -> dict[str, Any]:
        """Return the range of D and how much of it depends on the data."""
        share = self.suppressed().mean(dim=1)
        return {
            "D, least and most of a direction": span(self.mean),
            "share of suppressed directions (D > 1/2), first and last layer": f"{share[0]:.3f}, {share[-1]:.3f}",
            "standard deviation of D from sample to sample, mean": round(self.deviation.mean().item(), 4),
        }

    def figure(self) -> Figure:
        """Draw D, sorted within each head, one panel per layer."""
        from tost.analysis import plots

        figure, panels = plots.panels(len(self.layers), 4, 2.4, 1.9)
        for i, axes in enumerate(panels):
            ordered = self.mean[i].sort(dim=-1).values.numpy()
            picture = axes.imshow(ordered, cmap=plots.SEQUENTIAL, vmin=0, vmax=1, aspect="auto")
            axes.set_title(f"layer {self.layers[i]}: {self.suppressed()[i].mean():.0%} above ½", fontsize=plots.TICK)
        plots.add_color_bar(figure, picture, panels, "D", shrink=0.9)
        figure.supxlabel("direction, sorted", fontsize=plots.LABEL)
        figure.supylabel("head", fontsize=plots.LABEL)
        figure.suptitle("D = 1 / (1 + second moment), from 0 (kept) to 1 (suppressed)", fontsize=plots.TITLE)
        return figure


def moment_blocks(
    layer: AttentionLayer, w: Tensor, pi: Tensor, mask: Tensor | None = None, decay: Tensor | None = None
) -> Tensor:
    """Return the second moments of the groups that a layer uses, a matrix for each block of g features.

    Args:
        layer: The layer.
        w: Projected tokens, ``[B, N, H, D]``.
        pi: Their memberships, ``[B, N, H]``.
        mask: Real tokens, bool ``[B, N]``.
        decay: Those of the tokens in a layer that sets them from the data; None for those of tokens of zeros.

    Returns:
        ``[B, 1, H, D / g, g, g]``, or in a causal layer those of every token, ``[B, N, H, D / g, g, g]``.
    """
    extensions = layer.attention.extensions
    g, options = extensions.block_size, extensions.operator_options()
    if isinstance(layer.attention, CausalTSSAttention):
        decay = layer.decay_of(w) if decay is None else decay
        found = causal_moments(w, pi, mask, decay, causal_form(decay, **options))
    else:
        found = group_moments(w, pi, mask, Form(**options))
    return matrices(found, w.shape[-1], g)


def moments(
    layer: AttentionLayer, w: Tensor, pi: Tensor, mask: Tensor | None = None, decay: Tensor | None = None
) -> Tensor:
    """Return the second moments along the principal directions of each block, largest first; see `moment_blocks`.

    Returns:
        ``[B, 1, H, D]``, or in a causal layer those of every token, ``[B, N, H, D]``.
    """
    return _principal(moment_blocks(layer, w, pi, mask, decay))


def _principal(blocks: Tensor) -> Tensor:
    """Return the eigenvalues of the blocks ``[..., D / g, g, g]``, largest first in each, ``[..., D]``."""
    if blocks.shape[-1] == 1:
        return blocks.flatten(-3)
    eigenvalues: Tensor = torch.linalg.eigvalsh(blocks)
    return eigenvalues.clamp_min(0).flip(-1).flatten(-2)


def gains_by_layer(model: nn.Module, batches: Iterable[Batch], *, layers: Sequence[int] | None = None) -> Gains:
    """Measure D in every TSSA layer; arguments and errors are those of `head_usage`.

    Example:
        >>> import torch, tost, tost.analysis
        >>> model = tost.create_model("tost_mini")
        >>> tost.analysis.gains_by_layer(model, [torch.randn(4, 3, 32, 32)]).mean.shape
        torch.Size([6, 4, 16])
    """

    def measure(record: LayerRecord) -> tuple[Tensor, ...]:
        w, mask = record.stream("tokens"), record.mask
        blocks = moment_blocks(record.layer, w, record.membership(), mask, record.decay).double()
        gain = 1 / (1 + _principal(blocks))  # [B, 1 or N, H, D]
        if gain.shape[1] > 1 and mask is not None:
            each = zero_padding(gain, mask).sum(dim=1) / mask.sum(dim=1).clamp_min(1)[:, None, None]
        else:
            each = gain.mean(dim=1)
        return each.sum(dim=0), each.square().sum(dim=0), blocks[:, -1].sum(dim=0)

    chosen, sums, samples = sum_by_layer(model, batches, measure, layers=layers)
    mean, square, blocks = (total / samples for total in sums)
    deviation = (square - mean.square()).clamp_min(0).sqrt()
    return Gains(tuple(layer.index for layer in chosen), mean, deviation, samples, blocks)
