"""Memory: the peak of a pass, what it keeps for its backward pass, and how the C library gives memory back.

The C library keeps some of the memory that is freed for later use, and how much depends on the order in which tensors
come and go: the same pass may show a third more in one process than in another. Peaks are therefore measured in
processes with `RETURN_AT_ONCE`, in which every block is returned when it is freed. The peak is then what the tensors
need, to a percent the same in every process.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import Tensor

# For glibc: blocks from this size on are mapped one by one, and unmapped when they are freed. Others ignore it.
RETURN_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": str(128 * 1024)}
# Numbers of the C library's two settings, and what it would arrive at by itself after a few large tensors: it keeps
# freed blocks up to the first size for later use, and gives memory back when the second is free.
_MMAP_THRESHOLD, _TRIM_THRESHOLD, _KEPT = -3, -1, 32 << 20


@dataclass
class Peak:
    """Memory during a pass, in bytes: by how much it grew at most, and the most that the process had."""

    growth: int = 0
    process: int = 0


@contextmanager
def watch_peak(device: str = "cpu") -> Iterator[Peak]:
    """Measure the memory of a block of code; the result is complete when the block ends."""
    peak = Peak()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield peak
        peak.process = torch.cuda.max_memory_allocated()
    else:
        before = psutil.Process().memory_info().rss
        with suppress(OSError):  # starts the peak again from the present, where the system can: building must not count
            Path("/proc/self/clear_refs").write_text("5")
        yield peak
        peak.process = _peak_memory()
    peak.growth = max(0, peak.process - before)


def _peak_memory() -> int:
    """Return the most memory that this process has used since its peak was last reset, in bytes."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        import resource

        largest: int = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return largest if sys.platform == "darwin" else 1024 * largest  # bytes there, kibibytes elsewhere
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return 1024 * int(line.split()[1])


def keep_freed_memory() -> None:
    """Let the C library keep freed blocks for later use again; where it is another one, nothing happens."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    mallopt(_MMAP_THRESHOLD, _KEPT)
    mallopt(_TRIM_THRESHOLD, 2 * _KEPT)


def limit_memory(limit_bytes: int | None, device: str = "cpu") -> None:
    """Make a pass that needs more memory fail by itself, before the system ends other processes."""
    if limit_bytes is None:
        return
    if device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total))
        return
    with suppress(ImportError, ValueError, OSError):
        import resource

        used = getattr(psutil.Process().memory_info(), "data", 0)
        resource.setrlimit(resource.RLIMIT_DATA, (used + limit_bytes, resource.RLIM_INFINITY))


def kept_bytes(forward: Callable[[], Tensor], *, excluding: Iterable[Tensor] = ()) -> int:
    """Return the bytes that autograd keeps alive between forward and backward.

    Tensors that share a storage count once, and a view counts its whole storage, because that is what stays in memory.
    Only what goes through autograd's saved tensors is seen; an operator that hid tensors elsewhere would look better
    than it is.

    Args:
        forward: The computation; at least one of its inputs requires a gradient.
        excluding: Tensors that exist anyway, such as parameters.

    Returns:
        The number of bytes.

    Example:
        >>> x = torch.ones(1000, requires_grad=True)
        >>> kept_bytes(lambda: x.exp())  # the derivative of exp needs its result: 1000 numbers of 4 bytes
        4000
    """
    ignored = {tensor.untyped_storage().data_ptr() for tensor in excluding}
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in ignored:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        # Held until the count is done, so that no freed storage can hand its address to another one.
        result = forward()
        total = sum(sizes.values())
    del result
    return total
