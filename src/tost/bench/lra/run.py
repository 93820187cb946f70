"""The token mixers of the Long-Range Arena in one encoder: training steps per second, peak memory, and each alone.

The encoder is that of the paper's Text task: 4 blocks of width 256 with 4 heads and MLPs of width 1024, without
dropout, on full sequences of random bytes. A step is forward, backward and AdamW. The first mixer is the subject; all
take turns, and every ratio is formed within a turn. Memory is measured in one process per mixer and length.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn

from tost.bench.harness.environment import Environment
from tost.bench.harness.gate import BOUNDS, Check, GateResult
from tost.bench.harness.timing import (
    Clock,
    Plan,
    Round,
    Spread,
    Trial,
    interleave,
    plan_repeats,
    ratios,
    spread,
    warm_up,
)
from tost.bench.lra.step import LraStep, Trainer, Usage, run_in_process
from tost.errors import ConfigError
from tost.models import create_model, model_options
from tost.models.mixers import list_mixers
from tost.models.sequence.model import sequence_mixer
from tost.models.sequence.options import SequenceClassifierOptions
from tost.testing import relative_rms

__all__ = ["LraCase", "LraReport", "LraRow", "LraScale", "Work", "check_encoder", "expected_seconds", "measure_lra"]

ENCODER = "lra_text"
PATHX, PATHX_TOKENS, PATHX_BATCH = "lra_pathx", 16_384, 2
SUBJECT, BASELINE = "tssa", "softmax"
_LONG = ("reformer", "bigbird", "linformer", "linear", "performer", "nystrom", "s4", "s4d")
MIXERS = (SUBJECT, BASELINE, *_LONG)
_STATES = {"state_size": 4}  # S4's own setting for this task; it is 64 elsewhere, and slower
_BOUND = 10 * BOUNDS[torch.float32]  # a whole network loses a digit more than one operator

Watch = Callable[[str], None]


class Work(StrEnum):
    """What is timed: a training step of the encoder, the mixer alone in either pass, a step of the Path-X model."""

    STEP = "step"
    FWD = "mixer fwd"
    FWD_BWD = "mixer fwd+bwd"
    PATHX = "path-x step"


@dataclass(frozen=True, kw_only=True)
class LraCase:
    """One kind of work on sequences of one length."""

    work: Work
    tokens: int
    batch: int = 1

    @property
    def label(self) -> str:
        """A few words for progress."""
        return f"{self.work}, {self.batch} x {self.tokens:,} tokens"


@dataclass(frozen=True, kw_only=True)
class LraScale:
    """How much is measured.

    Attributes:
        lengths: Sequence lengths, ascending.
        mixers: Names of mixers; the first is compared with the others.
        form: Whose defaults the mixers have, see the option ``mixer_form`` of the long-range models.
        repeats: Timed runs of each mixer, if they are short.
        mixer_seconds: Time after which a mixer has had enough, but for the first and not before three runs.
        skip_seconds: A mixer whose single run is expected to take longer is left out.
        memory_seconds: The same for the one step whose memory is measured.
        memory: Whether memory is measured.
        pathx: Whether a step of the Path-X model is measured, for the first mixer and softmax attention.
        sizes: Options of the encoder that replace the task's.
    """

    lengths: tuple[int, ...] = (1024, 2048, 3072, 4096, 16_384)
    mixers: tuple[str, ...] = MIXERS
    form: str = "paper"
    repeats: int = 7
    mixer_seconds: float = 10.0
    skip_seconds: float = 20.0
    memory_seconds: float = 120.0
    memory: bool = True
    pathx: bool = True
    sizes: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if unknown := [name for name in self.mixers if name not in list_mixers(place="sequence")]:
            raise ConfigError(f"{', '.join(unknown)}: not a mixer; the mixers are: {', '.join(MIXERS)}.")
        if not self.lengths or min(self.lengths) < 1 or list(self.lengths) != sorted(set(self.lengths)):
            raise ConfigError(f"lengths {list(self.lengths)} given; positive ones are needed, in ascending order.")

    @classmethod
    def quick(cls) -> LraScale:
        """Return a scale for a demonstration: short sequences, few runs."""
        return cls(lengths=(256, 1024), repeats=3, mixer_seconds=1.0, pathx=False)

    @property
    def cases(self) -> list[LraCase]:
        """Everything to be measured, in order."""
        works = [Work.STEP, Work.FWD, Work.FWD_BWD]
        cases = [LraCase(work=work, tokens=tokens) for work in works for tokens in self.lengths]
        return cases + [LraCase(work=Work.PATHX, tokens=PATHX_TOKENS, batch=PATHX_BATCH)] * self.pathx

    def options(self, mixer: str) -> dict[str, Any]:
        """Return the options of the encoder with a mixer."""
        own = {"mixer_options": _STATES} if mixer in ("s4", "s4d") else {}
        return {"mixer": mixer, "mixer_form": self.form, **own, **self.sizes}


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


@dataclass(kw_only=True)
class LraReport:
    """A measurement together with everything needed to judge it."""

    command: str
    environment: Environment
    gate: GateResult
    scale: LraScale
    rows: list[LraRow] = field(default_factory=list)
    complete: bool = False

    @property
    def stem(self) -> str:
        """File name without its ending. A selection does not replace the standard measurement."""
        standard = LraScale(repeats=self.scale.repeats)
        theme = "lra" if self.scale == standard else "lra-selection"
        return f"{theme}_{self.environment.slug}_{self.environment.month}"

    def to_json(self) -> dict[str, object]:
        """Return one object of plain types; times are in seconds. Behind a red gate there are no times."""
        return {
            "theme": "lra",
            "complete": self.complete,
            "command": self.command,
            "environment": asdict(self.environment),
            "gate": self.gate.to_json(),
            "scale": asdict(self.scale),
            "encoder": model_options(ENCODER, dict(self.scale.sizes)).model_dump(mode="json"),
            "rows": [asdict(row) for row in self.rows] if self.gate.passed else [],
        }


def check_encoder() -> list[Check]:
    """Compare logits and gradients of an encoder with TSSA with those of the reference operator, in float64."""
    sizes = {"embed_dim": 64, "depth": 2, "max_length": 130, "dropout": 0.0}
    found: list[dict[str, Tensor]] = []
    for backend, dtype in (("auto", torch.float32), ("reference", torch.float64)):
        torch.manual_seed(0)
        model = create_model(ENCODER, **sizes, backend=backend).to(dtype)
        ids = torch.randint(258, (2, 130), generator=torch.Generator().manual_seed(1))
        logits = model(ids, mask=torch.arange(130) < torch.tensor([[130], [71]]))
        logits.logsumexp(dim=-1).sum().backward()
        gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        found.append({"logits": logits.detach(), "gradients": torch.cat(gradients)})
    fast, slow = found
    return [Check(name=f"{ENCODER} {what}", error=relative_rms(fast[what], slow[what]), bound=_BOUND) for what in fast]


def expected_seconds(known: Sequence[tuple[int, float]], tokens: int) -> float:
    """Say what a run may take, from shorter ones.

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
    watch: Watch,
    in_process: Callable[[LraStep], Usage] = run_in_process,
    clock: Clock = time.perf_counter,
) -> Iterator[list[LraRow]]:
    """Measure mixers, one case after the other.

    Args:
        scale: What to measure, and for how long.
        watch: Gets a line when a case starts.
        in_process: Takes a step elsewhere and tells what it used.
        clock: Source of seconds.

    Yields:
        The rows of a case, one per mixer, in the order of `scale.mixers`.
    """
    known: dict[tuple[Work, str], list[tuple[int, float]]] = {}
    for case in scale.cases:
        watch(case.label)
        if case.work is Work.PATHX:
            yield _measure_pathx(scale, case, in_process)
            continue
        expected = {name: expected_seconds(known.get((case.work, name), []), case.tokens) for name in scale.mixers}
        rows = _timed_rows(scale, case, expected, clock)
        if case.work is Work.STEP and scale.memory:
            rows = [_with_memory(row, scale, expected[row.mixer], in_process) for row in rows]
        for row in rows:
            if row.seconds:
                known.setdefault((case.work, row.mixer), []).append((case.tokens, row.seconds.median))
        yield rows


