"""Whether ``backend="auto"`` may take the Triton kernels on this machine: a record that `tost bench gpu-check` writes.

The record is one JSON file in the user's cache folder. It names the device and the versions that passed; any other
device or version has to pass again. Of several GPUs of different kinds every one has to.
"""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from tost._io import read_json, write_json
from tost._machine import VERSION
from tost.errors import TostError


def record_path() -> Path:
    """Return where the record is kept: ``tost/gpu-check.json`` in ``XDG_CACHE_HOME`` or ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tost" / "gpu-check.json"


def subject(device: int | None = None) -> dict[str, str]:
    """Return what an approval is for: a GPU, the current one if None, and the versions of torch, triton and tost."""
    found = {"device": torch.cuda.get_device_name(device) if torch.cuda.is_available() else ""}
    found["tost"] = VERSION
    for package in ("torch", "triton"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = ""
    return found


def state() -> str:
    """Return whether the kernels have passed on this machine, in words."""
    if not torch.cuda.is_available():
        return "no GPU here"
    if approved():
        return "passed on this device: `auto` uses the kernels"
    return "not checked on this device with these versions: run `tost bench gpu-check`"


def approved() -> bool:
    """Return whether ``backend="auto"`` may take the kernels here."""
    if not torch.cuda.is_available():
        return False
    passed = _records()
    return all(subject(device) in passed for device in range(torch.cuda.device_count()))


# For the compiler the answer is a constant. `torch.compiler.assume_constant_result` sets the same mark, but loads the
# compiler first: two seconds, also for those who compile nothing.
approved._dynamo_marked_constant = True  # type: ignore[attr-defined]


def approve() -> Path:
    """Record that the kernels passed on this machine; returns the path of the record."""
    path, passed = record_path(), _records()
    if subject() not in passed:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"passed": [*passed, subject()]})
    return path


def _records() -> list[object]:
    """Return what has passed; a file that is missing or is something else counts for nothing."""
    path = record_path()
    if not path.is_file():
        return []
    try:
        found = read_json(path)
    except TostError:
        return []
    passed = found.get("passed") if isinstance(found, dict) else None
    return passed if isinstance(passed, list) else []
