"""The program in processes of its own that need not import torch: they are forked from one that did, and no more."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

# Where forking is not safe, processes start from nothing: the same, only slower.
CONTEXT = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
SECONDS = 240


def run_tost(
    *arguments: str, folder: Path | None = None, search: Sequence[Path] = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run ``tost``, as ``python -c "from tost.cli import main; main()"`` does.

    Args:
        *arguments: What stands behind ``tost``.
        folder: The working directory; that of this process if None.
        search: Where else to look for installed packages.
        **variables: Environment variables, besides those of this process.
    """
    return _run(arguments, folder or Path.cwd(), search, [variables])[0]


def run_ranks(*arguments: str, count: int = 2) -> list[subprocess.CompletedProcess[str]]:
    """Run ``tost`` in several processes that know of each other, as a launcher such as torchrun starts them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    sizes = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    ranks = [{**place, **sizes, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
    return _run(arguments, Path.cwd(), (), ranks)


def _run(
    arguments: Sequence[str], folder: Path, search: Sequence[Path], variables: Sequence[Mapping[str, str]]
) -> list[subprocess.CompletedProcess[str]]:
    CONTEXT.set_forkserver_preload(["tost.cli", "tost.train.loop"])
    with tempfile.TemporaryDirectory() as parent:
        texts = [[Path(parent, f"{name}{rank}") for name in ("out", "err")] for rank in range(len(variables))]
        processes = [
            CONTEXT.Process(target=_main, args=(arguments, folder, search, {**os.environ, **own}, files))
            for own, files in zip(variables, texts, strict=True)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(SECONDS)
            if process.exitcode is None:
                process.kill()
                process.join()
        return [
            subprocess.CompletedProcess(arguments, process.exitcode, *(file.read_text() for file in files))
            for process, files in zip(processes, texts, strict=True)
        ]


def _main(
    arguments: Sequence[str],
    folder: Path,
    search: Sequence[Path],
    environment: Mapping[str, str],
    files: Sequence[Path],
) -> None:
    for descriptor, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[:0] = ["", *map(str, search)]
    sys.argv = ["tost", *arguments]

    import torch

    from tost.cli import main

    torch.set_num_threads(1)
    main()
