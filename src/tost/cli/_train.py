"""`tost train`: run a recipe, watch it, interrupt it, resume it.

As a program, ``python -m tost.cli._train ARGUMENTS OF TORCHRUN`` is torchrun with messages in place of its tracebacks.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tost._machine import available_cpus
from tost.cli import _console
from tost.cli._arguments import Config, Device, Json, Overrides
from tost.errors import INTERRUPTED

if TYPE_CHECKING:
    from tost.train.config import RunConfig
    from tost.train.loop import Reporter
    from tost.train.metrics import StepRecord

ProgressStyle = Literal["auto", "live", "plain", "none"]
"""How a run reports on stderr."""


def train(
    config: Config,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Run folder. Default: runs/<name of the configuration>.")] = None,
    resume: Annotated[
        str | None, typer.Option(help="auto: newest checkpoint of the run folder; or a checkpoint, or another run.")
    ] = None,
    accept_data_change: Annotated[
        bool, typer.Option("--accept-data-change", help="Resume although the content of the data set has changed.")
    ] = False,
    nproc: Annotated[int, typer.Option(min=1, help="Processes to start on this machine.")] = 1,
    device: Device = "auto",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Build everything, print its size, and stop.")] = False,
    progress: Annotated[ProgressStyle, typer.Option(help="Live bar or plain lines; auto looks.")] = "auto",
    json: Json = False,
) -> None:
    """Train a recipe. Ctrl-C once saves and stops, twice stops at once."""
    from tost.recipes import load_config

    settings = load_config(config, overrides or [])
    # The stem of a file, or the whole name of a built-in one: small/cifar10 is not finetune/cifar10.
    folder = out or Path("runs") / (Path(config).stem if Path(config).suffix else config)
    if dry_run:
        _dry_run(settings)
        return
    if nproc > 1 and "LOCAL_RANK" not in os.environ:
        raise typer.Exit(_launch(nproc, folder))
    from tost.recipes import get_task
    from tost.train.loop import fit

    task = get_task(settings.recipe)
    with _open_reporter(progress, settings.train.steps) as reporter:
        options = {"resume": resume, "device": device, "accept_data_change": accept_data_change}
        result = fit(settings, task, folder, reporter=reporter, **options)  # type: ignore[arg-type]
    if _console.is_first():
        if json:
            _console.show_json({"status": result.status, "step": result.step, "out": str(folder), **result.metrics})
        else:
            _console.show(str(folder))
    if "LOCAL_RANK" in os.environ:
        # A launched process ends at once: while Python frees its modules, threads of the process group may abort it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(INTERRUPTED if result.status == "interrupted" else 0)
    if result.status == "interrupted":
        raise typer.Exit(INTERRUPTED)


@contextmanager
def _open_reporter(style: ProgressStyle, steps: int) -> Iterator[Reporter]:
    """Yield a live bar on a terminal, one greppable line per record elsewhere, or silence."""
    from tost.train.loop import LineReporter
    from tost.train.metrics import format_line

    if style == "none" or not _console.is_first():
        yield LineReporter(lambda text: None)
    elif style == "plain" or (style == "auto" and not _console.is_live()):
        yield LineReporter()
    else:
        with _console.live_bars() as bars:
            task = bars.add_task("starting", total=steps)

            class Live(LineReporter):
                def step(self, record: StepRecord) -> None:
                    fields = format_line(record).partition(" | ")[2]
                    bars.update(task, completed=record.step, description=fields)

            yield Live(lambda text: _console.print_above(bars, text))


def _launch(nproc: int, folder: Path) -> int:
    """Run this same command in `nproc` processes through torchrun; return its exit code."""
    launcher = [sys.executable, "-m", "tost.cli._train", "--standalone", f"--nproc-per-node={nproc}"]
    # Time to save before torchrun loses patience. After the dashes there are no options of torchrun, which would take
    # --nproc for an abbreviation.
    command = [*launcher, "--shutdown-timeout=600", "-m", "--", "tost.cli", *sys.argv[1:]]
    # Each process takes its share of the cores; torchrun would give every one a single thread.
    threads = str(max(1, available_cpus() // nproc))
    summary = folder / "summary.json"
    before = summary.read_bytes() if summary.is_file() else b""
    # A session of its own: Ctrl-C then reaches this process only, which passes it on once.
    process = subprocess.Popen(command, env={"OMP_NUM_THREADS": threads, **os.environ}, start_new_session=True)
    asked = False

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked and number == signal.SIGINT:
            os.killpg(process.pid, signal.SIGKILL)
        elif not asked:
            process.terminate()
        asked = True

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, pass_on)
    code = process.wait()
    after = summary.read_bytes() if summary.is_file() else b""
    stopped = after != before and b'"interrupted"' in after  # not the summary of the run that is resumed
    return INTERRUPTED if asked or (code != 0 and stopped) else code


def torchrun(arguments: list[str]) -> int:
    """Start the processes and wait for them; return the exit code of the first that failed.

    A process that fails prints its reason itself; one that was ended by a signal cannot.
    """
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.disable(logging.ERROR)
    try:
        run.run(run.parse_args(arguments))  # type: ignore[no-untyped-call]
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        if failure.exitcode >= 0:
            return failure.exitcode
        name = signal.Signals(-failure.exitcode).name
        _console.log(f"process {rank} was ended by {name}, and with it the others; the checkpoints before are intact")
        return 1
    return 0


def _dry_run(config: RunConfig) -> None:
    """Build the data and, without memory, the model; show what a run would cost."""
    import torch

    from tost.recipes import get_task
    from tost.train.metrics import format_count

    task = get_task(config.recipe)
    bundle = task.build_data(config)
    with torch.device("meta"):
        model = task.build_model(config, bundle)
    parameters = sum(p.numel() for p in model.parameters())
    sample = {name: value.unsqueeze(0).to("meta") for name, value in bundle.train[0].items()}
    tokens = task.tokens(sample) * config.train.batch_size
    flops = task.flops(model, sample)
    work = math.nan if flops is None else 3 * flops * config.train.batch_size  # the backward pass is twice the forward
    copies = 4 + (config.train.ema_decay is not None)  # weights, gradients, two moments, perhaps an average
    rows = [
        ("model", config.model.name),
        ("parameters", f"{parameters:,}"),
        ("training samples", f"{len(bundle.train):,}"),
        ("steps", f"{config.train.steps:,}"),
        (f"{'tokens' if task.unit == 'tok' else 'images'} per step", f"{tokens:,}"),
        ("arithmetic per step", f"{format_count(work)}FLOP"),
        ("arithmetic of the run", f"{format_count(work * config.train.steps)}FLOP"),
        ("memory for weights, gradients and optimizer", f"{copies * 4 * parameters / 1e6:.1f} MB"),
    ]
    _console.show_table(("dry run", ""), rows)


if __name__ == "__main__":
    sys.exit(torchrun(sys.argv[1:]))
