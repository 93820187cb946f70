"""The machine and the software: processor, memory limits, version and source revision, as measurements record them."""

from __future__ import annotations

import errno
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

VERSION = "0.1.0"
"""Version of this package; pyproject.toml reads it from here."""

# What torch, its libraries and the system say when no memory is left. The last one may have another cause, rarely.
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
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        match = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), flags=re.MULTILINE)
        if match:
            return re.sub(r"\((?:R|TM)\)|\bCPU\b|@.*", "", match[1]).strip()
    return platform.processor() or platform.machine()


def source_revision() -> str | None:
    """Return the git revision of the checkout that this package is imported from, None if it is not in one."""
    root = Path(__file__).resolve().parents[2]
    # An installed copy may lie inside the checkout of another project, whose revision is not that of this package.
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
    return [_shortened(argument) for argument in sys.argv[1:]]


def _shortened(argument: str) -> str:
    key, equals, value = argument.rpartition("=")
    return f"{key}{equals}{Path(value).name}" if Path(value).is_absolute() else argument


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error means that there was not enough memory; torch has no class for it on CPUs."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _NO_MEMORY)
