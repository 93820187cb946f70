"""The machine, the software and the time of a measurement."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from datetime import UTC, datetime

import torch

import tost
from tost._env import VARIABLES
from tost._machine import available_cpus, cpu_model, source_revision
from tost._text import count
from tost.ops import available_backends, native_info, operators


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Machine, software and moment of a measurement.

    Attributes:
        cpu: Model of the processor.
        cores: Logical processors that this process may use.
        threads: Threads that torch uses for one operation.
        load: Average number of busy processes in the minute before, None where the system has no such number.
        system: Operating system and architecture.
        python: Version of Python.
        torch: Version of torch.
        tost: Version of this package.
        revision: Git revision of this package, ending in ``-dirty`` when files differ from it; None outside a checkout.
        backends: By operator, every backend with "ready" or the reason it is not, fastest first.
        native: What is known about the native kernel.
        variables: Environment variables of this package that are set.
        measured: When, in UTC.
    """

    cpu: str
    cores: int
    threads: int
    load: float | None
    system: str
    python: str
    torch: str
    tost: str
    revision: str | None
    backends: dict[str, dict[str, str]]
    native: dict[str, str]
    variables: dict[str, str]
    measured: str

    @property
    def slug(self) -> str:
        """Short name of the machine for file names."""
        words = re.sub(r"[^a-z0-9]+", "-", self.cpu.lower()).strip("-")
        return f"{words}-{self.threads}t"

    @property
    def month(self) -> str:
        """Year and month of the measurement, ``yyyymm``."""
        return self.measured[:7].replace("-", "")

    @property
    def summary(self) -> str:
        """One line: processor, threads and versions."""
        revision = f" ({self.revision})" if self.revision else ""
        return f"{self.cpu}, {count(self.threads, 'thread')} | torch {self.torch} | tost {self.tost}{revision}"


def describe_environment() -> Environment:
    """Return the environment of this process as it is now."""
    return Environment(
        cpu=cpu_model(),
        cores=available_cpus(),
        threads=torch.get_num_threads(),
        load=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        torch=torch.__version__,
        tost=tost.__version__,
        revision=source_revision(),
        backends={op: available_backends(op) for op in operators()},
        native=native_info(),
        variables={variable.name: variable.get() for variable in VARIABLES if variable.name in os.environ},
        measured=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    )
