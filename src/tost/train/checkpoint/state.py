"""Content of a checkpoint: weights, optimizer, averages, position in the data, random numbers.

Tensors are stored whole and by parameter name, also when the run shards them, so that a run may resume with another
number of processes. Everything that decides what comes next is included: a resumed run takes exactly the steps that it
would have taken without the interruption.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint.state_dict as states
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tost._io import read_json, write_json
from tost._machine import is_out_of_memory
from tost.data import Loader
from tost.errors import CheckpointError, StorageError, TostError
from tost.train.checkpoint.files import (
    AVERAGES,
    WEIGHTS,
    CheckpointStore,
    check_fit,
    load_tensors,
    pack_rng,
    restore_rng,
    save_tensors,
)
from tost.train.config.files import FORMAT, check_format
from tost.train.distributed import Distributed
from tost.train.optim import WeightAverage

_WHOLE = states.StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclass(frozen=True)
class Position:
    """How far a run has come.

    Attributes:
        step: Optimizer steps done.
        metrics: The last validation metrics.
        best: The best value so far of the metric that the run is judged by.
    """

    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    best: float | None = None


@dataclass(frozen=True)
class RunState:
    """The parts of a run whose state a checkpoint holds.

    Attributes:
        model: The model as the processes hold it: plain, wrapped or sharded.
        optimizer: Its optimizer.
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
    processes: Distributed


def save_checkpoint(store: CheckpointStore, position: Position, run: RunState, *, best: bool) -> None:
    """Write a checkpoint of everything that an exact resume needs.

    Raises:
        StorageError: The disk is full or cannot be written; the checkpoints before are untouched.
    """
    processes, average, scaler = run.processes, run.average, run.processes.accelerator.scaler
    optimizer = cast(dict[str, Any], states.get_optimizer_state_dict(run.model, run.optimizer, options=_WHOLE))
    tensors = {
        f"{name}/{key}": value if isinstance(value, Tensor) else torch.tensor(value)
        for name, quantities in optimizer.get("state", {}).items()  # only the first process receives whole tensors
        for key, value in quantities.items()
    }
    weights = cast(dict[str, Tensor], states.get_model_state_dict(run.model, options=_WHOLE))
    averages = {} if average is None else average.average
    averages = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in averages.items()}
    state = {
        "format": FORMAT,
        **asdict(position),
        "groups": optimizer.get("param_groups", []),
        "data": run.fingerprint,
        "loader": run.loader.state_dict(),
        "processes": processes.size,
        "scaler": None if scaler is None else scaler.state_dict(),
    }
    temporary = store.begin(position.step)
    try:
        with processes.together():
            if processes.is_first:
                store.prepare(position.step)
                save_tensors(temporary / WEIGHTS, weights)
                save_tensors(temporary / "optimizer.safetensors", tensors)
                if average is not None:
                    save_tensors(temporary / AVERAGES, averages)
                write_json(temporary / "state.json", state, allow_nan=True)
        with processes.together():
            write_json(temporary / f"random-{processes.rank:05d}.json", pack_rng())
        with processes.together():
            if processes.is_first:
                store.commit(position.step, best=best)
    except OSError as error:
        if processes.is_first:
            store.discard(position.step)
        raise StorageError(
            f"cannot write the checkpoint of step {position.step} to {store.folder}: {error}. "
            "The checkpoints before it are intact; make room and continue with `--resume auto`."
        ) from error


