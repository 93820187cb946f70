"""The machine and the software: processors and their limits, memory errors, version and source revision. No torch."""

from __future__ import annotations

import errno
import math
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tost.errors import ConfigError

if TYPE_CHECKING:
    import torch

VERSION = "0.1.0"
"""Version of this package; pyproject.toml reads it from here."""

# Messages of torch, its libraries and the system without memory. The last one may have another cause, rarely.
_NO_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "bad_alloc",
    "storage size calculation overflowed",
    "could not create a primitive",
)


def cpu_model() -> str:
    """Return the marketing name of the processor, or its architecture where the system does not provide it."""
    if found := _cpuinfo("model name"):
        return re.sub(r"\((?:R|TM)\)|\bCPU\b|@.*", "", found).strip()
    return platform.processor() or platform.machine()


def _cpuinfo(field: str) -> str:
    """Return a field of the first processor as Linux describes it; empty where there is none."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    match = re.search(rf"^{field}\s*:\s*(.+)$", text, flags=re.MULTILINE)
    return match[1] if match else ""


_BF16_FLAGS = {"avx512_bf16", "amx_bf16"}
_READING_SECONDS = 0.1
_WAITING = {"GOMP_SPINCOUNT": "30000", "KMP_BLOCKTIME": "1"}
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


def limit_threads(number: str = "") -> None:
    """Set OpenMP's variables of this process and its children, unless they are set; called by the command line only.

    Waiting threads spin for about a millisecond and then sleep: spinning is ruinous on a busy machine. Their number
    stays within the limit of a container, unless one is given. Has no effect once torch is loaded.

    Args:
        number: Threads, as ``TOST_NUM_THREADS`` has them; empty for the default.

    Raises:
        ConfigError: It is no positive whole number.
    """
    if not any(name in os.environ for name in (*_WAITING, "OMP_WAIT_POLICY")):
        os.environ.update(_WAITING)
    if number:
        if not re.fullmatch(r"0*[1-9][0-9]{0,3}", number):
            raise ConfigError(f"TOST_NUM_THREADS={number!r} is no number of threads; set it to 1 or more, or unset it.")
        os.environ["OMP_NUM_THREADS"] = number
    elif available_cpus() < _allowed_cpus():
        os.environ.setdefault("OMP_NUM_THREADS", str(available_cpus()))


def available_cpus() -> int:
    """Return the number of processors for this process, within the limit of its container (control groups, version 2).

    Limits of the groups around its own count, as far as they are visible.
    """
    limits = [float(_allowed_cpus())]
    try:
        own = re.findall(r"^0::/(.*)$", _OWN_CGROUPS.read_text(encoding="utf-8"), flags=re.MULTILINE)
    except OSError:
        own = []
    for folder in [parent for path in own for parent in (Path(path), *Path(path).parents)]:
        try:
            quota, period = (_CGROUPS / folder / "cpu.max").read_text(encoding="utf-8").split()
            limits.append(int(quota) / int(period))
        except (OSError, ValueError, ZeroDivisionError):
            continue  # no such file, or "max": no limit
    return max(1, math.floor(min(limits)))


def _allowed_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def source_revision() -> str | None:
    """Return the git revision of the checkout that this package is imported from, None if it is not in one."""
    root = Path(__file__).resolve().parents[2]
    # An installed copy may lie inside the checkout of another project, whose revision is another one.
    if not (root / ".git").exists() or not (root / "src" / "tost").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=10"]
    try:
        # Without optional locks, describing a checkout does not disturb other uses of it.
        environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10, env=environment)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def command_arguments() -> list[str]:
    """Return the arguments of this process, absolute paths cut to their last part: results are published."""
    pairs = [argument.rpartition("=") for argument in sys.argv[1:]]
    return [f"{key}{equals}{Path(text).name if Path(text).is_absolute() else text}" for key, equals, text in pairs]


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means too little memory; torch has no class for it on CPUs."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _NO_MEMORY)


DeviceChoice = Literal["auto", "cpu", "cuda"]
"""A device by name; ``auto`` is a GPU if there is one, or else the CPU."""


def choose_device(wanted: str) -> torch.device:
    """Return the device for a `DeviceChoice`; loads torch.

    Raises:
        ConfigError: ``cuda`` was requested, but there is no GPU.
    """
    import torch

    present = torch.cuda.is_available()
    if wanted == "cuda" and not present:
        raise ConfigError("--device cuda was given, but torch finds no CUDA device here; use --device cpu or auto.")
    return torch.device("cuda" if present and wanted != "cpu" else "cpu")


def fast_precision(device: torch.device) -> Literal["fp32", "bf16"]:
    """Return the precision of ``auto``: bf16 where the device has instructions for its products, or else fp32.

    CPUs have them with AVX512-BF16 or AMX, NVIDIA GPUs from compute capability 8.0. Loads torch.
    """
    import torch

    if device.type == "cuda":
        fast = torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        flags = set(_cpuinfo("flags").split())
        mkldnn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        fast = device.type == "cpu" and mkldnn and bool(flags & _BF16_FLAGS)
    return "bf16" if fast else "fp32"


def read_bandwidth(size: int) -> float:
    """Return the bytes per second at which memory of `size` bytes is read again and again on the CPU. Loads torch."""
    import torch

    memory = torch.zeros(max(1, size // 4))
    best, began = math.inf, time.perf_counter()
    while time.perf_counter() - began < _READING_SECONDS:
        start = time.perf_counter()
        memory.sum()
        best = min(best, time.perf_counter() - start)
    return memory.nbytes / best
