"""Preparing data sets: writing the files that a data set is read from, as `tost data prepare` does.

This file imports no torch and no numpy, because the command line lists the names before it runs anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from tost._io import DRAFT_PREFIX, read_json, remove_drafts, write_json
from tost._lazy import load
from tost._options import Options, check_options, options_error
from tost._text import did_you_mean
from tost.errors import ConfigError, StorageError

MARKER = "prepare.json"
"""File in every prepared folder that holds its name and options, so that the same command can continue."""


Report = Callable[[int, int, str], None]
"""Progress callback: number of items done, their total number, and their name."""


class PrepareOptions(Options):
    """Options of one data set that can be prepared; the class describes the data set completely.

    Attributes:
        name: Name on the command line.
        summary: One line for tables.
        run: ``"module:function"``, loaded when it runs. The function takes ``(options, out, *, workers, report)`` and
            returns facts for the last line. Called again with the same arguments after it was stopped, it continues
            and ends with the same bytes; the fact ``"already there"`` means that the folder was complete.
        check: ``"module:function"`` that takes the folder and returns facts, or raises `StorageError` if a file is
            damaged; None if there is no check.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    run: ClassVar[str]
    check: ClassVar[str | None] = None


@cache
def _preparers() -> dict[str, type[PrepareOptions]]:
    from tost.data.embedded import DigitFilesOptions
    from tost.data.lra.options import GENERATED
    from tost.data.text.corpora import CORPORA

    preparers: list[type[PrepareOptions]] = [*CORPORA, *GENERATED, DigitFilesOptions]
    return {preparer.name: preparer for preparer in preparers}


def list_preparers() -> list[str]:
    """Return the names that `prepare` takes, sorted."""
    return sorted(_preparers())


def find_preparer(name: str) -> type[PrepareOptions]:
    """Return the options of the data set called `name`.

    Raises:
        ConfigError: There is none; the message lists those that exist.
    """
    preparers = _preparers()
    if name not in preparers:
        raise ConfigError(
            f"there is no data set {name!r} to prepare; {did_you_mean(name, preparers)}"
            f"there are: {', '.join(list_preparers())}."
        )
    return preparers[name]


def prepare(
    name: str, given: Mapping[str, Any], out: Path, *, workers: int = 1, report: Report | None = None
) -> dict[str, object]:
    """Make a data set, or continue where an earlier call with the same options stopped.

    Args:
        name: One of `list_preparers`.
        given: Its options; text is converted where another type is needed.
        out: Folder to write to: new, empty, or of an earlier call with the same name and options.
        workers: Processes that share the work; text is shared by the tokenizer's threads, RAYON_NUM_THREADS of them.
            The files do not depend on it.
        report: Progress callback.

    Returns:
        Facts about the result.

    Raises:
        ConfigError: The name, an option or the folder cannot be used, or the source is not what it should be.
        StorageError: A file cannot be read or written.
    """
    options, problems = check_options(find_preparer(name), given)
    if options is None:
        raise options_error(f"the options of {name} cannot be used", problems)
    _claim(out, options)
    try:
        return dict(load(options.run)(options, out, workers=workers, report=report or (lambda *_: None)))
    except ConfigError:
        # A folder in which nothing was done is emptied, so that a mistake in the options can be corrected in place.
        if [entry.name for entry in out.iterdir()] == [MARKER]:
            (out / MARKER).unlink()
        raise
    except OSError as error:
        raise StorageError(
            f"cannot continue with {error.filename or out}: {error.strerror or error}; "
            "what is done is kept: fix this and run the same command again."
        ) from error


def check_folder(out: Path) -> dict[str, object]:
    """Check the files of a prepared folder against its records.

    Args:
        out: A folder that `prepare` wrote.

    Returns:
        Facts about its content.

    Raises:
        ConfigError: It is no such folder.
        StorageError: A file is missing or damaged.
    """
    marker = _read_marker(out)
    if marker is None:
        raise ConfigError(f"{out} was not written by `tost data prepare`: it has no {MARKER}.")
    preparer = find_preparer(str(marker.get("name")))
    if preparer.check is None:
        raise ConfigError(f"{out} holds {preparer.name}, for which there is no check.")
    return dict(load(preparer.check)(out))


def _claim(out: Path, options: PrepareOptions) -> None:
    """Create the folder, or check that an earlier call with the same options did."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out} is a file; give a folder.")
    asked: dict[str, Any] = {"name": options.name, "options": options.model_dump(mode="json")}
    marker = _read_marker(out) if out.is_dir() else None
    if marker is not None and isinstance(marker.get("options"), dict):  # options may be newer than the folder
        defaults = type(options).model_construct().model_dump(mode="json")
        marker["options"] = {**defaults, **marker["options"]}
    if marker is None:
        # The draft of the marker is all that is left if the very first write was interrupted.
        names = sorted(entry.name for entry in out.iterdir()) if out.is_dir() else []
        others = [name for name in names if not name.startswith(DRAFT_PREFIX)]
        if others:
            some = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
            raise ConfigError(f"{out} holds something else ({some}); give a folder that is new or empty.")
        try:
            write_json(out / MARKER, asked)
        except OSError as error:
            raise StorageError(f"cannot write to {out}: {error.strerror}; give another --out.") from error
    elif marker != asked:
        before, now = marker.get("options") or {}, asked["options"]
        changed = [key for key in {**before, **now} if before.get(key) != now.get(key)]
        differs = ", ".join(f"{key} was {before.get(key)!r} and is {now.get(key)!r}" for key in changed)
        if marker.get("name") != asked["name"]:
            differs = f"it holds {marker.get('name')!r}"
        raise ConfigError(f"{out} was begun with other settings ({differs}); use the same settings, or another --out.")
    remove_drafts(out)


def _read_marker(out: Path) -> dict[str, Any] | None:
    if not (out / MARKER).is_file():
        return None
    again = "remove the folder and prepare it again."
    marker = read_json(out / MARKER, error=StorageError, hint=again)
    if not isinstance(marker, dict):
        raise StorageError(f"{out / MARKER} holds no settings; {again}")
    return marker
