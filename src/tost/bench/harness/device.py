"""Devices: which one to measure on, how long a call takes there, and how much memory is free."""

from __future__ import annotations

from collections.abc import Callable

import psutil
import torch

from tost.bench.harness.timing import Stopwatch
from tost.train import device as devices


def choose_device(wanted: str) -> tuple[str, str | None]:
    """Return the device to use, and the name of the GPU if it is one; see `tost.train.device`."""
    chosen = devices.choose_device(wanted).type
    return chosen, torch.cuda.get_device_name() if chosen == "cuda" else None


def stopwatch_of(device: str) -> Stopwatch | None:
    """Return what times calls on a device; None for a CPU, where the clock does."""
    return gpu_seconds if device == "cuda" else None


def gpu_seconds(run: Callable[[], object]) -> float:
    """Return the seconds between the events that the GPU passes before and after a call."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    begin.record()
    result = run()
    end.record()
    end.synchronize()
    del result
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds / 1000


def free_bytes(device: str) -> int:
    """Return the memory that is free now."""
    return int(torch.cuda.mem_get_info()[0] if device == "cuda" else psutil.virtual_memory().available)
