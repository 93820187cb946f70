"""`tost bench model`: whole image models against each other, throughput in both passes and peak memory.

The first model is the subject. All take turns on the same images, and every ratio is formed within a round.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tost._text import Table, grouped
from tost.bench.harness import (
    Benchmark,
    Check,
    Gate,
    Row,
    Trial,
    cell,
    columns,
    compare_networks,
    interleave,
    plain,
    ratios,
    run_in_process,
    spread,
    spread_of,
    warm_up,
    watch_peak,
    with_quartiles,
)
from tost.bench.ops import MODES, check_operators
from tost.models import create_model, model_options

STANDARD_MODELS = ("tost_small_patch16_224", "vit_small_patch16_224", "xcit_small_nolpi_patch16_224")


@dataclass(frozen=True)
class Pass:
    """One pass of a registered model over `batch` images of `image_size` pixels."""

    model: str
    image_size: int
    batch: int
    training: bool

    def build(self) -> tuple[nn.Module, Tensor]:
        """Return the model and its images."""
        torch.manual_seed(0)
        # Models with learned positions need the size of the images.
        sized = "image_size" in type(model_options(self.model, {})).model_fields
        model = create_model(self.model, **({"image_size": self.image_size} if sized else {}))
        return model.train(self.training), torch.rand(self.batch, 3, self.image_size, self.image_size)


def run_pass(model: nn.Module, images: Tensor, training: bool) -> Tensor:
    """Run a model once; in training its gradients are filled."""
    with torch.inference_mode(not training):
        logits: Tensor = model(images)
    if training:
        logits.logsumexp(dim=-1).mean().backward()  # type: ignore[no-untyped-call]
    return logits


def peak_bytes(what: Pass) -> int:
    """Return by how much the memory of this process grows at most during a pass. Gradients count, weights do not."""
    model, images = what.build()
    with watch_peak() as peak:
        run_pass(model, images, what.training)
    return peak[0]


def check_model(name: str) -> list[Check]:
    """Compare a model's logits and gradients with those of the reference operators; only for models with TSSA."""
    if getattr(model_options(name, {}), "mixer", None) != "tssa":
        return []

    def run(backend: str, dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
        model = create_model(name, backend=backend).to(dtype).train()
        images = torch.rand(2, 3, 64, 96, generator=torch.Generator().manual_seed(1)).to(dtype)
        return model, run_pass(model, images, training=True)

    return compare_networks(name, run)


@dataclass
class Models(Benchmark):
    """Time whole image models against each other, and measure their memory.

    Attributes:
        models: Registered image models; the first is compared with the others.
        size: Images in a batch by their size.
        mode: Passes: ``fwd``, ``fwd+bwd``.
        repeats: Timed passes of each model.
        memory: Also measure peak memory, in one process per model and case.
    """

    name: ClassVar[str] = "model"
    heading: ClassVar[str] = "Whole image models against each other"
    checked: ClassVar[str] = "the operators and the first model with the reference"
    introduction: ClassVar[str] = (
        "The models took turns on the same images; a ratio compares two passes of one round. Medians, with quartiles "
        "in brackets. Peak memory is the growth of a fresh process during its first pass, weights not included."
    )
    selects: ClassVar[tuple[str, ...]] = ("models", "size", "mode")

    models: tuple[str, ...] = STANDARD_MODELS
    size: dict[int, int] = field(default_factory=lambda: {224: 8, 512: 2, 1024: 1})
    mode: tuple[str, ...] = MODES
    repeats: int = 11
    memory: bool = True

    @property
    def steps(self) -> int:
        """One per size and pass."""
        return len(self.size) * len(self.mode)

    def check(self) -> Gate:
        """Compare the operators and the first model with the reference."""
        gate = check_operators(["tssa"])
        gate.checks += check_model(self.models[0])
        return gate

    def measure(self, results: dict[str, Any], watch: Callable[[str], None]) -> Iterator[str]:
        """Measure all sizes and passes."""
        for (image_size, batch), mode in product(self.size.items(), self.mode):
            training = mode == "fwd+bwd"
            watch(f"{batch} x {image_size} px, {'training' if training else 'inference'}")
            passes = {name: Pass(name, image_size, batch, training) for name in self.models}
            trials, parameters = {}, {}
            for name, each in passes.items():
                model, images = each.build()
                trials[name] = Trial(partial(run_pass, model, images, training), model.zero_grad)
                parameters[name] = sum(p.numel() for p in model.parameters() if p.requires_grad)
                warm_up(trials[name], runs=2)
            rounds = interleave(trials, dict.fromkeys(trials, self.repeats))
            del trials
            gc.collect()
            rows: list[Row] = []
            for name, each in passes.items():
                row = {"model": name, "parameters": parameters[name]}
                row["case"] = {"image_size": image_size, "batch": batch, "training": training}
                row |= {"seconds": plain(spread_of(rounds, name)), "peak_bytes": None}
                row["ratio"] = plain(spread(ratios(rounds, name, self.models[0])))
                if self.memory:
                    row["peak_bytes"] = run_in_process(peak_bytes, each, label=f"measuring the memory of {name}")
                rows.append(row)
            results["rows"] += rows
            yield ", ".join(f"{row['model']} {row['seconds']['median']:.3g} s" for row in rows)

    def tables(self, results: Mapping[str, Any]) -> list[Table]:
        """Return one table per pass: images per second, time relative to the first model, peak memory."""
        tables = []
        for training, rows in grouped(results["rows"], lambda row: bool(row["case"]["training"])).items():
            cells: list[tuple[str, Callable[[Row], str]]] = [
                ("images", lambda row: f"{row['case']['batch']} x {row['case']['image_size']} px"),
                ("model", lambda row: row["model"]),
                ("parameters", lambda row: f"{row['parameters']:,}"),
                ("images/s", lambda row: f"{row['case']['batch'] / row['seconds']['median']:.2f}"),
                (f"time / {self.models[0]}", lambda row: with_quartiles(row["ratio"])),
                ("peak MB", lambda row: cell(row["peak_bytes"], ".0f", 1e-6)),
            ]
            what = "Training step without optimizer" if training else "Inference"
            tables.append(columns(f"{what}: {self.models[0]} against others", rows, cells, labels=2))
        return tables
