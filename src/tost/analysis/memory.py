"""State memory: how much of a causal layer's state each token makes up as later tokens arrive."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tost.analysis.records import Batch, LayerRecord, select_layers, sum_by_layer
from tost.analysis.result import Result, grid_rows, span
from tost.errors import ConfigError
from tost.nn import CausalTSSAttention
from tost.ops._scan import Products, running_sums

MARKS = (1 / 16, 1 / 4, 1 / 2)
TIMES = 48
RECENT = 64


@dataclass(frozen=True)
class StateMemory(Result):
    """How long tokens stay in the state.

    The state of a head is three sums over tokens; token m adds ``pi_m`` to the mass and ``pi_m w_m^2`` to the weighted
    squares, faded by ``decay`` with every token after it where the layer forgets; where channels forget at different
    rates, by the geometric mean of a head. Shares are those of the mass and of the weighted squares (summed over the D
    features), means over the samples.

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
        decay_half_life: Tokens after which forgetting alone halves a share, ``[L, H]``; infinite without forgetting. If
            the data set it, that of tokens of zeros.
        samples: How many samples.
    """

    name: ClassVar[str] = "state-memory"
    drawing: ClassVar[str] = "text:draw_memory"
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

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per layer, head and number of last tokens."""
        axes = {"layer": self.layers, "head": range(self.mass.shape[1]), "last_tokens": self.recent}
        return grid_rows(axes, {"share_of_mass": self.mass, "share_of_squares": self.squares})

    def summary(self) -> dict[str, Any]:
        """Return how far back the state reaches."""
        low, high = self.half_life.min().item(), self.half_life.max().item()
        found = {"tokens of a text": self.length, "half of a state is the last so many tokens": f"{low:g} to {high:g}"}
        if self.forgets:
            finite = self.decay_half_life[torch.isfinite(self.decay_half_life)]
            found["half-life of forgetting, least and most of a head, tokens"] = span(finite, ".4g")
        return found


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

    found = sum_by_layer(model, batches, measure, layers=layers)
    mass, squares, trace = (total / found.samples for total in found.sums)
    length = mass.shape[-1]
    mass, squares = mass.cumsum(dim=-1), squares.cumsum(dim=-1)
    last = torch.linspace(0, math.log(length), RECENT, dtype=torch.float64).exp().round().long()
    kept = sorted(set(last.tolist()))
    marks, times = _points(length)
    return StateMemory(
        layers=found.indices,
        length=length,
        recent=tuple(kept),
        mass=mass[..., torch.tensor(kept) - 1],
        squares=squares[..., torch.tensor(kept) - 1],
        marks=marks,
        times=times,
        trace=trace,
        half_life=(mass < 0.5 - 1e-9).sum(dim=-1) + 1,
        decay_half_life=torch.stack([_decay_half_life(layer.attention) for layer in found.layers]),
        samples=found.samples,
    )


def _points(length: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the positions of the tokens that are followed, and those at which they are looked at."""
    marks = tuple(sorted({int(mark * (length - 1)) for mark in MARKS}))
    times = torch.linspace(0, length - 1, min(TIMES, length)).round().long().tolist()
    return marks, tuple(sorted(set(times)))


def _shares(record: LayerRecord) -> list[Tensor]:
    """Return sums over the samples of the shares: of mass and squares by age, [H, N], and of single tokens."""
    pi = record.membership().double()  # [B, N, H]
    w = record.stream("tokens").double()
    N = pi.shape[1]
    log = torch.zeros(()) if record.decay is None else _log(record.decay)
    upto = log.expand(pi.shape).cumsum(dim=1)  # [B, N, H], as pi
    found = []
    for added in (pi, pi * w.square().sum(dim=-1)):
        faded = added.cpu() * torch.exp(upto[:, -1:] - upto)
        found.append((faded / faded.sum(dim=1, keepdim=True).clamp_min(1e-300)).sum(dim=0).flip(0).mT)  # [H, ages]
    total = running_sums(
        pi.cpu().unsqueeze(-1),
        pi.new_zeros(*pi.shape[::2], 1).cpu(),
        Products(log.expand(pi.shape).exp().unsqueeze(-1)),
    )
    marks, times = (torch.tensor(points) for points in _points(N))
    since = (upto[:, None, times] - upto[:, marks, None]).clamp_max(0)  # [B, marks, times, H]
    faded = torch.exp(since) * (times >= marks[:, None])[..., None]
    share = pi.cpu()[:, marks, None] * faded / total.squeeze(-1)[:, None, times]
    found.append(share.sum(dim=0).movedim(-1, 0))
    return found


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
