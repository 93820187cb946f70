"""`tost sweep`: train several settings and compare them in one table. Loads no torch; the runs do."""

from __future__ import annotations

import importlib.util
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tost._machine import available_cpus
from tost._progress import Pace, format_duration
from tost._text import integers
from tost.cli import _console
from tost.cli._arguments import Json, Overrides
from tost.errors import INTERRUPTED, ConfigError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from tost.sweep import Run, RunOutcome, Watcher

FAILED = 1


def sweep(
    plan: Annotated[str, typer.Argument(metavar="PLAN", help="Built-in plan (see `tost ls sweeps`) or YAML file.")],
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder.", show_default="runs/<plan>")] = None,
    jobs: Annotated[int, typer.Option(min=1, metavar="N", help="Runs at a time.")] = 1,
    threads: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Threads per run.", show_default="an equal share")
    ] = None,
    only: Annotated[
        str | None, typer.Option(metavar="PATTERN", help="Arms or runs to carry out, such as 'tost_*' or '*/seed0'.")
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Seeds.", show_default="those of the plan")
    ] = None,
    start: Annotated[
        Path | None,
        typer.Option("--from", metavar="DIR", help="Sweep whose weights arms start from, if the plan needs one."),
    ] = None,
    store: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Copy the results here once all runs are finished.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, list the runs, and stop.")] = False,
    json: Json = False,
) -> None:
    """Train several settings and compare them in one table.

    Each run is a process of its own. Finished runs are not repeated and interrupted ones go on, so the same command
    completes a sweep that was stopped. Ctrl-C once lets the runs save and stops, twice stops at once.
    """
    from tost import sweep as sweeps

    changes = overrides or []
    loaded = sweeps.load_plan(plan)
    if seeds is not None:
        loaded = loaded.model_copy(update={"seeds": _parse_seeds(seeds)})
    folder = out or Path("runs") / Path(plan).stem

    def look() -> tuple[list[Run], list[Run]]:
        """Return all runs that are known, and those that are to be carried out."""
        runs = sweeps.expand(loaded, changes, folder, name=plan, start=start)
        sweeps.check_folders(runs)
        return runs, sweeps.unfinished(runs, sweeps.select(runs, only) if only else runs)

    runs, waiting = look()
    if dry_run:
        _list(runs, waiting, json=json)
        return
    outcomes: list[RunOutcome] = []
    stopped = False
    while waiting and not stopped and not any(outcome.reason for outcome in outcomes):
        ended, stopped = _carry_out(waiting, folder, jobs, threads)
        outcomes += ended
        runs, waiting = look()  # where something is tuned, finished trials bring new runs
    if loaded.measure and not stopped:
        with sweeps.claim(folder), _console.progress() as progress:
            sweeps.measure_runs(loaded, runs, progress.update)
    results = sweeps.collect(plan, loaded, changes, runs)
    sweeps.write_results(folder / "results.json", results)
    _draw(folder / "states.svg", results)
    _show(results, outcomes)
    stored = store is None or _store(store, results)
    if problem := sweeps.metric_problem(results):
        raise ConfigError(problem)
    if json:
        _console.show_json(results)
    else:
        _console.show(str(folder / "results.json"))
    if stopped:
        raise typer.Exit(INTERRUPTED)
    if not stored or any(outcome.reason for outcome in outcomes):
        raise typer.Exit(FAILED)


def _parse_seeds(text: str) -> list[int]:
    seeds = list(integers(text) or ())
    if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise typer.BadParameter(f"{text!r} is not a list of seeds, each once; write for example --seeds 0,1,2.")
    return seeds


def _list(runs: Sequence[Run], waiting: Sequence[Run], *, json: bool) -> None:
    """Show what a sweep would do."""
    from tost.sweep import state_of

    names = {run.name for run in waiting}
    todo = {"new": "start", "interrupted": "go on", "failed": "try again"}
    rows = []
    for run in runs:
        state = state_of(run)
        action = todo[state] if run.name in names else "-"
        rows.append((run.name, str(state), action, f"tost {shlex.join(run.arguments)}"))
    headers = ("run", "state", "would", "command")
    _console.show_table(headers, rows)
    if json:
        _console.show_json({"runs": [dict(zip(headers, row, strict=True)) for row in rows]})


