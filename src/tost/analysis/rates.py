"""Coding rates by layer: does each layer compress, as the theory predicts?

A layer looks at the tokens Z of a residual stream as its attention does: x = norm(Z), w = U x, and pi the membership of
w. With n_k the mass of group k and s_k its second moment in the layer's coordinates,

    variational   R_c^var = 1/2 sum_k n_k/n sum_i log(1 + s_k[i])                 what TSSA takes a gradient step on;
                  with blocks of features, a log-determinant for each of them
    subspaces     1/2 sum_k n_k/n log det(I + sum_n pi[n,k] w_k w_k^T / n_k)      the log-determinant that it bounds
    rate          R = 1/2 log det(I + d/(n eps^2) x^T x)                          all tokens as one group
    compression   R_c = 1/2 sum_k n_k/n log det(I + d/(n_k eps^2) x^T diag(pi_k) x)     group by group
    reduction     Delta R = R - R_c

The scale d/eps^2 is part of the learned U in the first two; in the others eps = sqrt(d), that is ``log(1 + x)``, unless
given. All are in nats, of one sequence or image. In causal layers pi is the causal membership, and the sums are those
after the last token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import pairwise
from operator import add
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from tost.analysis.records import Batch, LayerRecord, Place, attention_layers, choose, observe
from tost.analysis.result import Result, plain
from tost.errors import ConfigError
from tost.objective import coding_rate, compression_rate, spectral_sum
from tost.ops._blocks import in_blocks

if TYPE_CHECKING:
    from tost.analysis.run import Samples

Measure = Literal["variational", "subspaces", "rate", "compression", "reduction"]
MEASURES: tuple[Measure, ...] = get_args(Measure)
STREAMS: tuple[Place, ...] = ("input", "attention", "output")
STEPS: tuple[tuple[Place, Place], ...] = (("input", "attention"), ("attention", "output"))
"""The two halves of a block: the attention, and the MLP after it."""


class Falls(NamedTuple):
    """How often R_c^var falls, on average over the samples.

    Attributes:
        over_depth: From one layer to the next, after the attention.
        steps: How many such steps there are.
        within: From before a layer's attention to after it, measured with the layer's own subspaces.
        layers: How many layers there are.
    """

    over_depth: int
    steps: int
    within: int
    layers: int


@dataclass(frozen=True)
class RateCurve:
    """Rates of samples, layer by layer.

    Attributes:
        source: Which model: ``"trained"``, ``"control"`` or another label.
        split: Which samples.
        place: Where in the block: ``"input"``, ``"attention"`` or ``"output"``.
        layers: Numbers of the layers.
        values: By measure, ``[S, L]``: samples and layers, float64.
    """

    source: str
    split: str
    place: Place
    layers: tuple[int, ...]
    values: dict[Measure, Tensor] = field(repr=False)

    def mean(self, measure: Measure = "variational") -> Tensor:
        """Return the mean over the samples, ``[L]``."""
        return self.values[measure].mean(dim=0)

    def quartiles(self, measure: Measure = "variational") -> Tensor:
        """Return lower quartile, median and upper quartile over the samples, ``[3, L]``."""
        return self.values[measure].quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64), dim=0)


@dataclass(frozen=True)
class CodingRates(Result):
    """Rates by layer, for any number of models, samples and places; ``a + b`` holds both.

    Attributes:
        curves: One for every model, split and place.
    """

    name: ClassVar[str] = "coding-rate"
    drawing: ClassVar[str] = "rates:draw_rates"
    curves: tuple[RateCurve, ...]

    def __add__(self, other: CodingRates) -> CodingRates:
        return CodingRates(self.curves + other.curves)

    def curve(self, source: str, split: str, place: Place) -> RateCurve:
        """Return one curve.

        Raises:
            ConfigError: There is no such curve.
        """
        for curve in self.curves:
            if (curve.source, curve.split, curve.place) == (source, split, place):
                return curve
        have = ", ".join(f"{curve.source}/{curve.split}/{curve.place}" for curve in self.curves)
        raise ConfigError(f"there is no curve {source}/{split}/{place}; there are {have}.")

    def change(self, source: str, split: str, before: Place, after: Place) -> RateCurve:
        """Return by how much a layer changes the rates between two places, sample by sample, with its own subspaces.

        Raises:
            ConfigError: One of the places was not measured.
        """
        first, second = (self.curve(source, split, place) for place in (before, after))
        return replace(second, values={measure: second.values[measure] - first.values[measure] for measure in MEASURES})

    def steps(self) -> list[tuple[Place, Place]]:
        """Return the steps within a block of which both ends were measured."""
        places = {curve.place for curve in self.curves}
        return [step for step in STEPS if places >= set(step)]

    def pairs(self) -> list[tuple[str, str]]:
        """Return the models and splits that there are, in order."""
        return list(dict.fromkeys((curve.source, curve.split) for curve in self.curves))

    def falls(self, source: str, split: str) -> Falls:
        """Count in how many layers R_c^var falls; needs the places input and attention."""
        before, after = (self.curve(source, split, place).mean() for place in ("input", "attention"))
        over_depth = int((after.diff() < 0).sum())
        return Falls(over_depth, len(after) - 1, int((after < before).sum()), len(after))

    def to_json(self) -> dict[str, Any]:
        """Return means and quartiles of everything as plain data, changes within a block included."""
        curves = []
        for place, curve in self._all():
            numbers = {name: {"mean": curve.mean(name), "quartiles": curve.quartiles(name)} for name in MEASURES}
            samples = len(curve.values["variational"])
            labels = {"source": curve.source, "split": curve.split, "place": place, "layers": curve.layers}
            curves.append({**labels, "samples": samples, "measures": numbers})
        return {"unit": "nats", "curves": plain(curves), "summary": plain(self.summary())}

    def _all(self) -> list[tuple[str, RateCurve]]:
        """Return every curve and then every change, each with the name of its place."""
        changes = [
            (f"{after} - {before}", self.change(source, split, before, after))
            for source, split in self.pairs()
            for before, after in self.steps()
        ]
        return [(curve.place, curve) for curve in self.curves] + changes

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per model, split, place or change, layer and measure."""
        found = []
        for place, curve in self._all():
            for measure in MEASURES:
                mean, quartiles = curve.mean(measure).tolist(), curve.quartiles(measure).mT.tolist()
                for layer, value, (lower, median, upper) in zip(curve.layers, mean, quartiles, strict=True):
                    labels = {"source": curve.source, "split": curve.split, "place": place, "layer": layer}
                    spread = {"lower_quartile": lower, "median": median, "upper_quartile": upper}
                    found.append({**labels, "measure": measure, "mean": value, **spread})
        return found

    def summary(self) -> dict[str, Any]:
        """Return how often R_c^var falls, for every model and split."""
        found: dict[str, Any] = {}
        if ("input", "attention") not in self.steps():
            return found
        for source, split in self.pairs():
            falls = self.falls(source, split)
            mean = self.curve(source, split, "attention").mean().tolist()
            key = f"{source}, {split}"
            found[f"{key}: R_c^var falls from layer to layer"] = f"{falls.over_depth} of {falls.steps}"
            found[f"{key}: R_c^var falls within the attention"] = f"{falls.within} of {falls.layers}"
            found[f"{key}: R_c^var behind the first and the last attention"] = f"{mean[0]:.3f}, {mean[-1]:.3f}"
        return found

    def verdict(self) -> str:
        """Return in how many layers R_c^var falls, in the trained model and in the control, and where it rises.

        Empty if there are no samples of a trained model.
        """
        split = next((split for source, split in reversed(self.pairs()) if source == "trained"), None)
        if split is None:
            return ""
        trained = self.falls("trained", split)
        samples = f" ({split} samples)" if split else ""
        most = trained.steps > 0 and 2 * trained.over_depth > trained.steps
        sentence = (
            f"The compression measure R_c^var {'falls' if most else 'does not fall over most layers: it falls'} in "
            f"{trained.over_depth} of {trained.steps} steps from one layer to the next, and within the attention of "
            f"{trained.within} of {trained.layers} layers{samples}."
        )
        curve = self.curve("trained", split, "attention")
        rising = (curve.mean().diff() >= 0).tolist()
        rises = [f"{a} to {b}" for (a, b), up in zip(pairwise(curve.layers), rising, strict=True) if up]
        if rises:
            sentence += f" It rises from layer {', '.join(rises)}."
        if ("control", split) in self.pairs():
            control = self.falls("control", split)
            sentence += (
                f" In an untrained model of the same form: {control.over_depth} of {control.steps} steps and "
                f"{control.within} of {control.layers} layers."
            )
        return sentence


