"""How many threads to use and how they wait: settings that OpenMP reads once, when torch is loaded. Loads no torch.

A thread that waits for another one by spinning is quick on an idle machine and ruinous on a busy one, where the other
may not be running: GNU OpenMP spins for milliseconds at each of the hundreds of meetings of a training step. Here it
spins for about as long as going to sleep and being woken takes, and then sleeps. `import tost` arranges this, unless
torch was loaded before it or the environment says otherwise.
"""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

WAITING = {"GOMP_SPINCOUNT": "30000", "KMP_BLOCKTIME": "1"}
"""How GNU OpenMP (turns of a loop, 0.3 to 1.5 ms) and LLVM's (milliseconds) wait before they sleep."""

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


def prepare() -> None:
    """Set OpenMP's variables for this process and its children, unless they are set or it is too late."""
    if "torch" in sys.modules:
        return
    if not any(name in os.environ for name in (*WAITING, "OMP_WAIT_POLICY")):
        os.environ.update(WAITING)
    # OpenMP knows which processors it may use, but not how much of them a container gets.
    if "OMP_NUM_THREADS" not in os.environ and available_cpus() < _allowed_cpus():
        os.environ["OMP_NUM_THREADS"] = str(available_cpus())


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
