"""One target under atheris; started by `fuzz.run`, which sets the limits and reads what comes out."""

from __future__ import annotations

import argparse
import mmap
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import atheris

from fuzz.harness import CRASHES, FOUND, LENGTH_BYTES, LONGEST_INPUT, Harness, memory_limit, problem_of
from fuzz.mutate import mutate

HANGING = 60.0
"""Processor time after which an input that not even an exception can interrupt ends the process."""
# Python modules whose branches guide the fuzzer: the package, and the parsers in Python that it calls.
GUIDED = ["tost", "yaml", "tarfile", "gzip", "csv", "PIL"]


def main() -> None:
    """Fuzz until libFuzzer's limits are reached; options that are not known here are its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--corpus", type=Path, required=True, help="folder that holds what was found, and will")
    parser.add_argument("--folder", type=Path, required=True, help="empty folder for the files of the target")
    parser.add_argument("--current", type=Path, required=True, help="file that holds the input being tried")
    arguments, options = parser.parse_known_args()
    with atheris.instrument_imports(include=GUIDED, enable_loader_override=False):
        from fuzz.targets import TARGETS

        harness = TARGETS[arguments.target](arguments.folder)
        for seed in harness.seeds:  # what is imported at first use belongs to no input
            problem_of(harness, seed)
    for number, seed in enumerate(harness.seeds):
        (arguments.corpus / f"seed-{number}").write_bytes(seed)
    with current_input(arguments.current) as show:
        _fuzz(harness, CRASHES / arguments.target, [arguments.corpus, *options], show)


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


def _fuzz(harness: Harness, crashes: Path, options: list[str | Path], show: Callable[[bytes], None]) -> None:
    known: set[str] = set()

    def test(data: bytes) -> None:
        show(data)
        signal.setitimer(signal.ITIMER_VIRTUAL, HANGING)  # its signal ends the process
        if not (problem := problem_of(harness, data)):
            return
        if problem not in known:
            print(FOUND + problem, flush=True)
            known.add(problem)
        file = crashes / problem
        if not file.exists() or len(data) < file.stat().st_size:
            file.write_bytes(data)

    def change(data: bytes, most: int, seed: int) -> bytes:
        chance = Random(seed)
        if chance.random() < 0.5:
            return atheris.Mutate(data, most)
        return (data[: harness.prefix] + mutate(data[harness.prefix :], chance, harness.words))[:most]

    atheris.Setup([sys.argv[0], *map(str, options)], test, custom_mutator=change)
    with memory_limit():
        for file in sorted(crashes.glob("*")):  # what was mended stays mended, and what was not is not forgotten
            test(file.read_bytes())
        atheris.Fuzz()


if __name__ == "__main__":
    main()