def _timed_rows(scale: LraScale, case: LraCase, expected: Mapping[str, float], clock: Clock) -> list[LraRow]:
    taking_part = [name for name in scale.mixers if expected[name] <= scale.skip_seconds]
    built = {name: _build(scale, case, name) for name in taking_part}
    rounds = _rounds({name: trial for name, (trial, _) in built.items()}, case, scale, clock) if built else []
    rows = []
    for name in scale.mixers:
        if name in built:
            rows.append(_row(name, case, built[name][1], rounds, scale))
        else:
            note = (
                f"{case.label}: {name} not timed, about {expected[name]:.0f} s per run expected from shorter ones, "
                f"more than the {scale.skip_seconds:.0f} s allowed"
            )
            rows.append(LraRow(mixer=name, case=case, note=note))
    return rows


def _rounds(trials: Mapping[str, Trial], case: LraCase, scale: LraScale, clock: Clock) -> list[Round]:
    estimates = {name: warm_up(trial, runs=2, clock=clock).estimate_seconds for name, trial in trials.items()}
    # A mixer alone takes milliseconds, so that more runs cost nothing and are needed.
    case_seconds = 0.0 if case.work is Work.STEP else scale.mixer_seconds / 2
    plan = Plan(repeats=scale.repeats, case_seconds=case_seconds, contender_seconds=scale.mixer_seconds)
    repeats = plan_repeats(estimates, always={scale.mixers[0]}, plan=plan)
    return interleave(trials, repeats=repeats, clock=clock)


