"""Shared parts of the benchmarks: correctness gate, interleaved timing, memory, worker processes, result files.

Timing on noisy machines: every round runs each contender once, in an order that is shuffled anew, so that a slow phase
of the machine slows all of them. Ratios compare two times of one round; reports show their medians and quartiles.

Memory: the C library keeps some freed blocks for later use, depending on the order of allocations. Peaks are therefore
measured in fresh processes with `RETURN_AT_ONCE`, in which every block is returned when it is freed.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import platform
import random
import re
import shlex
import statistics
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_type_hints

import psutil
import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

import tost
from tost._env import VARIABLES
from tost._io import write_atomic
from tost._lazy import load
from tost._machine import available_cpus, command_arguments, cpu_model, source_revision
from tost._text import Table, count
from tost.errors import TostError
from tost.ops import available_backends, native_info, operators
from tost.testing import relative_rms

Row = dict[str, Any]
"""One measurement, as the JSON file holds it."""

Round = dict[str, float]
"""Seconds by contender; a contender that sat this round out is absent."""

BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Largest relative rms error of an operator or a layer, by dtype."""

NETWORK_BOUND = 10 * BOUNDS[torch.float32]
"""The same for whole networks, which lose a digit more."""

RETURN_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": str(128 * 1024)}
"""For glibc: map blocks from this size on one by one, and unmap them when they are freed."""

MISSING = "-"

Job = TypeVar("Job")
Result = TypeVar("Result")

_OUT_OF_MEMORY = ("can't allocate memory", "cannot allocate memory", "out of memory", "bad_alloc", "memoryerror")
# mallopt: numbers of the two settings, and the block size up to which glibc would keep freed memory by itself.
_MMAP_THRESHOLD, _TRIM_THRESHOLD, _KEPT = -3, -1, 32 << 20


@dataclass(frozen=True)
class Check:
    """One comparison with a reference; an error that is not a number does not pass."""

    name: str
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        """Whether the error is within the bound."""
        return self.error <= self.bound

    def __str__(self) -> str:
        return f"{self.name}: relative rms {self.error:.3g} exceeds {self.bound:.3g}"


@dataclass
class Gate:
    """All comparisons, and the calls that a backend declined with its reason. Speeds are shown only if it passed."""

    checks: list[Check] = field(default_factory=list)
    declined: dict[str, str] = field(default_factory=dict)

    @property
    def failures(self) -> list[Check]:
        """The comparisons that failed."""
        return [check for check in self.checks if not check.passed]

    @property
    def passed(self) -> bool:
        """True when something was compared and nothing failed."""
        return bool(self.checks) and not self.failures

    @property
    def summary(self) -> str:
        """A few words for the head of a table."""
        if self.passed:
            return f"gate: {count(len(self.checks), 'check')} passed"
        return f"gate: {len(self.failures)} of {count(len(self.checks), 'check')} FAILED"


def compare_networks(name: str, run: Callable[[str, torch.dtype], tuple[nn.Module, Tensor]]) -> list[Check]:
    """Compare a network on its fastest operators with the same weights on the reference operators in float64.

    Args:
        name: Prefix of the names of the checks.
        run: From a backend and a dtype to the network, with gradients, and its output.
    """
    found = []
    for backend, dtype in (("auto", torch.float32), ("reference", torch.float64)):
        torch.manual_seed(0)
        model, output = run(backend, dtype)
        # As one vector, because some gradients are zero up to rounding: a key's bias does not change a softmax.
        gradients = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
        found.append({"logits": output.detach(), "gradients": torch.cat(gradients)})
    fast, slow = found
    return [Check(f"{name} {part}", relative_rms(fast[part], slow[part]), NETWORK_BOUND) for part in fast]


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of `count` values."""

    median: float
    lower: float
    upper: float
    count: int


def spread(values: Sequence[float]) -> Spread:
    """Return the median and the quartiles of at least one value."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0], 1)
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, lower, upper, len(values))


def spread_of(rounds: Sequence[Round], name: str) -> Spread:
    """Return the median and the quartiles of a contender's times."""
    return spread([seconds[name] for seconds in rounds if name in seconds])


def ratios(rounds: Sequence[Round], name: str, base: str) -> list[float]:
    """Return ``name / base`` for each round in which both ran."""
    return [seconds[name] / seconds[base] for seconds in rounds if name in seconds and base in seconds]


