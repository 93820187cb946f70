"""Measures the attention layers: time against the limit, and bytes kept for the backward pass."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tost.bench.harness import timing
from tost.bench.harness.memory import keep_freed_memory, kept_bytes
from tost.bench.harness.passes import layer_trial
from tost.bench.harness.timing import Plan, Round, Spread, Trial, Warmup
from tost.bench.ops.cases import Case, Mode, Op, Shape
from tost.bench.ops.contenders import CONTENDERS, LIMIT, Contender, our_layer
from tost.bench.ops.gate import Sample, candidates
from tost.errors import BackendError

# A quadratic contender is first run at this length, and the square of the factor to the real one is its estimate.
_PROBE_TOKENS = 2048
_GROWTH_FROM_TOKENS = 4096
# Parts of a `Spread`, and how the names of a row's columns end.
_ENDINGS = {"median": "median", "lower": "lower_quartile", "upper": "upper_quartile"}


@dataclass(frozen=True, kw_only=True)
class Row(Case):
    """One contender in one case.

    Attributes:
        contender: Its name.
        seconds_median: Time of one run; None if it was skipped. The quartiles follow.
        repeats: Timed runs.
        ratio_to_limit_median: Time relative to the limit, from pairs of runs in one round. The quartiles follow.
        ratio_of_medians: The same from the medians of all runs.
        warmup_runs: Untimed runs before.
        first_run_seconds: Time of the first of them.
        kept_bytes: Bytes kept for backward, parameters not counted; only in forward and backward cases.
        note: Why it was skipped or ran less often; may be empty.
    """

    contender: str
    seconds_median: float | None = None
    seconds_lower_quartile: float | None = None
    seconds_upper_quartile: float | None = None
    repeats: int = 0
    ratio_to_limit_median: float | None = None
    ratio_to_limit_lower_quartile: float | None = None
    ratio_to_limit_upper_quartile: float | None = None
    ratio_of_medians: float | None = None
    warmup_runs: int = 0
    first_run_seconds: float | None = None
    kept_bytes: int | None = None
    note: str = ""

    @property
    def case(self) -> Case:
        """What was measured."""
        return Case(**self.shape, mode=self.mode)

    @property
    def seconds(self) -> Spread | None:
        """Time of one run."""
        return self._spread("seconds")

    @property
    def ratio(self) -> Spread | None:
        """Time relative to the limit."""
        return self._spread("ratio_to_limit")

    def _spread(self, name: str) -> Spread | None:
        values = {part: getattr(self, f"{name}_{ending}") for part, ending in _ENDINGS.items()}
        return None if values["median"] is None else Spread(**values, count=self.repeats)


@dataclass(frozen=True, kw_only=True)
class KeptRow(Shape):
    """Bytes that one implementation of an operator, without its projections, keeps for the backward pass."""

    implementation: str
    bytes: int
    input_bytes: int


@dataclass(frozen=True, kw_only=True)
class Growth:
    """Time per token of one contender at two lengths; a factor of 1 is linear cost."""

    op: Op
    mode: Mode
    contender: str
    from_tokens: int
    to_tokens: int
    from_seconds_per_token: float
    to_seconds_per_token: float
    factor: float


@dataclass(kw_only=True)
class OpsResults:
    """Everything measured so far."""

    rows: list[Row] = field(default_factory=list)
    operator_kept_bytes: list[KeptRow] = field(default_factory=list)
    growth: list[Growth] = field(default_factory=list)


def growth(rows: Iterable[Row]) -> list[Growth]:
    """Compare the time per token at the longest length with that at 4,096 tokens (or the shortest length measured).

    Args:
        rows: Rows of a measurement; only single sequences are used.

    Returns:
        One entry per operator, pass and contender that was measured at two lengths or more.
    """
    groups: dict[tuple[Any, ...], dict[int, float]] = {}
    for row in rows:
        if row.batch == 1 and row.seconds_median is not None:
            key = (row.op, row.mode, row.contender, row.width, row.heads, row.dtype)
            groups.setdefault(key, {})[row.tokens] = row.seconds_median / row.tokens
    found = []
    for (op, mode, contender, *_), per_token in groups.items():
        start = _GROWTH_FROM_TOKENS if _GROWTH_FROM_TOKENS in per_token else min(per_token)
        end = max(per_token)
        if start < end:
            first, last = per_token[start], per_token[end]
            ends: dict[str, Any] = {"from_tokens": start, "to_tokens": end, "factor": last / first}
            ends |= {"from_seconds_per_token": first, "to_seconds_per_token": last}
            found.append(Growth(op=op, mode=mode, contender=contender, **ends))
    return found


def measure_case(case: Case, *, plan: Plan, contenders: Sequence[Contender] = CONTENDERS) -> list[Row]:
    """Measure all contenders of one case, taking turns.

    Args:
        case: What to measure.
        plan: How long to measure.
        contenders: What to measure, the limit among it; those that do not fit the operator are left out.

    Returns:
        One row per contender, in the order given; a skipped one has no times but a note.
    """
    keep_freed_memory()  # otherwise chance decides in which processes every tensor is made of new pages
    x, cotangent = _inputs(case, plan.seed)
    fitting = [contender for contender in contenders if case.op in contender.ops]
    entrants, refusals = _line_up(fitting, case, x, cotangent, plan)
    estimates = {name: entrant.warmup.estimate_seconds for name, entrant in entrants.items()}
    always = {contender.name for contender in fitting if contender.always}
    repeats = timing.plan_repeats(estimates, always=always, plan=plan)
    trials = {name: entrant.trial for name, entrant in entrants.items()}
    rounds = timing.interleave(trials, repeats=repeats, seed=plan.seed)
    rows = [
        _row(case, contender.name, entrants[contender.name], rounds, x)
        if contender.name in entrants
        else Row(**vars(case), contender=contender.name, note=refusals[contender.name])
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
    generator = torch.Generator().manual_seed(seed)
    inputs = Sample(
        w=torch.randn(case.batch, case.tokens, case.heads, case.head_width, generator=generator),
        temperature=torch.ones(case.heads),
        bias=torch.zeros(case.heads, case.tokens) if case.causal else None,
        mask=None,
    ).leaves(getattr(torch, case.dtype))
    parameters = [tensor for tensor in (inputs.temperature, inputs.bias) if tensor is not None]
    rows = []
    for name, candidate in candidates(case.op, case.block_size).items():
        try:
            kept = kept_bytes(partial(candidate.call, inputs), excluding=parameters)
        except BackendError:
            continue  # a backend may be ready and yet not take this dtype; the gate lists what it declines
        rows.append(KeptRow(**case.shape, implementation=name, bytes=kept, input_bytes=inputs.w.nbytes))
    return rows


@dataclass(frozen=True, kw_only=True)
class _Entrant:
    """A contender that is built, warm and ready to be timed."""

    layer: nn.Module
    trial: Trial
    warmup: Warmup


def _line_up(
    contenders: Sequence[Contender], case: Case, x: Tensor, cotangent: Tensor | None, plan: Plan
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
        trial = layer_trial(layer, x, cotangent)
        try:
            warmup = timing.warm_up(trial, runs=plan.warmup)
        except RuntimeError as error:
            if not contender.compiled:
                raise
            first_line = (str(error).strip().splitlines() or [""])[0]
            refusals[contender.name] = f"could not run: {type(error).__name__}: {first_line}".rstrip(": ")
            continue
        entrants[contender.name] = _Entrant(layer=layer, trial=trial, warmup=warmup)
    return entrants, refusals


def _row(case: Case, name: str, entrant: _Entrant, rounds: Sequence[Round], x: Tensor) -> Row:
    seconds, limit = timing.spread_of(rounds, name), timing.spread_of(rounds, LIMIT)
    layer, kept = entrant.layer, None
    if case.mode is Mode.FWD_BWD:
        kept = kept_bytes(partial(layer, x), excluding=layer.parameters())
    return Row(
        **vars(case),
        contender=name,
        **_flat("seconds", seconds),
        repeats=seconds.count,
        **_flat("ratio_to_limit", timing.spread(timing.ratios(rounds, name, LIMIT))),
        ratio_of_medians=seconds.median / limit.median,
        warmup_runs=entrant.warmup.runs,
        first_run_seconds=entrant.warmup.first_seconds,
        kept_bytes=kept,
        note=f"slow, so timed in only {seconds.count} of {limit.count} rounds" if seconds.count < limit.count else "",
    )


def _flat(name: str, value: Spread) -> dict[str, Any]:
    return {f"{name}_{ending}": getattr(value, part) for part, ending in _ENDINGS.items()}


def _inputs(case: Case, seed: int) -> tuple[Tensor, Tensor | None]:
    """Return the tokens, and the gradient that arrives at the output if there is a backward pass."""
    generator = torch.Generator().manual_seed(seed)
    shape, dtype = (case.batch, case.tokens, case.width), getattr(torch, case.dtype)
    x, cotangent = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    return (x, None) if case.mode is Mode.FWD else (x.requires_grad_(), cotangent)


def _prepare(layer: nn.Module, case: Case) -> nn.Module:
    return layer.to(getattr(torch, case.dtype)).train()


def _too_slow(contender: Contender, case: Case, plan: Plan) -> str:
    """Return the reason to skip a quadratic contender at this length, or an empty string."""
    if not contender.quadratic or case.tokens <= _PROBE_TOKENS:
        return ""
    probe = replace(case, tokens=_PROBE_TOKENS)
    layer = _prepare(contender.build(probe, nn.Identity()), probe)
    measured = timing.warm_up(layer_trial(layer, *_inputs(probe, plan.seed)), runs=2).estimate_seconds
    estimate = measured * (case.tokens / probe.tokens) ** 2
    if estimate <= plan.skip_seconds:
        return ""
    return (
        f"skipped: about {estimate:.0f} s per run expected from {probe.tokens} tokens, "
        f"more than the {plan.skip_seconds:.0f} s allowed"
    )
