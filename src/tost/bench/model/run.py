"""Whole image models against each other: throughput in both passes, and peak memory.

The first model is the subject. All take turns on the same images, and every ratio is formed within a turn. The gate is
that the subject computes with its fast operators what it computes with the reference.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from tost.bench.harness.environment import Environment
from tost.bench.harness.gate import BOUNDS, Check, GateResult
from tost.bench.harness.peak import Pass, peak_bytes, run_pass
from tost.bench.harness.timing import Spread, Trial, interleave, ratios, spread, warm_up
from tost.models import create_model, model_options
from tost.testing import relative_rms

__all__ = ["STANDARD_MODELS", "STANDARD_SIZES", "ModelCase", "ModelReport", "ModelRow", "check_model", "measure_models"]

STANDARD_MODELS = ("tost_small_patch16_224", "vit_small_patch16_224", "xcit_small_nolpi_patch16_224")
STANDARD_SIZES = {224: 8, 512: 2, 1024: 1}
"""Images in a batch by their size: a step then takes about a second on two cores."""

_SIDES = (("auto", torch.float32), ("reference", torch.float64))
_BOUND = 10 * BOUNDS[torch.float32]  # a whole network loses a digit more than one operator


@dataclass(frozen=True, kw_only=True)
class ModelCase:
    """Images of one size, and whether the backward pass is included."""

    image_size: int
    batch: int
    training: bool

    @property
    def label(self) -> str:
        """A few words for tables."""
        return f"{self.batch} x {self.image_size} px, {'training' if self.training else 'inference'}"


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
class ModelReport:
    """A measurement together with everything needed to judge it."""

    command: str
    environment: Environment
    gate: GateResult
    rows: list[ModelRow] = field(default_factory=list)

    @property
    def stem(self) -> str:
        """File name without its ending: theme, hardware and month."""
        return f"model_{self.environment.slug}_{self.environment.month}"

    def to_json(self) -> dict[str, object]:
        """Return one object of plain types; times are in seconds. Behind a red gate there are no times."""
        rows = [asdict(row) for row in self.rows] if self.gate.passed else []
        return {
            "theme": "model",
            "command": self.command,
            "environment": asdict(self.environment),
            "gate": self.gate.to_json(),
            "rows": rows,
        }


def check_model(name: str) -> list[Check]:
    """Compare a model's logits and gradients with those of the same weights on the reference operators, in float64.

    Args:
        name: A registered model. One whose operators have no implementations to choose from has nothing to compare.
    """
    options = model_options(name, {})
    if getattr(options, "mixer", None) != "tssa":
        return []
    fast, slow = (_results(name, backend, dtype) for backend, dtype in _SIDES)
    return [
        Check(name=f"{name} {what}", error=relative_rms(fast[what], slow[what]), bound=_BOUND)
        for what in ("logits", "gradients")
    ]


def _results(name: str, backend: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = create_model(name, backend=backend).to(dtype).train()
    images = torch.rand(2, 3, 64, 96, generator=torch.Generator().manual_seed(1)).to(dtype)
    logits = run_pass(model, images, training=True)
    # As one vector, because some gradients are zero up to rounding: a key's bias does not change a softmax.
    gradients = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    return {"logits": logits.detach(), "gradients": torch.cat(gradients)}


def measure_models(
    names: Sequence[str],
    cases: Sequence[ModelCase],
    *,
    repeats: int,
    memory: bool,
    watch: Callable[[str], None],
) -> Iterator[list[ModelRow]]:
    """Measure models, one case after the other.

    Args:
        names: Registered models; the first is the subject.
        cases: What to measure.
        repeats: Timed passes of each.
        memory: Whether to measure peak memory too, in one process per model and case.
        watch: Gets a line when something starts.

    Yields:
        The rows of a case, in the order of `names`.
    """
    for case in cases:
        watch(case.label)
        yield list(_measure_case(names, case, repeats=repeats, memory=memory))
        gc.collect()


def _measure_case(names: Sequence[str], case: ModelCase, *, repeats: int, memory: bool) -> Iterator[ModelRow]:
    options = {name: _options(name, case.image_size) for name in names}
    peaks = {name: _peak(name, options[name], case) if memory else None for name in names}
    torch.manual_seed(0)
    images = torch.rand(case.batch, 3, case.image_size, case.image_size)
    models = {name: create_model(name, **options[name]).train(case.training) for name in names}
    trials = {name: _trial(model, images, case) for name, model in models.items()}
    for trial in trials.values():
        warm_up(trial, runs=2)
    rounds = interleave(trials, repeats=dict.fromkeys(names, repeats))
    for name in names:
        yield ModelRow(
            model=name,
            parameters=sum(p.numel() for p in models[name].parameters() if p.requires_grad),
            case=case,
            seconds=spread([times[name] for times in rounds]),
            ratio=spread(ratios(rounds, name, names[0])),
            peak_bytes=peaks[name],
        )


def _options(name: str, image_size: int) -> dict[str, Any]:
    """Return what has to be said about the size of the images: to models with learned positions."""
    return {"image_size": image_size} if "image_size" in type(model_options(name, {})).model_fields else {}


def _peak(name: str, options: Mapping[str, Any], case: ModelCase) -> int:
    return peak_bytes(
        Pass(model=name, options=dict(options), batch=case.batch, image_size=case.image_size, training=case.training)
    )


def _trial(model: nn.Module, images: torch.Tensor, case: ModelCase) -> Trial:
    def reset() -> None:
        model.zero_grad(set_to_none=True)

    return Trial(lambda: run_pass(model, images, training=case.training), reset)
