"""What the state of a causal model remembers: how much of its sums each token makes up as later tokens come."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from tost.analysis.gains import running_sums
from tost.analysis.records import Batch, LayerRecord, attention_layers, choose, observe
from tost.analysis.result import plain
from tost.errors import ConfigError
from tost.nn import CausalTSSAttention

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["StateMemory", "state_memory"]

MARKS = (1 / 16, 1 / 4, 1 / 2)
TIMES = 48
RECENT = 64


@dataclass(frozen=True)
class StateMemory:
    """How long tokens stay in the state.

    The state of a head is three sums over tokens; token m adds ``pi_m`` to the mass and ``pi_m w_m^2`` to the weighted
    squares, faded by ``decay`` with every token after it where the layer forgets. Shares are those of the mass and of
    the weighted squares (summed over the D features), means over the samples.

    Attributes:
        layers: Numbers of the layers.
        length: Number of tokens of a sample, N.
        recent: Numbers of last tokens, ascending to N.
        mass: Share of the mass that those last tokens hold at the end of the text, ``[L, H, recent]``.
        squares: The same of the weighted squares.
        marks: Positions of the tokens that are followed.
        times: Positions at which they are looked at.
        trace: Share of the mass that a followed token has at a time, ``[L, H, marks, times]``; 0 before it came.
        half_life: Smallest number of last tokens that hold half of the mass at the end, ``[L, H]``.
        decay_half_life: Tokens after which forgetting alone halves a share, ``[L, H]``; infinite without forgetting.
        samples: How many samples.
    """

    name: ClassVar[str] = "state-memory"
    layers: tuple[int, ...]
    length: int
    recent: tuple[int, ...] = field(repr=False)
    mass: Tensor = field(repr=False)
    squares: Tensor = field(repr=False)
    marks: tuple[int, ...]
    times: tuple[int, ...] = field(repr=False)
    trace: Tensor = field(repr=False)
    half_life: Tensor
    decay_half_life: Tensor
    samples: int

    @property
    def forgets(self) -> bool:
        """Whether any layer forgets."""
        return bool(torch.isfinite(self.decay_half_life).any())

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain data; a half-life that is infinite is None."""
        keys = ("layers", "length", "recent", "mass", "squares", "marks", "times", "trace", "half_life", "samples")
        half_lives = {"decay_half_life": plain(self.decay_half_life)}
        return {**{key: plain(getattr(self, key)) for key in keys}, **half_lives, "summary": plain(self.summary())}

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per layer, head and number of last tokens."""
        return [
            {"layer": layer, "head": head, "last_tokens": count, "share_of_mass": mass, "share_of_squares": squares}
            for i, layer in enumerate(self.layers)
            for head in range(self.mass.shape[1])
            for count, mass, squares in zip(
                self.recent, self.mass[i, head].tolist(), self.squares[i, head].tolist(), strict=True
            )
        ]

    def summary(self) -> dict[str, Any]:
        """Return how far back the state reaches."""
        low, high = self.half_life.min().item(), self.half_life.max().item()
        found = {"tokens of a text": self.length, "half of a state is the last so many tokens": f"{low:g} to {high:g}"}
        if self.forgets:
            finite = self.decay_half_life[torch.isfinite(self.decay_half_life)]
            found["half-life of forgetting, least and most of a head, tokens"] = (
                f"{finite.min().item():.4g}, {finite.max().item():.4g}"
            )
        return found

    def figure(self) -> Figure:
        """Draw what the last tokens hold, the fate of single tokens, and the half-lives."""
        from tost.analysis.figures.text import draw_memory

        return draw_memory(self)


def state_memory(model: nn.Module, batches: Iterable[Batch], *, layers: Sequence[int] | None = None) -> StateMemory:
    """Measure how much of the state each token makes up as later tokens come.

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
    every = attention_layers(model)
    chosen = choose(layers, len(every))
    if not isinstance(every[chosen[0]].attention, CausalTSSAttention):
        raise ConfigError("only causal TSSA layers have a state that remembers; this model's look at whole sequences.")
    sums: dict[int, tuple[Tensor, ...]] = {}

    def visit(record: LayerRecord) -> None:
        if record.mask is not None and not record.mask.all():
            raise ConfigError("the memory of a state is measured on whole texts, but these are padded; cut them.")
        parts, index = _shares(record), record.layer.index
        before = sums.get(index)
        if before is not None and before[0].shape != parts[0].shape:
            raise ConfigError(
                f"texts of {before[0].shape[-1]} and of {parts[0].shape[-1]} tokens are compared by age; cut them to "
                "one length."
            )
        sums[index] = parts if before is None else tuple(a + b for a, b in zip(before, parts, strict=True))

    samples = observe(model, batches, visit, layers=chosen)
    mass, squares, trace = (torch.stack([sums[index][i] for index in chosen]) / samples for i in range(3))
    length = mass.shape[-1]
    mass, squares = mass.cumsum(dim=-1), squares.cumsum(dim=-1)
    last = torch.linspace(0, math.log(length), RECENT, dtype=torch.float64).exp().round().long()
    kept = sorted(set(last.tolist()))
    marks, times = _points(length)
    return StateMemory(
        layers=tuple(chosen),
        length=length,
        recent=tuple(kept),
        mass=mass[..., torch.tensor(kept) - 1],
        squares=squares[..., torch.tensor(kept) - 1],
        marks=marks,
        times=times,
        trace=trace,
        half_life=(mass < 0.5 - 1e-9).sum(dim=-1) + 1,
        decay_half_life=torch.stack([_decay_half_life(every[index].attention) for index in chosen]),
        samples=samples,
    )


