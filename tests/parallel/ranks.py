"""Runs a function in several real processes that talk over loopback, and brings back what each of them returns."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# A rank that waits longer for the others than this is lost; the run then fails rather than hangs.
TIMEOUT = timedelta(seconds=120)


def run_ranks(size: int, folder: Path, job: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return ``job(*arguments)`` of every rank. `job` must be importable; tensors come back as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    # A server that has loaded torch, and has not used it, is forked for each rank: they start at once.
    multiprocessing.set_forkserver_preload(
        ["torch.distributed", "tost.models", "tost.parallel", "tests.parallel.ranks"]
    )
    mp.start_processes(_child, args=(size, str(folder), job, arguments), nprocs=size, start_method="forkserver")
    return [torch.load(folder / f"result_{rank}.pt") for rank in range(size)]


def _child(rank: int, size: int, folder: str, job: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=size, timeout=TIMEOUT)
    result = job(*arguments)
    torch.save(result, Path(folder) / f"result_{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
