"""One point of a figure, in a process of its own: time of a pass, peak memory, bytes kept; and the machine's own peaks.

Run as ``python -m tost.bench.attention.point``, it does what the JSON object on its standard input says and prints
another one. A process does nothing else, so that its memory is that of one contender and its heap is fresh.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import psutil
import torch
from torch import Tensor

from tost.bench.attention.cases import Figure, Point
from tost.bench.attention.cost import Cost
from tost.bench.attention.layers import build_layers
from tost.bench.harness.memory import kept_bytes
from tost.bench.harness.peak import RETURN_AT_ONCE, forget_peak, peak_memory
from tost.errors import TostError

__all__ = ["Job", "Outcome", "Roofline", "Work", "measure_point", "measure_roofline", "roofline_in_process", "run_job"]

_SHORT = 16  # tokens of the pass that comes first, to load what is loaded on first use
_WORDS = ("can't allocate memory", "cannot allocate memory", "out of memory", "bad_alloc", "memoryerror")
# Numbers of the C library's two settings, and what it would arrive at by itself after a few large tensors: it keeps
# freed blocks up to the first size for later use, and gives memory back when the second is free.
_MMAP_THRESHOLD, _TRIM_THRESHOLD, _KEPT = -3, -1, 32 << 20


@dataclass(frozen=True, kw_only=True)
class Job:
    """A point, and how to measure it; see `AttentionScale` for the fields that have the same names there.

    Attributes:
        point: What to measure.
        threads: Threads of torch.
        device: ``cpu`` or ``cuda``.
        pass_seconds: See there.
        least_repeats: See there.
        most_repeats: See there.
        limit_bytes: Memory that the process may take; None for no limit.
    """

    point: Point
    threads: int
    device: str = "cpu"
    pass_seconds: float = 2.0
    least_repeats: int = 3
    most_repeats: int = 50
    limit_bytes: int | None = None

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Job:
        """Read what `asdict` made."""
        point = content["point"]
        return cls(**{**content, "point": Point(**{**point, "figure": Figure(point["figure"])})})


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a point took.

    Attributes:
        seconds: Timed passes.
        peak_bytes: By how much memory grew at most during a pass. Weights and input exist before, gradients do not.
        kept_bytes: What the forward pass keeps for the backward pass; None without one.
        weight_bytes: Size of the parameters.
    """

    seconds: tuple[float, ...]
    peak_bytes: int
    kept_bytes: int | None
    weight_bytes: int


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """The best that this machine does: operations per second in a matrix product, bytes per second in a copy."""

    flops_per_second: float
    bytes_per_second: float

    def bound(self, cost: Cost) -> float:
        """Return the seconds that nothing can beat: ``max(operations / rate, bytes / bandwidth)``.

        Data that a cache still holds need not be moved, so that short sequences may come below the second.
        """
        return max(cost.flops / self.flops_per_second, cost.moved / self.bytes_per_second)


class Work:
    """The layers of a point, with their input.

    Args:
        point: What to build.
        device: Where.
    """

    def __init__(self, point: Point, device: str = "cpu") -> None:
        torch.manual_seed(0)
        self.point = point
        self.layers = build_layers(point).to(device).train(point.training)
        if point.whole:
            self.x = torch.randint(point.vocab_size, (1, point.tokens), device=device)
        else:
            self.x = torch.randn(1, point.tokens, point.width, device=device).requires_grad_(point.training)
        self.cotangent = torch.randn_like(self.x) if point.training else None

    def run(self) -> Tensor:
        """Take one pass."""
        if self.cotangent is None:
            with torch.no_grad():
                result: Tensor = self.layers(self.x)
            return result
        result = self.layers(self.x)
        torch.autograd.backward(result, self.cotangent)
        return result

    def reset(self) -> None:
        """Drop the gradients of a pass."""
        for tensor in (self.x, *self.layers.parameters()):
            tensor.grad = None

    def run_short(self) -> None:
        """Take a pass on the first few tokens."""
        short = self.layers(self.x[:, :_SHORT])
        if self.cotangent is not None:
            short.sum().backward()
        self.reset()

    def kept(self) -> int | None:
        """Return the bytes that a forward pass keeps for its backward pass; the input counts, parameters do not."""
        if self.cotangent is None:
            return None
        return kept_bytes(lambda: self.layers(self.x), excluding=self.layers.parameters())


def measure_point(job: Job) -> Outcome:
    """Measure a point in this process.

    The first pass shows the memory, with a C library that returns freed blocks at once. A slow one is also the timed
    one. Otherwise the library keeps freed blocks from then on, as it would by itself, and passes are repeated.
    """
    torch.set_num_threads(job.threads)
    _limit_memory(job)
    work = Work(job.point, job.device)
    with torch.set_grad_enabled(job.point.training):
        work.run_short()
    kept = work.kept()
    first, peak = _first_pass(work, job.device)
    seconds = [first]
    if first <= job.pass_seconds:
        keep_freed_memory()
        _timed(work, job.device)
        wanted = int(job.pass_seconds / max(first, 1e-9))
        repeats = min(max(wanted, job.least_repeats), job.most_repeats)
        seconds = [_timed(work, job.device) for _ in range(repeats)]
    weights = sum(parameter.nbytes for parameter in work.layers.parameters())
    return Outcome(seconds=tuple(seconds), peak_bytes=peak, kept_bytes=kept, weight_bytes=weights)


