"""Runs the tests of the native kernel under the sanitizers, and stores what came out in results/sanitize.json.

python scripts/sanitize.py                  all sanitizers
python scripts/sanitize.py --only thread    one of them: address (with undefined behaviour), thread
python scripts/sanitize.py --isa avx2       one instruction set

The kernel is built into build/sanitize, beside a copy of the package; the usual library is left alone. Each sanitizer
runs on every instruction set that this processor has. AddressSanitizer and UndefinedBehaviorSanitizer run the tests of
the operators and of the native generation, except those of other backends and of compilers, which do not run the
kernel. ThreadSanitizer runs those that use several threads, with plain threads in the place of libgomp, whose
synchronization it cannot see. Needs GCC on Linux.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from tost._io import write_json
from tost._machine import VERSION

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "sanitize"
RESULTS = ROOT / "results" / "sanitize.json"
THREADS = 4
OPTIMIZE = "-O1"  # with more, GCC takes many minutes for the checks of arithmetic
# Runs pytest with "auto" meaning one instruction set, also in tests that go back to it, and without other backends.
PYTEST = """
import sys, tost.ops._library as library, pytest
select, isa = library.select_isa, sys.argv[1]
library.select_isa = lambda name: select(isa if name == "auto" else name)
library.select_isa("auto")

class Native:
    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items):
        backends = [getattr(item, "callspec", None) and item.callspec.params.get("backend") for item in items]
        items[:] = [item for item, backend in zip(items, backends) if backend in (None, "native", "auto")]

sys.exit(pytest.main(sys.argv[2:], plugins=[Native()]))
"""
AVAILABLE = """
import tost.ops._library as library
from tost.errors import ConfigError
for name in library.compiled_isas():
    try:
        library.select_isa(name)
    except ConfigError:
        continue
    print(name)