@dataclass(frozen=True)
class Trial:
    """One contender, ready to be timed.

    Attributes:
        run: The timed call.
        reset: Called after the clock has stopped.
        device: ``cuda`` is timed by events of the GPU.
    """

    run: Callable[[], object]
    reset: Callable[[], object] = lambda: None
    device: str = "cpu"

    def seconds(self) -> float:
        """Run once and return the time."""
        if self.device == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
            begin.record()
            result = self.run()
            end.record()
            end.synchronize()
            seconds: float = begin.elapsed_time(end) / 1000
        else:
            start = time.perf_counter()
            result = self.run()  # freed after the clock was read: returning its memory is no part of the computation
            seconds = time.perf_counter() - start
        del result
        self.reset()
        return seconds


def layer_trial(layer: nn.Module, x: Tensor, cotangent: Tensor | None, device: str = "cpu") -> Trial:
    """Return the forward pass of a layer without a graph, or with a `cotangent` its forward and backward pass."""

    def run() -> Tensor:
        with torch.set_grad_enabled(cotangent is not None):
            y: Tensor = layer(x)
        if cotangent is not None:
            torch.autograd.backward(y, cotangent)
        return y

    def reset() -> None:
        for tensor in (x, *layer.parameters()):
            tensor.grad = None

    return Trial(run, reset, device)


def warm_up(trial: Trial, runs: int) -> list[float]:
    """Run a contender a few times untimed; runs of more than a second are repeated once at most."""
    seconds: list[float] = []
    while len(seconds) < runs and not (len(seconds) > 1 and seconds[-1] > 1.0):
        seconds.append(trial.seconds())
    return seconds


