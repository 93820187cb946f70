"""The folder of a run: configuration, environment, metrics, results and checkpoints.

::

    runs/<name>/  config.yaml  env.json  [start.json]  metrics.jsonl  summary.json  log.txt  checkpoints/
                  [changes.jsonl]  [tokenizer_record.json  tokenizer.json]
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from tost._io import DRAFT_PREFIX, write_atomic, write_json, writing
from tost._machine import VERSION, command_arguments, cpu_model, source_revision
from tost._yaml import flatten
from tost.errors import CheckpointError, ConfigError
from tost.ops import native_info
from tost.train.checkpoint.files import CheckpointStore, resolve_checkpoint
from tost.train.checkpoint.model import InitialWeights
from tost.train.config import RunConfig, config_hash, dump_config
from tost.train.config.files import FORMAT, read_run_document

LOCK = ".lock"
STALE_SECONDS = 600
"""Age of a draft that is no longer being written."""
WRITTEN = ("config.yaml", "env.json", "start.json", "metrics.jsonl", "summary.json")
"""Files that only the run itself writes, each whole or not at all."""
FREE = (
    "backend",
    "gradient_checkpointing",
    "dropout",
    "attention_dropout",
    "head_dropout",
    "drop_path",
    "drop_path_rule",
)
"""Options of models that may change at a resume: they decide how a model is computed or trained."""
PACKAGES = ("torch", "accelerate", "numpy", "timm", "transformers", "datasets")


class RunFolder:
    """Writes the files of a run. Only the first process of a run has one.

    Args:
        path: The folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"

    @property
    def is_run(self) -> bool:
        """Whether the folder already holds a run."""
        return (self.path / "config.yaml").exists()

    def refuse_existing(self) -> None:
        """Raise if a new run would overwrite an old one."""
        if self.is_run:
            raise ConfigError(
                f"{self.path} already holds a run, and a run is never overwritten. To continue it add "
                f"`--resume auto`; to start another one give a different `--out`."
            )
        if self.path.exists() and any(path.name != LOCK for path in self.path.iterdir()):
            raise ConfigError(
                f"{self.path} is not empty and holds no run; give an empty or new folder with `--out`. If a run was "
                "killed there while it was starting, add `--resume auto`."
            )

    def find_start(self, resume: str | Path | None, report: Callable[[str], None]) -> Path | None:
        """Return the checkpoint to resume from, None for a new run. Without the lock it may change at any time.

        Args:
            resume: ``"auto"`` for the newest checkpoint here, if there is one; a checkpoint; another run; None for a
                new run.
            report: Receives a line for each damaged checkpoint, and one if there is none.

        Raises:
            ConfigError: A run here would be overwritten, or mixed with another one.
            CheckpointError: There is no such checkpoint, or it is damaged.
        """
        if resume is None:
            self.refuse_existing()
            return None
        if resume != "auto":
            found = resolve_checkpoint(Path(resume), report)
            if found.parent != self.checkpoints.resolve():
                self.refuse_existing()  # two runs would be mixed
            return found
        store = CheckpointStore(self.checkpoints)
        newest = store.newest(report)
        if newest is None:
            if damaged := store.steps():
                raise CheckpointError(
                    f"none of the {len(damaged)} checkpoints in {self.checkpoints} is whole; nothing was changed. "
                    "Restore them from a copy, or start a new run in another folder with `--out`."
                )
            if self.is_run and not (self.path / "env.json").exists():  # a run writes that first
                raise ConfigError(
                    f"{self.path} has a config.yaml that is not of a run; give another folder with `--out`."
                )
            report(f"no checkpoint in {self.path} yet, starting from the beginning")
        return newest

    @contextmanager
    def locked(self, report: Callable[[str], None]) -> Iterator[None]:
        """Keep other processes from writing to the folder, for the duration of a ``with`` block.

        The lock is the system's, on the file ``.lock``: it ends with the process, however that ends. Readers need none.

        Args:
            report: Receives a line if the file system knows no locks.

        Raises:
            ConfigError: Another process has the lock; the message names it.
            StorageError: The folder cannot be written.
        """
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            file = (self.path / LOCK).open("a+", encoding="utf-8")
        with file:
            try:
                # Unlike a lock by flock, this one is not inherited by data workers, which may outlive a killed run.
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                file.seek(0)
                raise ConfigError(
                    f"{self.path} is being written by {file.read().strip() or 'another process'}. Wait for it to end, "
                    "stop it (it saves upon SIGTERM), or give another folder with `--out`."
                ) from None
            except OSError as error:
                report(f"{self.path} cannot be locked ({error}); let no other run write to it")
            holder = f"process {os.getpid()} on {platform.node()} since {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
            with writing(self.path):
                file.truncate(0)
                file.write(holder)
                file.flush()
                os.fsync(file.fileno())  # other machines read it too
            try:
                yield
            finally:
                with suppress(OSError):
                    file.truncate(0)

    def start(self, config: RunConfig, environment: Mapping[str, Any], origin: InitialWeights | None = None) -> None:
        """Write down what was asked for, where it runs, and which weights it starts from, if not from random ones."""
        with writing(self.path):
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            write_json(self.path / "env.json", {"format": FORMAT, **environment, "config_hash": config_hash(config)})
            if origin is not None:
                write_json(self.path / "start.json", asdict(origin))
            write_atomic(self.path / "config.yaml", dump_config(config))

    def drop_after(self, step: int) -> None:
        """Drop records of steps that the run will take again, and what an interrupted write left."""
        with writing(self.path):
            for draft in self.path.glob(f"{DRAFT_PREFIX}*"):
                # A recent draft of another file may belong to a command that writes here now.
                is_ours = any((draft / name).exists() for name in WRITTEN)
                if is_ours or time.time() - draft.stat().st_mtime > STALE_SECONDS:
                    shutil.rmtree(draft)
        path = self.path / "metrics.jsonl"
        if path.exists():
            with writing(path):
                lines = path.read_text("utf-8", errors="replace").splitlines()
                write_atomic(path, "".join(f"{line}\n" for line in lines if _is_until(step, line)))

    def record(self, value: Mapping[str, Any], name: str = "metrics.jsonl") -> None:
        """Append one record to ``metrics.jsonl``, or to another file of that kind."""
        self.log(json.dumps(value), name)

    def log(self, line: str, name: str = "log.txt") -> None:
        """Append one line to ``log.txt``, or to another file."""
        path = self.path / name
        with writing(path), path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(line + "\n")

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write ``summary.json``."""
        with writing(self.path):
            write_json(self.path / "summary.json", summary, allow_nan=True)


def _is_until(step: int, line: str) -> bool:
    try:
        return bool(json.loads(line)["step"] <= step)
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


def changed_settings(folder: Path, config: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Return the settings, by dotted key, that a run has changed since it wrote its folder: old and new value.

    A key that only one of the two has is another version's, and its meaning is the default.
    """
    if not (path := folder / "config.yaml").is_file():
        return {}
    old, new = flatten(read_run_document(path).values), flatten(config.model_dump(mode="json"))
    return {key: (old[key], new[key]) for key in old if key in new and old[key] != new[key]}


def check_changes(changes: Mapping[str, tuple[Any, Any]], checkpoint: str) -> None:
    """Raise if settings were changed with which a checkpoint means something else.

    Raises:
        CheckpointError: The task or what the model computes is another one.
    """
    free = {f"model.{option}" for option in FREE}
    if wrong := [key for key in changes if key.partition(".")[0] in ("recipe", "model") and key not in free]:
        listed = ", ".join(f"{key}: {changes[key][0]} -> {changes[key][1]}" for key in wrong)
        raise CheckpointError(
            f"{checkpoint} belongs to another model ({listed}). Resume with the configuration that the run was started "
            "with; train.init_from starts a new run from its weights."
        )


def describe_environment(device: torch.device, processes: int) -> dict[str, Any]:
    """Return versions, processor, threads, the operator's implementation and the command, without private paths."""
    versions = {"tost": VERSION}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "versions": versions,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu_model(),
        "threads": torch.get_num_threads(),
        "processes": processes,
        "device": str(device),
        "native": native_info(),
        "command": ["tost", *command_arguments()],
        "revision": source_revision(),
    }
