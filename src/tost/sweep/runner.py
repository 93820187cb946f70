"""Execute runs, several at a time, each in its own process, so that a crash of one does not end the others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tost.errors import INTERRUPTED, ConfigError
from tost.sweep.runs import OUTPUT, Run, State, state_of

POLL_SECONDS = 0.2
_TAIL_LINES = 12
_TAIL_BYTES = 4096

Process = subprocess.Popen[bytes]


class Watcher(Protocol):
    """Receives progress events."""

    def started(self, run: Run) -> None:
        """A process was started, for the first time or to go on."""

    def ended(self, outcome: RunOutcome) -> None:
        """A run finished, failed, was interrupted, or could not be started."""

    def tick(self, running: Sequence[Run]) -> None:
        """Time passes."""


@dataclass(frozen=True)
class RunOutcome:
    """How a run ended.

    Attributes:
        run: Which one.
        state: What its folder holds now.
        seconds: How long its process lived.
        reason: Why it did not finish; empty if it did.
    """

    run: Run
    state: State
    seconds: float = 0.0
    reason: str = ""


def execute(
    runs: Sequence[Run],
    start: Callable[[Run], Process],
    watcher: Watcher,
    *,
    jobs: int = 1,
    stopping: Callable[[], bool] = lambda: False,
    poll_seconds: float = POLL_SECONDS,
) -> list[RunOutcome]:
    """Carry out runs, in their order as far as dependencies and `jobs` allow.

    Once `stopping` returns True, nothing new is started; every process gets one SIGINT, upon which it saves and ends.
    An exception, such as a second Ctrl-C, ends them at once.

    Args:
        runs: What to carry out; none of them is finished.
        start: Starts the process of a run.
        watcher: Receives progress events.
        jobs: Most processes at a time.
        stopping: Whether to stop.
        poll_seconds: Time between two looks at the processes.

    Returns:
        One outcome for each run, in the order in which they ended; those that never started come last.
    """
    return _Execution(runs, start, watcher, jobs=jobs).until_done(stopping, poll_seconds)


class _Execution:
    """Runs that wait, runs that are at work, and what has come out."""

    def __init__(self, runs: Sequence[Run], start: Callable[[Run], Process], watcher: Watcher, *, jobs: int) -> None:
        self._waiting = list(runs)
        self._working: dict[str, tuple[Run, Process, float]] = {}
        self._outcomes: list[RunOutcome] = []
        self._start, self._watcher, self._jobs = start, watcher, jobs

    def until_done(self, stopping: Callable[[], bool], poll_seconds: float) -> list[RunOutcome]:
        asked = False
        try:
            while True:
                if stopping() and not asked:
                    asked = True
                    for _, process, _ in self._working.values():
                        process.send_signal(signal.SIGINT)
                if not asked:
                    self._start_ready()
                if not self._working:
                    break
                self._watcher.tick([run for run, _, _ in self._working.values()])
                if not self._collect(asked):
                    time.sleep(poll_seconds)
        finally:
            for _, process, _ in self._working.values():
                process.kill()
                process.wait()
        for run in self._waiting:
            self._end(RunOutcome(run, state_of(run), reason="stopped before its turn"))
        return self._outcomes

    def _start_ready(self) -> None:
        """Start what can be started, after dropping what never can."""
        failed = {outcome.run.name for outcome in self._outcomes if outcome.reason}
        while dropped := [run for run in self._waiting if run.after in failed]:
            for run in dropped:
                failed.add(run.name)
                self._waiting.remove(run)
                self._end(RunOutcome(run, state_of(run), reason=f"{run.after}, which it starts from, did not finish"))
        for run in list(self._waiting):
            unfinished = {*self._working, *(other.name for other in self._waiting)}
            if len(self._working) < self._jobs and run.after not in unfinished:
                self._waiting.remove(run)
                self._working[run.name] = (run, self._start(run), time.monotonic())
                self._watcher.started(run)

    def _collect(self, asked: bool) -> bool:
        """Handle processes that have ended; return whether there were any."""
        codes = {name: process.poll() for name, (_, process, _) in self._working.items()}
        ended = {name: code for name, code in codes.items() if code is not None}
        for name, code in ended.items():
            run, _, began = self._working.pop(name)
            state, reason = state_of(run), ""
            if state is not State.finished:
                reason = "interrupted" if asked or code == INTERRUPTED else _describe_exit(code)
            self._end(RunOutcome(run, state, time.monotonic() - began, reason))
        return bool(ended)

    def _end(self, outcome: RunOutcome) -> None:
        self._outcomes.append(outcome)
        self._watcher.ended(outcome)


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"exit code {code}" if code else "ended before its last step"
    try:
        return f"ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"ended by signal {-code}"


def start_process(run: Run, *, threads: int | None = None, keep_open: Sequence[int] = ()) -> Process:
    """Start the process of a run. Its output is appended to a file in its folder.

    Args:
        run: Which one.
        threads: Threads per operation; None for the default of the environment.
        keep_open: Descriptors that it inherits.
    """
    run.folder.mkdir(parents=True, exist_ok=True)
    environment = {"OMP_WAIT_POLICY": "passive", **os.environ}  # threads that wait do not take the others' time
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    with (run.folder / OUTPUT).open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "tost.cli", *run.arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            pass_fds=keep_open,
            # A session of its own: Ctrl-C then reaches the sweep only, which passes it on once.
            start_new_session=True,
        )


@contextmanager
def claim(out: Path) -> Iterator[int]:
    """Keep others from working in a sweep's folder for the duration of a ``with`` block.

    Yields:
        The descriptor that holds the claim. A process that inherits it holds it too, so that a run that outlives its
        sweep cannot be started a second time.

    Raises:
        ConfigError: Somebody is at work there.
    """
    import fcntl  # not on every system, so not needed to read results

    out.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(out / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another sweep, or a run that outlived one, is at work in {out}; wait for it, or give another --out"
            ) from None
        yield descriptor
    finally:
        os.close(descriptor)


def tail(run: Run, lines: int = _TAIL_LINES) -> list[str]:
    """Return the last lines of the output of a run's process."""
    return [line.rstrip() for line in _last_bytes(run.folder / OUTPUT).splitlines()[-lines:]]


def progress_of(run: Run) -> Mapping[str, float]:
    """Return the newest step that a run has logged: its number, loss and the time left; nothing before the first."""
    for line in reversed(_last_bytes(run.folder / "metrics.jsonl").splitlines()):
        if line.startswith('{"kind": "step"') and line.endswith("}"):
            try:
                record = json.loads(line)
            except ValueError:
                return {}
            return {name: record[name] for name in ("step", "loss", "eta_seconds") if name in record}
    return {}


def _last_bytes(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
