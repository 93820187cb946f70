"""Measuring a model on a validation set, exactly: sums over every sample once, whatever the number of processes."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tost._io import write_json
from tost._machine import DeviceChoice
from tost._progress import Report, silent
from tost._text import html_card, number
from tost.analysis.rates import compression_by_layer
from tost.data import Dataset, make_evaluation_loader
from tost.errors import CheckpointError, ConfigError
from tost.train.checkpoint.files import read_model_tensors
from tost.train.checkpoint.model import load_initial, load_weights
from tost.train.config import RunConfig, load_config
from tost.train.distributed import Distributed
from tost.train.evaluate import TextTest
from tost.train.registry import get_task
from tost.train.task import Details, Task


@dataclass(frozen=True)
class Measurement:
    """A model on a data set.

    Attributes:
        metrics: What the task makes of the sums.
        counts: Tables that the task counted, whole: every sample is in them once.
    """

    metrics: dict[str, float]
    counts: dict[str, Tensor]


@torch.no_grad()
def measure(
    model: nn.Module,
    task: Task,
    dataset: Dataset,
    config: RunConfig,
    processes: Distributed,
    report: Report = silent,
) -> Measurement:
    """Run a model over a data set.

    Args:
        model: The model, wrapped or not; its training mode is restored.
        task: What a batch costs.
        dataset: The samples.
        config: ``evaluate.batches`` limits how many batches each process takes.
        processes: Those that share the work.
        report: Receives the batches that are done, and how many there are.
    """
    batch_size = config.evaluate.batch_size or config.train.batch_size
    loader = make_evaluation_loader(
        dataset,
        batch_size=batch_size,
        rank=processes.data_rank,
        world_size=processes.data_size,
        workers=config.data.workers,
        pin_memory=processes.pin_memory,
    )
    training = model.training
    model.eval()
    sums: dict[str, float] = {"loss": 0.0}
    counts: dict[str, Tensor] = {}
    terms = 0.0
    total = min(len(loader), config.evaluate.batches or len(loader))
    with processes.context():  # one for all batches: autocast rounds each weight once
        for done, batch in enumerate(islice(loader, total), 1):
            placed = processes.place(batch)
            result = task.compute(model, placed)
            terms += float(task.terms(placed))
            sums["loss"] += result.loss.item()
            for name, value in result.sums.items():
                sums[name] = sums.get(name, 0.0) + float(value)
            for name, table in result.counts.items():
                counts[name] = counts[name] + table if name in counts else table
            report(done, total)
    layers = {}
    if config.evaluate.telemetry:  # on the first batch, which every process runs whole
        first = next(iter(make_evaluation_loader(dataset, batch_size=batch_size)))
        whole = {name: value.to(processes.device) for name, value in first.items()}
        layers = compression_by_layer(model, lambda: task.compute(model, whole))
    model.train(training)
    processes.reshard(model)
    names = sorted(sums)
    values = torch.tensor([terms, *(sums[name] for name in names)], dtype=torch.float64, device=processes.device)
    terms, *totals = processes.sum(values).tolist()
    metrics = {**task.metrics(dict(zip(names, totals, strict=True)), terms), **layers}
    return Measurement(metrics, {name: processes.sum(counts[name]).cpu() for name in sorted(counts)})


@dataclass(frozen=True)
class Evaluation:
    """What is known about a model after its validation set was measured.

    Attributes:
        metrics: By name.
        details: Results of the task beyond them.
        counts: The tables that the details were made from.
        class_names: Names of their rows and columns; empty if the data has none.
    """

    metrics: Mapping[str, float]
    details: Details
    counts: Mapping[str, Tensor]
    class_names: tuple[str, ...]

    def _repr_html_(self) -> str:
        """Return a table for a notebook."""
        return html_card("evaluation", {name: number(value) for name, value in self.metrics.items()})

    def content(self) -> dict[str, Any]:
        """Return metrics and report as plain data for JSON; a metric that is no number is null."""
        finite = {name: value if math.isfinite(value) else None for name, value in self.metrics.items()}
        return {**finite, **self.details.content}

    def write(self, folder: Path) -> list[Path]:
        """Write ``evaluation.json``, and each table as a file of comma-separated values; return the files."""
        folder.mkdir(parents=True, exist_ok=True)
        files = [folder / "evaluation.json"]
        write_json(files[0], self.content())
        for name, table in self.counts.items():
            names = self.class_names or tuple(map(str, range(table.shape[-1])))
            files.append(folder / f"{name}.csv")
            with files[-1].open("w", newline="", encoding="utf-8") as file:
                rows = csv.writer(file)
                rows.writerow(("label", *names))
                rows.writerows((row_name, *row) for row_name, row in zip(names, table.tolist(), strict=True))
        return files


def evaluate_checkpoint(
    checkpoint: Path,
    *,
    overrides: Sequence[str] = (),
    ema: bool = False,
    test: TextTest | None = None,
    device: DeviceChoice = "auto",
    report: Report = silent,
) -> Evaluation:
    """Measure a checkpoint of a run.

    Args:
        checkpoint: A checkpoint folder inside a run folder.
        overrides: Changes to the run's configuration, as ``key=value``.
        ema: Use the moving average of the weights; what has none, such as the statistics of a batch norm, is taken as
            it is.
        test: Protocol for the text of a language model; None for the metrics of the run's task.
        device: Where to compute; ``"auto"`` takes a GPU if there is one.
        report: Receives the progress; see `measure`.

    Raises:
        CheckpointError: The checkpoint cannot be read, or does not belong to the configuration beside it.
        ConfigError: The text was prepared with another tokenizer than the training data, or cannot be measured so.
    """
    path = checkpoint.parents[1] / "config.yaml"
    if not path.is_file():
        raise CheckpointError(
            f"{checkpoint} does not lie in a run folder, so it is not known which data to measure it on; name a "
            f"configuration instead: `tost eval CONFIG train.init_from={checkpoint}`."
        )
    config = load_config(path, overrides)
    tensors = read_model_tensors(checkpoint, ema=ema)
    return _evaluate(
        config, lambda model: load_weights(model, tensors, str(checkpoint)), test, device, report, source=checkpoint
    )


def evaluate_initial(
    config: RunConfig, *, test: TextTest | None = None, device: DeviceChoice = "auto", report: Report = silent
) -> Evaluation:
    """Measure the weights that a run would start from, ``train.init_from``; see `evaluate_checkpoint`.

    Raises:
        ConfigError: The configuration names no weights, or the text cannot be measured so.
        CheckpointError: They cannot be read, or belong to another model or another number of classes.
    """
    source = config.train.init_from
    if source is None:
        raise ConfigError("a configuration has no weights to measure; add train.init_from=PATH, or name a run.")
    return _evaluate(
        config, lambda model: load_initial(model, source, lambda line: None, head="same"), test, device, report
    )


def _evaluate(
    config: RunConfig,
    load: Callable[[nn.Module], object],
    test: TextTest | None,
    device: DeviceChoice,
    report: Report,
    *,
    source: Path | None = None,
) -> Evaluation:
    if test is not None:
        from tost.train.evaluate.text import evaluate_on_text  # which imports this module

        return evaluate_on_text(config, load, test, device, report, source=source)
    task = get_task(config.recipe)
    with Distributed.join(config, device=device) as processes:
        bundle = task.build_data(config)
        model = task.build_model(config, bundle)
        load(model)
        found = measure(model.to(processes.device), task, bundle.validation, config, processes, report)
    return Evaluation(found.metrics, task.details(found.counts, bundle.info), found.counts, bundle.info.class_names)