def _row(name: str, case: LraCase, parameters: int, rounds: Sequence[Round], scale: LraScale) -> LraRow:
    compared = ratios(rounds, name, scale.mixers[0])
    return LraRow(
        mixer=name,
        case=case,
        parameters=parameters,
        seconds=spread([times[name] for times in rounds if name in times]),
        ratio=spread(compared) if compared else None,
    )


def _build(scale: LraScale, case: LraCase, name: str) -> tuple[Trial, int]:
    """Return what is to be timed, and its number of parameters."""
    if case.work is Work.STEP:
        trainer = Trainer(_step(scale, case, name))
        return Trial(trainer.step, lambda: None), _count(trainer.model)
    options = model_options(ENCODER, {"dropout": 0.0, "max_length": case.tokens, **scale.options(name)})
    assert isinstance(options, SequenceClassifierOptions)
    torch.manual_seed(0)
    mixer = sequence_mixer(options).train()
    x = torch.randn(case.batch, case.tokens, options.embed_dim)
    return _mixer_trial(mixer, x, training=case.work is Work.FWD_BWD), _count(mixer)


def _mixer_trial(mixer: nn.Module, x: Tensor, *, training: bool) -> Trial:
    cotangent = torch.randn_like(x)
    x.requires_grad_(training)

    def forward() -> Tensor:
        with torch.no_grad():
            y: Tensor = mixer(x)
        return y

    def forward_and_backward() -> Tensor:
        y: Tensor = mixer(x)
        torch.autograd.backward(y, cotangent)
        return y

    def reset() -> None:
        for tensor in (x, *mixer.parameters()):
            tensor.grad = None

    return Trial(forward_and_backward if training else forward, reset)


def _step(scale: LraScale, case: LraCase, name: str) -> LraStep:
    options, threads = scale.options(name), torch.get_num_threads()
    return LraStep(model=ENCODER, options=options, tokens=case.tokens, batch=case.batch, threads=threads)


def _with_memory(row: LraRow, scale: LraScale, expected: float, in_process: Callable[[LraStep], Usage]) -> LraRow:
    if expected > scale.memory_seconds:
        return row
    usage = in_process(_step(scale, row.case, row.mixer))
    return _replace_memory(row, usage)


def _replace_memory(row: LraRow, usage: Usage) -> LraRow:
    return LraRow(**{**vars(row), "peak_bytes": usage.peak_bytes, "process_bytes": usage.process_bytes})


def _measure_pathx(scale: LraScale, case: LraCase, in_process: Callable[[LraStep], Usage]) -> list[LraRow]:
    rows = []
    for name in dict.fromkeys((scale.mixers[0], BASELINE)):
        own = {"mixer": name, "mixer_form": scale.form}
        usage = in_process(
            LraStep(model=PATHX, options=own, tokens=case.tokens, batch=case.batch, threads=torch.get_num_threads())
        )
        row = LraRow(mixer=name, case=case, seconds=spread([usage.seconds]))
        rows.append(_replace_memory(row, usage))
    return rows


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
