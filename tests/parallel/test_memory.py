"""A sequence that does not fit into the memory of one process fits into that of two."""

from __future__ import annotations

import resource
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor

import tost
from tests.parallel.ranks import run_ranks
from tost.parallel import ContextParallel
from tost.testing import assert_close

C, H, LAYERS, TOKENS = 64, 4, 2, 300_000


def train_step(context: ContextParallel | None, num_tokens: int) -> Tensor:
    """Forward and backward through a few causal layers; returns the gradient of the first weights."""
    torch.manual_seed(0)
    layers = [tost.CausalTSSAttention(C, H, 1, position_bias=None) for _ in range(LAYERS)]
    # Each rank makes its own tokens: none of them ever holds the whole sequence.
    lengths, rank = ([num_tokens], 0) if context is None else (context.split_lengths(num_tokens), context.rank)
    index = torch.arange(lengths[rank]) + sum(lengths[:rank])
    x = torch.sin(index[:, None] * torch.linspace(0.01, 3, C)).unsqueeze(0)
    with context or nullcontext():
        for layer in layers:
            x = x + layer(x)
        (x.square().sum() / num_tokens).backward()
    gradient = layers[0].proj_in.weight.grad
    return gradient if context is None else context.sum(gradient)


def status_bytes(name: str) -> int:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[name].split()[0]) * 1024


def limited_step(shared: bool, budget: int | None) -> dict[str, object]:
    """Run the step with `budget` bytes more than the process has after a small one; None for no limit."""
    context = ContextParallel() if shared else None
    train_step(context, 1_000)
    resident, limits = status_bytes("VmRSS"), resource.getrlimit(resource.RLIMIT_DATA)
    if budget is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (status_bytes("VmData") + budget, limits[1]))
    gradient, error = None, None
    try:
        gradient = train_step(context, TOKENS)
    except (MemoryError, RuntimeError) as problem:
        error = f"{type(problem).__name__}: {problem}"
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)
    return {"gradient": gradient, "error": error, "peak": status_bytes("VmHWM") - resident}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs the limits of Linux")
def test_a_sequence_too_long_for_one_process_runs_on_two(tmp_path):
    (free,) = run_ranks(1, tmp_path / "free", limited_step, False, None)
    assert free["error"] is None
    budget = int(0.75 * free["peak"])
    (one,) = run_ranks(1, tmp_path / "one", limited_step, False, budget)
    two = run_ranks(2, tmp_path / "two", limited_step, True, budget)
    assert one["gradient"] is None
    assert "memory" in one["error"], one["error"]
    for rank in two:
        assert rank["error"] is None
        assert_close("gradient", rank["gradient"], free["gradient"], 1e-4)
