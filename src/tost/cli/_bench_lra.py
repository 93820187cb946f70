"""`tost bench lra`: the token mixers of the Long-Range Arena in one encoder."""

from __future__ import annotations

import shlex
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tost._machine import command_arguments
from tost.bench.ops.cases import Op
from tost.cli import _console

if TYPE_CHECKING:
    from tost.bench.lra.run import LraReport, LraScale

__all__ = ["Form", "lra"]


class Form(StrEnum):
    """Whose defaults the mixers have."""

    PAPER = "paper"
    LRA = "lra"


def lra(
    lengths: Annotated[
        str | None,
        typer.Option(metavar="N,N,...", help="Sequence lengths.", show_default="1024,2048,3072,4096,16384"),
    ] = None,
    mixers: Annotated[
        str | None,
        typer.Option(metavar="NAME,...", help="Mixers; the first is compared with the others.", show_default="all"),
    ] = None,
    form: Annotated[
        Form, typer.Option(metavar="|".join(Form), help="Mixers as in their papers, or as in the official code.")
    ] = Form.PAPER,
    repeats: Annotated[
        int | None, typer.Option(min=3, metavar="N", help="Timed runs of each.", show_default="7, with --quick 3")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Threads per operation.", show_default="torch's own")
    ] = None,
    memory: Annotated[bool, typer.Option(help="Measure peak memory too, in one process each.")] = True,
    pathx: Annotated[bool, typer.Option(help="Measure a step of the Path-X model too.")] = True,
    quick: Annotated[bool, typer.Option("--quick", help="Short sequences, few runs: a demonstration.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Write JSON, Markdown and plots here.")] = None,
    json: Annotated[bool, typer.Option("--json", help="End with one line of JSON.")] = False,
) -> None:
    """Time long-range mixers in the same encoder, and measure their memory."""
    import torch

    from tost.bench.lra.run import LraScale
    from tost.bench.lra.tables import lra_findings, lra_tables
    from tost.bench.ops.plot import require_matplotlib

    standard = LraScale.quick() if quick else LraScale()
    scale = replace(
        standard,
        lengths=tuple(sorted(set(_numbers(lengths)))) if lengths else standard.lengths,
        mixers=tuple(dict.fromkeys(name.strip() for name in mixers.split(","))) if mixers else standard.mixers,
        form=str(form),
        repeats=repeats or standard.repeats,
        memory=memory,
        pathx=pathx and standard.pathx,
    )
    if out:
        require_matplotlib()
    if threads:
        torch.set_num_threads(threads)
    report = _measure(scale)
    for table in lra_tables(report.rows):
        _console.show_table(table.headers, table.rows, title=table.title, labels=table.labels)
        for note in table.notes:
            _console.log(note)
    for sentence in lra_findings(report.rows):
        _console.show(sentence)
    _finish(report, out=out, json=json)


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of numbers; write for example --lengths 1024,4096.") from None


def _measure(scale: LraScale) -> LraReport:
    """Pass the gate and measure; an interrupt ends the measurement and keeps the finished cases."""
    from tost.bench.harness.environment import describe_environment
    from tost.bench.harness.gate import GateResult, run_gate
    from tost.bench.lra.run import LraReport, check_encoder, measure_lra

    _console.log("gate: comparing the operator, and an encoder, with the reference")
    gate = GateResult(checks=(*run_gate([Op.TSSA]).checks, *check_encoder()))
    report = LraReport(
        command=shlex.join(["tost", *command_arguments()]), environment=describe_environment(), gate=gate, scale=scale
    )
    if not gate.passed:
        for check in gate.failures:
            _console.show(f"  {check.message}")
        _console.log("the gate is red: an implementation is wrong, so no speed was measured")
        raise typer.Exit(1)
    _console.log(f"{report.environment.summary} | {gate.summary}")
    load, cores = report.environment.load, report.environment.cores
    if load is not None and load > 0.5 * cores:
        _console.log(f"warning: the machine is busy (load {load} on {cores} cores), so expect wide quartiles")
    with _console.steps(len(scale.cases)) as steps:
        try:
            for rows in measure_lra(scale, watch=steps.start):
                report.rows += rows
                shown = ", ".join(f"{row.mixer} {row.seconds.median:.3g} s" for row in rows if row.seconds)
                steps.finish(shown)
            report.complete = True
        except KeyboardInterrupt:
            _console.log("interrupted: the finished cases are kept")
    return report


def _finish(report: LraReport, *, out: Path | None, json: bool) -> None:
    from tost.bench.lra.tables import write_lra

    for path in write_lra(report, out) if out else ():
        _console.log(f"wrote {path}")
    if json:
        _console.show_json(report.to_json())
    if not report.complete:
        raise typer.Exit(130)
