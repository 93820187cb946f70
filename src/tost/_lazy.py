"""Lazy packages: names are imported on first use, as listed in the package's stub file.

A lazy package has an ``__init__.pyi`` with one ``from module import name as name`` per public name. Type checkers read
it as it is; `attach` reads the same file, so that each name is written once.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def attach(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package that loads its names on first use.

    Args:
        package: ``__name__`` of the package; its stub file is ``__init__.pyi`` beside ``__init__.py``.

    Returns:
        The two module-level functions that Python calls, and the sorted public names.
    """
    stub = Path(str(sys.modules[package].__file__)).with_suffix(".pyi")
    imports = [node for node in ast.parse(stub.read_text("utf-8")).body if isinstance(node, ast.ImportFrom)]
    home = {alias.name: str(node.module) for node in imports for alias in node.names}

    def get(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        # `from package import module as module` names a submodule; everything else is an attribute of its module.
        is_module = home[name] == package
        value = import_module(f"{package}.{name}") if is_module else getattr(import_module(home[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home})

    return get, names, sorted(home)


def load(target: str) -> Any:
    """Import the object that a ``"package.module:name"`` string refers to."""
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)
