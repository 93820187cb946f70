"""The token mixers of the Long-Range Arena in one encoder: training steps per second, peak memory, and each alone.

The encoder is that of the paper's Text task: 4 blocks of width 256 with 4 heads and MLPs of width 1024, without
dropout, on full sequences of random bytes. A step is forward, backward and AdamW. The first mixer is the subject; all
take turns, and every ratio is formed within a turn. Memory is measured in one process per mixer and length.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tost.bench.harness import timing
from tost.bench.harness.gate import Check, compare_networks
from tost.bench.harness.passes import Usage, layer_trial, measure_step
from tost.bench.harness.timing import Clock, Plan, Spread, Trial
from tost.bench.harness.worker import run_in_process
from tost.bench.lra.cases import LraCase, LraScale, Work
from tost.models import create_model, model_options
from tost.models.sequence.model import sequence_mixer
from tost.models.sequence.options import SequenceClassifierOptions

ENCODER = "lra_text"
PATHX, BASELINE = "lra_pathx", "softmax"
_SHORT = 16  # tokens of the pass that comes first, to load what is loaded on first use


@dataclass(frozen=True, kw_only=True)
class LraRow:
    """One mixer in one case.

    Attributes:
        mixer: Its name.
        case: What was measured.
        parameters: Of the model, or of the mixer alone.
        seconds: One run; None if it was left out.
        ratio: Time over that of the first mixer, from pairs of runs in one round.
        peak_bytes: By how much the memory of a fresh process grew during a step.
        process_bytes: The most memory that this process had.
        note: Why something is missing.
    """

    mixer: str
    case: LraCase
    parameters: int | None = None
    seconds: Spread | None = None
    ratio: Spread | None = None
    peak_bytes: int | None = None
    process_bytes: int | None = None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class LraStep:
    """One step: forward, cross-entropy, backward and AdamW, on random tokens without padding.

    Attributes:
        model: Registered model of token sequences.
        options: Options that replace the model's own.
        tokens: Length of the sequences, N.
        batch: Sequences, B.
    """

    model: str
    options: dict[str, Any] = field(default_factory=dict)
    tokens: int
    batch: int = 1


@dataclass(kw_only=True)
class LraResults:
    """Everything measured so far."""

    rows: list[LraRow] = field(default_factory=list)


class Trainer:
    """A model with its optimizer and one batch.

    Args:
        step: What to train.
    """

    def __init__(self, step: LraStep) -> None:
        torch.manual_seed(0)
        options = {"dropout": 0.0, "max_length": step.tokens, **step.options}
        chosen: Any = model_options(step.model, options)
        self.model = create_model(step.model, **options).train()
        # Steps too small to change anything: all repetitions do the same work.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=True)
        self.ids = torch.randint(chosen.vocab_size, (step.batch, step.tokens))
        self.targets = torch.randint(chosen.num_classes, (step.batch,))

    def loss(self, tokens: int | None = None) -> Tensor:
        """Return the cross-entropy of the batch, or of the first `tokens` of each sequence."""
        logits: Tensor = self.model(self.ids[:, :tokens])
        return F.cross_entropy(logits, self.targets)

    def step(self) -> float:
        """Take a step and return its loss."""
        loss = self.loss()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()


def take_step(step: LraStep) -> Usage:
    """Take a step in this process."""
    trainer = Trainer(step)
    trainer.loss(_SHORT).backward()  # type: ignore[no-untyped-call]
    trainer.optimizer.zero_grad(set_to_none=True)
    return measure_step(trainer.step)


def step_in_process(step: LraStep) -> Usage:
    """Take a step in a fresh process.

    Raises:
        TostError: The process failed.
    """
    return run_in_process(take_step, step, label=f"a training step of {step.model} {step.options}")


def check_encoder() -> list[Check]:
    """Compare logits and gradients of an encoder with TSSA with those of the reference operator, in float64."""
    sizes = {"embed_dim": 64, "depth": 2, "max_length": 130, "dropout": 0.0}

    def run(backend: str, dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
        model = create_model(ENCODER, **sizes, backend=backend).to(dtype)
        ids = torch.randint(258, (2, 130), generator=torch.Generator().manual_seed(1))
        logits = model(ids, mask=torch.arange(130) < torch.tensor([[130], [71]]))
        logits.logsumexp(dim=-1).sum().backward()
        return model, logits

    return compare_networks(ENCODER, run)


def expected_seconds(known: Sequence[tuple[int, float]], tokens: int) -> float:
    """Predict the time of a run from shorter ones.

    Args:
        known: Lengths and seconds, ascending.
        tokens: Length of the run in question.

    Returns:
        Seconds, if time goes on to grow as it did from the shortest to the longest, at least linearly and at most
        quadratically; the latter if there is only one. 0 if nothing is known.
    """
    if not known:
        return 0.0
    (first, start), (last, end) = known[0], known[-1]
    power = 2.0 if first == last else math.log(max(end, 1e-9) / max(start, 1e-9)) / math.log(last / first)
    growth: float = (tokens / last) ** min(max(power, 1.0), 2.0)
    return end * growth


def measure_lra(
    scale: LraScale,
    *,
    watch: Callable[[str], None],
    in_process: Callable[[LraStep], Usage] = step_in_process,
    clock: Clock = time.perf_counter,
) -> Iterator[list[LraRow]]:
    """Measure mixers, one case after the other.

    Args:
        scale: What to measure, and for how long.
        watch: Called with a line when a case starts.
        in_process: Takes a step in another process.
        clock: Source of seconds.

    Yields:
        The rows of a case, one per mixer, in the order of `scale.mixers`.
    """
    known: dict[tuple[Work, str], list[tuple[int, float]]] = {}
    for case in scale.cases:
        watch(case.label)
        if case.work is Work.PATHX:
            yield [_pathx_row(scale, case, name, in_process) for name in dict.fromkeys((scale.mixers[0], BASELINE))]
            continue
        expected = {name: expected_seconds(known.get((case.work, name), []), case.tokens) for name in scale.mixers}
        rows = _timed_rows(scale, case, expected, clock)
        if case.work is Work.STEP and scale.memory:
            rows = [
                row
                if expected[row.mixer] > scale.memory_seconds
                else _with_memory(row, in_process(_step(scale, case, row.mixer)))
                for row in rows
            ]
        for row in rows:
            if row.seconds:
                known.setdefault((case.work, row.mixer), []).append((case.tokens, row.seconds.median))
        yield rows


def _timed_rows(scale: LraScale, case: LraCase, expected: Mapping[str, float], clock: Clock) -> list[LraRow]:
    """Time the mixers that are fast enough, taking turns."""
    built = {name: _build(scale, case, name) for name in scale.mixers if expected[name] <= scale.skip_seconds}
    trials = {name: trial for name, (trial, _) in built.items()}
    estimates = {name: timing.warm_up(trial, runs=2, clock=clock).estimate_seconds for name, trial in trials.items()}
    # A mixer alone takes milliseconds, so that more runs cost nothing and are needed.
    case_seconds = 0.0 if case.work is Work.STEP else scale.mixer_seconds / 2
    plan = Plan(repeats=scale.repeats, case_seconds=case_seconds, contender_seconds=scale.mixer_seconds)
    repeats = timing.plan_repeats(estimates, always={scale.mixers[0]}, plan=plan)
    rounds = timing.interleave(trials, repeats=repeats, clock=clock) if trials else []
    rows = []
    for name in scale.mixers:
        if name in built:
            compared, seconds = timing.ratios(rounds, name, scale.mixers[0]), timing.spread_of(rounds, name)
            ratio = timing.spread(compared) if compared else None
            rows.append(LraRow(mixer=name, case=case, parameters=built[name][1], seconds=seconds, ratio=ratio))
        else:
            expectation = f"about {expected[name]:.0f} s per run expected from shorter ones"
            note = f"{name} not timed, {expectation}, more than the {scale.skip_seconds:.0f} s allowed"
            rows.append(LraRow(mixer=name, case=case, note=f"{case.label}: {note}"))
    return rows


def _build(scale: LraScale, case: LraCase, name: str) -> tuple[Trial, int]:
    """Return what is to be timed, and its number of parameters."""
    if case.work is Work.STEP:
        trainer = Trainer(_step(scale, case, name))
        return Trial(trainer.step), _count(trainer.model)
    options = model_options(ENCODER, {"dropout": 0.0, "max_length": case.tokens, **scale.options(name)})
    assert isinstance(options, SequenceClassifierOptions)
    torch.manual_seed(0)
    mixer = sequence_mixer(options).train()
    x = torch.randn(case.batch, case.tokens, options.embed_dim)
    cotangent = torch.randn_like(x)
    if case.work is Work.FWD:
        return layer_trial(mixer, x, None), _count(mixer)
    return layer_trial(mixer, x.requires_grad_(), cotangent), _count(mixer)


def _step(scale: LraScale, case: LraCase, name: str) -> LraStep:
    return LraStep(model=ENCODER, options=scale.options(name), tokens=case.tokens, batch=case.batch)


def _with_memory(row: LraRow, usage: Usage) -> LraRow:
    return replace(row, peak_bytes=usage.peak_bytes, process_bytes=usage.process_bytes)


def _pathx_row(scale: LraScale, case: LraCase, name: str, in_process: Callable[[LraStep], Usage]) -> LraRow:
    options = {"mixer": name, "mixer_form": scale.form.value}
    usage = in_process(LraStep(model=PATHX, options=options, tokens=case.tokens, batch=case.batch))
    return _with_memory(LraRow(mixer=name, case=case, seconds=timing.spread([usage.seconds])), usage)


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
