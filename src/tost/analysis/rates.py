"""Coding rates by layer: does each layer compress, as the theory predicts?

A layer measures the tokens Z of a residual stream as its attention does: x = norm(Z), w = U x, and pi the membership of
w. With n_k the mass of group k and s_k its second moment in the layer's coordinates,

    variational   R_c^var = 1/2 sum_k n_k/n sum_i log(1 + s_k[i])                 what TSSA takes a gradient step on;
                  with blocks of features, a log-determinant for each of them
    rate          R = 1/2 log det(I + d/(n eps^2) x^T x)                          all tokens as one group
    compression   R_c = 1/2 sum_k n_k/n log det(I + d/(n_k eps^2) x^T diag(pi_k) x)     group by group
    reduction     Delta R = R - R_c

The scale d/eps^2 is part of the learned U in the first; in the others eps = sqrt(d), that is ``log(1 + x)``, unless
given. All are in nats, of one sequence or image. In causal layers pi is the causal membership, and the sums are those
after the last token.

Gated layers have windows in place of groups: with S_b[n] the covariance of block b about the mean of its window,
``R_c^var = 1/2 sum_k sum_b log det(I + S_b[n])``, the mean over the tokens n. In R_c the share of a head in the
coding-rate gain takes the place of pi.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from tost.analysis.records import (
    Batch,
    LayerRecord,
    Place,
    Statistics,
    attention_layers,
    capture,
    choose,
    observe,
)
from tost.analysis.result import Result, plain
from tost.errors import ConfigError
from tost.objective import coding_rate, compression_rate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tost.analysis.run import Samples

Measure = Literal["variational", "rate", "compression", "reduction"]
MEASURES: tuple[Measure, ...] = get_args(Measure)
PLACES: dict[Place, str] = {
    "input": "in front of the attention",
    "attention": "behind the attention",
    "output": "behind the block",
}
STEPS: dict[tuple[Place, Place], str] = {
    ("input", "attention"): "what the attention does to it (below 0: compresses)",
    ("attention", "output"): "what the MLP does to it",
}
"""The two halves of a block."""


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
        place: Where in the block: ``"input"``, ``"attention"``, ``"output"``, or the change between two of them.
        layers: Numbers of the layers.
        values: By measure, ``[S, L]``: samples and layers, float64.
    """

    source: str
    split: str
    place: str
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
    curves: tuple[RateCurve, ...]

    def __add__(self, other: CodingRates) -> CodingRates:
        return CodingRates(self.curves + other.curves)

    def curve(self, source: str, split: str, place: Place) -> RateCurve:
        """Return one curve.

        Raises:
            ConfigError: There is no such curve.
        """
        known = {(curve.source, curve.split, curve.place): curve for curve in self.curves}
        if (source, split, place) not in known:
            have = ", ".join(map("/".join, known))
            raise ConfigError(f"there is no curve {source}/{split}/{place}; there are {have}.")
        return known[source, split, place]

    def change(self, source: str, split: str, before: Place, after: Place) -> RateCurve:
        """Return by how much a layer changes the rates between two places, sample by sample, with its own subspaces.

        Raises:
            ConfigError: One of the places was not measured.
        """
        first, second = (self.curve(source, split, place) for place in (before, after))
        values = {measure: second.values[measure] - first.values[measure] for measure in MEASURES}
        return replace(second, place=f"{after} - {before}", values=values)

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
        return {"unit": "nats", "curves": self.rows(), "summary": plain(self.summary())}

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per model, split, place or change, layer and measure."""
        rows = []
        for curve in (*self.curves, *(self.change(*pair, *step) for pair in self.pairs() for step in self.steps())):
            for measure in MEASURES:
                numbers = torch.stack((curve.mean(measure), *curve.quartiles(measure)), dim=1).tolist()
                for layer, values in zip(curve.layers, numbers, strict=True):
                    labels = {"source": curve.source, "split": curve.split, "place": curve.place, "layer": layer}
                    columns = ("mean", "lower_quartile", "median", "upper_quartile")
                    rows.append({**labels, "measure": measure, **dict(zip(columns, values, strict=True))})
        return rows

    def summary(self) -> dict[str, Any]:
        """Return how often R_c^var falls, for every model and split."""
        lines: dict[str, Any] = {}
        for source, split in self.pairs() if ("input", "attention") in self.steps() else ():
            falls = self.falls(source, split)
            mean = self.curve(source, split, "attention").mean()
            key = f"{source}, {split}: R_c^var"
            lines[f"{key} falls from layer to layer"] = f"{falls.over_depth} of {falls.steps}"
            lines[f"{key} falls within the attention"] = f"{falls.within} of {falls.layers}"
            lines[f"{key} behind the first and the last attention"] = f"{mean[0]:.3f}, {mean[-1]:.3f}"
        return lines

    def verdict(self) -> str:
        """Return in how many layers R_c^var falls, in the trained model and in the control, and where it rises.

        Empty if there are no samples of a trained model.
        """
        split = next((split for source, split in reversed(self.pairs()) if source == "trained"), None)
        if split is None:
            return ""
        trained, curve = self.falls("trained", split), self.curve("trained", split, "attention")
        most = trained.steps > 0 and 2 * trained.over_depth > trained.steps
        sentence = (
            f"The compression measure R_c^var {'falls' if most else 'does not fall over most layers: it falls'} in "
            f"{trained.over_depth} of {trained.steps} steps from one layer to the next, and within the attention of "
            f"{trained.within} of {trained.layers} layers{f' ({split} samples)' if split else ''}."
        )
        rising = (curve.mean().diff() >= 0).tolist()
        if rises := [f"{a} to {b}" for (a, b), up in zip(pairwise(curve.layers), rising, strict=True) if up]:
            sentence += f" It rises from layer {', '.join(rises)}."
        if ("control", split) in self.pairs():
            control = self.falls("control", split)
            sentence += (
                f" In an untrained model of the same form: {control.over_depth} of {control.steps} steps and "
                f"{control.within} of {control.layers} layers."
            )
        return sentence

    def figure(self) -> Figure:
        """Draw R_c^var behind the attention, by how much each half of a block changes it, and R beside R_c.

        Lines are means, bands go from the lower to the upper quartile of the samples.
        """
        from tost.analysis import plots

        place = max((curve.place for curve in self.curves), key=("input", "output", "attention").index)
        drawn = [(PLACES[place], r"$R_c^{\,\mathrm{var}}$ (nats)", [self.curve(*pair, place) for pair in self.pairs()])]  # type: ignore[index,arg-type]
        for step in self.steps():
            changes = [self.change(*pair, *step) for pair in self.pairs()]
            drawn.append((STEPS[step], r"change of $R_c^{\,\mathrm{var}}$ (nats)", changes))
        figure, (*panels, last) = plots.panels(len(drawn) + 1, 2, 5.4, 3.2)
        for axes, (title, label, curves) in zip(panels, drawn, strict=True):
            for i, curve in enumerate(curves):
                color, line = ("0.45", "--") if curve.source == "control" else (plots.color(i), "-")
                look = {"color": color, "linestyle": line, "marker": plots.marker(i)}
                _draw(axes, curve, "variational", f"{curve.source}, {curve.split}", **look)
            plots.finish(axes, title=title, x="layer", y=label)
            if curves[0].place in PLACES:
                axes.set_ylim(bottom=0)
            else:
                axes.axhline(0, color="0.2", linewidth=0.8)
        # Where memberships are nearly uniform R and R_c lie on top of each other.
        shown = next((curve for curve in drawn[0][2][::-1] if curve.source != "control"), drawn[0][2][0])
        _draw(last, shown, "rate", "$R$, all tokens", color=plots.color(4), linewidth=4, alpha=0.8)
        _draw(last, shown, "compression", "$R_c$, by group", color=plots.color(2), marker="o", linestyle="--")
        plots.finish(last, title=f"{PLACES[place]} ({shown.source}, {shown.split})", x="layer", y="rate (nats)")  # type: ignore[index]
        last.set_ylim(bottom=0)
        last.legend(frameon=False, fontsize=plots.LABEL, loc="lower left")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False, fontsize=plots.LABEL)
        samples = len(shown.values["variational"])
        figure.supxlabel(f"line: mean; band: middle half of {samples} samples", fontsize=plots.TICK, color="0.35")
        return figure


def _draw(axes: Any, curve: RateCurve, measure: Measure, label: str, **style: Any) -> None:
    lower, _, upper = curve.quartiles(measure).tolist()
    axes.fill_between(curve.layers, lower, upper, color=style["color"], alpha=0.16, linewidth=0)
    axes.plot(curve.layers, curve.mean(measure).tolist(), label=label, markersize=5, **style)
    axes.set_xticks(curve.layers[:: max(1, len(curve.layers) // 12)])


def rates_of_tokens(x: Tensor, found: Statistics, *, eps: float | None = None) -> dict[Measure, Tensor]:
    """Return the rates of tokens, as the module's head defines them.

    Args:
        x: Tokens as the attention gets them, ``[B, n, d]``.
        found: Their statistics in a layer.
        eps: Coding precision of rate and compression; None for ``sqrt(d)``.

    Returns:
        By measure, ``[B]``, float64.
    """
    eps, x = math.sqrt(x.shape[-1]) if eps is None else eps, x.double()
    rate = coding_rate(x, eps, mask=found.mask)
    compression = compression_rate(x, found.share().double(), eps, mask=found.mask)
    reduction = rate - compression
    return {"variational": found.rate().double(), "rate": rate, "compression": compression, "reduction": reduction}


def coding_rate_by_layer(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    layers: Sequence[int] | None = None,
    split: str = "validation",
    source: str = "trained",
    eps: float | None = None,
    places: Sequence[Place] = tuple(PLACES),
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
        One curve per place. Only four numbers per sample, layer and place are kept.

    Raises:
        ConfigError: The model has no TSSA blocks, or there are no samples.

    Example:
        >>> import torch, tost, tost.analysis
        >>> model = tost.create_model("tost_mini")
        >>> rates = tost.analysis.coding_rate_by_layer(model, [torch.randn(4, 3, 32, 32)])
        >>> rates.curve("trained", "validation", "attention").mean().shape
        torch.Size([6])
    """
    if unknown := set(places) - set(PLACES):
        raise ConfigError(f"there is no place {', '.join(sorted(unknown))}; choose from {', '.join(PLACES)}.")
    chosen = choose(layers, len(attention_layers(model)))
    measured: dict[tuple[Place, int, Measure], list[Tensor]] = {}

    def visit(record: LayerRecord) -> None:
        for place in places:
            x, w = record.project(record.stream(place))
            found = record.layer.statistics(w.double(), x, record.mask)
            rates = rates_of_tokens(x, found, eps=eps)
            for measure, values in rates.items():
                measured.setdefault((place, record.layer.index, measure), []).append(values.cpu())

    observe(model, batches, visit, layers=layers, what=places)
    curves = []
    for place in places:
        values = {m: torch.stack([torch.cat(measured[place, i, m]) for i in chosen], dim=1) for m in MEASURES}
        curves.append(RateCurve(source, split, place, tuple(chosen), values))
    return CodingRates(tuple(curves))


