"""State memory: how much of a causal layer's statistics the last tokens make up."""

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

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RECENT = 64


@dataclass(frozen=True)
class StateMemory(Result):
    """How far back the state of a causal layer reaches.

    The statistics of a head are weighted means over tokens. Token m has the weight ``pi_m / sum pi``; in a gated layer
    each block of features has a window of its own, where the weight fades with the gates of later tokens. Shares of the
    weight are means over the samples.

    Attributes:
        layers: Numbers of the layers.
        length: Number of tokens of a sample, N.
        recent: Numbers of last tokens, ascending to N.
        mass: Share of the weight that those last tokens have at the end of the text, mean over the blocks of a head,
            ``[L, H, recent]``.
        half_life: Smallest number of last tokens that have half of the weight at the end, ``[L, H, P]``: effective
            lengths of the windows of P blocks, in layers without gates P = 1.
        gated: Whether windows are gated.
        samples: How many samples.
    """

    name: ClassVar[str] = "state-memory"
    layers: tuple[int, ...]
    length: int
    recent: tuple[int, ...] = field(repr=False)
    mass: Tensor = field(repr=False)
    half_life: Tensor
    gated: bool
    samples: int

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per layer, head and number of last tokens."""
        axes = {"layer": self.layers, "head": range(self.mass.shape[1]), "last_tokens": self.recent}
        return grid_rows(axes, {"share_of_mass": self.mass})

    def summary(self) -> dict[str, Any]:
        """Return how far back the state reaches."""
        reach = span(self.half_life.double(), "g").replace(", ", " to ")
        return {"tokens of a text": self.length, "half of a window is the last so many tokens": reach}

    def figure(self) -> Figure:
        """Draw which share of the weight the last tokens have, and the half-lives of all windows."""
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
            for block, lengths in enumerate(self.half_life[:, head].mT):
                right.plot(self.layers, lengths.numpy(), label="" if block else f"head {head}", **look)
        alike: dict[str, Any] = {"color": "0.45", "linestyle": ":", "linewidth": 2, "label": "all tokens alike"}
        left.plot(self.recent, [tokens / self.length for tokens in self.recent], **alike)
        right.axhline(self.length / 2, **alike)
        plots.log_tokens(left)
        right.set_xticks(self.layers)
        if self.gated:
            plots.log_tokens(right, "y")
        else:
            right.set_ylim(bottom=0)
        plots.finish(left, title="weight of the last tokens, at the end", x="last tokens", y="share of the weight")
        of_what = "a block's window" if self.gated else "the state"
        plots.finish(right, title=f"half of {of_what} is the last so many tokens", x="layer", y="tokens")
        left.legend(frameon=False, fontsize=plots.TICK)
        right.legend(frameon=False, fontsize=8.5, ncols=2 if heads > 4 else 1)
        title = f"What the state remembers of {self.length} tokens ({self.samples} texts)"
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
        torch.Size([2, 4, 1])
    """
    if not select_layers(model, layers)[0].is_causal:
        raise ConfigError("only causal TSSA layers have a state, but those of this model mix whole sequences.")
    lengths: set[int] = set()

    def measure(record: LayerRecord) -> tuple[Tensor]:
        if record.mask is not None and not record.mask.all():
            raise ConfigError("the memory of a state is measured on whole texts, but these are padded; cut them.")
        lengths.add(record.stream("tokens").shape[1])
        if len(lengths) > 1:
            given = " and of ".join(map(str, sorted(lengths)))
            raise ConfigError(f"texts of {given} tokens are compared by age; cut them to one length.")
        return (record.statistics().weights().double().sum(dim=0).flip(0).movedim(0, -1),)  # by age, [H, P, N]

    chosen, (weights,), samples = sum_by_layer(model, batches, measure, layers=layers)
    mass = (weights / samples).cumsum(dim=-1)
    length = mass.shape[-1]
    last = torch.linspace(0, math.log(length), RECENT, dtype=torch.float64).exp().round().long()
    last = torch.unique(last)
    return StateMemory(
        layers=tuple(layer.index for layer in chosen),
        length=length,
        recent=tuple(last.tolist()),
        mass=mass[..., last - 1].mean(dim=2),
        half_life=(mass < 0.5 - 1e-6).sum(dim=-1) + 1,
        gated=chosen[0].is_gated,
        samples=samples,
    )
