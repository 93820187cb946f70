"""What is measured about the token mixers of the Long-Range Arena. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

from tost.bench.harness.benchmark import Benchmark, Option, numbers
from tost.errors import ConfigError

MIXERS = (*("tssa", "softmax", "reformer", "bigbird", "linformer"), *("linear", "performer", "nystrom", "s4", "s4d"))
PATHX_TOKENS, PATHX_BATCH = 16_384, 2
_LENGTHS = (1024, 2048, 3072, 4096, 16_384)
_STATES = {"state_size": 4}  # S4's own setting for this task; it is 64 elsewhere, and slower


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


class Form(StrEnum):
    """Whose defaults the mixers have."""

    PAPER = "paper"
    LRA = "lra"


def _ascending(text: str) -> tuple[int, ...]:
    return tuple(sorted(set(numbers(text, "lengths"))))


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

    Raises:
        ConfigError: A mixer is unknown, or the lengths are not ascending.
    """

    lengths: Annotated[tuple[int, ...], Option("Sequence lengths.", metavar="N,N,...", convert=_ascending)] = _LENGTHS
    mixers: Annotated[
        tuple[str, ...], Option("Mixers; the first is compared with the others.", metavar="NAME,...", default="all")
    ] = MIXERS
    form: Annotated[Form, Option("Mixers as in their papers, or as in the official code.")] = Form.PAPER
    repeats: Annotated[int, Option("Timed runs of each.", metavar="N", least=3, selects=False)] = 7
    mixer_seconds: float = 10.0
    skip_seconds: float = 20.0
    memory_seconds: float = 120.0
    memory: Annotated[bool, Option("Measure peak memory too, in one process each.")] = True
    pathx: Annotated[bool, Option("Measure a step of the Path-X model too.")] = True
    sizes: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not set(self.mixers) <= set(MIXERS):
            from tost.models.mixers import list_mixers

            if unknown := [name for name in self.mixers if name not in list_mixers(place="sequence")]:
                raise ConfigError(f"{', '.join(unknown)}: not a mixer; the mixers are: {', '.join(MIXERS)}.")
        if not self.lengths or min(self.lengths) < 1 or list(self.lengths) != sorted(set(self.lengths)):
            raise ConfigError(f"lengths {list(self.lengths)} given; positive ones are needed, in ascending order.")

    @classmethod
    def quick(cls) -> LraScale:
        """Short sequences, few runs: a demonstration."""
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
        return {"mixer": mixer, "mixer_form": self.form.value, **own, **self.sizes}


_HELP = "Time long-range mixers in the same encoder, and measure their memory."
_CODE = "tost.bench.lra.tables:LraMeasurement"
BENCHMARK = Benchmark(name="lra", help=_HELP, scale=LraScale, measurement=_CODE, files="JSON, Markdown and a plot")
