"""The folder of a run: configuration, environment, metrics, results and checkpoints.

::

    runs/<name>/  config.yaml  env.json  [start.json]  metrics.jsonl  summary.json  log.txt  checkpoints/
                  [tokenizer_record.json  tokenizer.json]
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from tost._io import write_atomic, write_json
from tost._machine import command_arguments, cpu_model, source_revision
from tost.errors import ConfigError
from tost.ops import native_info
from tost.train.checkpoint.initial import InitialWeights
from tost.train.config import RunConfig, config_hash, dump_config
from tost.train.config.upgrade import FORMAT

PACKAGES = ("torch", "accelerate", "torchdata", "numpy", "timm", "transformers", "datasets")


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
        if self.path.exists() and any(self.path.iterdir()):
            raise ConfigError(f"{self.path} is not empty and holds no run; give an empty or new folder with `--out`.")

    def start(self, config: RunConfig, environment: Mapping[str, Any], origin: InitialWeights | None = None) -> None:
        """Write down what was asked for, where it runs, and which weights it starts from, if not from random ones."""
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        write_atomic(self.path / "config.yaml", dump_config(config))
        write_json(self.path / "env.json", {"format": FORMAT, **environment, "config_hash": config_hash(config)})
        if origin is not None:
            write_json(self.path / "start.json", asdict(origin))

    def drop_after(self, step: int) -> None:
        """Drop records of steps that a resumed run will take again."""
        path = self.path / "metrics.jsonl"
        if not path.exists():
            return
        kept = []
        for line in path.read_text().splitlines():
            try:
                record = json.loads(line)
            except ValueError:  # the last line of an interrupted write
                continue
            if record["step"] <= step:
                kept.append(line)
        write_atomic(path, "".join(f"{line}\n" for line in kept))

    def record(self, value: Mapping[str, Any]) -> None:
        """Append one record to ``metrics.jsonl``."""
        with (self.path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(value) + "\n")

    def log(self, line: str) -> None:
        """Append one line to ``log.txt``."""
        with (self.path / "log.txt").open("a") as file:
            file.write(line + "\n")

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write ``summary.json``."""
        write_json(self.path / "summary.json", summary, allow_nan=True)


def describe_environment(device: torch.device, processes: int) -> dict[str, Any]:
    """Return versions, processor, threads, the operator's implementation and the command, without private paths."""
    versions = {}
    for package in ("tost", *PACKAGES):
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
