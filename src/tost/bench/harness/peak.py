"""Peak memory of one pass of a model, measured in a process of its own, where nothing else has touched the heap.

The C library would keep some of the memory that is given back, for later use, and how much depends on the order in
which tensors come and go: the same pass may show a third more in one process than in another. Here it is told to return
every block at once, so that the peak is what the tensors need, to a percent the same in every process.

Run as ``python -m tost.bench.harness.peak``, it does what the JSON object on its standard input says and prints the
bytes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from tost.errors import TostError
from tost.models import create_model

__all__ = ["RETURN_AT_ONCE", "Pass", "forget_peak", "peak_bytes", "peak_memory", "run_pass"]

# For glibc: blocks from this size on are mapped one by one, and unmapped when they are freed. Others ignore it.
RETURN_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": str(128 * 1024)}


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One pass of an image classifier.

    Attributes:
        model: Registered name.
        options: Options that replace the model's own.
        batch: Images.
        image_size: Height and width of the square images.
        in_chans: Channels.
        training: Forward and backward; else forward alone, without a graph.
    """

    model: str
    options: dict[str, Any] = field(default_factory=dict)
    batch: int
    image_size: int
    in_chans: int = 3
    training: bool


def peak_bytes(what: Pass) -> int:
    """Return by how much the memory of a fresh process grows, at most, during a pass.

    Weights and images exist before; gradients do not, so they count.

    Raises:
        TostError: The process failed; the message ends with its last words.
    """
    done = subprocess.run(
        [sys.executable, "-m", "tost.bench.harness.peak"],
        input=json.dumps(asdict(what)),
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | RETURN_AT_ONCE,
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise TostError(f"measuring the memory of {what.model} failed with code {done.returncode}: {last[0]}")
    return int(done.stdout)


def run_pass(model: torch.nn.Module, images: torch.Tensor, *, training: bool) -> torch.Tensor:
    """Run a model once; in training its gradients are filled."""
    if not training:
        with torch.inference_mode():
            logits: torch.Tensor = model(images)
        return logits
    logits = model(images)
    logits.logsumexp(dim=-1).mean().backward()  # type: ignore[no-untyped-call]
    return logits


def _measure(what: Pass) -> int:
    torch.manual_seed(0)
    model = create_model(what.model, **what.options).train(what.training)
    images = torch.rand(what.batch, what.in_chans, what.image_size, what.image_size)
    before: int = psutil.Process().memory_info().rss
    forget_peak()
    run_pass(model, images, training=what.training)
    return max(0, peak_memory() - before)


def forget_peak() -> None:
    """Make the peak start again from the present, where the system can: building the model must not count."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def peak_memory() -> int:
    """Return the most memory that this process has used since `forget_peak`, in bytes."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        import resource

        largest: int = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return largest if sys.platform == "darwin" else 1024 * largest  # bytes there, kibibytes elsewhere
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return 1024 * int(line.split()[1])


if __name__ == "__main__":
    sys.stdout.write(f"{_measure(Pass(**json.load(sys.stdin)))}\n")
