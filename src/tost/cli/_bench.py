"""`tost bench`: measurements, shown only when the gate is green."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tost._machine import command_arguments
from tost.bench.generate.cases import Part, Scale
from tost.bench.ops.cases import Case, Dtype, Mode, Op, select_cases
from tost.cli import _console
from tost.cli._bench_attention import attention
from tost.cli._bench_lra import lra

if TYPE_CHECKING:
    from tost.bench.harness.gate import GateResult
    from tost.bench.harness.timing import Plan
    from tost.bench.ops.report import OpsReport
    from tost.bench.ops.run import Measurements

__all__ = ["app", "generate", "model", "ops", "train"]

app = typer.Typer(help="Measure speed and memory, if all results are right.", no_args_is_help=True)
app.command()(lra)
app.command()(attention)

_STANDARD = "as the standard shapes"


@app.command()
def ops(
    op: Annotated[
        list[Op] | None, typer.Option(metavar="|".join(Op), help="Operator; repeat for more.", show_default="all")
    ] = None,
    mode: Annotated[
        list[Mode] | None, typer.Option(metavar="|".join(Mode), help="Pass; repeat for more.", show_default="both")
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Sequence lengths.", show_default=_STANDARD)
    ] = None,
    width: Annotated[int | None, typer.Option(min=1, metavar="N", help="Model width.", show_default=_STANDARD)] = None,
    heads: Annotated[int | None, typer.Option(min=1, metavar="N", help="Heads.", show_default=_STANDARD)] = None,
    batch: Annotated[int | None, typer.Option(min=1, metavar="N", help="Sequences.", show_default=_STANDARD)] = None,
    dtype: Annotated[Dtype, typer.Option(metavar="|".join(Dtype), help="Type of inputs and weights.")] = Dtype.FLOAT32,
    repeats: Annotated[
        int | None, typer.Option(min=3, metavar="N", help="Least timed runs.", show_default="30, with --quick 5")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Threads per operation.", show_default="torch's own")
    ] = None,
    compiled: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Include torch.compile of the paper's formulation.")
    ] = True,
    quick: Annotated[bool, typer.Option("--quick", help="Few short sequences, few runs: a demonstration.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Write JSON, Markdown and a plot here.")] = None,
    json: Annotated[bool, typer.Option("--json", help="End with one line of JSON.")] = False,
) -> None:
    """Time our attention layers against their projections, the paper's code and others."""
    cases = select_cases(
        ops=op or tuple(Op),
        modes=mode or tuple(Mode),
        dtype=dtype,
        tokens=_numbers(tokens) if tokens else None,
        batch=batch,
        width=width,
        heads=heads,
        quick=quick,
    )
    try:
        report = _pass_gate(cases, _plan(quick=quick, repeats=repeats), threads=threads, out=out)
        if report.gate.passed:
            _measure(report, cases, compiled=compiled, out=out)
    except KeyboardInterrupt:
        _console.log("interrupted before anything was measured; nothing was kept")
        raise typer.Exit(130) from None
    _show(report, json=json)
    _finish(report, cases, out=out)


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of numbers; write for example --tokens 1024,4096.") from None


def _plan(*, quick: bool, repeats: int | None) -> Plan:
    from tost.bench.harness.timing import Plan

    plan = Plan(repeats=5, case_seconds=0.0, contender_seconds=2.0) if quick else Plan()
    return plan if repeats is None else replace(plan, repeats=repeats)


def _command_line() -> str:
    return shlex.join(["tost", *command_arguments()])


def _pass_gate(cases: Sequence[Case], plan: Plan, *, threads: int | None, out: Path | None) -> OpsReport:
    """Check every implementation; return a report that has no measurement yet."""
    import torch

    from tost.bench.harness.environment import describe_environment
    from tost.bench.harness.gate import run_gate
    from tost.bench.ops.plot import require_matplotlib
    from tost.bench.ops.report import OpsReport
    from tost.bench.ops.run import Measurements

    if out:
        require_matplotlib()
    if threads:
        torch.set_num_threads(threads)
    _console.log("gate: comparing every implementation with the reference")
    return OpsReport(
        # A selection must not replace the files of the standard measurement.
        theme="ops" if cases == select_cases() else "ops-selection",
        environment=describe_environment(),
        gate=run_gate(list(dict.fromkeys(case.op for case in cases))),
        plan=plan,
        command=_command_line(),
        measurements=Measurements(),
    )


def _measure(report: OpsReport, cases: Sequence[Case], *, compiled: bool, out: Path | None) -> None:
    """Fill the report, and keep it on disk while it grows."""
    from tost.bench.ops.contenders import CONTENDERS
    from tost.bench.ops.run import measure

    _console.log(report.headline)
    _warn_if_busy(report.environment.load, report.environment.cores)
    contenders = [contender for contender in CONTENDERS if compiled or not contender.compiled]
    with _console.steps(len(cases)) as steps:
        watcher = _Watcher(report, steps, out)
        measure(cases, plan=report.plan, contenders=contenders, watcher=watcher, into=report.measurements)


