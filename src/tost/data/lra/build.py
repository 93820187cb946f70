"""The tasks of the Long Range Arena: from a configuration to the two splits."""

from __future__ import annotations

from pathlib import Path

from tost.data.dataset import DataBundle
from tost.data.lra.options import (
    LraImageOptions,
    LraListOpsOptions,
    LraOptions,
    LraPathfinderOptions,
    LraRetrievalOptions,
    LraTextOptions,
)
from tost.data.lra.readers.listops import build_lra_listops
from tost.data.lra.readers.pixels import build_lra_image, build_lra_pathfinder
from tost.data.lra.readers.retrieval import build_lra_retrieval
from tost.data.lra.readers.text import build_lra_text

__all__ = ["build_lra"]


def build_lra(name: str, options: LraOptions, path: str) -> DataBundle:
    """Return a task of the Long Range Arena.

    Samples of symbols have inputs int64 ``[N]`` and a mask; pairs of documents ``[2, N]``. Pixels are ids int64 ``[N]``
    or numbers float32 ``[N, 1]``, with a mask if zeros are masked. Targets are int64 ``[]``.

    Args:
        name: Its name in the registry.
        options: What to read, and how.
        path: Where it lies: the release or a part of it; for text and images a folder, or ``hub:NAME``.

    Raises:
        ConfigError: The files are not what the task consists of, or do not fit the options.
        StorageError: A file is damaged.
    """
    match options:
        case LraListOpsOptions():
            return build_lra_listops(options, Path(path))
        case LraTextOptions():
            return build_lra_text(options, path)
        case LraRetrievalOptions():
            return build_lra_retrieval(options, Path(path))
        case LraImageOptions():
            return build_lra_image(options, path)
        case LraPathfinderOptions():
            return build_lra_pathfinder(name, options, Path(path))
    raise AssertionError(f"no reader for {type(options).__name__}")
