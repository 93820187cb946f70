"""Commands of tost in processes that can be started and killed cheaply.

A victim is forked from a process that has imported everything and computed nothing, so that it is at work after a few
hundredths of a second. It runs the command line of tost unchanged.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

TIMEOUT = 120.0
"""Seconds after which a process that should have ended counts as hanging."""


def preload() -> None:
    """Import what the victims need."""
    import accelerate  # noqa: F401
    import sklearn.datasets  # noqa: F401
    import torch.utils.data  # noqa: F401

    import tost.cli._convert
    import tost.cli._generate
    import tost.cli._look
    import tost.cli._train
    import tost.data.lra.listops
    import tost.data.toy
    import tost.generation
    import tost.train.loop
    import tost.train.registry  # noqa: F401


class Victim:
    """The processes of one command.

    Args:
        arguments: The command line, without ``tost``.
        log: File that its output is appended to.
        prepare: Called in each process before the command, such as to limit its memory.
        processes: How many processes share the work, as torchrun would start them.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        log: Path,
        *,
        prepare: Callable[[], None] | None = None,
        processes: int = 1,
    ) -> None:
        self.log = log
        self._begin = log.stat().st_size if log.exists() else 0
        self.codes: dict[int, int | None] = {}
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(processes)}
        for rank in range(processes):
            numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(processes)}
            environment = {**shared, **numbers} if processes > 1 else {}
            self.codes[fork(arguments, log, environment, prepare)] = None

    @property
    def pid(self) -> int:
        """Process id of the first process."""
        return next(iter(self.codes))

    @property
    def output(self) -> str:
        """What the command has written so far."""
        with self.log.open("rb") as file:
            file.seek(self._begin)
            return file.read().decode(errors="replace")

    def poll(self) -> int | None:
        """Return the exit code of the first process that failed, 0 if all are done, None while one runs."""
        for pid, code in self.codes.items():
            if code is None:
                found, status = os.waitpid(pid, os.WNOHANG)
                self.codes[pid] = os.waitstatus_to_exitcode(status) if found else None
        if None in self.codes.values():
            return None
        return next((code for code in self.codes.values() if code), 0)

    def wait(self, seconds: float = TIMEOUT) -> int:
        """Wait until all processes have ended, and return the exit code.

        Raises:
            TimeoutError: They have not; they are killed.
        """
        if not self.wait_for(lambda: False, seconds) and self.poll() is None:
            self.kill()
            raise TimeoutError(f"still running after {seconds:.0f} s:\n{self.output[-2000:]}")
        code = self.poll()
        self.sweep_up()
        return 0 if code is None else code

    def wait_for(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait until the condition holds; False if the processes end or the time is up before."""
        deadline = time.monotonic() + seconds
        while self.poll() is None and time.monotonic() < deadline:
            if condition():
                return True
            time.sleep(0.001)
        return False

    def kill(self, gap: float = 0.0, *, alone: bool = False) -> None:
        """Kill the processes with SIGKILL.

        Args:
            gap: Seconds between one process and the next.
            alone: Leave children such as data workers alone, as ``kill -9`` does.
        """
        for pid, code in self.codes.items():
            if code is None:
                _signal(pid, signal.SIGKILL, group=not alone)
                time.sleep(gap)
        while self.poll() is None:
            time.sleep(0.001)

    def terminate(self) -> None:
        """Ask every process to stop, with SIGTERM."""
        for pid, code in self.codes.items():
            if code is None:
                _signal(pid, signal.SIGTERM, group=False)

    def sweep_up(self) -> None:
        """End children that have outlived the processes."""
        for pid in self.codes:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


def fork(
    arguments: Sequence[str], log: Path, environment: Mapping[str, str], prepare: Callable[[], None] | None
) -> int:
    """Run a command of tost in a forked process and return its id.

    Args:
        arguments: The command line, without ``tost``.
        log: File that its output is appended to.
        environment: Variables to set.
        prepare: Called before the command.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        return pid
    code = 1
    try:
        os.setsid()
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.environ.update(environment)
        sys.argv = ["tost", *arguments]
        if prepare is not None:
            prepare()
        from tost.cli import main

        main()
    except SystemExit as done:
        code = done.code if isinstance(done.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()  # a bug: every way to fail has a message
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _signal(pid: int, number: int, *, group: bool) -> None:
    for send in (os.killpg, os.kill) if group else (os.kill,):
        with suppress(ProcessLookupError):  # it has ended, or does not lead a group yet
            send(pid, number)


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])