def _points(length: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the positions of the tokens that are followed, and those at which they are looked at."""
    marks = tuple(sorted({int(mark * (length - 1)) for mark in MARKS}))
    times = torch.linspace(0, length - 1, min(TIMES, length)).round().long().tolist()
    return marks, tuple(sorted(set(times)))


def _shares(record: LayerRecord) -> tuple[Tensor, ...]:
    """Return sums over the samples of the shares: of mass and squares by age, [H, N], and of single tokens."""
    pi = record.membership().double()  # [B, N, H]
    w = record.stream("tokens").double()
    _, N, H = pi.shape
    layer = record.layer
    assert isinstance(layer.attention, CausalTSSAttention)
    decay = layer.attention.decay()
    log = torch.zeros(H, dtype=torch.float64) if decay is None else decay.double().log().cpu()
    age = torch.arange(N - 1, -1, -1, dtype=torch.float64)[:, None]
    found = []
    for added in (pi, pi * w.square().sum(dim=-1)):
        faded = added.cpu() * torch.exp(age * log)
        found.append((faded / faded.sum(dim=1, keepdim=True).clamp_min(1e-300)).sum(dim=0).flip(0).mT)  # [H, ages]
    total = running_sums(layer, pi.unsqueeze(-1), None).squeeze(-1).cpu()  # [B, N, H]
    marks, times = (torch.tensor(points) for points in _points(N))
    since = (times[None, :] - marks[:, None]).double()  # [marks, times]
    faded = torch.exp(since.clamp_min(0)[..., None] * log) * (since >= 0)[..., None]
    share = pi.cpu()[:, marks, None] * faded / total[:, None, times]
    found.append(share.sum(dim=0).movedim(-1, 0))
    return tuple(found)


def _decay_half_life(attention: nn.Module) -> Tensor:
    assert isinstance(attention, CausalTSSAttention)
    decay = attention.decay()
    if decay is None:
        return torch.full((attention.num_heads,), math.inf, dtype=torch.float64)
    logs = decay.detach().double().log().cpu()
    return torch.where(logs < 0, math.log(0.5) / logs, math.inf)
