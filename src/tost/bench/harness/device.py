"""Devices: which one to measure on, when it is done, and how much memory is free."""

from __future__ import annotations

from collections.abc import Callable

import psutil
import torch

from tost.bench.harness.timing import no_wait
from tost.errors import ConfigError


def choose_device(wanted: str) -> tuple[str, str | None]:
    """Return the device to use, and the name of the GPU if it is one.

    Args:
        wanted: ``auto``, ``cpu`` or ``cuda``.

    Raises:
        ConfigError: ``cuda`` was requested, but there is no GPU.
    """
    present = torch.cuda.is_available()
    if wanted == "cuda" and not present:
        raise ConfigError("--device cuda was given, but torch finds no CUDA device here; use --device cpu or auto.")
    if wanted == "cpu" or not present:
        return "cpu", None
    return "cuda", torch.cuda.get_device_name()


def wait_for(device: str) -> Callable[[], None]:
    """Return what waits for a device; a CPU is done when a call returns."""
    return torch.cuda.synchronize if device == "cuda" else no_wait


def free_bytes(device: str) -> int:
    """Return the memory that is free now."""
    return int(torch.cuda.mem_get_info()[0] if device == "cuda" else psutil.virtual_memory().available)
