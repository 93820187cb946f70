"""Fuzzes the parsers of files from outside, and adds what was done to results/fuzz.json.

python -m fuzz.run                                 every target for a minute, one after the other
python -m fuzz.run --target idx --seconds 600      one target for ten minutes
python -m fuzz.run --seconds 3600 --slice 240      an hour for every target, in turns of four minutes
python -m fuzz.run --seconds 3600 --inputs 100000  the same, but no more than so many inputs for a target

Allowed for any input is success, or an error of tost.errors with a message. Anything else is a problem: another
exception, too much time or memory, a crash. Its input is stored in tests/fuzz/crashes/TARGET, where the tests replay
it. The exit code is 1 if there was one.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

from fuzz.harness import CRASHES, FOUND, LENGTH_BYTES, ROOT, Outcome, Turn
from fuzz.targets import TARGETS
from tost._io import write_json
from tost._machine import VERSION

RESULTS = ROOT / "results" / "fuzz.json"
CORPUS = ROOT / "build" / "fuzz"
NEVER = 1 << 30
Ask = Callable[[Turn], Outcome]
"""Has a worker take a turn."""
FINISHED = "stat::number_of_executed_units"
MISSING = """atheris, the coverage-guided fuzzer, is not installed. `make fuzz` installs it, or
    pip install --constraint constraints.txt --editable '.[fuzz]'