class _Watcher:
    """Shows the progress of a measurement and writes down what is finished."""

    def __init__(self, report: OpsReport, steps: _console.Steps, out: Path | None) -> None:
        self._report = report
        self._steps = steps
        self._out = out

    def started(self, case: Case) -> None:
        self._steps.start(case.label)

    def finished(self, case: Case, measurements: Measurements) -> None:
        from tost.bench.ops.contenders import LIMIT
        from tost.bench.ops.report import write_report

        ratios = {row.contender: row.ratio for row in measurements.rows if row.case == case}
        text = ", ".join(f"{name} {ratio.median:.2f}" for name, ratio in ratios.items() if ratio and name != LIMIT)
        self._steps.finish(f"times the limit: {text}")
        if self._out:
            write_report(self._report, self._out)


def _show(report: OpsReport, *, json: bool) -> None:
    from tost.bench.ops.tables import brief_tables

    _console.show(f"machine  {report.headline}")
    for check in report.gate.failures:
        _console.show(f"  {check.message}")
    _console.show()
    for table in brief_tables(report.measurements):
        _console.show_table(table.headers, table.rows, title=table.title, labels=table.labels)
        for note in table.notes:
            _console.log(note)
    if json:
        _console.show_json(report.to_json())


def _finish(report: OpsReport, cases: Sequence[Case], *, out: Path | None) -> None:
    """Write the files, say where they are, and exit with the code that fits."""
    from tost.bench.ops.report import write_report

    if not report.gate.passed:
        _console.log("the gate is red: an implementation is wrong, so no speed was measured")
        raise typer.Exit(1)
    paths = write_report(report, out) if out else []
    for path in paths:
        _console.log(f"wrote {path}")
    if not report.measurements.complete:
        done = len({row.case for row in report.measurements.rows})
        where = f"in {paths[0]}" if paths else "above, but in no file (there was no --out)"
        _console.log(f"interrupted: {done} of {len(cases)} cases are kept {where}")
        raise typer.Exit(130)


@app.command()
def train(
    config: Annotated[str, typer.Argument(help="What to train meanwhile.")] = "demo/stdlib_bytes",
    overrides: Annotated[list[str] | None, typer.Argument(help="Changes to it, such as train.batch_size=8.")] = None,
    repeats: Annotated[int, typer.Option(min=3, metavar="N", help="Timed stretches of each side.")] = 7,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Write JSON here.")] = None,
    json: Annotated[bool, typer.Option("--json", help="End with one line of JSON.")] = False,
) -> None:
    """Time the training engine against a bare loop that takes the same steps."""
    from tost.bench.harness.files import write_atomically
    from tost.bench.train import measure_overhead
    from tost.recipes import load_config

    standard = ["train.steps=40", "schedule.warmup_steps=5", "checkpoint.every=1000", "checkpoint.best_metric=null"]
    standard += ["evaluate.every=0", "evaluate.batches=1"]
    settings = load_config(config, [*standard, *(overrides or [])])
    report = measure_overhead(settings, repeats=repeats, command=_command_line(), report=_console.log)
    rows = [
        (name, f"{1e3 * value.median:.2f}", f"{1e3 * value.lower:.2f}-{1e3 * value.upper:.2f}")
        for name, value in (("bare loop", report.bare), ("engine", report.engine))
    ]
    _console.show_table(("side", "ms per step", "quartiles"), rows, title=report.environment.summary, labels=1)
    _console.show(f"engine / bare loop: {report.ratio.median:.3f} ({report.ratio.lower:.3f}-{report.ratio.upper:.3f})")
    if out:
        path = out / f"train_{report.environment.slug}_{report.environment.month}.json"
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(path, _pretty(report.to_json()).encode())
        _console.log(f"wrote {path}")
    if json:
        _console.show_json(report.to_json())


@app.command()
def model(
    models: Annotated[
        list[str] | None, typer.Argument(help="Registered image models; the first is compared with the others.")
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(metavar="PX:B,...", help="Image sizes with images per batch.", show_default="224:8,512:2,1024:1"),
    ] = None,
    mode: Annotated[
        list[Mode] | None, typer.Option(metavar="|".join(Mode), help="Pass; repeat for more.", show_default="both")
    ] = None,
    repeats: Annotated[int, typer.Option(min=3, metavar="N", help="Timed passes of each model.")] = 11,
    memory: Annotated[bool, typer.Option(help="Measure peak memory too, in one process each.")] = True,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Write JSON and Markdown here.")] = None,
    json: Annotated[bool, typer.Option("--json", help="End with one line of JSON.")] = False,
) -> None:
    """Time whole image models against each other, and measure their memory."""
    from tost.bench.harness.environment import describe_environment
    from tost.bench.harness.gate import GateResult, run_gate
    from tost.bench.model.run import (
        STANDARD_MODELS,
        STANDARD_SIZES,
        ModelCase,
        ModelReport,
        check_model,
        measure_models,
    )
    from tost.bench.model.tables import model_markdown, model_tables

    names = models or list(STANDARD_MODELS)
    sizes = _sizes(size) if size else STANDARD_SIZES
    passes = [each is Mode.FWD_BWD for each in (mode or tuple(Mode))]
    cases = [ModelCase(image_size=s, batch=b, training=t) for s, b in sizes.items() for t in passes]
    _console.log("gate: comparing the operators, and the first model, with the reference")
    gate = GateResult(checks=(*run_gate([Op.TSSA]).checks, *check_model(names[0])))
    report = ModelReport(command=_command_line(), environment=describe_environment(), gate=gate)
    _require_green(gate)
    _console.log(f"{report.environment.summary} | {gate.summary}")
    for rows in measure_models(names, cases, repeats=repeats, memory=memory, watch=_console.log):
        report.rows += rows
    for table in model_tables(report.rows):
        _console.show_table(table.headers, table.rows, title=table.title, labels=table.labels)
    if out:
        _write_pages(out, report.stem, report.to_json(), model_markdown(report))
    if json:
        _console.show_json(report.to_json())


