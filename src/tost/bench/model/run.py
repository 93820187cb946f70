"""Whole image models against each other: throughput in both passes, and peak memory.

The first model is the subject. All take turns on the same images, and every ratio is formed within a turn. The gate is
that the subject computes with its fast operators what it computes with the reference.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tost.bench.harness.gate import Check, compare_networks
from tost.bench.harness.memory import watch_peak
from tost.bench.harness.timing import Spread, Trial, interleave, ratios, spread, spread_of, warm_up
from tost.bench.harness.worker import run_in_process
from tost.bench.model.cases import ModelCase, ModelScale
from tost.models import create_model, model_options


@dataclass(frozen=True, kw_only=True)
class ModelRow:
    """One model in one case.

    Attributes:
        model: Its name.
        parameters: How many are trained.
        case: What was measured.
        seconds: One pass.
        ratio: Time of this model over that of the subject, from pairs of passes in one round.
        peak_bytes: Growth of memory during a pass in a process of its own; None if not measured.
    """

    model: str
    parameters: int
    case: ModelCase
    seconds: Spread
    ratio: Spread
    peak_bytes: int | None = None


@dataclass(kw_only=True)
class ModelResults:
    """Everything measured so far."""

    rows: list[ModelRow] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One pass of a registered model; `options` replace the model's own."""

    model: str
    options: dict[str, Any] = field(default_factory=dict)
    case: ModelCase

    def build(self) -> nn.Module:
        """Return the model."""
        torch.manual_seed(0)
        return create_model(self.model, **self.options).train(self.case.training)


def _images(case: ModelCase) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(case.batch, 3, case.image_size, case.image_size, generator=generator)


def peak_bytes(what: Pass) -> int:
    """Return by how much the memory of a fresh process grows, at most, during a pass.

    Weights and images exist before; gradients do not, so they count.

    Raises:
        TostError: The process failed.
    """
    return run_in_process(_peak_here, what, label=f"measuring the memory of {what.model}")


def _peak_here(what: Pass) -> int:
    model, images = what.build(), _images(what.case)
    with watch_peak() as peak:
        run_pass(model, images, training=what.case.training)
    return peak.growth


def run_pass(model: nn.Module, images: Tensor, *, training: bool) -> Tensor:
    """Run a model once; in training its gradients are filled."""
    with torch.inference_mode(not training):
        logits: Tensor = model(images)
    if training:
        logits.logsumexp(dim=-1).mean().backward()  # type: ignore[no-untyped-call]
    return logits


def check_model(name: str) -> list[Check]:
    """Compare a model's logits and gradients with those of the same weights on the reference operators, in float64.

    Args:
        name: A registered model. One whose operators have no implementations to choose from has nothing to compare.
    """
    if getattr(model_options(name, {}), "mixer", None) != "tssa":
        return []

    def run(backend: str, dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
        model = create_model(name, backend=backend).to(dtype).train()
        images = torch.rand(2, 3, 64, 96, generator=torch.Generator().manual_seed(1)).to(dtype)
        return model, run_pass(model, images, training=True)

    return compare_networks(name, run)


def measure_models(scale: ModelScale, *, watch: Callable[[str], None]) -> Iterator[list[ModelRow]]:
    """Measure models, one case after the other.

    Args:
        scale: What to measure.
        watch: Called with a line when a case starts.

    Yields:
        The rows of a case, in the order of `scale.models`.
    """
    for case in scale.cases:
        watch(case.label)
        yield _measure_case(scale, case)
        gc.collect()


def _measure_case(scale: ModelScale, case: ModelCase) -> list[ModelRow]:
    passes = {name: Pass(model=name, options=_options(name, case.image_size), case=case) for name in scale.models}
    peaks = {name: peak_bytes(each) if scale.memory else None for name, each in passes.items()}
    images, models = _images(case), {name: each.build() for name, each in passes.items()}
    trials = {
        name: Trial(partial(run_pass, model, images, training=case.training), model.zero_grad)
        for name, model in models.items()
    }
    for trial in trials.values():
        warm_up(trial, runs=2)
    rounds = interleave(trials, repeats=dict.fromkeys(trials, scale.repeats))
    return [
        ModelRow(
            model=name,
            parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
            case=case,
            seconds=spread_of(rounds, name),
            ratio=spread(ratios(rounds, name, scale.models[0])),
            peak_bytes=peaks[name],
        )
        for name, model in models.items()
    ]


def _options(name: str, image_size: int) -> dict[str, Any]:
    """Return the size of the images for models with learned positions, which need it."""
    return {"image_size": image_size} if "image_size" in type(model_options(name, {})).model_fields else {}
