"""Lazy packages: names are imported on first use, as listed in the package's stub file.

A lazy package has an ``__init__.pyi`` with one ``from module import name as name`` per public name, for type checkers
and for `attach`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from tost.errors import MissingPackageError

EXTRAS = {
    **dict.fromkeys(("accelerate", "sklearn", "datasets", "scipy"), "train"),
    **dict.fromkeys(("timm", "torchvision", "PIL", "pyarrow"), "vision"),
    **dict.fromkeys(("transformers", "tokenizers"), "language"),
    "jinja2": "analysis",
    "matplotlib": "analysis",
    **dict.fromkeys(("starlette", "uvicorn", "anyio"), "explore"),
    **dict.fromkeys(("onnx", "onnxscript", "onnxruntime", "openvino"), "deploy"),
}
"""Optional packages, with the extra that installs them."""


@contextmanager
def naming_extras() -> Iterator[None]:
    """Add the name of the extra to the error about a missing optional package.

    Raises:
        MissingPackageError: The package is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS or isinstance(error, MissingPackageError):
            raise
        raise MissingPackageError(
            f"this needs the package {package}, which is not installed; run: "
            f"pip install 'tost-transformer[{EXTRAS[package]}]'",
            name=error.name,
        ) from error


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
        with naming_extras():
            value = import_module(f"{package}.{name}") if is_module else getattr(import_module(home[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home})

    return get, names, sorted(home)


def load(target: str) -> Any:
    """Import the object that a ``"package.module:name"`` string refers to."""
    module, _, name = target.partition(":")
    with naming_extras():
        return getattr(import_module(module), name)
