"""State memory: how much of a causal layer's state the last tokens make up."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from tost.analysis.records import Batch, LayerRecord, select_layers, sum_by_layer
from tost.analysis.result import Result, grid_rows, span
from tost.errors import ConfigError
from tost.nn import CausalTSSAttention

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RECENT = 64


@dataclass(frozen=True)
class StateMemory(Result):
    """How far back the state of a causal layer reaches.

    The state of a head is three sums over tokens; token m adds ``pi_m`` to the mass and ``pi_m w_m^2`` to the weighted
    squares, faded by ``decay`` with every token after it where the layer forgets; where channels forget at different
    rates, by the geometric mean of a head. Shares are of the mass and of the weighted squares (summed over the D
    features), means over the samples.

    Attributes:
        layers: Numbers of the layers.
        length: Number of tokens of a sample, N.
        recent: Numbers of last tokens, ascending to N.
        mass: Share of the mass that those last tokens hold at the end of the text, ``[L, H, recent]``.
        squares: The same of the weighted squares.
        half_life: Smallest number of last tokens that hold half of the mass at the end, ``[L, H]``.
        decay_half_life: Tokens after which forgetting alone halves a share, ``[L, H]``; infinite without forgetting. If
            the data sets it, for tokens of zeros.
        samples: How many samples.
    """

    name: ClassVar[str] = "state-memory"
    layers: tuple[int, ...]
    length: int
    recent: tuple[int, ...] = field(repr=False)
    mass: Tensor = field(repr=False)
    squares: Tensor = field(repr=False)
    half_life: Tensor
    decay_half_life: Tensor
    samples: int

    @property
    def forgets(self) -> bool:
        """Whether any layer forgets."""
        return bool(torch.isfinite(self.decay_half_life).any())

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per layer, head and number of last tokens."""
        axes = {"layer": self.layers, "head": range(self.mass.shape[1]), "last_tokens": self.recent}
        return grid_rows(axes, {"share_of_mass": self.mass, "share_of_squares": self.squares})

    def summary(self) -> dict[str, Any]:
        """Return how far back the state reaches."""
        reach = span(self.half_life.double(), "g").replace(", ", " to ")
        lines = {"tokens of a text": self.length, "half of a state is the last so many tokens": reach}
        if self.forgets:
            finite = self.decay_half_life[torch.isfinite(self.decay_half_life)]
            lines["half-life of forgetting, least and most of a head, tokens"] = span(finite, ".4g")
        return lines

    def figure(self) -> Figure:
        """Draw which share of the mass the last tokens hold, and the half-lives of all heads."""
        from tost.analysis import plots

        figure, (left, right) = plots.panels(2, 2, 5.2, 3.6)
        count, heads = len(self.layers), self.mass.shape[1]
        for i, layer in enumerate(self.layers):
            for head in range(heads):
                label = f"layer {layer}" if head == 0 and i in (0, count // 2, count - 1) else None
                shade = plots.depth_color(i, count)
                left.plot(self.recent, self.mass[i, head].numpy(), color=shade, linewidth=1.2, label=label)
        for head in range(heads):
            look: dict[str, Any] = {"color": plots.color(head), "marker": plots.marker(head), "linewidth": 1}
            right.plot(self.layers, self.half_life[:, head].numpy(), label=f"head {head}", **look)
        alike: dict[str, Any] = {"color": "0.45", "linestyle": ":", "linewidth": 2, "label": "all tokens alike"}
        left.plot(self.recent, [tokens / self.length for tokens in self.recent], **alike)
        right.axhline(self.length / 2, **alike)
        plots.log_tokens(left)
        right.set_xticks(self.layers)
        right.set_ylim(bottom=0)
        plots.finish(left, title="mass of the last tokens, at the end", x="last tokens", y="share of the state's mass")
        plots.finish(right, title="half of the state is the last so many tokens", x="layer", y="tokens")
        left.legend(frameon=False, fontsize=plots.TICK)
        right.legend(frameon=False, fontsize=8.5, ncols=2 if heads > 4 else 1)
        forgetting = "with" if self.forgets else "without"
        title = f"What the state remembers of {self.length} tokens ({forgetting} forgetting, {self.samples} texts)"
        figure.suptitle(title, fontsize=plots.TITLE)
        return figure


def state_memory(model: nn.Module, batches: Iterable[Batch], *, layers: Sequence[int] | None = None) -> StateMemory:
    """Measure how much of the state the last tokens make up.

    Args:
        model: A model with causal TSSA layers.
        batches: Texts, all of one length and without padding.
        layers: Which layers; None for all.

    Raises:
        ConfigError: The model has no causal TSSA layers, or texts differ in length.

    Example:
        >>> import torch, tost, tost.analysis
        >>> model = tost.create_model("tost_lm_base", embed_dim=32, depth=2, num_heads=4, vocab_size=256)
        >>> tost.analysis.state_memory(model, [torch.randint(256, (3, 64))]).half_life.shape
        torch.Size([2, 4])
    """
    if not isinstance(select_layers(model, layers)[0].attention, CausalTSSAttention):
        raise ConfigError("only causal TSSA layers have a state that remembers; this model's look at whole sequences.")
    lengths: set[int] = set()

    def measure(record: LayerRecord) -> list[Tensor]:
        if record.mask is not None and not record.mask.all():
            raise ConfigError("the memory of a state is measured on whole texts, but these are padded; cut them.")
        lengths.add(record.stream("tokens").shape[1])
        if len(lengths) > 1:
            given = " and of ".join(map(str, sorted(lengths)))
            raise ConfigError(f"texts of {given} tokens are compared by age; cut them to one length.")
        return _shares(record)

    chosen, sums, samples = sum_by_layer(model, batches, measure, layers=layers)
    mass, squares = ((total / samples).cumsum(dim=-1) for total in sums)
    length = mass.shape[-1]
    last = torch.linspace(0, math.log(length), RECENT, dtype=torch.float64).exp().round().long()
    last = torch.unique(last)
    return StateMemory(
        layers=tuple(layer.index for layer in chosen),
        length=length,
        recent=tuple(last.tolist()),
        mass=mass[..., last - 1],
        squares=squares[..., last - 1],
        half_life=(mass < 0.5 - 1e-9).sum(dim=-1) + 1,
        decay_half_life=torch.stack([_decay_half_life(layer.attention) for layer in chosen]),
        samples=samples,
    )


def _shares(record: LayerRecord) -> list[Tensor]:
    """Return sums over the samples of the shares of mass and squares by age, [H, N] each."""
    pi = record.membership().double().cpu()  # [B, N, H]
    later = torch.zeros_like(pi)
    if record.decay is not None:
        upto = _log(record.decay).expand(pi.shape).cumsum(dim=1)
        later = upto[:, -1:] - upto
    shares = []
    for added in (pi, pi * record.stream("tokens").double().cpu().square().sum(dim=-1)):
        faded = added * later.exp()
        shares.append((faded / faded.sum(dim=1, keepdim=True).clamp_min(1e-300)).sum(dim=0).flip(0).mT)
    return shares


def _log(decay: Tensor) -> Tensor:
    """Return the logarithms of decays by head, of [..., H] or [..., H, K]; none so low that a difference is NaN."""
    log = decay.detach().double().clamp_min(1e-300).log().cpu()
    return log.mean(dim=-1) if decay.dim() in (2, 4) else log


def _decay_half_life(attention: nn.Module) -> Tensor:
    assert isinstance(attention, CausalTSSAttention)
    decay = attention.decay()
    if decay is None:
        return torch.full((attention.num_heads,), math.inf, dtype=torch.float64)
    log = _log(decay)
    return torch.where(log < 0, math.log(0.5) / log, math.inf)
