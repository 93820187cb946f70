"""A parser with what it takes to attack it: inputs to start from, and the verdict on what an input did."""

from __future__ import annotations

import os
import resource
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from tost.errors import TostError

ROOT = Path(__file__).resolve().parents[1]
CRASHES = ROOT / "tests" / "fuzz" / "crashes"
"""Inputs that once did something that is not allowed, by target; replayed by the tests."""
FOUND = "found: "
"""Start of the lines in which a worker names a problem."""
SECONDS = 10.0
"""Processor time that one input may take. Not time on a clock, which goes on while a process is stopped."""
LONGEST_INPUT = 1 << 16
SHORTEST_LIMIT = 1 << 13
"""Length that every target allows: enough for brackets that are nested deeper than Python counts."""
LENGTH_BYTES = 8
"""Bytes in front of the current input of a worker that say how long it is."""
MEMORY = 1 << 30
"""Bytes of memory that one input may take."""


@dataclass(frozen=True)
class Harness:
    """A parser that is ready to be called.

    Attributes:
        parse: Reads an input, and uses what it has read as the program would.
        seeds: Files as the program writes them, from which fuzzing starts.
        words: Pieces that mean something to the parser.
        prefix: Bytes at the start of an input that choose the file, and belong to none.
    """

    parse: Callable[[bytes], object]
    seeds: Sequence[bytes]
    words: Sequence[bytes] = ()
    prefix: int = 0

    @property
    def longest(self) -> int:
        """Length of the longest input: room for two of the largest seed. Long inputs take time and find little."""
        return min(LONGEST_INPUT, max(SHORTEST_LIMIT, 2 * max(map(len, self.seeds), default=0)))


@dataclass(frozen=True)
class Turn:
    """What a worker is asked to do.

    Attributes:
        target: Name of the parser.
        seconds: Processor time that it may take, besides that for the inputs of earlier turns.
        corpus: Folder that holds inputs to start from, and will hold those that reach something new.
        log: File for what libFuzzer writes.
        current: File that holds the input being tried.
        options: Of libFuzzer.
    """

    target: str
    seconds: float
    corpus: str
    log: str
    current: str
    options: Sequence[str] = ()


@dataclass(frozen=True)
class Outcome:
    """How a turn ended.

    Attributes:
        code: Exit code of the process; minus the number of the signal that ended it.
        seconds: Processor time that it took.
    """

    code: int
    seconds: float


class TimeLimitError(BaseException):
    """An input took too long. Not an `Exception`, so that no parser can take it for a damaged file."""


def problem_of(harness: Harness, data: bytes) -> str:
    """Return what is wrong with what an input did, in a form that fits a file name; empty if nothing is.

    Allowed are success, and an error of `tost.errors` with a message.
    """
    try:
        with time_limit():
            harness.parse(data)
    except TostError as error:
        return "" if str(error).strip() else f"{type(error).__name__}-without-message"
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return f"{type(error).__name__}-{_place(error)}"
    return ""


def _place(error: BaseException) -> str:
    """Return the innermost function of the package that an error came through."""
    frames = traceback.extract_tb(error.__traceback__)
    last = next((frame for frame in reversed(frames) if "/tost/" in frame.filename), frames[-1])
    return f"{Path(last.filename).parent.name}.{Path(last.filename).stem}-{last.name.strip('<>')}"


@contextmanager
def time_limit(seconds: float = SECONDS) -> Iterator[None]:
    """Bound the processor time of what happens inside; beyond it is a `TimeLimitError`."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeLimitError(f"more than {seconds} s")

    handler = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, handler)


@contextmanager
def memory_limit(memory: int = MEMORY) -> Iterator[None]:
    """Bound the memory that is taken inside, where the system says how much there was; beyond it is `MemoryError`."""
    size = Path("/proc/self/statm")
    if not size.exists():
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(size.read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + memory, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def write_file(path: Path, data: bytes) -> None:
    """Write a file; unlike `Path.write_bytes` with few calls, as it happens for every input."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.write(file, data)
    finally:
        os.close(file)


def one_file(path: Path, parse: Callable[[Path], object], seeds: Sequence[bytes], words: Sequence[str] = ()) -> Harness:
    """Return the harness of a parser of single files."""

    def write_and_parse(data: bytes) -> None:
        write_file(path, data)
        parse(path)

    return Harness(write_and_parse, seeds, [word.encode() for word in words])


def one_of_many(
    folder: Path,
    names: Sequence[str],
    parse: Callable[[Path], object],
    *,
    prepare: Callable[[Path], Sequence[Path]] | None = None,
    words: Sequence[str] = (),
) -> Harness:
    """Return the harness of a parser of folders: the first byte of an input chooses the file that the rest replaces.

    Args:
        folder: A folder as the program writes it.
        names: Files in it that are attacked.
        parse: Reads what the file that it gets belongs to.
        prepare: Called with a file after it was replaced, such as to bring checksums up to date; returns what else it
            wrote.
        words: Pieces that mean something to the parser.
    """
    files = [folder / name for name in names]
    original = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def replace_and_parse(data: bytes) -> None:
        file = files[data[0] % len(files)] if data else files[0]
        changed = [file]
        try:
            write_file(file, data[1:])
            if prepare is not None:
                changed += prepare(file)
            parse(file)
        finally:
            for path in changed:
                write_file(path, original[path])

    seeds = [bytes([number]) + original[file] for number, file in enumerate(files)]
    return Harness(replace_and_parse, seeds, [word.encode() for word in words], prefix=1)
