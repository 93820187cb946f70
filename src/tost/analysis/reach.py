"""Gated memory: how far back the means of `GatedTSSA` and `MinGRU` reach, channel by channel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tost.analysis.records import Batch, choose, run_batches
from tost.analysis.result import Result, grid_rows, span
from tost.errors import ConfigError
from tost.nn import GatedTSSA, MinGRU


@dataclass(frozen=True)
class GatedMemory(Result):
    """How far back gated means reach.

    After the last token of a text the mean of a channel is ``sum_m weight[m] v[m]``, with
    ``weight[m] = z[m] prod_{n > m} (1 - z[n])``: what token m wrote, and what later tokens left of it.

    Attributes:
        layers: Numbers of the layers, among those with gated means.
        length: Number of tokens of a text, N.
        written: Mean of z, how much of a channel a token replaces, ``[L, C]``.
        reach: Smallest number of last tokens that hold half of the mean, ``[L, C]``, from weights that are means over
            the texts; N + 1 where all tokens together hold less.
        samples: How many texts.
    """

    name: ClassVar[str] = "gated-memory"
    drawing: ClassVar[str] = "text:draw_reach"
    layers: tuple[int, ...]
    length: int
    written: Tensor = field(repr=False)
    reach: Tensor = field(repr=False)
    samples: int

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per layer and channel."""
        axes = {"layer": self.layers, "channel": range(self.reach.shape[1])}
        return grid_rows(axes, {"written": self.written, "reach": self.reach})

    def summary(self) -> dict[str, Any]:
        """Return how far back the means reach, and how much a token writes."""
        middle = self.reach.double().median(dim=1).values
        beyond = (self.reach > self.length).double().mean().item()
        return {
            "tokens of a text": self.length,
            "half of a mean is the last so many tokens, median channel by layer": ", ".join(
                f"{tokens:g}" for tokens in middle.tolist()
            ),
            "the same, least and most of a channel": span(self.reach.double(), "g"),
            "share of channels that reach beyond the text": round(beyond, 4),
            "share of a channel that a token replaces, least and most": span(self.written, ".3f"),
        }


def gated_layers(model: nn.Module) -> list[GatedTSSA | MinGRU]:
    """Return the layers with gated means, in order; none for other models."""
    return [module for module in model.modules() if isinstance(module, GatedTSSA | MinGRU)]


def gated_memory(model: nn.Module, batches: Iterable[Batch], *, layers: Sequence[int] | None = None) -> GatedMemory:
    """Measure of which tokens the gated means consist at the end of texts.

    Args:
        model: A model with the mixer ``gated_tssa`` or ``mingru``.
        batches: Texts, all of one length and without padding.
        layers: Which of these layers; None for all.

    Raises:
        ConfigError: The model has no such layers, there are no texts, or they differ in length or are padded.

    Example:
        >>> import torch, tost, tost.analysis
        >>> model = tost.create_model("tost_lm_base_plus2", embed_dim=32, depth=2, num_heads=4, vocab_size=256)
        >>> tost.analysis.gated_memory(model, [torch.randint(256, (3, 64))]).reach.shape
        torch.Size([2, 32])
    """
    mixers = gated_layers(model)
    chosen = choose(layers, len(mixers), "layers with gated means")
    written, weights = ({index: torch.zeros(()) for index in chosen} for _ in range(2))
    lengths = set()

    def watch(index: int) -> Callable[..., None]:
        def visit(mixer: nn.Module, given: tuple[Tensor, ...], named: dict[str, Any]) -> None:
            mask = named.get("mask", given[1] if len(given) > 1 else None)
            if mask is not None and not mask.all():
                raise ConfigError("gated means are measured on whole texts, but these are padded; cut them.")
            lengths.add(given[0].shape[1])
            if len(lengths) > 1:
                found = " and of ".join(map(str, sorted(lengths)))
                raise ConfigError(f"texts of {found} tokens are compared by age; cut them to one length.")
            z, weight = _weights(mixers[index], given[0])
            written[index] = written[index] + z.mean(dim=1).sum(dim=0)
            weights[index] = weights[index] + weight.sum(dim=0)

        return visit

    with ExitStack() as hooks:
        for index in chosen:
            hooks.enter_context(mixers[index].register_forward_pre_hook(watch(index), with_kwargs=True))
        samples = run_batches(model, batches)
    held = torch.stack([weights[index] for index in chosen]).flip(1).cumsum(dim=1) / samples  # [L, last tokens, C]
    return GatedMemory(
        layers=tuple(chosen),
        length=held.shape[1],
        written=torch.stack([written[index] for index in chosen]) / samples,
        reach=(held < 0.5 - 1e-9).sum(dim=1) + 1,
        samples=samples,
    )


def _weights(mixer: GatedTSSA | MinGRU, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return z and the weights of the tokens x [B, N, C] in the means after the last of them, both [B, N, C]."""
    logit = mixer.proj_in(x)[..., : mixer.embed_dim].double().cpu()
    left = F.logsigmoid(-logit)  # log(1 - z)
    later = left.flip(1).cumsum(dim=1).flip(1) - left
    return logit.sigmoid(), torch.exp(F.logsigmoid(logit) + later)
