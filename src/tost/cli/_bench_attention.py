"""`tost bench attention`: the paper's efficiency figures, measured here."""

from __future__ import annotations

import shlex
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tost._machine import command_arguments
from tost.bench.attention.cases import AttentionScale, Device, Figure
from tost.bench.ops.cases import Op
from tost.cli import _console

if TYPE_CHECKING:
    from tost.bench.attention.run import AttentionReport, AttentionRow

__all__ = ["attention"]


def attention(
    figure: Annotated[
        list[Figure] | None, typer.Option(metavar="|".join(Figure), help="Figure; repeat for more.", show_default="all")
    ] = None,
    device: Annotated[
        Device, typer.Option(metavar="|".join(Device), help="Where; auto takes a GPU if there is one.")
    ] = Device.AUTO,
    threads: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Threads per operation.", show_default="torch's own")
    ] = None,
    limit_seconds: Annotated[
        float | None, typer.Option(min=0, metavar="S", help="Leave out slower passes.", show_default="60")
    ] = None,
    limit_gb: Annotated[
        float | None,
        typer.Option(min=0, metavar="GB", help="Leave out what needs more.", show_default="3/4 of what is free"),
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0, metavar="M", help="Start nothing after this long.", show_default="26")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Short sequences, few runs: a demonstration.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Write JSON, Markdown and plots here.")] = None,
    json: Annotated[bool, typer.Option("--json", help="End with one line of JSON.")] = False,
) -> None:
    """Time ToST, ViT, CRATE, XCiT and GPT-2 attention by size, with memory and roofline."""
    import torch

    from tost.bench.attention.run import choose_device
    from tost.bench.attention.tables import attention_findings, attention_tables
    from tost.bench.ops.plot import require_matplotlib

    if out:
        require_matplotlib()
    if threads:
        torch.set_num_threads(threads)
    place, accelerator = choose_device(device)
    standard = AttentionScale.quick(place) if quick else AttentionScale.standard(place)
    scale = replace(
        standard,
        shapes=standard.only(figure) if figure else standard.shapes,
        limit_seconds=standard.limit_seconds if limit_seconds is None else limit_seconds,
        limit_bytes=None if limit_gb is None else int(1e9 * limit_gb),
        total_seconds=standard.total_seconds if minutes is None else 60 * minutes,
    )
    # A part, or a quick look, must not replace the files of the whole.
    theme = "attention-quick" if quick else "attention" if set(scale.shapes) == set(Figure) else "attention-selection"
    report = _pass_gate(scale, theme, accelerator)
    _measure(report, out)
    for table in attention_tables(report.rows):
        _console.show_table(table.headers, table.rows, title=table.title, labels=table.labels)
        for note in table.notes:
            _console.log(note)
    for sentence in attention_findings(report.rows, report.pairs):
        _console.show(sentence)
    _finish(report, out=out, json=json)


def _pass_gate(scale: AttentionScale, theme: str, accelerator: str | None) -> AttentionReport:
    """Check operators and layers; return a report that has no measurement yet."""
    from tost.bench.attention.layers import check_layers
    from tost.bench.attention.run import AttentionReport
    from tost.bench.harness.environment import describe_environment
    from tost.bench.harness.gate import GateResult, run_gate

    _console.log("gate: comparing operators and layers with the reference")
    operators = run_gate(list(Op))
    gate = GateResult(checks=(*operators.checks, *check_layers()), declined=operators.declined)
    command = shlex.join(["tost", *command_arguments()])
    environment = describe_environment()
    report = AttentionReport(
        command=command, environment=environment, gate=gate, scale=scale, theme=theme, accelerator=accelerator
    )
    if not gate.passed:
        for check in gate.failures:
            _console.show(f"  {check.message}")
        _console.log("the gate is red: an implementation is wrong, so no speed was measured")
        raise typer.Exit(1)
    _console.log(f"{report.machine} | {gate.summary}")
    if environment.load is not None and environment.load > 0.5 * environment.cores:
        _console.log(f"warning: the machine is busy (load {environment.load} on {environment.cores} cores)")
    return report


def _measure(report: AttentionReport, out: Path | None) -> None:
    """Fill the report, and keep it on disk while it grows; an interrupt ends the measurement."""
    import torch

    from tost.bench.attention.point import roofline_in_process
    from tost.bench.attention.run import measure_attention, measure_pairs
    from tost.bench.attention.tables import write_attention

    scale, started = report.scale, time.monotonic()
    try:
        report.roofline = roofline_in_process(device=scale.device, threads=torch.get_num_threads())
        roof = report.roofline
        _console.log(
            f"this machine: {roof.flops_per_second / 1e9:.0f} GFLOP/s in a matrix product, "
            f"{roof.bytes_per_second / 1e9:.1f} GB/s in a copy"
        )
        for pair in measure_pairs(scale, watch=_console.log):
            report.pairs.append(pair)
        with _console.steps(len(scale.points)) as steps:
            for row in measure_attention(scale, roof, watch=steps.start):
                report.rows.append(row)
                steps.finish(_summary(row))
                report.elapsed_seconds = time.monotonic() - started
                if out:
                    write_attention(report, out)
        report.complete = True
    except KeyboardInterrupt:
        _console.log("interrupted: the finished points are kept")
    report.elapsed_seconds = time.monotonic() - started


def _summary(row: AttentionRow) -> str:
    if row.seconds is None or row.peak_bytes is None:
        return f"left out: {row.note}"
    return f"{1e3 * row.seconds.median:.4g} ms, {row.peak_bytes / 1e6:.0f} MB, {row.distance:.2f} x roofline"


def _finish(report: AttentionReport, *, out: Path | None, json: bool) -> None:
    from tost.bench.attention.tables import write_attention

    for path in write_attention(report, out) if out else ():
        _console.log(f"wrote {path}")
    if json:
        _console.show_json(report.to_json())
    if not report.complete:
        raise typer.Exit(130)
