"""`tost compare`, `tost report` and `tost explore`: runs side by side, on a page, in the browser."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from tost._machine import command_arguments
from tost._plugins import allow_typed
from tost._text import UNKNOWN
from tost.cli import _console
from tost.cli._arguments import Json
from tost.errors import ConfigError


def compare(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run folders, or folders that hold some.", show_default=False)
    ],
    json: Json = False,
) -> None:
    """Show runs side by side: status, steps, best result, size, speed, and the settings in which they differ."""
    from tost.report.runs import as_cells, differences, find_runs, read_runs, summarize

    records = read_runs([found for folder in runs for found in find_runs(folder) or [folder]])
    summaries = [summarize(record) for record in records]
    _console.show_entries([as_cells(summary) for summary in summaries])
    differing = differences(records) if len(records) > 1 else {}
    if differing:
        rows = [
            (key, *(UNKNOWN if value is None else str(value) for value in values)) for key, values in differing.items()
        ]
        _console.show()
        _console.show_table(("setting", *(record.name for record in records)), rows, title="Settings that differ")
    if json:
        _console.show_json({"runs": summaries, "differences": differing})


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders; they are shown side by side.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="The page.", show_default="report.html in the first RUN")
    ] = None,
    analyses: Annotated[
        str, typer.Option(metavar="NAMES|all|none", help="Which analyses, such as coding-rate,heads; `all` that apply.")
    ] = "all",
    bench: Annotated[
        list[Path] | None, typer.Option(metavar="FILE.json", help="Measurement by `tost bench`; can be repeated.")
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Text to continue, by default the start of the validation text; repeatable."),
    ] = None,
) -> None:
    """Write one HTML page about runs: curves, results, analyses, speed. It works offline."""
    from tost.report import write_report

    names = tuple(dict.fromkeys(part.strip() for part in analyses.split(",") if part.strip()))
    if names not in (("all",), ("none",)):
        if not names or {"all", "none"} & set(names):
            raise ConfigError(
                f"--analyses {analyses!r} is not clear; give names with commas between them, or all, or none."
            )
        allow_typed(*names)
    with _console.progress() as progress:
        page = write_report(
            runs,
            out or runs[0] / "report.html",
            benchmarks=bench or (),
            analyses=None if names == ("all",) else () if names == ("none",) else names,
            prompts=prompt or (),
            command=("tost", *command_arguments()),
            log=progress.note,
        )
    _console.show(str(page))


def explore(
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN|CKPT|MODEL",
            help="Run folders, checkpoints, model folders, or names of `tost ls pretrained`.",
            show_default="all models in the box",
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at.", show_default="a free one")] = 0,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Look inside models: type a text, drop a picture, compare. Ctrl-C ends it.

    The page is served to this machine only, at a random address, and needs no network.
    """
    from tost.explore import open_models, serve

    def ready(address: str) -> None:
        _console.log(f"{', '.join(models)}; Ctrl-C ends it")
        _console.show(address)
        if open_page:
            webbrowser.open(address)

    models = open_models(sources or [])
    try:
        serve(models, port=port, ready=ready)
    except KeyboardInterrupt:
        _console.log("ended")
