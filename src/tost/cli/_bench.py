"""`tost bench`: measurements, shown only when the gate is green."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tost._text import integers
from tost.cli import _console
from tost.errors import ConfigError

if TYPE_CHECKING:
    from tost.bench.harness import Benchmark, Report

app = typer.Typer(help="Measure speed and memory, if all results are right.", no_args_is_help=True)

Op = StrEnum("Op", ["tssa", "causal_tssa", "gated_tssa"])
Mode = StrEnum("Mode", {"FORWARD": "fwd", "BACKWARD": "fwd+bwd"})
Dtype = StrEnum("Dtype", ["float32", "bfloat16", "float64"])
Figure = StrEnum("Figure", ["alone", "tokens", "width", "large", "causal", "base"])
Part = StrEnum("Part", ["prefill", "decode", "batch", "train"])
Device = StrEnum("Device", ["auto", "cpu", "cuda"])

Out = Annotated[Path | None, typer.Option(metavar="DIR", help="Write JSON, Markdown and pictures here.")]
Json = Annotated[bool, typer.Option("--json", help="End with one line of JSON.")]
Quick = Annotated[bool, typer.Option("--quick", help="Measure small sizes a few times, as a demonstration.")]
Threads = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Threads per operation.", show_default="torch's own")
]
Modes = Annotated[
    list[Mode] | None, typer.Option(metavar="fwd|fwd+bwd", help="Pass; repeat for more.", show_default="both")
]
_STANDARD = "as the standard shapes"


@app.command()
def ops(
    op: Annotated[
        list[Op] | None,
        typer.Option(metavar="|".join(Op), help="Operator; repeat for more.", show_default="all"),
    ] = None,
    mode: Modes = None,
    tokens: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Sequence lengths.", show_default=_STANDARD)
    ] = None,
    width: Annotated[int | None, typer.Option(metavar="N", min=1, help="Model width.", show_default=_STANDARD)] = None,
    heads: Annotated[int | None, typer.Option(metavar="N", min=1, help="Heads.", show_default=_STANDARD)] = None,
    batch: Annotated[int | None, typer.Option(metavar="N", min=1, help="Sequences.", show_default=_STANDARD)] = None,
    dtype: Annotated[Dtype, typer.Option(help="Type of inputs and weights.")] = Dtype.float32,
    block_size: Annotated[
        int, typer.Option(metavar="N", min=1, help="Features in a block of our layer's statistics.")
    ] = 1,
    repeats: Annotated[int, typer.Option(metavar="N", min=3, help="Least timed runs.")] = 30,
    compile: Annotated[bool, typer.Option(help="Include torch.compile of the paper's listing.")] = True,
    quick: Quick = False,
    threads: Threads = None,
    out: Out = None,
    json: Json = False,
) -> None:
    """Time our attention layers against their projections, the paper's code and others."""
    from tost.bench import ops as bench

    benchmark = bench.Ops(
        op=tuple(op or bench.OPS),
        mode=tuple(mode or bench.MODES),
        tokens=None if tokens is None else _numbers(tokens),
        width=width,
        heads=heads,
        batch=batch,
        dtype=dtype,
        block_size=block_size,
        repeats=repeats,
        compile=compile,
        quick=quick,
    )
    _run(benchmark, threads, out, json)


@app.command()
def attention(
    figure: Annotated[
        list[Figure] | None,
        typer.Option(metavar="|".join(Figure), help="Figure; repeat for more.", show_default="all"),
    ] = None,
    device: Annotated[Device, typer.Option(help="Where; auto takes a GPU if there is one.")] = Device.auto,
    limit_seconds: Annotated[float, typer.Option(metavar="S", min=0, help="Skip slower passes.")] = 60.0,
    limit_gb: Annotated[
        float | None,
        typer.Option(metavar="GB", min=0, help="Skip passes that need more.", show_default="3/4 of the free memory"),
    ] = None,
    minutes: Annotated[float, typer.Option(metavar="M", min=0, help="Start no point after this long.")] = 26.0,
    quick: Quick = False,
    threads: Threads = None,
    out: Out = None,
    json: Json = False,
) -> None:
    """Time ToST, ViT, CRATE, XCiT and GPT-2 attention by size, with memory."""
    from tost.bench import attention as bench

    benchmark = bench.Attention(
        figure=tuple(figure or bench.FIGURES),
        device=device,
        limit_seconds=limit_seconds,
        limit_bytes=None if limit_gb is None else int(1e9 * limit_gb),
        total_seconds=60 * minutes,
        quick=quick,
    )
    _run(benchmark, threads, out, json)