def rates_of_tokens(
    x: Tensor, w: Tensor, pi: Tensor, *, eps: float | None = None, mask: Tensor | None = None, block_size: int = 1
) -> dict[Measure, Tensor]:
    """Return the rates of tokens, as the module's head defines them.

    Args:
        x: Tokens as the attention sees them, ``[..., n, d]``.
        w: The same in the coordinates of the heads, ``[..., n, K, p]``.
        pi: Memberships, ``[..., n, K]``.
        eps: Coding precision of rate and compression; None for ``sqrt(d)``.
        mask: Real tokens, bool ``[..., n]``.
        block_size: Features in a block of the layer's statistics.

    Returns:
        By measure, ``[...]``, float64.
    """
    eps = math.sqrt(x.shape[-1]) if eps is None else eps
    x, w, pi = x.double(), w.double(), pi.double()
    if mask is not None:
        w, pi = w.masked_fill(~mask[..., None, None], 0), pi.masked_fill(~mask[..., None], 0)
    count = x.shape[-2] if mask is None else mask.sum(-1).clamp_min(1)[..., None]
    mass = pi.sum(-2)  # [..., K]
    weight = pi / mass.where(mass > 0, 1)[..., None, :]
    groups = w.movedim(-2, -3)  # [..., K, n, p]
    moments = (weight.mT[..., None] * groups).mT @ groups
    share = mass / count
    if block_size == 1:
        of_blocks = torch.diagonal(moments, dim1=-2, dim2=-1).log1p()
    else:
        pairs = in_blocks(in_blocks(moments, block_size).movedim(-3, -1), block_size)  # [..., blocks, g, blocks, g]
        of_blocks = spectral_sum(torch.diagonal(pairs, dim1=-4, dim2=-2).movedim(-1, -3))  # [..., K, p / g, g, g]
    rate = coding_rate(x, eps, mask=mask)
    compression = compression_rate(x, pi, eps, mask=mask)
    return {
        "variational": 0.5 * (share * of_blocks.sum(-1)).sum(-1),
        "subspaces": 0.5 * (share * spectral_sum(moments)).sum(-1),
        "rate": rate,
        "compression": compression,
        "reduction": rate - compression,
    }


