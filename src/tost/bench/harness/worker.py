"""One process per point: a function runs in a fresh process, where nothing else has touched the heap.

The parent sends a JSON object to the standard input of ``python -m tost.bench.harness.worker`` and reads another one
from its standard output. The function takes one dataclass and returns another; its annotations say which.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, get_type_hints

import torch
from pydantic import TypeAdapter

from tost._lazy import load
from tost.bench.harness.memory import RETURN_AT_ONCE, limit_memory
from tost.errors import TostError

Job = TypeVar("Job")
Result = TypeVar("Result")

_OUT_OF_MEMORY = ("can't allocate memory", "cannot allocate memory", "out of memory", "bad_alloc", "memoryerror")


@dataclass(frozen=True, kw_only=True)
class _Task:
    """What a process does: call `function` with `job`, on `threads` threads, within `limit_bytes` of a device."""

    function: str
    job: Any
    threads: int | None
    device: str
    limit_bytes: int | None


def run_in_process(
    function: Callable[[Job], Result],
    job: Job,
    *,
    label: str,
    timeout: float | None = None,
    inherit_threads: bool = True,
    device: str = "cpu",
    limit_bytes: int | None = None,
) -> Result:
    """Call a function in a fresh process, whose C library returns freed memory at once.

    Args:
        function: Top-level function of a module, from one dataclass to another.
        job: Its argument.
        label: What the process does, for error messages.
        timeout: Seconds after which the process is ended.
        inherit_threads: Use as many threads as this process; False for the default of the new one.
        device: Where the limit applies.
        limit_bytes: Memory that the process may take.

    Raises:
        TostError: The process failed or took too long; the message ends with the reason in a few words.
    """
    task = _Task(
        function=f"{function.__module__}:{function.__name__}",
        job=TypeAdapter(type(job)).dump_python(job, mode="json"),
        threads=torch.get_num_threads() if inherit_threads else None,
        device=device,
        limit_bytes=limit_bytes,
    )
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tost.bench.harness.worker"],
            input=TypeAdapter(_Task).dump_json(task),
            capture_output=True,
            check=False,
            env=os.environ | RETURN_AT_ONCE,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        raise TostError(f"{label}: ended after {timeout:.0f} s") from None
    if done.returncode:
        raise TostError(f"{label}: {reason(done.returncode, done.stderr.decode(errors='replace'))}")
    return TypeAdapter(get_type_hints(function)["return"]).validate_json(done.stdout)


def reason(code: int, errors: str) -> str:
    """Return in a few words why a process failed.

    Args:
        code: Its exit code.
        errors: What it wrote to its standard error.
    """
    last = (errors.strip().splitlines() or [""])[-1]
    if code == -9:
        return "ended by the system, as when memory runs out"
    if any(word in last.lower() for word in _OUT_OF_MEMORY):
        return "out of memory"
    return f"failed with code {code}: {last or 'no message'}"


def _main() -> None:
    task = TypeAdapter(_Task).validate_json(sys.stdin.buffer.read())
    if task.threads is not None:
        torch.set_num_threads(task.threads)
    function = load(task.function)
    limit_memory(task.limit_bytes, task.device)
    hints = get_type_hints(function)
    returned = hints.pop("return")
    (parameter,) = hints.values()
    result = function(TypeAdapter(parameter).validate_python(task.job))
    sys.stdout.buffer.write(TypeAdapter(returned).dump_json(result) + b"\n")


if __name__ == "__main__":
    _main()
