"""Statistics of heads: their usage, subspaces and gains.

TSSA scales direction d of head h by its gain ``D[h, d] = 1 / (1 + moment[h, d])``, the same for all tokens: near 1
where the group has little energy, near 0 where it has much. The attention subtracts the scaled tokens (before the
output projection), so a direction with D near 0 is kept, and one with D near 1 is suppressed, by its membership.
Where statistics are in blocks of features, the directions of a head are the principal ones of each block, the
largest moment first: a block scales tokens along them by ``1 / (1 + eigenvalue)``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tost.analysis.records import AttentionLayer, Batch, LayerRecord, select_layers, sum_by_layer
from tost.analysis.result import Result, entropy, grid_rows, span
from tost.nn import CausalTSSAttention
from tost.ops._blocks import matrices
from tost.ops._inputs import causal_form
from tost.ops._numerics import zero_padding
from tost.ops.form import Form
from tost.ops.pytorch import causal_moments, group_moments

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class HeadUsage(Result):
    """Usage, temperature and rank of the heads of every layer.

    Attributes:
        layers: Numbers of the layers.
        usage: Share of all memberships that a head gets, ``[L, H]``; they add up to 1 over H.
        hard: Share of the tokens whose largest membership is the head's, ``[L, H]``.
        temperature: Learned multiplier of the head's energy, ``[L, H]``.
        rank: Effective rank of the head's group, ``[L, H]``, from 1 to D: the exponential of the entropy of the
            eigenvalues of ``sum_n pi[n] w_n w_n^T`` over all samples.
        entropy: Mean entropy of a token's membership, ``[L]``; 1 is uniform.
        head_dim: D.
        samples: How many samples.
    """

    name: ClassVar[str] = "heads"
    layers: tuple[int, ...]
    usage: Tensor
    hard: Tensor
    temperature: Tensor
    rank: Tensor
    entropy: Tensor
    head_dim: int
    samples: int

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per layer and head."""
        values = {
            "usage": self.usage,
            "hard_share": self.hard,
            "temperature": self.temperature,
            "effective_rank": self.rank,
            "entropy_of_layer": self.entropy,
        }
        return grid_rows({"layer": self.layers, "head": range(self.usage.shape[1])}, values)

    def summary(self) -> dict[str, Any]:
        """Return the extremes."""
        return {
            "usage of a head, least and most": span(self.usage, ".4g"),
            "temperature, least and most": span(self.temperature, ".4g"),
            f"effective rank of a head's group (of {self.head_dim}), least and most": span(self.rank, ".4g"),
            "entropy of memberships, least and most of a layer (1 = uniform)": span(self.entropy, ".4g"),
        }

    def figure(self) -> Figure:
        """Draw usage, hard share, temperature and rank of every head; the entropy stands beside the layer."""
        from tost.analysis import plots

        heads = self.usage.shape[1]
        tables = {
            f"usage (equal: {1 / heads:.3g})": (self.usage, 2 / heads),
            "share of tokens with it as largest": (self.hard, 2 / heads),
            "temperature": (self.temperature, None),
            f"effective rank (of {self.head_dim})": (self.rank, self.head_dim),
        }
        figure, panels = plots.panels(4, 2, 4.4, max(2.4, 0.3 * len(self.layers) + 0.8))
        rows = [f"{layer} ({entropy:.3f})" for layer, entropy in zip(self.layers, self.entropy.tolist(), strict=True)]
        for axes, (title, (values, top)) in zip(panels, tables.items(), strict=True):
            plots.draw_table(axes, title, values.numpy(), rows, top)
        figure.supylabel("layer (entropy of its memberships; 1 = uniform)", fontsize=plots.LABEL)
        figure.suptitle(f"The heads, over {self.samples} samples", fontsize=plots.TITLE)
        return figure


def effective_rank(moment: Tensor) -> Tensor:
    """Return the exponential of the entropy of the eigenvalues' shares: d for the identity, 1 for one direction.

    Args:
        moment: Positive semi-definite, ``[..., d, d]``.

    Returns:
        ``[...]``; 0 for a matrix of zeros.
    """
    values: Tensor = torch.linalg.eigvalsh(moment.double()).clamp_min(0)
    total = values.sum(dim=-1, keepdim=True)
    share = values / total.where(total > 0, 1)
    return torch.exp(-torch.special.xlogy(share, share).sum(dim=-1)) * (total.squeeze(-1) > 0)


