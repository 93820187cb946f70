"""Data sets, embedded or read from disk, and loaders that remember their position.

Importing this package loads no torch: the names below are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tost._lazy import lazy

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

__getattr__, __dir__ = lazy(
    __name__,
    {
        "_registry": ("DataSpec", "find_data", "list_data"),
        "build": ("build_data",),
        "dataset": ("Batch", "DataBundle", "Dataset", "Sample"),
        "loader": ("Loader", "make_evaluation_loader", "make_loader"),
        "options": ("DataInfo", "DataOptions", "DataShape"),
        "stdlib_bytes": ("decode",),
        "tokens": ("TokenFolder", "TokenSplit", "open_tokens", "tokenizer_of"),
    },
)