It has wheels for Linux on x86-64; elsewhere it has to be built with clang. The tests in tests/fuzz need none of it."""


@dataclass
class Tally:
    """What was done to one target, over all invocations.

    Attributes:
        name: The target.
        inputs: Inputs that were tried.
        seconds: Processor time that it took.
        coverage: Branches of the guided modules that were reached.
        quiet_inputs: Inputs since one last reached a new branch.
        quiet_seconds: Processor time of the turns since one last reached a new branch.
        problems: What the last turn found, and what is stored and still fails.
    """

    name: str
    inputs: int = 0
    seconds: int = 0
    coverage: int = 0
    quiet_inputs: int = 0
    quiet_seconds: int = 0
    problems: int = 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", action="append", choices=TARGETS, help="one or more of them; all by default")
    parser.add_argument("--seconds", type=int, default=60, help="processor time for every target (60)")
    parser.add_argument("--inputs", type=int, default=0, help="at most, for every target; 0 for any number")
    parser.add_argument("--slice", type=int, default=120, help="processor time of a turn (120)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file to add to (results/fuzz.json)")
    given = parser.parse_args(arguments)
    if find_spec("atheris") is None:
        print(MISSING, file=sys.stderr)
        return 2
    names = given.target or list(TARGETS)
    tallies = read_tallies(given.results)
    spent, tried = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # faster than a disk, if there is one
    with tempfile.TemporaryDirectory(dir=memory) as folder, worker(Path(folder)) as ask:
        while waiting := [n for n in names if spent[n] < given.seconds and not 0 < given.inputs <= tried[n]]:
            for name in waiting:
                turn = min(given.slice, given.seconds - spent[name])
                done = take_turn(name, turn, given.inputs - tried[name] if given.inputs else 0, ask, Path(folder))
                spent[name] += turn
                tried[name] += done.inputs
                add(tallies.setdefault(name, Tally(name)), done)
                write_tallies(given.results, tallies)
                rate = done.inputs // max(1, done.seconds)
                print(
                    f"{name}: {done.inputs:,} inputs, {rate:,} a second, coverage {done.coverage:,}, "
                    f"problems {done.problems}",
                    flush=True,
                )
    return int(any(tallies[name].problems for name in names))


def take_turn(name: str, seconds: int, inputs: int, ask: Ask, folder: Path) -> Tally:
    """Fuzz one target for a while, in a process of its own.

    Args:
        name: The target.
        seconds: Processor time that it may take.
        inputs: How many may be tried; 0 for any number.
        ask: Has a worker take a turn.
        folder: For the input that is being tried.
    """
    corpus, log, crashes = CORPUS / "corpus" / name, CORPUS / f"{name}.log", CRASHES / name
    for place in (corpus, crashes):
        place.mkdir(parents=True, exist_ok=True)
    options = {
        "runs": inputs + len(list(corpus.iterdir())) if inputs else -1,
        "timeout": NEVER,  # libFuzzer reads a clock, which goes on while the process is stopped
        "report_slow_units": NEVER,
        "rss_limit_mb": 0,  # the limit of the address space is stricter
        "len_control": 0,
        "artifact_prefix": f"{crashes}/",
        "print_final_stats": 1,
    }
    current = folder / "current"
    current.unlink(missing_ok=True)
    given = [f"-{key}={value}" for key, value in options.items()]
    done = ask(Turn(name, seconds, str(corpus), str(log), str(current), given))
    finished = FINISHED in log.read_text(errors="replace")
    if done.code or not finished:  # libFuzzer ends with 0 and its statistics when its time is over
        reason = signal.Signals(-done.code).name if done.code < 0 else f"exit-{done.code}"
        with log.open("a") as output:
            output.write(f"\n{FOUND}{reason}\n")
        if not finished and current.exists():
            content = current.read_bytes()
            size = int.from_bytes(content[:LENGTH_BYTES], "little")
            (crashes / reason).write_bytes(content[LENGTH_BYTES : LENGTH_BYTES + size])
    return read_log(name, log.read_text(errors="replace"), round(done.seconds))


@contextmanager
def worker(folder: Path) -> Iterator[Ask]:
    """Start a worker; return what has it take a turn.

    Args:
        folder: An empty one, for the files of the targets.
    """
    command = [sys.executable, "-m", "fuzz.worker", "--folder", str(folder)]
    # A fork has no other threads, and where in Rust an error came from is not shown, which takes milliseconds to find.
    alone = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "RUST_BACKTRACE": "0"}
    log = CORPUS / "worker.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        log.open("w") as said,
        subprocess.Popen(
            command, cwd=ROOT, env=alone, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        lines, answers = process.stdin, process.stdout

        def ask(turn: Turn) -> Outcome:
            print(json.dumps(asdict(turn)), file=lines, flush=True)
            if not (answer := answers.readline()):
                raise SystemExit(f"the worker ended while it prepared {turn.target}; what it said is in {log}")
            return Outcome(**json.loads(answer))

        yield ask
        lines.close()


def read_log(name: str, text: str, seconds: int) -> Tally:
    """Return what a worker did, by what it and libFuzzer wrote."""
    status = re.findall(r"^#(\d+)\t(\w+) +cov: (\d+)", text, flags=re.MULTILINE)
    start = next((int(number) for number, kind, _ in status if kind == "INITED"), 0)
    last = max((int(number) for number, _, _ in status), default=0)
    coverage = max((int(cov) for _, _, cov in status), default=0)
    newest = next((int(number) for number, _, cov in status if int(cov) == coverage), 0)
    total = re.search(rf"{FINISHED}: +(\d+)", text)
    tried = int(total[1]) if total else last
    problems = set(re.findall(rf"^{FOUND}(.+)$", text, flags=re.MULTILINE))
    problems |= set(re.findall(r"^==\d+== ERROR: libFuzzer: (.+)$", text, flags=re.MULTILINE))
    if not status:  # it did not even start
        problems.add(text[-2000:])
    return Tally(
        name,
        inputs=max(0, tried - start),
        seconds=seconds,
        coverage=coverage,
        quiet_inputs=max(0, tried - max(start, newest)),
        problems=len(problems),
    )


def add(tally: Tally, turn: Tally) -> None:
    """Add a turn to what was done before."""
    grown = turn.coverage > tally.coverage
    tally.inputs += turn.inputs
    tally.quiet_inputs = turn.quiet_inputs if grown else tally.quiet_inputs + turn.inputs
    tally.seconds += turn.seconds
    tally.quiet_seconds = 0 if grown else tally.quiet_seconds + turn.seconds
    tally.coverage, tally.problems = max(tally.coverage, turn.coverage), turn.problems


def read_tallies(path: Path) -> dict[str, Tally]:
    """Return what was done before, by target."""
    if not path.exists():
        return {}
    return {entry["name"]: Tally(**entry) for entry in json.loads(path.read_text())["targets"]}


def write_tallies(path: Path, tallies: dict[str, Tally]) -> None:
    """Write what was done so far."""
    known = [asdict(tallies[name]) for name in TARGETS if name in tallies]
    write_json(path, {"targets": known, "tost": VERSION, "date": datetime.now(UTC).date().isoformat()})


if __name__ == "__main__":
    raise SystemExit(main())