def head_usage(model: nn.Module, batches: Iterable[Batch], *, layers: Sequence[int] | None = None) -> HeadUsage:
    """Measure how the heads of every TSSA layer are used.

    Args:
        model: Any model with TSSA layers.
        batches: Samples. Every real token counts once.
        layers: Which layers; None for all.

    Raises:
        ConfigError: The model has no TSSA layers.

    Example:
        >>> import torch, tost, tost.analysis
        >>> model = tost.create_model("tost_mini")
        >>> tost.analysis.head_usage(model, [torch.randn(4, 3, 32, 32)]).usage.sum(dim=1).round(decimals=6)
        tensor([1., 1., 1., 1., 1., 1.], dtype=torch.float64)
    """

    def measure(record: LayerRecord) -> tuple[Tensor, ...]:
        pi = record.membership().double()
        real = torch.ones(pi.shape[:2], dtype=torch.bool, device=pi.device) if record.mask is None else record.mask
        w = zero_padding(record.stream("tokens").double(), record.mask)
        hard = F.one_hot(pi.argmax(dim=-1), pi.shape[-1]) * real.unsqueeze(-1)
        moment = torch.einsum("bnh,bnhi,bnhj->hij", pi, w, w)
        return pi.sum((0, 1)), hard.sum((0, 1)), entropy(pi)[real].sum(), real.sum(), moment

    chosen, (usage, hard, spread, tokens, moment), samples = sum_by_layer(model, batches, measure, layers=layers)
    return HeadUsage(
        tuple(layer.index for layer in chosen),
        usage=usage / tokens[:, None],
        hard=hard.double() / tokens[:, None],
        temperature=torch.stack([layer.temperatures().double().cpu() for layer in chosen]),
        rank=effective_rank(moment),
        entropy=spread / tokens,
        head_dim=chosen[0].attention.head_dim,
        samples=samples,
    )


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

        titles = [
            f"layer {i}: {share.mean():.0%} above ½" for i, share in zip(self.layers, self.suppressed(), strict=True)
        ]
        figure, _ = plots.draw_panels(self.mean.sort(dim=-1).values.numpy(), titles, "D", height=1.9)
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
        decay: Decays of the tokens in a layer that sets them from the data; None for tokens of zeros.

    Returns:
        ``[B, 1, H, D / g, g, g]``, or in a causal layer for every token, ``[B, N, H, D / g, g, g]``.
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
        ``[B, 1, H, D]``, or in a causal layer for every token, ``[B, N, H, D]``.
    """
    return _principal(moment_blocks(layer, w, pi, mask, decay))


def _principal(blocks: Tensor) -> Tensor:
    """Return the eigenvalues of the blocks ``[..., D / g, g, g]``, largest first in each, ``[..., D]``."""
    if blocks.shape[-1] == 1:
        return blocks.flatten(-3)
    eigenvalues: Tensor = torch.linalg.eigvalsh(blocks)
    return eigenvalues.clamp_min(0).flip(-1).flatten(-2)


def gains_by_layer(model: nn.Module, batches: Iterable[Batch], *, layers: Sequence[int] | None = None) -> Gains:
    """Measure D in every TSSA layer; arguments and errors as in `head_usage`.

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

        size, step = self.sample.shape[-1], self.directions
        names = {step * head + (step - 1) / 2: str(head) for head in range(size // step)}
        each = zip(self.layers, self.between, self.mutual, strict=True)
        titles = [f"layer {layer}: mean {mean:.3f}\nmost {most:.2f}" for layer, mean, most in each]
        figure, panels = plots.draw_panels(self.sample.abs().numpy(), titles, "|cosine| of directions", height=2.6)
        for axes in panels:
            for edge in range(step, size, step):
                axes.axhline(edge - 0.5, color="white", linewidth=0.6)
                axes.axvline(edge - 0.5, color="white", linewidth=0.6)
            axes.set_xticks(list(names), list(names.values()))
            axes.set_yticks(list(names), list(names.values()))
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
