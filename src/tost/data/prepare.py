"""Making data sets: which ones `tost data prepare` knows, and the folder that each is written to.

This file imports no torch and no numpy: the command line lists the names before it knows what to do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, get_origin

from pydantic import BaseModel, ValidationError

from tost._text import did_you_mean
from tost.data.lra.generate.options import LRA_GENERATED
from tost.data.text.options import NAMED_TEXT, TextOptions
from tost.data.toy.options import DigitsOptions
from tost.errors import ConfigError, StorageError

__all__ = ["MARKER", "PREPARERS", "Preparer", "Report", "check_folder", "find_preparer", "list_preparers", "prepare"]

MARKER = "prepare.json"
"""File in every prepared folder that says what was asked for, so that the same command can continue."""

Report = Callable[[int, int, str], None]
"""Called with what is done, what there is to do, and what it is, in words."""


class Preparer(NamedTuple):
    """One way to make a data set.

    Attributes:
        name: What the command is called with.
        summary: One line for tables.
        options: Its options, a pydantic model that forbids unknown names and describes every field.
        run: ``"module:function"``, loaded when it runs. The function takes ``(options, out, *, workers, report)`` and
            returns facts for the last line. Called again with the same arguments after it was stopped, it continues
            and ends with the same bytes; it says so if everything is there already.
        check: ``"module:function"`` that takes the folder and returns facts, or raises `StorageError` if a file is
            damaged; None if nothing can be checked.
    """

    name: str
    summary: str
    options: type[BaseModel]
    run: str
    check: str | None = None


_RUN_TEXT, _CHECK_TEXT = "tost.data.text.prepare:prepare_text", "tost.data.tokens.check:check_tokens"

PREPARERS: dict[str, Preparer] = {
    preparer.name: preparer
    for preparer in (
        Preparer(
            "text", "any text, jsonl or parquet files, or a data set of the hub", TextOptions, _RUN_TEXT, _CHECK_TEXT
        ),
        *(Preparer(name, named.summary, named.options, _RUN_TEXT, _CHECK_TEXT) for name, named in NAMED_TEXT.items()),
        *(Preparer(*generated) for generated in LRA_GENERATED),
        Preparer(
            "digits",
            "handwritten digits of scikit-learn as a folder of images",
            DigitsOptions,
            "tost.data.toy.digits:write_digits",
        ),
    )
}
"""Every preparer by name."""


def list_preparers() -> list[str]:
    """Return the names that `prepare` knows, sorted."""
    return sorted(PREPARERS)


def find_preparer(name: str) -> Preparer:
    """Return the preparer called `name`.

    Raises:
        ConfigError: There is none; the message lists those that exist.
    """
    if name not in PREPARERS:
        raise ConfigError(
            f"there is no data set {name!r} to prepare; {did_you_mean(name, PREPARERS)}"
            f"there are: {', '.join(list_preparers())}."
        )
    return PREPARERS[name]


def prepare(
    name: str, given: Mapping[str, Any], out: Path, *, workers: int = 1, report: Report | None = None
) -> dict[str, object]:
    """Make a data set, or continue where an earlier call with the same options stopped.

    Args:
        name: One of `list_preparers`.
        given: Its options; text is converted where another type is needed.
        out: Folder to write to: new, empty, or of an earlier call with the same name and options.
        workers: Processes that share the work. The files do not depend on it.
        report: Told about progress.

    Returns:
        Facts about what was made.

    Raises:
        ConfigError: The name, an option or the folder cannot be used, or the source is not what it should be.
        StorageError: Something cannot be read or written.
    """
    preparer = find_preparer(name)
    options = _options(preparer, given)
    _claim(out, name, options)
    run = _load(preparer.run)
    try:
        facts: dict[str, object] = run(options, out, workers=workers, report=report or _silent)
    except ConfigError:
        _release(out)
        raise
    except OSError as error:
        raise StorageError(
            f"cannot go on with {error.filename or out}: {error.strerror or error}; "
            "what is done is kept: mend it and give the same command again."
        ) from error
    return facts


def check_folder(out: Path) -> dict[str, object]:
    """Check the files of a prepared folder against what was recorded about them.

    Args:
        out: A folder that `prepare` wrote.

    Returns:
        Facts about what is in it.

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
    facts: dict[str, object] = _load(preparer.check)(out)
    return facts


def _silent(done: int, total: int, what: str) -> None:
    pass


def _load(place: str) -> Callable[..., Any]:
    module, _, function = place.partition(":")
    found: Callable[..., Any] = getattr(import_module(module), function)
    return found


def _options(preparer: Preparer, given: Mapping[str, Any]) -> BaseModel:
    fields = preparer.options.model_fields
    for key in given:
        if key not in fields:
            raise ConfigError(
                f"{preparer.name} has no option {key!r}; {did_you_mean(key, fields)}it takes: {', '.join(fields)}."
            )
    values = {key: _listed(value, fields[key].annotation) for key, value in given.items()}
    try:
        return preparer.options.model_validate(values)
    except ValidationError as error:
        found = [(".".join(map(str, item["loc"])), item) for item in error.errors(include_url=False)]
        lines = [f"{place}={item['input']!r}: {item['msg']}" if place else item["msg"] for place, item in found]
        raise ConfigError(f"options of {preparer.name}: {'; '.join(lines)}") from error


def _listed(value: Any, annotation: Any) -> Any:
    """Return text as a list where one is needed: ``a,b`` on the command line."""
    if isinstance(value, str) and get_origin(annotation) in (tuple, list):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


def _claim(out: Path, name: str, options: BaseModel) -> None:
    """Make the folder ours, or see that it is already and for the same purpose."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out} is a file; give a folder.")
    asked = {"name": name, "options": options.model_dump(mode="json")}
    marker = _read_marker(out) if out.is_dir() else None
    if marker is None:
        there = sorted(entry.name for entry in out.iterdir()) if out.is_dir() else []
        # A temporary file is all that is left if the very first write was interrupted.
        if there and there != [f"{MARKER}.tmp"]:
            some = ", ".join(there[:3]) + (", ..." if len(there) > 3 else "")
            raise ConfigError(f"{out} holds something else ({some}); give a folder that is new or empty.")
        try:
            out.mkdir(parents=True, exist_ok=True)
            temporary = out / f"{MARKER}.tmp"
            temporary.write_text(json.dumps(asked, indent=1) + "\n", encoding="utf-8")
            temporary.replace(out / MARKER)
        except OSError as error:
            raise StorageError(f"cannot write to {out}: {error.strerror}; give another --out.") from error
    elif marker != asked:
        raise ConfigError(
            f"{out} was begun with other settings ({_difference(marker, asked)}); "
            "give the settings of then, or another --out."
        )


def _release(out: Path) -> None:
    """Give a folder back in which nothing was done, so that a mistake in the options can be mended in place."""
    if [entry.name for entry in out.iterdir()] == [MARKER]:
        (out / MARKER).unlink()


def _read_marker(out: Path) -> dict[str, Any] | None:
    try:
        marker = json.loads((out / MARKER).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise StorageError(
            f"{out / MARKER} cannot be read: {error}; remove the folder and prepare it again."
        ) from error
    if not isinstance(marker, dict):
        raise StorageError(f"{out / MARKER} holds no settings; remove the folder and prepare it again.")
    return marker


def _difference(marker: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    if marker.get("name") != asked["name"]:
        return f"it holds {marker.get('name')!r}"
    before, now = marker.get("options") or {}, asked["options"]
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    return ", ".join(f"{key} was {before.get(key)!r} and is {now.get(key)!r}" for key in keys)
