"""`tost data`: prepare data sets, list those that can be prepared, and check prepared folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from tost._machine import available_cpus
from tost.cli import _console
from tost.errors import INTERRUPTED, ConfigError

app = typer.Typer(help="Make data sets and check them.", no_args_is_help=True, rich_markup_mode=None)


@app.command("prepare", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def prepare(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Data set to make; `tost data ls` lists the names.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write to, new or empty.")],
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Processes or threads that share the work. Default: one for each processor."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one line of JSON at the end.")] = False,
) -> None:
    """Make a data set. Options follow as key=value or --key value; `tost data ls NAME` explains them.

    Stopped by Ctrl-C or otherwise, the same command continues where it was; the files are the same in the end.
    """
    from tost.data.prepare import find_preparer
    from tost.data.prepare import prepare as make

    find_preparer(name)
    given = _given(context.args)
    try:
        with _console.progress() as progress:
            facts = make(name, given, out, workers=workers or available_cpus(), report=progress.update)
    except KeyboardInterrupt:
        _console.log(f"stopped; what is done is kept in {out}, and the same command continues there")
        raise typer.Exit(INTERRUPTED) from None
    if json:
        _console.show_json({"out": str(out), **facts})
    else:
        _console.show(f"{out}: {_facts(facts)}")


@app.command("ls")
def ls(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Show the options of this one.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one line of JSON instead.")] = False,
) -> None:
    """List what `tost data prepare` can make, or the options of one of them."""
    from tost.data.prepare import find_preparer, list_preparers

    if name is None:
        entries = [{"name": found, "summary": find_preparer(found).summary} for found in list_preparers()]
    else:
        entries = [
            {"option": key, "default": _default(field.get_default()), "meaning": field.description or ""}
            for key, field in find_preparer(name).model_fields.items()
        ]
    if json:
        _console.show_json({"entries": entries})
    else:
        _console.show_entries(entries)


@app.command("check")
def check(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that `tost data prepare` made.")],
    json: Annotated[bool, typer.Option("--json", help="Print one line of JSON instead.")] = False,
) -> None:
    """Compare every file of a prepared folder with its checksum."""
    from tost.data.prepare import check_folder

    with _console.progress() as progress:
        progress.start(f"checking {folder}")
        facts = check_folder(folder)
    if json:
        _console.show_json({"folder": str(folder), "ok": True, **facts})
    else:
        _console.show(f"{folder} is whole: {_facts(facts)}")


def _given(arguments: Sequence[str]) -> dict[str, str]:
    """Return options that were written as ``key=value``, ``--key=value`` or ``--key value``."""
    given: dict[str, str] = {}
    left = list(arguments)
    while left:
        text = left.pop(0)
        key, equals, value = text.removeprefix("--").partition("=")
        if not equals:
            if not text.startswith("--") or not left or left[0].startswith("--"):
                raise ConfigError(f"{text!r} is no option; write key=value or --key value.")
            value = left.pop(0)
        key = key.replace("-", "_")
        if key in given:
            raise ConfigError(f"option {key} is given twice: {given[key]!r} and {value!r}; keep one.")
        given[key] = value
    return given


def _default(value: object) -> str:
    if isinstance(value, tuple | list):
        return ",".join(map(str, value))
    return "" if value is None or repr(value) == "PydanticUndefined" else str(value)


def _facts(facts: dict[str, object]) -> str:
    def show(value: object) -> str:
        return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)

    return ", ".join(key if value is True else f"{key} {show(value)}" for key, value in facts.items())