@app.command()
def generate(
    part: Annotated[
        list[Part] | None, typer.Option(metavar="|".join(Part), help="What; repeat for more.", show_default="all")
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(min=3, metavar="N", help="Timed tokens of each.", show_default="40, with --quick 5")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Timed prompts and steps.", show_default="2, with --quick 1")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Threads per operation.", show_default="torch's own")
    ] = None,
    source: Annotated[
        Path | None, typer.Option(metavar="RUN|MODEL", help="A trained model, for the part quality.")
    ] = None,
    text: Annotated[Path | None, typer.Option(metavar="FILE", help="A text that it has not seen.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Two layers, short texts: a demonstration.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Write JSON and Markdown here.")] = None,
    json: Annotated[bool, typer.Option("--json", help="End with one line of JSON.")] = False,
) -> None:
    """Time language models: a token by context, batches, prompts, training steps, beside GPT-2."""
    import torch

    from tost.bench.generate.quality import measure_quality
    from tost.bench.generate.run import GenerateReport, check_generation, measure_generation
    from tost.bench.generate.tables import generate_markdown, generate_tables
    from tost.bench.harness.environment import describe_environment
    from tost.bench.harness.gate import GateResult, run_gate

    if (source is None) != (text is None) or (part == [Part.QUALITY] and source is None):
        raise typer.BadParameter("the part quality takes a trained model and a text: --source RUN --text FILE.")
    if threads:
        torch.set_num_threads(threads)
    scale = Scale.quick() if quick else Scale()
    scale = replace(scale, rounds=rounds or scale.rounds, repeats=repeats or scale.repeats)
    _console.log("gate: comparing operators, prompts and tokens with the reference")
    gate = GateResult(checks=(*run_gate([Op.CAUSAL_TSSA]).checks, *check_generation()))
    report = GenerateReport(command=_command_line(), environment=describe_environment(), gate=gate, scale=scale)
    _require_green(gate)
    _console.log(f"{report.environment.summary} | {gate.summary}")
    _warn_if_busy(report.environment.load, report.environment.cores)
    for rows in measure_generation(part or tuple(Part), scale, watch=_console.log):
        report.rows += rows
    if source is not None and text is not None and Part.QUALITY in (part or tuple(Part)):
        _console.log(f"quality: the loss of {source} on {text}")
        report.rows += measure_quality(source, text, tokens=1 << 16)
    for table in generate_tables(report.rows):
        _console.show_table(table.headers, table.rows, title=table.title, labels=table.labels)
        for note in table.notes:
            _console.log(note)
    if out:
        _write_pages(out, report.stem, report.to_json(), generate_markdown(report))
    if json:
        _console.show_json(report.to_json())


def _require_green(gate: GateResult) -> None:
    if gate.passed:
        return
    for check in gate.failures:
        _console.show(f"  {check.message}")
    _console.log("the gate is red: an implementation is wrong, so no speed was measured")
    raise typer.Exit(1)


def _warn_if_busy(load: float | None, cores: int) -> None:
    if load is not None and load > 0.5 * cores:
        _console.log(f"warning: the machine is busy (load {load} on {cores} cores), so expect wide quartiles")


def _write_pages(out: Path, stem: str, content: dict[str, object], page: str) -> None:
    from tost.bench.harness.files import write_atomically

    out.mkdir(parents=True, exist_ok=True)
    for path, text in ((out / f"{stem}.json", _pretty(content)), (out / f"{stem}.md", page)):
        write_atomically(path, text.encode())
        _console.log(f"wrote {path}")


def _sizes(text: str) -> dict[int, int]:
    try:
        return {int(px): int(batch) for px, _, batch in (part.partition(":") for part in text.split(","))}
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not a list of sizes with batches; write for example --size 224:8,512:2."
        ) from None


def _pretty(content: dict[str, object]) -> str:
    from json import dumps

    return dumps(content, indent=2) + "\n"