class _LoaderState(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    global_position: int = Field(ge=0, le=10**15)


class _State(BaseModel):
    """Content of ``state.json``. Its hash is right, but anyone can make hashes."""

    model_config = ConfigDict(strict=True)

    step: int = Field(ge=0, le=10**12)
    metrics: dict[str, float]
    best: float | None
    groups: list[dict[str, Any]]
    data: str
    loader: _LoaderState
    processes: int
    scaler: dict[str, Any] | None


def restore_checkpoint(
    path: Path, run: RunState, *, accept_data_change: bool = False
) -> tuple[Position, dict[str, tuple[Any, Any]]]:
    """Put a checkpoint back into a run that was just built from its configuration.

    Args:
        path: The checkpoint.
        run: The run.
        accept_data_change: Resume although the content of the data set has changed.

    Returns:
        The position, and the changes of the data: old and new value by name.

    Raises:
        CheckpointError: The checkpoint belongs to another model or another kind of run, the data has changed, or
            something in the checkpoint is not what this code writes.
    """
    try:
        return _restore(path, run, accept_data_change)
    except TostError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, AssertionError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        raise CheckpointError(
            f"{path} was not written by tost, or was changed since: {type(error).__name__}: {error}. Use another "
            "checkpoint of the run."
        ) from error


def _restore(path: Path, run: RunState, accept_data_change: bool) -> tuple[Position, dict[str, tuple[Any, Any]]]:
    content = read_json(path / "state.json", error=CheckpointError)
    check_format(content.get("format", 1), path.name)
    try:
        state = _State.model_validate(content)
    except ValidationError as error:
        wrong = [f"{'.'.join(map(str, entry['loc']))}: {entry['msg']}" for entry in error.errors()]
        raise ValueError(f"state.json: {'; '.join(wrong)}") from None
    best = state.best if state.best is None or math.isfinite(state.best) else None
    position = Position(step=state.step, metrics=state.metrics, best=best)
    processes, average, scaler = run.processes, run.average, run.processes.accelerator.scaler
    loader, here = state.loader.model_dump(), run.loader.state_dict()
    changes: dict[str, tuple[Any, Any]] = {}
    if state.data != run.fingerprint:
        changes["data (fingerprint)"] = (state.data[:12], run.fingerprint[:12])
        if loader.get("samples") != here["samples"]:
            changes["data (training samples)"] = (loader.get("samples"), here["samples"])
        if not accept_data_change:
            differing = ", ".join(f"{name}: {old} -> {new}" for name, (old, new) in changes.items())
            raise CheckpointError(
                f"{path.name} was trained on other data: {differing}. Resume with the same data set, options and seed. "
                "If files were repaired or removed on purpose, add --accept-data-change; the order of samples is then "
                "that of the data here."
            )
        loader["samples"] = here["samples"]
    if average is not None and not (path / AVERAGES).exists():
        raise CheckpointError(
            f"{path.name} holds no moving average, but train.ema_decay={average.decay}; resume without "
            "train.ema_decay, or from a run that had it."
        )
    options = states.StateDictOptions(full_state_dict=True)
    expected = cast(dict[str, Tensor], states.get_model_state_dict(run.model))
    weights: dict[str, Any] = {**load_tensors(path / WEIGHTS)}
    check_fit(expected, weights, path.name, "resume with the configuration that the run was started with")
    states.set_model_state_dict(run.model, weights, options=options)
    groups = _optimizer_state(path, state.groups, run.model)
    states.set_optimizer_state_dict(run.model, run.optimizer, groups, options=options)
    if average is not None:
        average.load(load_tensors(path / AVERAGES))
    if scaler is not None and state.scaler is not None:
        scaler.load_state_dict(state.scaler)
    try:
        run.loader.load_state_dict(loader)
    except ValueError as error:
        raise CheckpointError(f"{path.name} cannot be resumed here: {error}") from error
    randomness = path / f"random-{processes.rank:05d}.json"
    if state.processes == processes.size and randomness.exists():
        restore_rng(read_json(randomness, error=CheckpointError))
    return position, changes


def _optimizer_state(path: Path, groups: Any, model: nn.Module) -> dict[str, Any]:
    known = states.get_model_state_dict(model)
    state: dict[str, dict[str, Tensor]] = {}
    for name, tensor in load_tensors(path / "optimizer.safetensors").items():
        parameter, _, quantity = name.rpartition("/")
        state.setdefault(parameter, {})[quantity] = tensor
    groups = [{**group, "betas": tuple(group["betas"])} if "betas" in group else group for group in groups]
    listed = [name for group in groups for name in group["params"]]
    if strangers := ({*listed, *state} - known.keys()) | (state.keys() - {*listed}):
        raise ValueError(
            f"the optimizer has parameters that the model does not have: {', '.join(sorted(strangers)[:5])}"
        )
    return {"state": state, "param_groups": groups}
