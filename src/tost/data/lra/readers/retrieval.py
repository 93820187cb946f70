"""Reading the pairs of documents of the retrieval task (AAN) as they were released.

``new_aan_pairs.train.tsv`` and so on have no header and no quoting: a quotation mark is text like any other. The
columns are the label as a decimal number, two names of papers, two texts. The texts stay on disk.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tost.data.dataset import DataBundle, fingerprint, spread
from tost.data.lra.options import LraRetrievalOptions
from tost.data.lra.readers.layout import bundle, find_release
from tost.data.lra.sequences import BYTE_END, Alphabet, BytesInFile, Form, Sequences, make_alphabet
from tost.errors import ConfigError

_FILES = {"train": "new_aan_pairs.train.tsv", "val": "new_aan_pairs.eval.tsv", "test": "new_aan_pairs.test.tsv"}
_LABELS = {b"0.0": 0, b"1.0": 1, b"0": 0, b"1": 1}
_COLUMNS = 5


class _Pairs(NamedTuple):
    path: Path
    spans: NDArray[np.int64]
    targets: Tensor


def build_lra_retrieval(options: LraRetrievalOptions, path: str) -> DataBundle:
    """Return pairs: inputs int64 ``[2, length]``, mask bool of the same shape, targets int64 ``[]``."""
    names = [_FILES["train"], _FILES[options.validation_split]]
    folder = find_release(Path(path), "tsv_data", names)
    train, validation = (_index(folder / name) for name in names)
    data, spans = np.memmap(train.path, dtype=np.uint8, mode="r"), train.spans.reshape(-1, 2)
    texts = (data[begin:end].tobytes().decode("utf-8", errors="replace") for begin, end in spans)
    alphabet = make_alphabet(options, texts, train.path)
    form = Form.of(options, BYTE_END if alphabet is None else Alphabet.END)
    sets, parts = [], []
    for pairs in (train, validation):
        rows = spread(torch.arange(len(pairs.targets)), options.limit)
        source = BytesInFile(pairs.path, pairs.spans, alphabet)
        sets.append(Sequences(source, rows, pairs.targets, form, towers=2))
        parts += [torch.from_numpy(pairs.spans), pairs.targets, rows]
    return bundle(sets, fingerprint(*parts), {"folder": str(folder)})


def _index(path: Path) -> _Pairs:
    """Find the bytes of each text in a file."""
    spans, targets = [], []
    place = 0
    with path.open("rb") as file:  # lines end at line feeds only; texts hold other things that look like line ends
        for number, line in enumerate(file, start=1):
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
    return _Pairs(path, np.array(spans, dtype=np.int64), torch.tensor(targets))
