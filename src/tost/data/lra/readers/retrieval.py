"""Reading the pairs of documents of the retrieval task (AAN) as they were released.

``new_aan_pairs.train.tsv`` and so on have no header and no quoting: a quotation mark is text like any other. The
columns are the label as a decimal number, two names of papers, two texts. The texts stay on disk.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tost.data.dataset import DataBundle
from tost.data.lra.options import LraRetrievalOptions
from tost.data.lra.readers.layout import find_release, lines_of, sequence_bundle
from tost.data.lra.sequences import BytesInFile, end_id, make_alphabet
from tost.errors import ConfigError

_FILES = {"train": "new_aan_pairs.train.tsv", "val": "new_aan_pairs.eval.tsv", "test": "new_aan_pairs.test.tsv"}
_LABELS = {b"0.0": 0, b"1.0": 1, b"0": 0, b"1": 1}
_COLUMNS = 5


def build_lra_retrieval(options: LraRetrievalOptions, path: str) -> DataBundle:
    """Return pairs: inputs int64 ``[2, length]``, mask bool of the same shape, targets int64 ``[]``."""
    names = [_FILES["train"], _FILES[options.validation_split]]
    folder = find_release(Path(path), "tsv_data", names)
    files = [folder / name for name in names]
    indices = [_index(file) for file in files]
    data, spans = np.memmap(files[0], dtype=np.uint8, mode="r"), indices[0][0].reshape(-1, 2)
    texts = (data[begin:end].tobytes().decode("utf-8", errors="replace") for begin, end in spans)
    alphabet = make_alphabet(options, texts, files[0])
    splits = [
        (BytesInFile(file, spans, alphabet), targets, torch.arange(len(targets)))
        for file, (spans, targets) in zip(files, indices, strict=True)
    ]
    return sequence_bundle(splits, options, end_id(alphabet), {"folder": str(folder)})


def _index(path: Path) -> tuple[NDArray[np.int64], Tensor]:
    """Find the bytes of each text in a file, int64 ``[n, 2, 2]``, and the labels."""
    spans, targets = [], []
    place = 0
    with path.open("rb") as file:  # texts hold other things that look like line ends
        for number, line in enumerate(lines_of(file, path), start=1):
            columns = line.rstrip(b"\n").split(b"\t")
            if len(columns) != _COLUMNS:
                raise ConfigError(
                    f"{path}, line {number} has {len(columns)} columns; it must have {_COLUMNS}: label, two names of "
                    "papers, two texts."
                )
            label, first_name, second_name, first, second = columns
            if label not in _LABELS:
                shown = label[:20].decode("utf-8", errors="replace")
                raise ConfigError(f"{path}, line {number} has the label {shown!r}; it must be 0.0 or 1.0.")
            begin = place + len(label) + len(first_name) + len(second_name) + 3
            middle = begin + len(first) + 1
            spans.append(((begin, begin + len(first)), (middle, middle + len(second))))
            targets.append(_LABELS[label])
            place += len(line)
    if not targets:
        raise ConfigError(f"{path} is empty; it must hold lines of label, two names of papers, two texts.")
    return np.array(spans, dtype=np.int64), torch.tensor(targets)
