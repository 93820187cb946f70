"""Targets under atheris; started by `fuzz.run`, which asks for turns and reads what comes out.

Importing the package with its branches counted takes longer than a short turn, so it happens once: every turn is a fork
of this process. Each line of its input is a `Turn`; each line that it answers is an `Outcome`.
"""

from __future__ import annotations

import argparse
import json
import math
import mmap
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import lru_cache, partial
from pathlib import Path
from random import Random
from typing import Any

from fuzz.harness import CRASHES, FOUND, LENGTH_BYTES, LONGEST_INPUT, Harness, Outcome, Turn, memory_limit, problem_of

HANGING = 60.0
"""Processor time after which an input that not even an exception can interrupt ends the process."""
# Python modules whose branches guide the fuzzer: the package, and the parsers in Python that it calls.
GUIDED = ["tost", "yaml", "tarfile", "gzip", "csv", "PIL"]


def main() -> None:
    """Take turns until there is no further line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="empty folder for the files of the targets")
    folder = parser.parse_args().folder
    harnesses: dict[str, Harness] = {}
    for line in sys.stdin:
        turn = Turn(**json.loads(line))
        if turn.target not in harnesses:
            harnesses[turn.target] = _prepare(turn.target, folder / turn.target)
        outcome = fork(turn, partial(_fuzz, harnesses[turn.target], turn))
        print(json.dumps(asdict(outcome)), flush=True)


def _prepare(name: str, folder: Path) -> Harness:
    import atheris

    folder.mkdir()
    with atheris.instrument_imports(include=GUIDED, enable_loader_override=False):
        from fuzz.targets import TARGETS
        from tost import _yaml

        if not hasattr(_yaml._compose, "cache_info"):  # the files around the attacked one stay as they are
            _yaml._compose = lru_cache(_yaml._compose)
        harness = TARGETS[name](folder)
        for seed in harness.seeds:  # what is imported at first use belongs to no input
            problem_of(harness, seed)
    return harness


def fork(turn: Turn, work: Callable[[], Any]) -> Outcome:
    """Do something in a process of its own that writes into the log of a turn; return how it ended."""
    sys.stdout.flush()
    if (child := os.fork()) == 0:
        try:
            with Path(turn.log).open("wb") as log, Path(os.devnull).open("rb") as nothing:
                os.dup2(nothing.fileno(), 0)
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            work()
        except BaseException:
            os.write(2, traceback.format_exc().encode(errors="replace"))
        finally:
            os._exit(1)  # libFuzzer ends the process itself when it is done
    _, status, used = os.wait4(child, 0)
    return Outcome(os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime)


@contextmanager
def current_input(path: Path) -> Iterator[Callable[[bytes], None]]:
    """Keep the input that is being tried in a file, so that it is there whatever becomes of the process.

    Args:
        path: The file. It holds the length of the input in eight bytes, and the input.
    """
    with path.open("w+b") as file:
        file.truncate(LENGTH_BYTES + LONGEST_INPUT)
        with mmap.mmap(file.fileno(), 0) as memory:

            def show(data: bytes) -> None:
                memory[: LENGTH_BYTES + len(data)] = len(data).to_bytes(LENGTH_BYTES, "little") + data

            yield show


def _fuzz(harness: Harness, turn: Turn) -> None:
    import atheris

    from fuzz.mutate import mutate

    known: set[str] = set()
    crashes, end = CRASHES / turn.target, math.inf

    def test(data: bytes) -> None:
        show(data)
        signal.setitimer(signal.ITIMER_VIRTUAL, HANGING)  # its signal ends the process
        if time.process_time() > end:
            os.kill(os.getpid(), signal.SIGUSR1)  # asks libFuzzer to finish
        if not (problem := problem_of(harness, data)):
            return
        if problem not in known:
            print(FOUND + problem, flush=True)
            known.add(problem)
        file = crashes / problem
        if not file.exists() or len(data) < file.stat().st_size:
            file.write_bytes(data)

    def change(data: bytes, most: int, seed: int) -> bytes:
        nonlocal end
        if end == math.inf:  # all that was found before has been tried again
            end = time.process_time() + turn.seconds
        chance = Random(seed)
        if chance.random() < 0.5:
            return atheris.Mutate(data, most)
        return (data[: harness.prefix] + mutate(data[harness.prefix :], chance, harness.words))[:most]

    for number, seed in enumerate(harness.seeds):
        Path(turn.corpus, f"seed-{number}").write_bytes(seed)
    with current_input(Path(turn.current)) as show:
        options = [f"-max_len={harness.longest}", *turn.options]
        atheris.Setup([sys.argv[0], turn.corpus, *options], test, custom_mutator=change)
        with memory_limit():
            for file in sorted(crashes.glob("*")):  # what was mended stays mended, and what was not is not forgotten
                test(file.read_bytes())
            atheris.Fuzz()


if __name__ == "__main__":
    main()
