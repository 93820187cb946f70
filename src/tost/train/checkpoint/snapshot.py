"""What a checkpoint holds, and how a run puts it back: weights, optimiser, averages, data position, random numbers.

Tensors are stored whole and by parameter name, also when the run shards them, so that a run may go on with another
number of processes. Everything that decides what comes next is included: a run that was cut anywhere takes exactly the
steps that it would have taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from tost.data import Loader
from tost.errors import CheckpointError, StorageError
from tost.train.checkpoint.files import (
    CheckpointStore,
    load_tensors,
    pack_rng,
    read_json,
    restore_rng,
    save_tensors,
    write_json,
)
from tost.train.distributed import Processes
from tost.train.ema import WeightAverage

__all__ = ["Parts", "Snapshot", "restore", "save"]

_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclass(frozen=True)
class Snapshot:
    """The small numbers of a checkpoint.

    Attributes:
        step: Optimiser steps done.
        metrics: The last validation metrics.
        best: The best value so far of the metric that the run is judged by.
    """

    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    best: float | None = None


@dataclass(frozen=True)
class Parts:
    """The parts of a run whose state decides how it goes on.

    Attributes:
        model: The model as the processes hold it: plain, wrapped or sharded.
        optimizer: Its optimiser.
        average: The moving average of its weights, if the run keeps one.
        loader: The training data and the position in it.
        fingerprint: Identifies the content of the training data.
        processes: Those that take part.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    average: WeightAverage | None
    loader: Loader
    fingerprint: str
    processes: Processes


def save(store: CheckpointStore, snapshot: Snapshot, parts: Parts, *, best: bool) -> None:
    """Write a checkpoint of everything that decides how the run goes on.

    Raises:
        StorageError: The disk is full or cannot be written; the checkpoints before are untouched.
    """
    processes, average, scaler = parts.processes, parts.average, parts.processes.accelerator.scaler
    tensors, groups = _optimizer_tensors(parts.model, parts.optimizer)
    weights = cast(dict[str, Tensor], get_model_state_dict(parts.model, options=_WHOLE))
    averages = {} if average is None else {name: _whole(x) for name, x in average.average.items()}
    state = {
        **asdict(snapshot),
        "groups": groups,
        "data": parts.fingerprint,
        "loader": parts.loader.state_dict(),
        "processes": processes.size,
        "scaler": None if scaler is None else scaler.state_dict(),
    }
    temporary = store.begin(snapshot.step)
    try:
        if processes.is_first:
            store.prepare(snapshot.step)
            save_tensors(temporary / "model.safetensors", weights)
            save_tensors(temporary / "optimizer.safetensors", tensors)
            if average is not None:
                save_tensors(temporary / "ema.safetensors", averages)
            write_json(temporary / "state.json", state)
        processes.wait()
        write_json(temporary / f"random-{processes.rank:05d}.json", pack_rng())
        processes.wait()
        if processes.is_first:
            store.commit(snapshot.step, best=best)
        processes.wait()
    except OSError as error:
        if processes.is_first:
            store.discard(snapshot.step)
        raise StorageError(
            f"cannot write the checkpoint of step {snapshot.step} to {store.folder}: {error}. "
            "The checkpoints before it are intact; make room and go on with `--resume auto`."
        ) from error


def restore(path: Path, parts: Parts) -> Snapshot:
    """Put a checkpoint back into a run that was just built from its configuration.

    Raises:
        CheckpointError: The checkpoint belongs to another model or another kind of run.
    """
    state = read_json(path / "state.json")
    processes, average, scaler = parts.processes, parts.average, parts.processes.accelerator.scaler
    if state["data"] != parts.fingerprint:
        raise CheckpointError(
            f"{path.name} was trained on other data: its fingerprint is {state['data'][:12]}, that of the data here is "
            f"{parts.fingerprint[:12]}. Resume with the same data set, options and seed."
        )
    if average is not None and not (path / "ema.safetensors").exists():
        raise CheckpointError(
            f"{path.name} holds no moving average, but train.ema_decay={average.decay}; resume without "
            "train.ema_decay, or from a run that had it."
        )
    _load_model(path, parts.model)
    options = StateDictOptions(full_state_dict=True)
    set_optimizer_state_dict(parts.model, parts.optimizer, _optimizer_state(path, state["groups"]), options=options)
    if average is not None:
        average.load(load_tensors(path / "ema.safetensors"))
    if scaler is not None and state["scaler"] is not None:
        scaler.load_state_dict(state["scaler"])
    parts.loader.load_state_dict(state["loader"])
    randomness = path / f"random-{processes.rank:05d}.json"
    if state["processes"] == processes.size and randomness.exists():
        restore_rng(read_json(randomness))
    return Snapshot(step=state["step"], metrics=state["metrics"], best=state["best"])


def _whole(tensor: Tensor) -> Tensor:
    """Return a tensor with all its shards."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], Any]:
    """Return the optimiser's tensors as ``parameter/quantity``, and its groups as JSON values."""
    state = cast(dict[str, Any], get_optimizer_state_dict(model, optimizer, options=_WHOLE))
    if not state:  # only the first process receives whole tensors
        return {}, []
    tensors = {
        f"{name}/{key}": value if isinstance(value, Tensor) else torch.tensor(value)
        for name, quantities in state["state"].items()
        for key, value in quantities.items()
    }
    return tensors, state["param_groups"]


def _optimizer_state(path: Path, groups: Any) -> dict[str, Any]:
    state: dict[str, dict[str, Tensor]] = {}
    for name, tensor in load_tensors(path / "optimizer.safetensors").items():
        parameter, _, quantity = name.rpartition("/")
        state.setdefault(parameter, {})[quantity] = tensor
    groups = [{**group, "betas": tuple(group["betas"])} if "betas" in group else group for group in groups]
    return {"state": state, "param_groups": groups}


def _load_model(path: Path, model: nn.Module) -> None:
    tensors = load_tensors(path / "model.safetensors")
    here = cast(dict[str, Tensor], get_model_state_dict(model))
    expected = {name: tuple(x.shape) for name, x in here.items()}
    found = {name: tuple(x.shape) for name, x in tensors.items()}
    if expected != found:
        names = sorted({*expected, *found})
        wrong = [name for name in names if expected.get(name) != found.get(name)]
        example = wrong[0]
        raise CheckpointError(
            f"{path.name} belongs to another model: {len(wrong)} of {len(expected)} tensors differ, for example "
            f"{example} is {found.get(example, 'missing')} there and {expected.get(example, 'unknown')} here. "
            "Resume with the configuration that the run was started with."
        )
    set_model_state_dict(model, cast(dict[str, Any], tensors), options=StateDictOptions(full_state_dict=True))