@app.command()
def model(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            help="Registered image and language models; each kind is compared with its first.",
            show_default="ToST, ViT and XCiT of the small size, ToST and GPT-2 of the base size",
        ),
    ] = None,
    size: Annotated[
        str, typer.Option(metavar="PX:B,...", help="Image sizes with images per batch.")
    ] = "224:8,512:1,1024:1",
    context: Annotated[str, typer.Option(metavar="N,N,...", help="Tokens of a text.")] = "128,1024,8192",
    path: Annotated[
        list[str] | None,
        typer.Option(metavar="PATH", help="Way to run, such as 'torch bf16'; repeat for more.", show_default="all"),
    ] = None,
    repeats: Annotated[int, typer.Option(metavar="N", min=3, help="Timed passes of each.")] = 11,
    memory: Annotated[bool, typer.Option(help="Measure peak memory too, in one process each.")] = True,
    threads: Threads = None,
    out: Out = None,
    json: Json = False,
) -> None:
    """Time whole models in torch, ONNX Runtime and OpenVINO, with memory and roofline."""
    try:
        sizes = {int(px): int(batch) for px, _, batch in (part.partition(":") for part in size.split(","))}
    except ValueError:
        raise ConfigError(
            f"{size!r} is not a list of sizes with batches; write for example --size 224:8,512:1."
        ) from None
    from tost.bench import model as bench

    paths = tuple(path or bench.installed())
    if unknown := [name for name in paths if name not in bench.installed()]:
        raise ConfigError(f"--path {unknown[0]!r} cannot run here; there are {', '.join(bench.installed())}.")
    names = tuple(models or bench.STANDARD_MODELS)
    _run(bench.Models(names, sizes, _numbers(context), paths, repeats, memory), threads, out, json)


@app.command()
def generate(
    part: Annotated[
        list[Part] | None, typer.Option(metavar="|".join(Part), help="Part; repeat for more.", show_default="all")
    ] = None,
    repeats: Annotated[int, typer.Option(metavar="N", min=3, help="Timed tokens of each.")] = 40,
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="Timed prompts and steps.")] = 2,
    quick: Quick = False,
    threads: Threads = None,
    out: Out = None,
    json: Json = False,
) -> None:
    """Time language models: a token by context, batches, prompts, training steps, beside GPT-2."""
    from tost.bench import generate as bench

    _run(
        bench.Generate(part=tuple(part or bench.PARTS), repeats=repeats, rounds=rounds, quick=quick), threads, out, json
    )


def _numbers(text: str) -> tuple[int, ...]:
    found = integers(text)
    if found is None or min(found) < 1:
        raise ConfigError(f"{text!r} is not a list of lengths; write for example --tokens 1024,4096.")
    return found


@contextmanager
def _terminating_interrupts() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C: end the processes that a measurement has started, and keep the finished cases."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(benchmark: Benchmark, threads: int | None, out: Path | None, json: bool) -> None:
    """Pass the gate, measure, show and write."""
    import torch

    from tost.bench.plot import require_matplotlib

    if threads:
        torch.set_num_threads(threads)
    if out and benchmark.draws:
        require_matplotlib()
    with _terminating_interrupts():
        try:
            with _console.progress() as progress:
                progress.note(f"gate: comparing {benchmark.checked}")
                report = benchmark.open_report()
        except KeyboardInterrupt:
            _console.log("interrupted before anything was measured; nothing was kept")
            raise typer.Exit(130) from None
        _console.log(report.headline)
        finished = _measure(benchmark, report, out) if report.gate.passed else 0
    _console.show(f"machine  {report.headline}")
    for check in report.gate.failures:
        _console.show(f"  {check}")
    if not report.gate.passed:
        _console.log("the gate is red: an implementation is wrong, so no speed was measured")
    else:
        _console.show()
        for table in benchmark.tables(report.results):
            _console.print_table(table)
            for note in table.notes:
                _console.log(note)
        paths = report.write(out) if out else []
        for path in paths:
            _console.log(f"wrote {path}")
        if not report.complete:
            where = f"in {paths[0]}" if paths else "above, but in no file (there was no --out)"
            _console.log(f"interrupted: {finished} of {benchmark.steps} cases are kept {where}")
    if json:
        _console.show_json(report.to_json())
    if not report.complete:
        raise typer.Exit(130 if report.gate.passed else 1)


def _measure(benchmark: Benchmark, report: Report, out: Path | None) -> int:
    """Fill the report and keep it on disk while it grows; an interrupt ends the measurement, not the program.

    Returns:
        The number of finished cases.
    """
    load, cores = report.environment["load"], report.environment["cores"]
    if load is not None and load > 0.5 * cores:
        _console.log(f"warning: the machine is busy (load {load} on {cores} cores), so expect wide quartiles")
    finished = 0
    with _console.progress(benchmark.steps) as steps:
        try:
            for summary in benchmark.measure(report.results, steps.start):
                steps.finish(summary)
                finished += 1
                if out:
                    report.write(out)
            report.complete = True
        except KeyboardInterrupt:
            pass
    return finished
