"""Write the report page about run folders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tost._io import write_atomic
from tost.analysis.registry import find_analysis
from tost.errors import ConfigError, StorageError, TostError
from tost.report.bench import read_bench
from tost.report.page import Content, render
from tost.report.runs import RunRecord, read_runs

if TYPE_CHECKING:
    from tost.report.look import Insight
    from tost.report.texts import Passage

LARGEST = 10_000_000
"""Bytes of a page, at most."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the page is to show.

    Attributes:
        runs: Run folders.
        benchmarks: JSON files of `tost bench`.
        analyses: Names of analyses; None for all that apply, empty for none.
        prompts: Texts for language models to continue; empty for the beginning of their validation text.
        command: How the page was asked for.
    """

    runs: tuple[Path, ...]
    benchmarks: tuple[Path, ...] = ()
    analyses: tuple[str, ...] | None = None
    prompts: tuple[str, ...] = ()
    command: tuple[str, ...] = field(default=("tost", "report"))


def write_report(request: Request, out: Path, log: Callable[[str], None] | None = None) -> Path:
    """Write one HTML page about runs.

    Args:
        request: What to show.
        out: File to write; replaced whole if it is there.
        log: Receives lines about progress.

    Returns:
        The file.

    Raises:
        ConfigError: A run folder, a measurement or an analysis is not there, or the file cannot be named so.
        StorageError: The file cannot be written.
    """
    say = log or (lambda line: None)
    for name in request.analyses or ():
        find_analysis(name)  # a wrong name is found before anything is read
    if out.is_dir() or not out.name.endswith((".html", ".htm")):
        raise ConfigError(f"--out {out} is not the name of a page; give a file such as report.html.")
    runs = read_runs(request.runs)
    benchmarks = [read_bench(file) for file in request.benchmarks]
    insights: list[Insight] = []
    passages: dict[str, list[Passage]] = {}
    for run in runs:
        for problem in run.problems:
            say(f"{run.name}: {problem}")
        insight, texts = _look(run, request, say)
        insights += [insight] if insight else []
        passages |= {run.name: texts} if texts else {}
    content = Content(runs=runs, benchmarks=benchmarks, insights=insights, passages=passages, command=request.command)
    page = render(content, largest=LARGEST).encode("utf-8")
    if len(page) > LARGEST:
        raise ConfigError(f"a page about {len(runs)} runs would have {len(page) / 1e6:.0f} MB; give fewer runs.")
    try:
        write_atomic(out, page)
    except OSError as error:
        raise StorageError(f"cannot write {out}: {error.strerror or error}; give another --out.") from error
    say(f"{len(page) / 1e6:.2f} MB")
    return out


def _look(run: RunRecord, request: Request, say: Callable[[str], None]) -> tuple[Insight | None, list[Passage]]:
    """Open a run's model once, for analyses and for text; what fails is said on the page."""
    writes = run.recipe == "language_modeling"
    if request.analyses == () and not writes:
        return None, []
    from tost.report.look import Insight, look_into
    from tost.report.samples import load_run
    from tost.report.texts import continue_prompts

    try:
        opened = load_run(run.folder, log=say)
    except (TostError, OSError) as error:
        return Insight(run.name, notes=(f"The model could not be looked into: {error}",)), []
    insight = None if request.analyses == () else look_into(run.name, opened, request.analyses, say)
    try:
        return insight, continue_prompts(opened, request.prompts) if writes else []
    except TostError as error:
        known = insight or Insight(run.name)
        return replace(known, notes=(*known.notes, f"No text was generated: {error}")), []
