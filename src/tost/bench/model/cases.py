"""What is measured about whole image models. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from tost.bench.harness.benchmark import Benchmark, Option
from tost.bench.ops.cases import Mode
from tost.errors import ConfigError

STANDARD_MODELS = ("tost_small_patch16_224", "vit_small_patch16_224", "xcit_small_nolpi_patch16_224")


def _sizes(text: str) -> dict[int, int]:
    try:
        return {int(px): int(batch) for px, _, batch in (part.partition(":") for part in text.split(","))}
    except ValueError:
        raise ConfigError(
            f"{text!r} is not a list of sizes with batches; write for example --size 224:8,512:2."
        ) from None


@dataclass(frozen=True, kw_only=True)
class ModelCase:
    """Images of one size, and whether the backward pass is included."""

    image_size: int
    batch: int
    training: bool

    @property
    def label(self) -> str:
        """A few words for progress."""
        return f"{self.batch} x {self.image_size} px, {'training' if self.training else 'inference'}"


@dataclass(frozen=True, kw_only=True)
class ModelScale:
    """How much is measured.

    Attributes:
        models: Registered image models; the first is compared with the others.
        size: Images in a batch by their size; a step then takes about a second on two cores.
        mode: Passes.
        repeats: Timed passes of each model.
        memory: Whether to measure peak memory too, in one process per model and case.
    """

    models: Annotated[
        tuple[str, ...],
        Option(
            "Registered image models; the first is compared with the others.",
            argument=True,
            default="ToST, ViT and XCiT of the small size",
        ),
    ] = STANDARD_MODELS
    size: Annotated[
        dict[int, int], Option("Image sizes with images per batch.", metavar="PX:B,...", reads=str, convert=_sizes)
    ] = field(default_factory=lambda: {224: 8, 512: 2, 1024: 1})
    mode: Annotated[tuple[Mode, ...], Option("Pass; repeat for more.", default="both")] = tuple(Mode)
    repeats: Annotated[int, Option("Timed passes of each model.", metavar="N", least=3, selects=False)] = 11
    memory: Annotated[bool, Option("Measure peak memory too, in one process each.", selects=False)] = True

    @property
    def cases(self) -> list[ModelCase]:
        """Everything to be measured, in order."""
        return [
            ModelCase(image_size=size, batch=batch, training=mode is Mode.FWD_BWD)
            for size, batch in self.size.items()
            for mode in self.mode
        ]


_HELP = "Time whole image models against each other, and measure their memory."
_CODE = "tost.bench.model.tables:ModelMeasurement"
BENCHMARK = Benchmark(name="model", help=_HELP, scale=ModelScale, measurement=_CODE)
