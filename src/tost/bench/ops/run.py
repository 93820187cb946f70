"""Measures the attention layers: time against the limit, and bytes kept for the backward pass."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from tost.bench.harness.gate import Inputs, candidates
from tost.bench.harness.memory import kept_bytes
from tost.bench.harness.timing import (
    Plan,
    Round,
    Spread,
    Trial,
    Warmup,
    interleave,
    plan_repeats,
    ratios,
    spread,
    warm_up,
)
from tost.bench.ops.cases import Case, Mode
from tost.bench.ops.contenders import CONTENDERS, LIMIT, Contender, our_layer
from tost.errors import BackendError

__all__ = ["KeptRow", "Measurements", "Row", "Watcher", "measure", "measure_case", "measure_kept"]

# A quadratic contender is first run at this length, and the square of the factor to the real one is its estimate.
_PROBE_TOKENS = 2048


@dataclass(frozen=True, kw_only=True)
class Row:
    """One contender in one case.

    Attributes:
        case: What was measured.
        contender: Name of the contender.
        seconds: One run; None if it was skipped.
        ratio: Time relative to the limit, from pairs of runs in one round.
        ratio_of_medians: The same from the medians of all runs.
        warmup: The untimed runs before.
        kept: Bytes kept for backward, parameters not counted; only in forward and backward cases.
        note: Why it was skipped or ran less often; empty if there is nothing to say.
    """

    case: Case
    contender: str
    seconds: Spread | None = None
    ratio: Spread | None = None
    ratio_of_medians: float | None = None
    warmup: Warmup | None = None
    kept: int | None = None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class KeptRow:
    """Bytes that one implementation of an operator, without its projections, keeps for the backward pass."""

    case: Case
    implementation: str
    bytes: int
    input_bytes: int


@dataclass(kw_only=True)
class Measurements:
    """Everything measured so far; `complete` turns true at the end."""

    rows: list[Row] = field(default_factory=list)
    kept: list[KeptRow] = field(default_factory=list)
    complete: bool = False


class Watcher(Protocol):
    """Told about progress by `measure`."""

    def started(self, case: Case) -> None:
        """A case is about to be measured."""

    def finished(self, case: Case, measurements: Measurements) -> None:
        """A case is done; `measurements` includes it."""


def measure(
    cases: Sequence[Case],
    *,
    plan: Plan,
    watcher: Watcher,
    into: Measurements,
    contenders: Sequence[Contender] = CONTENDERS,
) -> None:
    """Measure all cases.

    An interrupt (Ctrl-C) ends the measurement, not the program: the finished cases stay, marked as incomplete.

    Args:
        cases: What to measure, in this order.
        plan: How long to measure.
        watcher: Told when a case starts and ends.
        into: Receives the rows of each case as soon as it is finished.
        contenders: Whom to measure; the limit must be among them.
    """
    try:
        for case in cases:
            watcher.started(case)
            rows = measure_case(case, plan=plan, contenders=contenders)
            kept = measure_kept(case, seed=plan.seed) if case.mode is Mode.FWD_BWD else []
            into.rows += rows
            into.kept += kept
            watcher.finished(case, into)
        into.complete = True
    except KeyboardInterrupt:
        return


def measure_case(case: Case, *, plan: Plan, contenders: Sequence[Contender] = CONTENDERS) -> list[Row]:
    """Measure all contenders of one case, taking turns.

    Args:
        case: What to measure.
        plan: How long to measure.
        contenders: Whom to measure; those that do not fit the operator are left out.

    Returns:
        One row per contender, in the order given; a skipped one has no times but a note.
    """
    x, cotangent = _inputs(case, plan.seed)
    fitting = [contender for contender in contenders if case.op in contender.ops]
    entrants, refusals = _line_up(fitting, case, x, cotangent, plan)
    estimates = {name: entrant.warmup.estimate_seconds for name, entrant in entrants.items()}
    always = {contender.name for contender in fitting if contender.always}
    repeats = plan_repeats(estimates, always=always, plan=plan)
    trials = {name: entrant.trial for name, entrant in entrants.items()}
    rounds = interleave(trials, repeats=repeats, seed=plan.seed)
    rows = [
        _row(case, entrants[contender.name], rounds, x)
        if contender.name in entrants
        else Row(case=case, contender=contender.name, note=refusals[contender.name])
        for contender in fitting
    ]
    # The next case may need the memory of this one's layers and graphs.
    del entrants, trials
    gc.collect()
    return rows


def measure_kept(case: Case, *, seed: int = 0) -> list[KeptRow]:
    """Measure what each implementation of the operator alone keeps for its backward pass.

    Args:
        case: Gives the operator, the shape and the dtype.
        seed: Seed of the inputs.

    Returns:
        One row per ready backend and one for the paper's formulation.
    """
    dtype = getattr(torch, case.dtype)
    generator = torch.Generator().manual_seed(seed)
    inputs = Inputs(
        w=torch.randn(case.batch, case.tokens, case.heads, case.head_width, generator=generator),
        temperature=torch.ones(case.heads),
        bias=torch.zeros(case.heads, case.tokens) if case.causal else None,
        mask=None,
    ).leaves(dtype)
    parameters = [tensor for tensor in (inputs.temperature, inputs.bias) if tensor is not None]
    rows = []
    for name, candidate in candidates(case.op).items():
        try:
            kept = kept_bytes(partial(candidate.call, inputs), excluding=parameters)
        except BackendError:
            continue  # a backend may be ready and yet not take this dtype; the gate lists what it declines
        rows.append(KeptRow(case=case.shape, implementation=name, bytes=kept, input_bytes=inputs.w.nbytes))
    return rows


@dataclass(frozen=True, kw_only=True)
class _Entrant:
    """A contender that is built, warm and ready to be timed."""

    name: str
    layer: nn.Module
    trial: Trial
    warmup: Warmup


def _line_up(
    contenders: Sequence[Contender], case: Case, x: Tensor, cotangent: Tensor, plan: Plan
) -> tuple[dict[str, _Entrant], dict[str, str]]:
    """Return the contenders that can be timed, and for the others the reason why not."""
    ours = _prepare(our_layer(case, backend="auto"), case)
    entrants: dict[str, _Entrant] = {}
    refusals: dict[str, str] = {}
    for contender in contenders:
        if reason := _too_slow(contender, case, plan):
            refusals[contender.name] = reason
            continue
        layer = _prepare(contender.build(case, ours), case)
        trial = _trial(layer, x, cotangent, case)
        try:
            warmup = warm_up(trial, runs=plan.warmup)
        except RuntimeError as error:
            if not contender.compiled:
                raise
            refusals[contender.name] = f"could not run: {_first_line(error)}"
            continue
        entrants[contender.name] = _Entrant(name=contender.name, layer=layer, trial=trial, warmup=warmup)
    return entrants, refusals


def _row(case: Case, entrant: _Entrant, rounds: Sequence[Round], x: Tensor) -> Row:
    seconds = spread([times[entrant.name] for times in rounds if entrant.name in times])
    limit = spread([times[LIMIT] for times in rounds])
    return Row(
        case=case,
        contender=entrant.name,
        seconds=seconds,
        ratio=spread(ratios(rounds, entrant.name, LIMIT)),
        ratio_of_medians=seconds.median / limit.median,
        warmup=entrant.warmup,
        kept=_kept_by_layer(entrant.layer, x) if case.mode is Mode.FWD_BWD else None,
        note=f"slow, so timed in only {seconds.count} of {limit.count} rounds" if seconds.count < limit.count else "",
    )


def _inputs(case: Case, seed: int) -> tuple[Tensor, Tensor]:
    """Return the tokens and the gradient that arrives at the output."""
    generator = torch.Generator().manual_seed(seed)
    shape = (case.batch, case.tokens, case.width)
    dtype = getattr(torch, case.dtype)
    x, cotangent = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    return x.requires_grad_(case.mode is Mode.FWD_BWD), cotangent


def _prepare(layer: nn.Module, case: Case) -> nn.Module:
    return layer.to(getattr(torch, case.dtype)).train()


def _trial(layer: nn.Module, x: Tensor, cotangent: Tensor, case: Case) -> Trial:
    def forward() -> Tensor:
        with torch.no_grad():
            y: Tensor = layer(x)
        return y

    def forward_and_backward() -> Tensor:
        y: Tensor = layer(x)
        torch.autograd.backward(y, cotangent)
        return y

    def reset() -> None:
        for tensor in (x, *layer.parameters()):
            tensor.grad = None

    return Trial(forward if case.mode is Mode.FWD else forward_and_backward, reset)


def _too_slow(contender: Contender, case: Case, plan: Plan) -> str:
    """Return the reason to skip a quadratic contender at this length, or an empty string."""
    if not contender.quadratic or case.tokens <= _PROBE_TOKENS:
        return ""
    probe = replace(case, tokens=_PROBE_TOKENS)
    x, cotangent = _inputs(probe, plan.seed)
    layer = _prepare(contender.build(probe, nn.Identity()), probe)
    measured = warm_up(_trial(layer, x, cotangent, probe), runs=2).estimate_seconds
    estimate = measured * (case.tokens / probe.tokens) ** 2
    if estimate <= plan.skip_seconds:
        return ""
    return (
        f"skipped: about {estimate:.0f} s per run expected from {probe.tokens} tokens, "
        f"more than the {plan.skip_seconds:.0f} s allowed"
    )


def _kept_by_layer(layer: nn.Module, x: Tensor) -> int:
    def forward() -> Tensor:
        y: Tensor = layer(x)
        return y

    return kept_bytes(forward, excluding=layer.parameters())


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": ")
