"""Two data sets from files that are installed anyway: scikit-learn's digits and the standard library's sources.

The sources are taken in the order of their paths, without tests and without what a build or an administrator puts
there. The last tenth of the files is for validation.
"""

from __future__ import annotations

import hashlib
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from platform import python_version
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from torch import Tensor

from tost._io import atomic_path
from tost.data.dataset import DataBundle, TensorDataset, fingerprint
from tost.data.embedded import DigitFilesOptions, DigitsOptions, StdlibBytesOptions
from tost.data.prepare import Report
from tost.data.spec import DataInfo
from tost.data.tokens.dataset import TokenWindows
from tost.errors import ConfigError

_SKIPPED_FOLDERS = re.compile(r"tests?|idlelib|lib2to3|(site|dist)-packages|config-.*|__pycache__")
_SKIPPED_FILES = re.compile(r"_sysconfigdata|(site|user)customize\.py$")
_VALIDATION_SHARE = 10  # one file in ten


def build_digits(options: DigitsOptions) -> DataBundle:
    """Return the digits: inputs float32 ``[64, 1]`` in [0, 1], row after row; targets int64 ``[]``.

    The split, 1,437 images for training and 360 for validation, is fixed and stratified by class.

    Args:
        options: No option exists.

    Raises:
        ConfigError: scikit-learn is not installed.
    """
    images, labels, is_validation = _load()
    inputs = torch.from_numpy(images.astype(np.float32)).unsqueeze(-1)  # [n, 64, 1]
    targets = torch.from_numpy(labels.astype(np.int64))
    train, validation = (
        TensorDataset({"inputs": inputs[chosen], "targets": targets[chosen]})
        for chosen in (~is_validation, is_validation)
    )
    info = DataInfo(fingerprint=fingerprint(*train.rows.values(), *validation.rows.values()))
    return DataBundle(train=train, validation=validation, info=info)


def write_digits(options: DigitFilesOptions, out: Path, *, workers: int, report: Report) -> dict[str, object]:
    """Write ``train/<digit>/<number>.png`` and ``val/<digit>/<number>.png``, 8 x 8 grey pixels each.

    The images and the split are those of the data set ``digits``.

    Args:
        options: No option exists.
        out: Folder to write to; what is there already is written again, with the same bytes.
        workers: Not used: it takes a second.
        report: Receives the progress.

    Returns:
        The numbers of images.

    Raises:
        ConfigError: scikit-learn is not installed.
    """
    from PIL import Image

    images, labels, is_validation = _load()
    grey = np.rint(images.reshape(-1, 8, 8) * 255).astype(np.uint8)
    splits = np.where(is_validation, "val", "train").tolist()
    for number, split in enumerate(splits):
        with atomic_path(out / split / str(labels[number]) / f"{number:04d}.png", sync=False) as draft:
            Image.fromarray(grey[number]).save(draft, format="PNG")
    report(len(grey), len(grey), "images")
    written = Counter(splits)
    return {"train_images": written["train"], "validation_images": written["val"]}


def _load() -> tuple[NDArray[np.float64], NDArray[Any], NDArray[np.bool_]]:
    """Return images ``[n, 64]`` in [0, 1], labels, and which are for validation: every fifth of each class."""
    # Read without importing scikit-learn, which would load SciPy and pandas too: seconds for a small table.
    spec = find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            "data set 'digits' is read from scikit-learn, which is not installed; run "
            "`pip install 'tost-transformer[train]'` or choose another data.name."
        )
    table = np.loadtxt(Path(spec.submodule_search_locations[0], "datasets", "data", "digits.csv.gz"), delimiter=",")
    images, labels = table[:, :-1], table[:, -1].astype(np.int64)
    is_validation = np.zeros(len(labels), dtype=bool)
    is_validation[np.argsort(labels, kind="stable")[::5]] = True
    return images / 16, labels, is_validation


class Corpus(NamedTuple):
    """Sources as text.

    Attributes:
        train: Bytes of the files for training, one after another, uint8 ``[n]``.
        validation: The same of the files for validation.
        files: How many files both have together.
        fingerprint: SHA-256 of both, in hexadecimal.
    """

    train: Tensor
    validation: Tensor
    files: int
    fingerprint: str


@cache
def read_corpus(folder: Path) -> Corpus:
    """Return every ``*.py`` file below a folder as two pieces of bytes.

    Args:
        folder: Where to look. Paths are sorted below it, so that its own place does not matter.

    Raises:
        ConfigError: There are not enough files for two pieces.
    """
    found: list[Path] = []
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not _SKIPPED_FOLDERS.fullmatch(name)]
        found += [Path(place, name) for name in files if name.endswith(".py") and not _SKIPPED_FILES.match(name)]
    found.sort(key=lambda path: path.relative_to(folder).as_posix())
    contents = [content for source in found if (content := source.read_bytes())]
    if len(contents) < 2:
        raise ConfigError(
            f"data set 'stdlib_bytes' reads the sources of the standard library, but {folder} holds {len(contents)} "
            "of them; use a Python that is installed with its sources, or choose another data.name."
        )
    first_held_out = len(contents) - max(1, len(contents) // _VALIDATION_SHARE)
    pieces = [b"".join(contents[:first_held_out]), b"".join(contents[first_held_out:])]
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(f"{len(piece)}\n".encode())
        digest.update(piece)
    train, validation = (torch.from_numpy(np.frombuffer(bytearray(piece), dtype=np.uint8)) for piece in pieces)
    return Corpus(train, validation, len(contents), digest.hexdigest())


class ByteArray:
    """Bytes in memory as a source of `TokenWindows`.

    Args:
        text: The bytes, uint8 ``[n]``.
    """

    def __init__(self, text: Tensor) -> None:
        self.text = text

    def __len__(self) -> int:
        return len(self.text)

    def __getitem__(self, place: slice) -> NDArray[np.uint8]:
        found: NDArray[np.uint8] = self.text[place].numpy()
        return found

    def windows(self, starts: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        """Return windows of the same length, int64 ``[B, length]``."""
        return sliding_window_view(self.text.numpy(), length)[starts].astype(np.int64)


def build_stdlib_bytes(options: StdlibBytesOptions, seed: int) -> DataBundle:
    """Return windows at random places for training, and side by side for validation.

    Args:
        options: Length and number of the windows.
        seed: Decides where the training windows start.

    Raises:
        ConfigError: The sources are missing, or shorter than a window.
    """
    corpus = read_corpus(Path(sysconfig.get_path("stdlib")))
    length, available = options.length, min(len(corpus.train), len(corpus.validation))
    if length >= available:
        raise ConfigError(
            f"data.options.length={length} does not fit into the corpus, whose smaller part has {available} bytes; "
            f"it can be at most {available - 1}."
        )
    counts = {"files": corpus.files, "train_bytes": len(corpus.train), "validation_bytes": len(corpus.validation)}
    info = DataInfo(fingerprint=corpus.fingerprint, details={"python": python_version(), **counts})
    return DataBundle(
        train=TokenWindows(ByteArray(corpus.train), length, count=options.windows, seed=seed),
        validation=TokenWindows(ByteArray(corpus.validation), length),
        info=info,
    )


def decode(ids: Tensor | Iterable[int]) -> str:
    """Return bytes as text; what is not UTF-8, such as a letter cut in two, becomes a replacement character.

    Args:
        ids: Numbers from 0 to 255, ``[N]``.

    Example:
        >>> decode([100, 101, 102])
        'def'
    """
    return bytes(ids.tolist() if isinstance(ids, Tensor) else ids).decode("utf-8", errors="replace")
