"""How many threads to use and how they wait: settings that are read once, when torch is loaded. Loads no torch.

A thread that waits for another one by spinning is quick on an idle machine and ruinous on a busy one, where the other
may not be running: GNU OpenMP spins for milliseconds at each of the hundreds of meetings of a training step. Here it
spins for about as long as going to sleep and being woken takes, and then sleeps. When it is woken, all others wait for
it while another process uses up its time slice. Threads that ask for short slices themselves are let in before that;
their share of the processor is the same. `import tost` arranges both, unless torch was loaded before it or the
environment says otherwise.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import sys
from pathlib import Path

WAITING = {"GOMP_SPINCOUNT": "30000", "KMP_BLOCKTIME": "1"}
"""How GNU OpenMP (turns of a loop, 0.3 to 1.5 ms) and LLVM's (milliseconds) wait before they sleep."""

TIME_SLICE = 100_000
"""Time slice to ask for, in nanoseconds: the shortest that Linux grants."""

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


def prepare() -> None:
    """Set OpenMP's variables for this process and its children, unless they are set or it is too late."""
    if "torch" in sys.modules:
        return
    if not any(name in os.environ for name in (*WAITING, "OMP_WAIT_POLICY")):
        os.environ.update(WAITING)
        set_time_slice(TIME_SLICE)
    # OpenMP knows which processors it may use, but not how much of them a container gets.
    if "OMP_NUM_THREADS" not in os.environ and available_cpus() < _allowed_cpus():
        os.environ["OMP_NUM_THREADS"] = str(available_cpus())


class _Scheduling(ctypes.Structure):
    """Linux's ``struct sched_attr``; for ordinary processes `runtime` is the time slice, and the last two are 0."""

    _fields_ = (
        *(("size", ctypes.c_uint32), ("policy", ctypes.c_uint32), ("flags", ctypes.c_uint64)),
        *(("nice", ctypes.c_int32), ("priority", ctypes.c_uint32)),
        *((name, ctypes.c_uint64) for name in ("runtime", "deadline", "period")),
    )


# Numbers of the system calls sched_setattr and sched_getattr, for which few C libraries have functions.
_SYSTEM_CALLS = {"x86_64": (314, 315), "aarch64": (274, 275)}
_ORDINARY = 0  # SCHED_OTHER


def time_slice() -> int | None:
    """Return the time slice of this thread in nanoseconds; None where the system does not tell."""
    found = _scheduling()
    return None if found is None or found.runtime == 0 else found.runtime


def _scheduling() -> _Scheduling | None:
    """Return how this thread is scheduled; None if that is not known, or not as ordinary processes are."""
    if sys.platform != "linux" or platform.machine() not in _SYSTEM_CALLS:
        return None
    found, (_, number) = _Scheduling(), _SYSTEM_CALLS[platform.machine()]
    failed = ctypes.CDLL(None).syscall(number, 0, ctypes.byref(found), ctypes.sizeof(found), 0)
    return None if failed or found.policy != _ORDINARY else found


def set_time_slice(nanoseconds: int) -> None:
    """Ask for a time slice for this thread and what it starts; 0 for the usual one. Linux has this since 6.12."""
    wanted = _scheduling()
    if wanted is not None and wanted.runtime > 0:
        wanted.size, wanted.runtime = ctypes.sizeof(wanted), nanoseconds
        ctypes.CDLL(None).syscall(_SYSTEM_CALLS[platform.machine()][0], 0, ctypes.byref(wanted), 0)


def available_cpus() -> int:
    """Return how many processors this process may keep busy: those it may run on, within the limit of its container."""
    quota = _quota()
    return _allowed_cpus() if quota is None else max(1, min(_allowed_cpus(), math.floor(quota)))


def _allowed_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _quota() -> float | None:
    """Return the smallest limit of the control groups that this process is in, in processors; None without any."""
    try:
        lines = _OWN_CGROUPS.read_text().splitlines()
    except OSError:
        return None
    found: list[float] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = _CGROUPS if not controllers else _CGROUPS / "cpu"
        # A container may see its own group as the root, and the limit may be that of a group around it.
        group = Path(path.lstrip("/"))
        folders = [root / group, *(root / parent for parent in group.parents), root]
        found += [limit for folder in folders if (limit := _limit(folder)) is not None]
    return min(found, default=None)


def _limit(folder: Path) -> float | None:
    """Return the limit of one control group, version 2 or 1; None if there is none."""
    try:
        if (file := folder / "cpu.max").exists():
            quota, period = file.read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return None if quota.strip() in ("max", "-1") else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None
