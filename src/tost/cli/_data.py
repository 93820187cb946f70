"""`tost data`: prepare data sets, list those that can be prepared, and check prepared folders."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from tost._machine import available_cpus
from tost.cli import _console
from tost.errors import INTERRUPTED, ConfigError

app = typer.Typer(help="Make data sets and check them.", no_args_is_help=True, rich_markup_mode=None)

Json = Annotated[bool, typer.Option("--json", help="Print one line of JSON instead.")]


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
    options = _read_options(context.args)
    workers = workers or available_cpus()
    os.environ.setdefault("RAYON_NUM_THREADS", str(workers))  # threads of the tokenizers library
    try:
        with _console.progress() as progress:
            facts = make(name, options, out, workers=workers, report=progress.update)
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
    json: Json = False,
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
    json: Json = False,
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


def _read_options(arguments: list[str]) -> dict[str, str]:
    """Return options that were written as ``key=value``, ``--key=value`` or ``--key value``."""
    options: dict[str, str] = {}
    remaining = iter(arguments)
    for text in remaining:
        key, equals, value = text.removeprefix("--").partition("=")
        if not equals:
            value = next(remaining, "--")
            if not text.startswith("--") or value.startswith("--"):
                raise ConfigError(f"{text!r} is no option; write key=value or --key value.")
        key = key.replace("-", "_")
        if key in options:
            raise ConfigError(f"option {key} is given twice: {options[key]!r} and {value!r}; keep one.")
        options[key] = value
    return options


def _default(value: object) -> str:
    if isinstance(value, tuple | list):
        return ",".join(map(str, value))
    return "" if value is None or repr(value) == "PydanticUndefined" else str(value)


def _facts(facts: dict[str, object]) -> str:
    """Write facts in one line; those that are true by their names."""
    written = {key: f"{value:,}" if type(value) is int else str(value) for key, value in facts.items()}
    return ", ".join(key if facts[key] is True else f"{key} {text}" for key, text in written.items())
