"""`tost bench`: measurements, shown only when the gate is green. All commands are made from their descriptions."""

from __future__ import annotations

import inspect
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

import typer

from tost.bench.harness.benchmark import Benchmark, Option, benchmarks, names, numbers, options_of, written
from tost.cli import _console

if TYPE_CHECKING:
    from tost.bench.harness.measurement import Measurement
    from tost.bench.harness.report import Report


def build() -> typer.Typer:
    """Return `tost bench` with one command for each benchmark."""
    made = typer.Typer(help="Measure speed and memory, if all results are right.", no_args_is_help=True)
    for benchmark in benchmarks():
        made.command(benchmark.name)(_command(benchmark))
    return made


def _command(benchmark: Benchmark) -> Callable[..., None]:
    """Return the function that typer makes a command of: its parameters are the options of the benchmark."""
    options = options_of(benchmark.scale)

    def command(**given: Any) -> None:
        out, json, threads, quick = (given.pop(name, None) for name in ("out", "json", "threads", "quick"))
        chosen = {name: _value(name, *options[name], value) for name, value in given.items() if value not in (None, [])}
        scale = benchmark.make_scale(quick=bool(quick), **chosen)
        theme = benchmark.theme(scale, quick=bool(quick))
        with _terminating_interrupts():
            _run(benchmark, scale, theme=theme, threads=threads, out=out, json=json)

    parameters = [_parameter(benchmark, name, kind, option) for name, (kind, option) in options.items()]
    parameters += _common(benchmark)
    command.__doc__ = benchmark.help
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def _parameter(benchmark: Benchmark, name: str, kind: Any, option: Option) -> inspect.Parameter:
    """Return an option of a benchmark as a parameter."""
    reads = option.reads or _reads(_given(kind), option)
    default, shown = _default(benchmark, name, option)
    details: dict[str, Any] = {"help": option.help, "show_default": shown, "min": option.least}
    if option.argument:
        made = typer.Argument(**details)
    else:
        element = get_args(reads)[0] if get_origin(reads) is list else reads
        choices = "|".join(element) if isinstance(element, type) and issubclass(element, StrEnum) else None
        flag = option.flag or name.replace("_", "-")
        flags = f"--{flag}/--no-{flag}" if reads is bool else f"--{flag}"
        made = typer.Option(flags, metavar=choices or option.metavar or None, **details)
    return _keyword(name, Annotated[reads | None, made], default)


def _default(benchmark: Benchmark, name: str, option: Option) -> tuple[Any, str | bool]:
    """Return the default of an option, and how it is shown. None stands for that of the scale."""
    standard = getattr(benchmark.scale(), name)
    quick = getattr(benchmark.make_scale(quick=True), name) if benchmark.has_quick else standard
    if option.default or standard in (None, ()):
        return None, option.default or False
    if isinstance(standard, tuple | dict):
        return None, written(standard)
    if quick == standard:
        return standard, True
    return None, name if standard is True else f"{written(standard)}, with --quick {written(quick)}"


def _reads(kind: Any, option: Option) -> Any:
    """Return what the command line reads for a field of some type."""
    if get_origin(kind) is tuple:
        element = get_args(kind)[0]
        return list[element] if option.argument or issubclass(element, StrEnum) else str  # type: ignore[valid-type]
    return kind


def _given(kind: Any) -> Any:
    """Return a type without None."""
    parts = [part for part in get_args(kind) if part is not type(None)]
    return parts[0] if isinstance(kind, UnionType) else kind


def _common(benchmark: Benchmark) -> list[inspect.Parameter]:
    threads = typer.Option(min=1, metavar="N", help="Threads per operation.", show_default="torch's own")
    out = typer.Option(metavar="DIR", help=f"Write {benchmark.files} here.")
    parameters = [_keyword("threads", Annotated[int | None, threads], None)]
    if benchmark.has_quick:
        explained = inspect.getdoc(benchmark.scale.quick)  # type: ignore[attr-defined]
        parameters.append(_keyword("quick", Annotated[bool, typer.Option("--quick", help=explained)], False))
    parameters.append(_keyword("out", Annotated[Path | None, out], None))
    json = typer.Option("--json", help="End with one line of JSON.")
    return [*parameters, _keyword("json", Annotated[bool, json], False)]


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _value(name: str, kind: Any, option: Option, given: Any) -> Any:
    """Return the value of a field from what the command line read."""
    if option.convert:
        return option.convert(given)
    if get_origin(_given(kind)) is tuple:
        if isinstance(given, list):
            return tuple(given)
        return numbers(given, option.flag or name) if get_args(_given(kind))[0] is int else names(given)
    return given


@contextmanager
def _terminating_interrupts() -> Iterator[None]:
    """Let SIGTERM do what Ctrl-C does: end the processes that a measurement has started, and keep what is finished."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(benchmark: Benchmark, scale: Any, *, theme: str, threads: int | None, out: Path | None, json: bool) -> None:
    """Pass the gate, measure, show and write."""
    import torch

    from tost.bench.harness.plot import require_matplotlib

    if threads:
        torch.set_num_threads(threads)
    try:
        measurement = benchmark.start(scale)
        if out and measurement.draws:  # fails now if pictures could not be drawn later
            require_matplotlib()
        with _console.progress() as progress:
            progress.note(f"gate: comparing {measurement.checked}")
            report = measurement.open_report(theme)
    except KeyboardInterrupt:
        _console.log("interrupted before anything was measured; nothing was kept")
        raise typer.Exit(130) from None
    finished = _measure(measurement, report, out) if report.gate.passed else 0
    _show(measurement, report)
    if not report.gate.passed:
        _console.log("the gate is red: an implementation is wrong, so no speed was measured")
    paths = measurement.write(report, out) if out and report.gate.passed else []
    for path in paths:
        _console.log(f"wrote {path}")
    if report.gate.passed and not report.complete:
        where = f"in {paths[0]}" if paths else "above, but in no file (there was no --out)"
        _console.log(f"interrupted: {finished} of {measurement.steps} cases are kept {where}")
    if json:
        _console.show_json(report.to_json())
    if not report.complete:
        raise typer.Exit(130 if report.gate.passed else 1)


def _measure(measurement: Measurement[Any, Any], report: Report[Any], out: Path | None) -> int:
    """Fill the report and keep it on disk while it grows; an interrupt ends the measurement, not the program.

    Returns:
        How many cases are finished.
    """
    _console.log(report.headline)
    load, cores = report.environment.load, report.environment.cores
    if load is not None and load > 0.5 * cores:
        _console.log(f"warning: the machine is busy (load {load} on {cores} cores), so expect wide quartiles")
    finished = 0
    with _console.progress(measurement.steps) as steps:
        try:
            for summary in measurement.measure(report.results, steps.start):
                steps.finish(summary)
                finished += 1
                if out:
                    measurement.write(report, out)
            report.complete = True
        except KeyboardInterrupt:
            pass
    return finished


def _show(measurement: Measurement[Any, Any], report: Report[Any]) -> None:
    _console.show(f"machine  {report.headline}")
    for check in report.gate.failures:
        _console.show(f"  {check.message}")
    _console.show()
    if not report.gate.passed:
        for sentence in measurement.regrets(report.gate):
            _console.show(sentence)
        return
    for table in measurement.tables(report.results):
        _console.print_table(table)
        for note in table.notes:
            _console.log(note)
    for sentence in measurement.findings(report.results):
        _console.show(sentence)


app = build()