def interleave(trials: Mapping[str, Trial], repeats: Mapping[str, int], seed: int = 0) -> list[Round]:
    """Time the contenders in rounds, as many as the largest number of repeats.

    A contender with fewer repeats takes part in rounds spread evenly over the whole time.
    """
    total = max(repeats.values())
    order = random.Random(seed)
    rounds: list[Round] = []
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for index in range(total):
            names = [name for name in trials if (index + 1) * repeats[name] // total > index * repeats[name] // total]
            order.shuffle(names)
            rounds.append({name: trials[name].seconds() for name in names})
    finally:
        if was_enabled:
            gc.enable()
    return rounds


def plan_repeats(
    estimates: Mapping[str, float], *, always: Collection[str], least: int, case_seconds: float, most_seconds: float
) -> dict[str, int]:
    """Decide how often each contender runs.

    Args:
        estimates: Seconds of one run, by contender.
        always: Contenders that take part in every round.
        least: Least number of rounds; short cases get up to ten times as many.
        case_seconds: Time that the rounds of a short case may take.
        most_seconds: Time after which the other contenders stop taking part, though never before three rounds.
    """
    affordable = int(case_seconds / max(sum(estimates.values()), 1e-9))
    rounds = min(max(least, affordable), 10 * least)
    return {
        name: rounds if name in always else min(rounds, max(3, int(most_seconds / max(seconds, 1e-9))))
        for name, seconds in estimates.items()
    }


@contextmanager
def watch_peak(device: str = "cpu") -> Iterator[list[int]]:
    """Measure by how many bytes memory grows at most in a block of code; the list receives the number at its end."""
    growth: list[int] = []
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield growth
        growth.append(torch.cuda.max_memory_allocated() - before)
        return
    before = psutil.Process().memory_info().rss
    with suppress(OSError):  # restarts the peak, where the system can: building must not count
        Path("/proc/self/clear_refs").write_text("5")
    yield growth
    growth.append(max(0, _peak_memory() - before))


def _peak_memory() -> int:
    """Return the most memory that this process has used since its peak was last reset, in bytes."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        import resource

        largest: int = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return largest if sys.platform == "darwin" else 1024 * largest  # bytes there, kibibytes elsewhere
    return 1024 * int(re.search(r"^VmHWM:\s*(\d+)", status, flags=re.MULTILINE)[1])  # type: ignore[index]


def keep_freed_memory() -> None:
    """Make glibc keep freed blocks for later use again; does nothing with other C libraries."""
    with suppress(OSError, AttributeError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, _KEPT)
        mallopt(_TRIM_THRESHOLD, 2 * _KEPT)


def free_bytes(device: str) -> int:
    """Return the memory that is free now."""
    return int(torch.cuda.mem_get_info()[0] if device == "cuda" else psutil.virtual_memory().available)


def limit_memory(limit_bytes: int | None, device: str = "cpu") -> None:
    """Make allocations above a limit fail in this process, before the system ends other processes."""
    if limit_bytes is None:
        return
    if device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total))
        return
    with suppress(ImportError, ValueError, OSError):
        import resource

        used = getattr(psutil.Process().memory_info(), "data", 0)
        resource.setrlimit(resource.RLIMIT_DATA, (used + limit_bytes, resource.RLIM_INFINITY))


def kept_bytes(forward: Callable[[], Tensor], excluding: Iterable[Tensor] = ()) -> int:
    """Return the bytes that autograd keeps alive between forward and backward.

    Tensors that share a storage count once, and a view counts its whole storage.

    Args:
        forward: The computation; at least one of its inputs requires a gradient.
        excluding: Tensors that exist anyway, such as parameters.

    Example:
        >>> x = torch.ones(1000, requires_grad=True)
        >>> kept_bytes(lambda: x.exp())  # the derivative of exp needs its result: 1000 numbers of 4 bytes
        4000
    """
    ignored = {tensor.untyped_storage().data_ptr() for tensor in excluding}
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in ignored:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()  # held until the count is done: a freed storage could pass its address on
        total = sum(sizes.values())
    del result
    return total


def run_in_process(
    function: Callable[[Job], Result],
    job: Job,
    *,
    label: str,
    timeout: float | None = None,
    device: str = "cpu",
    limit_bytes: int | None = None,
) -> Result:
    """Call a function in a fresh process, whose C library returns freed memory at once.

    Args:
        function: Top-level function of a module, from one dataclass to a type that JSON can hold.
        job: Its argument.
        label: Prefix of error messages.
        timeout: Seconds after which the process is ended.
        device: Device of the limit.
        limit_bytes: Memory that the process may take.

    Raises:
        TostError: The process failed or took too long; the message ends with the reason.
    """
    task = {
        "function": f"{function.__module__}:{function.__name__}",
        "job": TypeAdapter(type(job)).dump_python(job, mode="json"),
        "threads": torch.get_num_threads(),
        "device": device,
        "limit_bytes": limit_bytes,
    }
    try:
        done = subprocess.run(
            [sys.executable, "-c", "from tost.bench.harness import work; work()"],
            input=json.dumps(task).encode(),
            capture_output=True,
            check=False,
            env=os.environ | RETURN_AT_ONCE,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        raise TostError(f"{label}: ended after {timeout:.0f} s") from None
    if done.returncode:
        raise TostError(f"{label}: {failure(done.returncode, done.stderr.decode(errors='replace'))}")
    return TypeAdapter(get_type_hints(function)["return"]).validate_json(done.stdout)


def work() -> None:
    """Run the task on standard input in this process and write its result to standard output as JSON."""
    task = json.load(sys.stdin)
    torch.set_num_threads(task["threads"])
    function = load(task["function"])
    limit_memory(task["limit_bytes"], task["device"])
    hints = get_type_hints(function)
    returned = hints.pop("return")
    result = function(TypeAdapter(*hints.values()).validate_python(task["job"]))
    sys.stdout.buffer.write(TypeAdapter(returned).dump_json(result) + b"\n")


def failure(code: int, errors: str) -> str:
    """Return why a process failed, from its exit code and its standard error."""
    last = (errors.strip().splitlines() or [""])[-1]
    if code == -9:
        return "ended by the system, as when memory runs out"
    if any(word in last.lower() for word in _OUT_OF_MEMORY):
        return "out of memory"
    return f"failed with code {code}: {last or 'no message'}"


def describe_environment() -> dict[str, Any]:
    """Return machine, software and moment, as result files hold them."""
    return {
        "cpu": cpu_model(),
        "cores": available_cpus(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tost": tost.__version__,
        "revision": source_revision(),
        "backends": {op: available_backends(op) for op in operators()},
        "native": native_info(),
        "variables": {variable.name: variable.get() for variable in VARIABLES if variable.name in os.environ},
        "measured": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


class Benchmark(ABC):
    """A benchmark: a dataclass of what is measured, with the code that checks, measures and shows.

    Attributes:
        name: Its command, and the start of the names of its files.
        heading: Title of the Markdown page.
        checked: What the gate compares, for the progress line.
        draws: Whether there are pictures, which need matplotlib.
        selects: Fields whose values other than the default make a selection, with result files of its own.
    """

    name: ClassVar[str]
    heading: ClassVar[str]
    checked: ClassVar[str]
    introduction: ClassVar[str] = ""
    draws: ClassVar[bool] = False
    selects: ClassVar[tuple[str, ...]] = ()
    quick: bool = False
    device: str = "cpu"

    @abstractmethod
    def check(self) -> Gate:
        """Compare what is measured with its reference."""

    @property
    @abstractmethod
    def steps(self) -> int:
        """How often `measure` yields."""

    @abstractmethod
    def measure(self, results: dict[str, Any], watch: Callable[[str], None]) -> Iterator[str]:
        """Add the numbers of one case after the other to `results`, and yield a line about each.

        Args:
            results: Receives the numbers; ``rows`` is there.
            watch: Called with a line when something starts.
        """

    @abstractmethod
    def tables(self, results: Mapping[str, Any]) -> list[Table]:
        """Return the tables for a terminal and the page."""

    def pictures(self, report: Report) -> dict[str, bytes]:
        """Return image files, by the rest of their names after the stem."""
        return {}

    def about(self) -> dict[str, Any]:
        """Return the conditions that the result files hold; by default the options."""
        return {"scale": TypeAdapter(type(self)).dump_python(self, mode="json")}

    @property
    def theme(self) -> str:
        """Start of the file names; a demonstration or a selection does not replace the whole."""
        fields: Mapping[str, Any] = vars(type(self)())
        selected = any(getattr(self, field) != fields[field] for field in self.selects)
        return f"{self.name}-quick" if self.quick else f"{self.name}-selection" if selected else self.name

    def open_report(self) -> Report:
        """Pass the gate; returns a report that has no numbers yet."""
        return Report(self)


class Report:
    """A measurement together with everything needed to judge it.

    Args:
        benchmark: Checked here.

    Attributes:
        results: The numbers: ``rows`` and whatever else the benchmark has. Times are in seconds.
        complete: Whether all cases were measured.
    """

    def __init__(self, benchmark: Benchmark) -> None:
        self.benchmark = benchmark
        self.command = shlex.join(["tost", *command_arguments()])
        self.environment = describe_environment()
        self.accelerator = torch.cuda.get_device_name() if benchmark.device == "cuda" else None
        self.gate = benchmark.check()
        self.results: dict[str, Any] = {"rows": []}
        self.complete = False

    @property
    def stem(self) -> str:
        """File name without its ending: theme, hardware and month."""
        cpu = re.sub(r"[^a-z0-9]+", "-", self.environment["cpu"].lower()).strip("-")
        hardware = (
            self.accelerator.lower().replace(" ", "-") if self.accelerator else f"{cpu}-{self.environment['threads']}t"
        )
        return f"{self.benchmark.theme}_{hardware}_{self.environment['measured'][:7].replace('-', '')}"

    @property
    def machine(self) -> str:
        """One line: hardware and versions."""
        place = self.environment
        revision = f" ({place['revision']})" if place["revision"] else ""
        parts = [f"{place['cpu']}, {count(place['threads'], 'thread')}", f"torch {place['torch']}"]
        return " | ".join([*parts, f"tost {place['tost']}{revision}", *filter(None, [self.accelerator])])

    @property
    def headline(self) -> str:
        """One line: hardware, versions and the state of the gate."""
        return f"{self.machine} | {self.gate.summary}"

    def to_json(self) -> dict[str, Any]:
        """Return one object of plain types; without numbers if the gate is red."""
        return {
            "theme": self.benchmark.theme,
            "complete": self.complete and self.gate.passed,
            "command": self.command,
            "environment": self.environment,
            **({"accelerator": self.accelerator} if self.accelerator else {}),
            "gate": {
                "passed": self.gate.passed,
                "checks": len(self.gate.checks),
                "failures": list(map(str, self.gate.failures)),
                "declined": self.gate.declined,
                "bounds": {str(dtype).removeprefix("torch."): bound for dtype, bound in BOUNDS.items()},
            },
            **self.benchmark.about(),
            **(self.results if self.gate.passed else {"rows": []}),
        }

    def page(self, pictures: Iterable[str] = ()) -> str:
        """Return the Markdown page: pictures and tables."""
        load = self.environment["load"]
        busy = "" if load is None else f" (load average {load:g} at the start)"
        made = f"Made by `{self.command}` on {self.environment['measured'][:10]}{busy}."
        blocks = [f"# {self.benchmark.heading}", self.headline, made, self.benchmark.introduction]
        blocks += [f"![{self.benchmark.heading}]({self.stem}{ending})" for ending in pictures]
        for table in self.benchmark.tables(self.results):
            blocks += [f"## {table.title}", table.markdown(), "\n".join(f"- {note}" for note in table.notes)]
        return "\n\n".join(filter(None, blocks)) + "\n"

    def write(self, folder: Path) -> list[Path]:
        """Write the files of a measurement, and return their paths.

        An incomplete one goes to ``<stem>.partial.json`` and leaves the files of an earlier, complete one alone. A
        complete one is written as JSON, Markdown and pictures, and its partial file is removed.

        Raises:
            ValueError: The gate is red.
        """
        if not self.gate.passed:
            raise ValueError(f"{self.gate.summary}; speeds are shown only behind a green gate.")
        text = json.dumps(self.to_json(), indent=2, allow_nan=False) + "\n"
        partial = folder / f"{self.stem}.partial.json"
        if not self.complete:
            write_atomic(partial, text)
            return [partial]
        pictures = self.benchmark.pictures(self)
        contents: dict[str, str | bytes] = {".json": text, ".md": self.page(pictures), **pictures}
        for ending, content in contents.items():
            write_atomic(folder / f"{self.stem}{ending}", content)
        partial.unlink(missing_ok=True)
        return [folder / f"{self.stem}{ending}" for ending in contents]


def plain(value: Any) -> Row:
    """Return a dataclass as a row of plain types."""
    return asdict(value)


def cell(value: float | None, form: str = "", scale: float = 1.0) -> str:
    """Format a number, such as ``cell(seconds, ".1f", 1e3)``; a missing one is a dash."""
    return MISSING if value is None else format(scale * value, form)


def short(value: float | None) -> str:
    """Format a number in about three digits."""
    return MISSING if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def with_quartiles(value: Mapping[str, Any] | None, show: Callable[[float], str] = "{:.2f}".format) -> str:
    """Format a spread: the median with its quartiles in brackets; a single value has none."""
    if value is None:
        return MISSING
    if value["count"] == 1:
        return show(value["median"])
    return f"{show(value['median'])} ({show(value['lower'])}-{show(value['upper'])})"


def columns(
    title: str, rows: Sequence[Row], cells: Iterable[tuple[str, Callable[[Row], str]]], labels: int = 1
) -> Table:
    """Return a table with one line per row, from the titles of its columns and the functions that format their cells.

    Args:
        title: Line above the table.
        rows: Measurements.
        cells: Columns.
        labels: Number of columns on the left that hold words.
    """
    headers, texts = zip(*cells, strict=True)
    return Table(title=title, headers=headers, rows=[tuple(text(row) for text in texts) for row in rows], labels=labels)


def pivot(
    title: str,
    headers: Sequence[str],
    cells: Iterable[tuple[tuple[str, ...], str, str]],
    *,
    labels: int | None = None,
    notes: Iterable[str] = (),
) -> Table:
    """Return a table with one line per label and one column per name.

    Args:
        title: Line above the table.
        headers: Titles of the columns on the left.
        cells: Label of the line, name of the column, and text.
        labels: Number of columns with words; by default those on the left.
        notes: Lines below the table.
    """
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    names: dict[str, None] = {}
    for label, name, text in cells:
        lines.setdefault(label, {})[name] = text
        names[name] = None
    return Table(
        title=title,
        headers=(*headers, *names),
        rows=[(*label, *(line.get(name, MISSING) for name in names)) for label, line in lines.items()],
        labels=len(headers) if labels is None else labels,
        notes=tuple(notes),
    )
