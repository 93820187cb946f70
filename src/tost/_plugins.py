"""Registries that other packages can extend, and the rule for which foreign code may be imported. Loads no torch.

A name is found in this order: what tost itself or a decorator such as `tost.register_model` registered, entry points of
installed packages (``tost.models``, ``tost.data``, ...), and ``package.module:object``. The last kind imports code by
its name, so its package must be allowed first: by typing the name on the command line, with ``--plugin PACKAGE``, or in
``TOST_PLUGINS``. A configuration file or a run folder from elsewhere cannot allow anything.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from tost import _env
from tost._text import did_you_mean
from tost.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


class Described(Protocol):
    """What every spec has."""

    @property
    def name(self) -> str:
        """What users call it."""

    @property
    def description(self) -> str:
        """One line for listings."""


Spec = TypeVar("Spec", bound=Described)


def is_foreign(name: str) -> bool:
    """Return whether a name has the form ``package.module:object``."""
    module, colon, attribute = name.partition(":")
    return bool(colon) and all(part.isidentifier() for part in (*module.split("."), *attribute.split(".")))


def allow(*packages: str) -> None:
    """Allow code of these packages to be imported by name, in this process and in those that it starts.

    Importing a package may register models, data sets and so on; that happens when a registry is first asked.

    Args:
        packages: Importable names such as ``"my_package"``; what lies below each is allowed as well.
    """
    for package in packages:
        if not all(part.isidentifier() for part in package.split(".")):
            raise ConfigError(f"{package!r} is not the name of a package; give an importable name such as my_package.")
    os.environ[_env.PLUGINS.name] = ",".join(dict.fromkeys([*_allowed(), *packages]))


def allow_typed(*names: str) -> None:
    """Allow the packages of those names that have the form ``package.module:object``, because a user typed them."""
    allow(*(name.partition(":")[0].partition(".")[0] for name in names if is_foreign(name)))


def load_foreign(name: str) -> Any:
    """Import the object that ``package.module:object`` names.

    Raises:
        ConfigError: Its package is not allowed, or there is no such object.
    """
    module, _, attribute = name.partition(":")
    if not any(f"{module}.".startswith(f"{package}.") for package in _allowed()):
        package = module.partition(".")[0]
        raise ConfigError(
            f"{name!r} is code outside tost, and only you can allow it to run: type the name on the command line, add "
            f"`--plugin {package}`, or set {_env.PLUGINS.name}={package}."
        )
    found = _import(module)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{name!r}: {module} has no {attribute!r}; {did_you_mean(part, vars(found))}")
        found = getattr(found, part)
    return found


def _allowed() -> list[str]:
    return [package for package in _env.PLUGINS.get().split(",") if package]


def _import(module: str) -> Any:
    # A script's own folder is on the path, but that of `tost` is not the user's: look where they are.
    here = str(Path.cwd())
    if "" not in sys.path and here not in sys.path:
        sys.path.insert(0, here)
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, and something that it imports is not
        raise ConfigError(f"there is no module {module!r}; install its package or change to its folder.") from error


class Registry(Generic[Spec]):
    """Things of one kind by name.

    Args:
        kind: What they are called in messages, such as ``"model"``.
        group: Entry point group, such as ``"tost.models"``.
        adapt: Makes a spec from a name and the object that an entry point or ``package.module:object`` refers to.
        specs: What tost itself registers.
        plural: Of `kind`, if it is not formed with an s.
        columns: Returns what listings show of a spec between its name and its description.
    """

    def __init__(
        self,
        kind: str,
        group: str,
        adapt: Callable[[str, Any], Spec],
        specs: Iterable[Spec] = (),
        *,
        plural: str = "",
        columns: Callable[[Spec], dict[str, str]] = lambda spec: {},
    ) -> None:
        self._kind, self._group, self._adapt, self._columns = kind, group, adapt, columns
        self._plural, self._one = plural or f"{kind}s", f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"
        self._specs = {spec.name: spec for spec in specs}
        self._entry_points: dict[str, EntryPoint] | None = None

    def add(self, name: str, spec: Spec) -> None:
        """Register a spec.

        Raises:
            ConfigError: The name is taken, or looks like ``package.module:object``.
        """
        if name in self._specs:
            raise ConfigError(f"there is {self._one} {name!r} already; register it under another name.")
        if not name or ":" in name or name != name.strip():
            raise ConfigError(f"{name!r} cannot be the name of {self._one}; use letters, digits and underscores.")
        self._specs[name] = spec

    def names(self, pattern: str = "*") -> list[str]:
        """Return the registered names that match a shell pattern, sorted. Entry points are listed, not loaded."""
        known = {*self._found(), *self._specs}  # in this order: looking for entry points may register names
        return sorted(name for name in known if fnmatchcase(name, pattern))

    def get(self, name: str) -> Spec:
        """Return the spec of a name, loading an entry point or a foreign object if it is one.

        Raises:
            ConfigError: There is none; the message suggests a name and lists them all.
        """
        if name in self._specs:
            return self._specs[name]
        if is_foreign(name):
            return self._specs.setdefault(name, self._adapt(name, load_foreign(name)))
        entry = self._found().get(name)
        found = entry.load() if entry else None
        # Importing an allowed package or the object itself may have registered this name, by a decorator.
        if name in self._specs:
            return self._specs[name]
        if entry:
            return self._specs.setdefault(name, self._adapt(name, found))
        raise ConfigError(
            f"there is no {self._kind} {name!r}; {did_you_mean(name, self.names())}"
            f"{self._plural}: {', '.join(self.names())}."
        )

    def peek(self, name: str) -> Spec | None:
        """Return the spec of a name if that takes no import; None for entry points that have not been loaded."""
        return self._specs.get(name)

    def describe(self, name: str) -> dict[str, str]:
        """Return the line of a name in listings; of an entry point that was not loaded, the package it is from."""
        if name in self._specs:
            spec = self._specs[name]
            return {"name": name, **self._columns(spec), "description": spec.description}
        blank = dict.fromkeys(self._columns(next(iter(self._specs.values()))), "-")
        package = self._found()[name].module.partition(".")[0]
        return {"name": name, **blank, "description": f"from the package {package}"}

    def loaded(self) -> list[Spec]:
        """Return all specs that are registered or have been loaded."""
        return list(self._specs.values())

    def renamed(self, name: str, build: object) -> Spec | None:
        """Return the spec of what `build` makes under another name; None if it is not registered."""
        found: Any = next((spec for spec in self._specs.values() if getattr(spec, "build", None) is build), None)
        return None if found is None else replace(found, name=name)

    def __contains__(self, name: str) -> bool:
        return name in self._found() or name in self._specs

    def _found(self) -> dict[str, EntryPoint]:
        for package in _allowed():
            _import(package)
        if self._entry_points is None:
            from importlib.metadata import entry_points  # takes as long as all the rest of the command line's help

            self._entry_points = {entry.name: entry for entry in entry_points(group=self._group)}
        return self._entry_points