def _carry_out(waiting: Sequence[Run], folder: Path, jobs: int, threads: int | None) -> tuple[list[RunOutcome], bool]:
    """Carry out runs; return how they ended, and whether the user stopped them."""
    from tost.sweep import claim, execute, start_process
    from tost.train.stopping import StopRequest

    if threads is None and jobs > 1:
        threads = max(1, available_cpus() // jobs)
    with claim(folder) as lock, StopRequest() as stop, _open_watcher(len(waiting)) as watcher:
        start = partial(start_process, threads=threads, keep_open=(lock,))
        outcomes = execute(waiting, start, watcher, jobs=jobs, stopping=lambda: stop.requested)
    return outcomes, stop.requested and any(outcome.reason for outcome in outcomes)


def _show(results: Mapping[str, Any], outcomes: Sequence[RunOutcome]) -> None:
    """Show the table and what it means; then, on stderr, what went wrong."""
    from tost.sweep import State, measured_tables, statements, table, tail

    for shown in (table(results), *measured_tables(results)):
        _console.print_table(shown)
    for statement in statements(results):
        _console.show(statement)
    for outcome in outcomes:
        if outcome.reason and outcome.state is not State.new and outcome.reason != "interrupted":
            _console.log(f"{outcome.run.name}: {outcome.reason}; the end of what it said:")
            for line in tail(outcome.run):
                _console.log(f"    {line}")


def _draw(path: Path, results: Mapping[str, Any]) -> None:
    """Draw what the arms reach over what they remember, if the plan asks for it and it can be drawn."""
    from tost._io import write_atomic
    from tost.sweep import state_picture

    if importlib.util.find_spec("matplotlib") is not None and (picture := state_picture(results)) is not None:
        write_atomic(path, picture)


def _store(path: Path, results: Mapping[str, Any]) -> bool:
    """Store the results of a complete sweep; return whether they were stored."""
    from tost.sweep import write_results

    if not results["complete"]:
        _console.log(f"not stored in {path}: some runs are not finished")
        return False
    write_results(path, dict(results))
    _console.log(f"stored in {path}; `python scripts/update_results.py` shows it in the documentation")
    return True


@contextmanager
def _open_watcher(total: int) -> Iterator[Watcher]:
    """Show what happens on stderr: live bars on a terminal, lines elsewhere."""
    if not _console.is_live():
        yield _Plain(total)
        return
    with _console.live_bars("description", "bar", "count", "elapsed", "fields[text]") as progress:
        yield _Live(total, progress)


class _Plain:
    """One line when a run starts, one when it ends, and between them one every ten seconds."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._pace = total, 0, Pace()

    def say(self, text: str) -> None:
        _console.log(text)

    def started(self, run: Run) -> None:
        self.say(f"{run.name}: started, {run.settings.train.steps:,} steps; output in {run.folder / 'output.txt'}")

    def ended(self, outcome: RunOutcome) -> None:
        self._done += 1
        told = outcome.reason or "finished"
        time = f" after {outcome.seconds / 60:.1f} min" if outcome.seconds else ""  # it may never have been started
        left = (self._total - self._done) * self._pace.elapsed / self._done
        eta = f"; eta {format_duration(left)}" if self._done < self._total else ""
        self.say(f"[{self._done}/{self._total}] {outcome.run.name}: {told}{time}{eta}")

    def tick(self, running: Sequence[Run]) -> None:
        if self._pace.due():
            from tost.sweep import progress_of

            for run in running:
                found = progress_of(run)
                self.say(f"{run.name}: {_where(run, found) if found else 'starting'}")


class _Live(_Plain):
    """A bar for the sweep and one for each run at work."""

    def __init__(self, total: int, progress: Progress) -> None:
        super().__init__(total)
        self._progress = progress
        self._all = progress.add_task("runs", total=total, text="")
        self._bars: dict[str, TaskID] = {}

    def say(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)

    def started(self, run: Run) -> None:
        self._bars[run.name] = self._progress.add_task(run.name, total=run.settings.train.steps, text="starting")

    def ended(self, outcome: RunOutcome) -> None:
        super().ended(outcome)
        self._progress.update(self._all, advance=1)
        if outcome.run.name in self._bars:
            self._progress.remove_task(self._bars.pop(outcome.run.name))

    def tick(self, running: Sequence[Run]) -> None:
        from tost.sweep import progress_of

        for run in running:
            if found := progress_of(run):
                self._progress.update(self._bars[run.name], completed=found["step"], text=_where(run, found))


def _where(run: Run, found: Mapping[str, Any]) -> str:
    """Say how far a run is by what it has recorded."""
    steps = f"step {found['step']:,} of {run.settings.train.steps:,}"
    return f"{steps}, loss {found['loss']:.4f}, eta {format_duration(found['eta_seconds'])}"