def _first_pass(work: Work, device: str) -> tuple[float, int]:
    """Return the seconds of a pass, and by how many bytes memory grew at most."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        seconds = _timed(work, device)
        return seconds, max(0, torch.cuda.max_memory_allocated() - before)
    before = psutil.Process().memory_info().rss
    forget_peak()
    seconds = _timed(work, device)
    return seconds, max(0, peak_memory() - before)


def _timed(work: Work, device: str) -> float:
    wait = torch.cuda.synchronize if device == "cuda" else _no_wait
    wait()
    started = perf_counter()
    result = work.run()
    wait()
    seconds = perf_counter() - started
    del result
    work.reset()
    return seconds


def _no_wait() -> None:
    """A CPU is done when the call returns."""


def keep_freed_memory() -> None:
    """Let the C library keep freed blocks for later use again; where it is another one, nothing happens."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    mallopt(_MMAP_THRESHOLD, _KEPT)
    mallopt(_TRIM_THRESHOLD, 2 * _KEPT)


def _limit_memory(job: Job) -> None:
    """Make a pass that needs too much fail by itself, before the system ends other processes."""
    if job.limit_bytes is None:
        return
    if job.device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, job.limit_bytes / total))
        return
    try:
        import resource

        used = getattr(psutil.Process().memory_info(), "data", 0)
        resource.setrlimit(resource.RLIMIT_DATA, (used + job.limit_bytes, resource.RLIM_INFINITY))
    except (ImportError, ValueError, OSError):
        return


def measure_roofline(*, device: str = "cpu", threads: int, size: int = 2048, megabytes: int = 256) -> Roofline:
    """Measure the machine: the best of several matrix products, and of several copies, in float32.

    Args:
        device: ``cpu`` or ``cuda``.
        threads: Threads of torch.
        size: Rows and columns of the matrices.
        megabytes: Size of what is copied; it must not fit into a cache.
    """
    torch.set_num_threads(threads)
    left, right, result = (torch.randn(size, size, device=device) for _ in range(3))
    source, target = (torch.ones(megabytes << 18, device=device) for _ in range(2))
    product = _best(lambda: torch.mm(left, right, out=result), device)
    copy = _best(lambda: target.copy_(source), device)
    return Roofline(flops_per_second=2 * size**3 / product, bytes_per_second=2 * source.nbytes / copy)


def _best(call: Callable[[], object], device: str) -> float:
    """Return the seconds of the fastest of several calls."""
    wait = torch.cuda.synchronize if device == "cuda" else _no_wait
    seconds = []
    for _ in range(12):
        wait()
        started = perf_counter()
        call()
        wait()
        seconds.append(perf_counter() - started)
    return min(seconds)


def roofline_in_process(*, device: str, threads: int) -> Roofline:
    """Measure the machine in a fresh process.

    Raises:
        TostError: It failed.
    """
    # A GPU needs larger matrices to show what it can do.
    content = {"roofline": {"device": device, "threads": threads, "size": 8192 if device == "cuda" else 2048}}
    return Roofline(**_child(content, timeout=120.0, what="measuring the machine"))


def run_job(job: Job, *, timeout: float) -> Outcome:
    """Measure a point in a fresh process.

    Args:
        job: What to measure.
        timeout: Seconds after which the process is ended.

    Raises:
        TostError: The process failed, or took too long; the message says why in a few words.
    """
    found = _child(asdict(job), timeout=timeout, what=job.point.label)
    return Outcome(**{**found, "seconds": tuple(found["seconds"])})


def _child(content: dict[str, Any], *, timeout: float, what: str) -> dict[str, Any]:
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tost.bench.attention.point"],
            input=json.dumps(content),
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | RETURN_AT_ONCE,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        raise TostError(f"{what}: ended after {timeout:.0f} s") from None
    if done.returncode:
        raise TostError(f"{what}: {_reason(done.returncode, done.stderr)}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _reason(code: int, words: str) -> str:
    """Say in a few words why a process failed."""
    last = (words.strip().splitlines() or [""])[-1]
    if code == -9:
        return "ended by the system, as when memory runs out"
    if any(word in last.lower() for word in _WORDS):
        return "out of memory"
    return f"failed with code {code}: {last or 'it said nothing'}"


def _main() -> None:
    content = json.load(sys.stdin)
    if "roofline" in content:
        sys.stdout.write(json.dumps(asdict(measure_roofline(**content["roofline"]))) + "\n")
    else:
        sys.stdout.write(json.dumps(asdict(measure_point(Job.from_json(content)))) + "\n")


if __name__ == "__main__":
    _main()
