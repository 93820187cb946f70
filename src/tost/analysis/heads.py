"""Head usage, and how memberships flatten as sequences get longer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tost.analysis.records import AttentionLayer, Batch, LayerRecord, select_layers, sum_by_layer
from tost.analysis.result import Result, entropy, grid_rows, span
from tost.errors import ConfigError
from tost.nn import CausalTSSAttention
from tost.ops import membership
from tost.ops._numerics import zero_padding

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FACTORS = (1 / 16, 1 / 4, 1.0, 4.0, 16.0, 64.0)
MOST_RANGES = 64


@dataclass(frozen=True)
class HeadUsage(Result):
    """What the heads of every layer do.

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
class Flattening(Result):
    """Memberships against the number of tokens.

    Attributes:
        causal: Whether length means the position in a sequence; otherwise it is the number of tokens of the whole.
        layers: Numbers of the layers.
        lengths: Numbers of tokens; in a causal model, the middle of a range of positions.
        entropy: Mean entropy of a token's membership, ``[L, lengths]``; 1 is uniform.
        deviation: Mean over tokens of the largest difference between a membership and 1/H, ``[L, lengths]``.
        count_scaled: Whether the layers multiply their energies by the number of tokens.
        samples: How many samples.
    """

    name: ClassVar[str] = "flattening"
    causal: bool
    layers: tuple[int, ...]
    lengths: tuple[float, ...]
    entropy: Tensor
    deviation: Tensor
    count_scaled: bool
    samples: int

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per layer and length."""
        axes = {"layer": self.layers, "tokens": self.lengths}
        return grid_rows(axes, {"entropy": self.entropy, "deviation": self.deviation})

    def summary(self) -> dict[str, Any]:
        """Return how far memberships are from uniform at the shortest and at the longest."""
        mean = self.deviation.mean(dim=0)
        first, last = self.lengths[0], self.lengths[-1]
        return {
            f"largest |pi - 1/H| of a token, mean over layers, at {first:g} tokens": float(f"{mean[0].item():.3g}"),
            f"the same at {last:g} tokens": float(f"{mean[-1].item():.3g}"),
            "energies are multiplied by the number of tokens": "yes" if self.count_scaled else "no",
        }

    def figure(self) -> Figure:
        """Draw the distance from uniform over the number of tokens, on two logarithmic axes."""
        from tost.analysis import plots

        figure = plots.new_figure(6.4, 3.8)
        axes, count = figure.subplots(), len(self.layers)
        for i, layer in enumerate(self.layers):
            label = f"layer {layer}" if i in (0, count // 2, count - 1) else None
            line = {"color": plots.depth_color(i, count), "marker": "o", "markersize": 4, "label": label}
            axes.plot(self.lengths, self.deviation[i].clamp_min(1e-12).numpy(), **line)
        peak = int(self.deviation.mean(dim=0).argmax())  # the first token of a causal layer is a case of its own
        reference = [self.deviation[:, peak].max().item() * self.lengths[peak] / x for x in self.lengths[peak:]]
        axes.plot(self.lengths[peak:], reference, color="0.5", linestyle=":", label="falls as 1/tokens")
        axes.set_yscale("log")
        plots.log_tokens(axes)
        scaled = "energies times the number of tokens" if self.count_scaled else "normalized energies"
        unit = "position" if self.causal else "tokens in the sequence"
        title = f"Distance from uniform memberships\n({scaled}, {self.samples} samples)"
        plots.finish(axes, title=title, x=unit, y="largest |π - 1/H| of a token, mean")
        axes.legend(frameon=False, fontsize=plots.TICK)
        return figure


def membership_at_length(layer: AttentionLayer, w: Tensor, factor: float) -> Tensor:
    """Return the memberships of tokens in a non-causal layer if there were more or fewer of the same kind.

    Args:
        layer: A layer that is not causal.
        w: Projected tokens, ``[B, N, H, D]``.
        factor: Above 1: as if every token were there so many times, which divides normalized energies by it. Below 1:
            only every so-and-so-many-th token is there.

    Returns:
        pi of those tokens, ``[B, n, H]``.
    """
    attention = layer.attention
    if factor <= 1:
        count = max(1, round(factor * w.shape[1]))
        return layer.membership(w[:, torch.linspace(0, w.shape[1] - 1, count).round().long()])
    if attention.extensions.count_scaled or not attention.normalize:
        return layer.membership(w)
    return membership(w, layer.temperatures() / factor)


def membership_flattening(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    layers: Sequence[int] | None = None,
    factors: Sequence[float] = FACTORS,
) -> Flattening:
    """Measure how memberships flatten as sequences get longer.

    Energies are shares: over the n tokens they sum to D, so that logits fall as ``temperature * D / n`` and memberships
    tend to 1/H, unless the temperature grows or the energies are multiplied by the number of tokens
    (``Extensions(count_scaled=True)``).

    Args:
        model: Any model with TSSA layers.
        batches: Samples; without padding where layers are not causal.
        layers: Which layers; None for all.
        factors: Lengths for layers that are not causal, as multiples of the samples' own; see `membership_at_length`.
            Causal layers are measured at their positions instead, in ranges from a power of two to the next.

    Raises:
        ConfigError: The model has no TSSA layers, or a layer that is not causal meets padding.

    Example:
        >>> import torch, tost, tost.analysis
        >>> model = tost.create_model("tost_mini")
        >>> tost.analysis.membership_flattening(model, [torch.randn(4, 3, 32, 32)]).lengths
        (4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0)
    """
    causal = isinstance(select_layers(model, layers)[0].attention, CausalTSSAttention)
    length = 0

    def measure(record: LayerRecord) -> tuple[Tensor]:
        nonlocal length
        w = record.stream("tokens")
        length = max(length, w.shape[1])
        if causal:
            numbers = _by_position(record.membership().double(), record.mask)
            return (F.pad(numbers, (0, 0, 0, MOST_RANGES - len(numbers))),)
        if record.mask is not None and not record.mask.all():
            raise ConfigError("flattening is measured on whole samples, but these are padded; leave padded ones out.")
        return (torch.stack([_sums(membership_at_length(record.layer, w, f).double()) for f in factors]),)

    chosen, (table,), samples = sum_by_layer(model, batches, measure, layers=layers)  # [L, lengths, 3]
    table = table[:, table[0, :, 2] > 0]  # causal: as far as the longest sample reaches
    if causal:
        lengths = tuple(math.sqrt(2**i * min(2 ** (i + 1) - 1, length)) for i in range(table.shape[1]))
    else:
        lengths = tuple(float(max(1, round(factor * length))) for factor in factors)
    scaled = any(layer.attention.extensions.count_scaled for layer in chosen)
    entropies, deviations = (table[..., i] / table[..., 2] for i in range(2))
    return Flattening(causal, tuple(layer.index for layer in chosen), lengths, entropies, deviations, scaled, samples)


def _sums(pi: Tensor) -> Tensor:
    """Return the sums over tokens pi [tokens, H] of the entropy and the deviation, and their number, [3]."""
    flat = pi.flatten(0, -2)
    deviation = (flat - 1 / flat.shape[-1]).abs().amax(dim=-1)
    return torch.stack((entropy(flat).sum(), deviation.sum(), flat.new_tensor(len(flat)))).cpu()


def _by_position(pi: Tensor, mask: Tensor | None) -> Tensor:
    """Return those sums for positions 1, 2 to 3, 4 to 7 and so on, [ranges, 3]; padding does not count."""
    real = torch.ones(pi.shape[:2], dtype=torch.bool, device=pi.device) if mask is None else mask
    position = real.cumsum(dim=1)  # from 1
    ranges = int(position.max()).bit_length()
    return torch.stack([_sums(pi[real & (position >= 2**i) & (position < 2 ** (i + 1))]) for i in range(ranges)])
