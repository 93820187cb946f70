"""`tost report`: one page about runs, to be opened in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tost._machine import command_arguments
from tost._plugins import allow_typed
from tost.cli import _console
from tost.errors import ConfigError


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

    names = _names(analyses)
    command = ("tost", *command_arguments())
    with _console.progress() as progress:
        page = write_report(
            runs,
            out or runs[0] / "report.html",
            benchmarks=bench or (),
            analyses=names,
            prompts=prompt or (),
            command=command,
            log=progress.note,
        )
    _console.show(str(page))


def _names(text: str) -> tuple[str, ...] | None:
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if names == ("all",):
        return None
    if names == ("none",):
        return ()
    if not names or {"all", "none"} & set(names):
        raise ConfigError(f"--analyses {text!r} is not clear; give names with commas between them, or all, or none.")
    allow_typed(*names)
    return names
