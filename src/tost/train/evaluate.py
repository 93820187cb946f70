"""Measuring a model on a validation set, exactly: sums over every sample once, whatever the number of processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

import torch
from torch import nn

from tost.data import Dataset, make_evaluation_loader
from tost.train.checkpoint import read_model_tensors
from tost.train.config import RunConfig, load_config
from tost.train.distributed import Processes
from tost.train.task import Task
from tost.train.telemetry import compression_by_layer

__all__ = ["evaluate", "evaluate_checkpoint"]


@torch.no_grad()
def evaluate(
    model: nn.Module, task: Task, dataset: Dataset, config: RunConfig, processes: Processes
) -> dict[str, float]:
    """Return the metrics of a model on a data set.

    Args:
        model: The model, wrapped or not; its training mode is restored.
        task: What a batch costs.
        dataset: The samples.
        config: ``evaluate.batches`` limits how many batches each process takes.
        processes: Those that share the work.
    """
    loader = make_evaluation_loader(
        dataset,
        batch_size=config.evaluate.batch_size or config.train.batch_size,
        rank=processes.data_rank,
        world_size=processes.data_size,
        workers=config.data.workers,
    )
    training = model.training
    model.eval()
    sums: dict[str, float] = {"loss": 0.0}
    terms = 0.0
    for batch in islice(loader, config.evaluate.batches):
        placed = processes.place(batch)
        with processes.context():
            outcome = task.outcome(model, placed)
        terms += task.terms(placed)
        sums["loss"] += outcome.loss.item()
        for name, value in outcome.sums.items():
            sums[name] = sums.get(name, 0.0) + float(value)
    layers = _look_inside(model, task, dataset, config, processes) if config.evaluate.telemetry else {}
    model.train(training)
    processes.reshard(model)
    totals = {name: processes.total(sums[name]) for name in sorted(sums)}
    return {**task.metrics(totals, processes.total(terms)), **layers}


def _look_inside(
    model: nn.Module, task: Task, dataset: Dataset, config: RunConfig, processes: Processes
) -> dict[str, float]:
    """Return the compression term by layer on the first validation batch, which every process runs whole."""
    batch = next(
        iter(make_evaluation_loader(dataset, batch_size=config.evaluate.batch_size or config.train.batch_size))
    )
    whole = {name: value.to(processes.device) for name, value in batch.items()}
    return compression_by_layer(model, lambda: task.outcome(model, whole))


def evaluate_checkpoint(
    checkpoint: Path, get_task: Callable[[str], Task], *, overrides: Sequence[str], ema: bool
) -> dict[str, float]:
    """Build the model of a run, load a checkpoint of it, and measure it on the validation set.

    Args:
        checkpoint: A checkpoint folder inside a run folder.
        get_task: Looks up a recipe's task by name.
        overrides: Changes to the run's configuration, as ``key=value``.
        ema: Use the moving average of the weights.

    Raises:
        CheckpointError: The checkpoint cannot be read, or does not belong to the configuration beside it.
    """
    config = load_config(str(checkpoint.parents[1] / "config.yaml"), overrides)
    task = get_task(config.recipe)
    with Processes.join(config) as processes:
        bundle = task.build_data(config)
        model = task.build_model(config, bundle)
        model.load_state_dict(read_model_tensors(checkpoint, ema=ema), strict=not ema)
        return evaluate(model.to(processes.device), task, bundle.validation, config, processes)