def coding_rates(
    model: nn.Module, samples: Samples, *, layers: Sequence[int] | None = None, control: nn.Module | None = None
) -> CodingRates:
    """Measure the coding rates of both splits, and of an untrained model on one of them; see `coding_rate_by_layer`."""
    iter(samples)  # raises if there are none
    splits = {"train": samples.train, "validation": samples.validation}
    rates = CodingRates(())
    for split, batches in splits.items():
        if batches is not None:
            rates += coding_rate_by_layer(model, batches, layers=layers, split=split)
    if control is not None:
        split = rates.curves[-1].split
        rates += coding_rate_by_layer(control, samples, layers=layers, split=split, source="control")
    return rates


@torch.no_grad()
def compression_by_layer(model: nn.Module, run: Callable[[], Any]) -> dict[str, float]:
    """Measure R_c^var in every TSSA layer while `run` runs the model once, for the log of a training.

    Args:
        model: The model.
        run: Runs the model on a batch, in evaluation mode.

    Returns:
        Means over the batch, in the order in which the layers run: ``compression/layer_00`` of the tokens of the layer,
        and in blocks of this package ``compression/change_00``, by how much the attention changes it. Empty for a model
        without TSSA layers.
    """
    rates: list[Tensor] = []
    changes: list[Tensor] = []

    def measure(record: LayerRecord) -> None:
        rates.append(record.statistics().rate().mean())
        if record.attention is not None:
            x, w = record.project(record.attention)
            changes.append(record.layer.statistics(w, x, record.mask).rate().mean() - rates[-1])

    if layers := attention_layers(model):
        places: tuple[Place, ...] = ("tokens", "attention") if all(layer.block for layer in layers) else ("tokens",)
        with capture(model, what=places, visit=measure):
            run()
    logged = {"layer": rates, "change": changes}
    return {f"compression/{key}_{i:02d}": x.item() for key, values in logged.items() for i, x in enumerate(values)}