"""


class Sanitizer(NamedTuple):
    """How to build with a sanitizer, and what to run.

    Attributes:
        flags: For compiler and linker.
        preload: Libraries that have to be there before Python.
        environment: Options of the sanitizer.
        tests: What pytest runs.
        sources: Files to link besides the kernel.
    """

    flags: str
    preload: tuple[str, ...]
    environment: Mapping[str, str]
    tests: tuple[str, ...]
    sources: tuple[str, ...] = ()


TESTS = ("tests/ops", "tests/generation/test_native.py", "--ignore", "tests/ops/triton")
SANITIZERS = {
    "address": Sanitizer(
        flags="-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer",
        preload=("libasan.so", "libstdc++.so"),  # the second, so that exceptions of other libraries can be followed
        environment={"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"},
        tests=(*TESTS, "-k", "not compile"),
    ),
    "thread": Sanitizer(
        flags="-fsanitize=thread -fno-omit-frame-pointer",
        preload=("libtsan.so",),
        environment={"TSAN_OPTIONS": "ignore_noninstrumented_modules=1 die_after_fork=0 exitcode=66"},
        tests=(*TESTS, "-k", "thread"),
        sources=("scripts/openmp_threads.cpp",),
    ),
}


class Run(NamedTuple):
    """What one sanitizer said on one instruction set.

    Attributes:
        sanitizer: Its name here.
        isa: The instruction set.
        tests: Tests that passed.
        seconds: How long it took.
        problems: Tests that failed, and reports of the sanitizer.
    """

    sanitizer: str
    isa: str
    tests: int
    seconds: int
    problems: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SANITIZERS, help="one sanitizer; all by default")
    parser.add_argument("--isa", action="append", help="one instruction set; all that the processor has by default")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file to write (results/sanitize.json)")
    given = parser.parse_args(arguments)
    if shutil.which("g++") is None or sys.platform != "linux":
        print("the sanitizers need Linux and GCC (for example `apt install g++`)", file=sys.stderr)
        return 2
    runs, isas = [], given.isa or instruction_sets()
    for name in [given.only] if given.only else SANITIZERS:
        package = build(name, isas)
        for isa in isas:
            runs.append(run_tests(name, isa, package))
            print(f"{name}, {isa}: {runs[-1].tests} tests passed, {runs[-1].problems} problems", flush=True)
            write_results(given.results, runs)
    return int(any(run.problems or not run.tests for run in runs))


def write_results(path: Path, runs: Sequence[Run]) -> None:
    """Write what was found, and keep what the file says about other sanitizers."""
    kept = json.loads(path.read_text())["runs"] if path.exists() else []
    new = {(run.sanitizer, run.isa): run._asdict() for run in runs}
    found = {**{(run["sanitizer"], run["isa"]): run for run in kept}, **new}
    about = {"tost": VERSION, "date": datetime.now(UTC).date().isoformat()}
    write_json(path, {"runs": [found[key] for key in sorted(found)], **about})


def build(name: str, isas: Sequence[str]) -> Path:
    """Build a copy of the package with the kernel under a sanitizer, and return its folder.

    A kernel that was built from the same files is taken again.
    """
    sanitizer, package, temporary = SANITIZERS[name], BUILD / name, BUILD / f"{name}-temporary"
    library, stamp, made_of = package / "tost" / "ops" / "_kernels.so", BUILD / f"{name}.sha256", digest(name, isas)
    command = [sys.executable, "setup.py", "--quiet"]
    if library.exists() and stamp.exists() and stamp.read_text() == made_of:
        subprocess.run([*command, "build_py", "--build-lib", str(package)], cwd=ROOT, check=True)
        return package
    shutil.rmtree(package, ignore_errors=True)
    temporary.mkdir(parents=True, exist_ok=True)
    objects = []
    for source in sanitizer.sources:
        objects.append(str(temporary / f"{Path(source).stem}.o"))
        flags = ["-std=c++17", OPTIMIZE, "-fPIC", *sanitizer.flags.split()]
        subprocess.run(["g++", *flags, "-c", source, "-o", objects[-1]], cwd=ROOT, check=True)
    command += ["build", "--build-lib", str(package), "--build-temp", str(temporary)]
    link = " ".join([sanitizer.flags, *objects])
    flags = {"CFLAGS": sanitizer.flags, "CXXFLAGS": sanitizer.flags, "LDFLAGS": link}
    environment = {**os.environ, **flags, "TOST_BUILD_ISAS": " ".join(isas), "TOST_BUILD_FLAGS": OPTIMIZE}
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    if not library.exists():
        raise SystemExit(f"the kernel was not built with {sanitizer.flags}; what the compiler said is above")
    stamp.write_text(made_of)
    return package


def digest(name: str, isas: Sequence[str]) -> str:
    """Return a number for what a kernel is built from: files, flags and instruction sets."""
    sanitizer, content = SANITIZERS[name], sha256()
    sources = [
        ROOT / "setup.py",
        *(ROOT / "src" / "tost" / "ops" / "csrc").iterdir(),
        *map(ROOT.joinpath, sanitizer.sources),
    ]
    content.update(repr([sanitizer.flags, OPTIMIZE, sorted(isas)]).encode())
    for path in sorted(sources):
        content.update(path.read_bytes())
    return content.hexdigest()


def instruction_sets() -> list[str]:
    """Return the instruction sets that the usual library has and this processor too."""
    done = subprocess.run([sys.executable, "-c", AVAILABLE], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.split()


def run_tests(name: str, isa: str, package: Path) -> Run:
    """Run the tests of a sanitizer on one instruction set."""
    sanitizer, start = SANITIZERS[name], time.monotonic()
    environment = {
        **os.environ,
        **sanitizer.environment,
        "LD_PRELOAD": " ".join(map(find_library, sanitizer.preload)),
        "PYTHONPATH": os.pathsep.join([str(package), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": str(THREADS),
        "OMP_WAIT_POLICY": "passive",
    }
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", "--timeout", "3000"]
    log = BUILD / f"{name}-{isa}.log"
    with log.open("w") as output:  # to be looked at while it grows
        done = subprocess.run(
            [sys.executable, "-u", "-c", PYTEST, isa, *sanitizer.tests, *options],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    passed, problems = count_outcomes(log.read_text(errors="replace"), done.returncode)
    if problems:
        print(f"what was found is in {log}", file=sys.stderr)
    return Run(name, isa, passed, round(time.monotonic() - start), problems)


def count_outcomes(output: str, code: int) -> tuple[int, int]:
    """Return how many tests passed, and how many problems there were: failures, and reports of the sanitizer."""
    counts = {kind: int(number) for number, kind in re.findall(r"(\d+) (passed|failed|error)", output[-400:])}
    reports = len(re.findall(r"(?:ERROR: Address|WARNING: Thread)Sanitizer|runtime error:", output))
    problems = counts.get("failed", 0) + counts.get("error", 0) + reports
    return counts.get("passed", 0), problems or int(code != 0)


def find_library(name: str) -> str:
    """Return the path of a library of GCC."""
    done = subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return str(Path(done.stdout.strip()).resolve())


if __name__ == "__main__":
    raise SystemExit(main())
