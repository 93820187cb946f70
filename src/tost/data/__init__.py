"""Data sets, embedded or read from disk, and loaders that remember their position.

Importing this package loads no torch: the names below are loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tost.data._registry import DataSpec, find_data, list_data
    from tost.data.build import build_data
    from tost.data.dataset import Batch, DataBundle, Dataset, Sample
    from tost.data.loader import Loader, make_evaluation_loader, make_loader
    from tost.data.options import DataInfo, DataOptions, DataShape
    from tost.data.stdlib_bytes import decode
    from tost.data.tokens import TokenFolder, TokenSplit, open_tokens, tokenizer_of

__all__ = [
    "Batch",
    "DataBundle",
    "DataInfo",
    "DataOptions",
    "DataShape",
    "DataSpec",
    "Dataset",
    "Loader",
    "Sample",
    "TokenFolder",
    "TokenSplit",
    "build_data",
    "decode",
    "find_data",
    "list_data",
    "make_evaluation_loader",
    "make_loader",
    "open_tokens",
    "tokenizer_of",
]

_HOME = {
    "Batch": "dataset",
    "DataBundle": "dataset",
    "DataInfo": "options",
    "DataOptions": "options",
    "DataShape": "options",
    "DataSpec": "_registry",
    "Dataset": "dataset",
    "Loader": "loader",
    "Sample": "dataset",
    "TokenFolder": "tokens",
    "TokenSplit": "tokens",
    "build_data": "build",
    "decode": "stdlib_bytes",
    "find_data": "_registry",
    "list_data": "_registry",
    "make_evaluation_loader": "loader",
    "make_loader": "loader",
    "open_tokens": "tokens",
    "tokenizer_of": "tokens",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tost.data' has no attribute {name!r}")
    value = getattr(import_module(f"tost.data.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