def coding_rate_by_layer(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    layers: Sequence[int] | None = None,
    split: str = "validation",
    source: str = "trained",
    eps: float | None = None,
    places: Sequence[Place] = STREAMS,
) -> CodingRates:
    """Measure the coding rates of the residual stream in every TSSA layer.

    Args:
        model: A model of TSSA blocks, of this package, from timm or from transformers.
        batches: Samples; see `tost.analysis.records.Batch`. Every sample counts once, whatever the batch size.
        layers: Which layers; None for all.
        split: What to call the samples; empty for samples that need no name.
        source: What to call the model.
        eps: Coding precision of R and R_c; None for ``sqrt(C)``.
        places: Where in a block; ``"attention"`` is the paper's.

    Returns:
        One curve per place. Only five numbers per sample, layer and place are kept.

    Raises:
        ConfigError: The model has no TSSA blocks, or there are no samples.

    Example:
        >>> import torch, tost, tost.analysis
        >>> model = tost.create_model("tost_mini")
        >>> rates = tost.analysis.coding_rate_by_layer(model, [torch.randn(4, 3, 32, 32)])
        >>> rates.curve("trained", "validation", "attention").mean().shape
        torch.Size([6])
    """
    if unknown := set(places) - set(STREAMS):
        raise ConfigError(f"there is no place {', '.join(sorted(unknown))}; choose from {', '.join(STREAMS)}.")
    chosen = choose(layers, len(attention_layers(model)))
    found: dict[tuple[Place, int, Measure], list[Tensor]] = {}

    def visit(record: LayerRecord) -> None:
        for place in places:
            x, w = record.project(record.stream(place))
            block_size = record.layer.attention.extensions.block_size
            rates = rates_of_tokens(x, w, record.membership(w, x), eps=eps, mask=record.mask, block_size=block_size)
            for measure, values in rates.items():
                found.setdefault((place, record.layer.index, measure), []).append(values.cpu())

    observe(model, batches, visit, layers=layers, what=places)
    curves = []
    for place in places:
        values = {m: torch.stack([torch.cat(found[place, i, m]) for i in chosen], dim=1) for m in MEASURES}
        curves.append(RateCurve(source, split, place, tuple(chosen), values))
    return CodingRates(tuple(curves))


def coding_rates(
    model: nn.Module, samples: Samples, *, layers: Sequence[int] | None = None, control: nn.Module | None = None
) -> CodingRates:
    """Measure the coding rates of both splits, and of an untrained model on one of them.

    Args:
        model: A model of TSSA blocks.
        samples: Training samples, validation samples or both.
        layers: Numbers of the layers; None for all.
        control: An untrained model of the same form; None for no comparison.

    Raises:
        ConfigError: The model has no TSSA blocks, or there are no samples.
    """
    iter(samples)  # raises if there are none
    splits = {"train": samples.train, "validation": samples.validation}
    given = {split: batches for split, batches in splits.items() if batches is not None}
    found = [coding_rate_by_layer(model, batches, layers=layers, split=split) for split, batches in given.items()]
    if control is not None:
        split = "validation" if "validation" in given else "train"
        found.append(coding_rate_by_layer(control, samples, layers=layers, split=split, source="control"))
    return reduce(add, found)
