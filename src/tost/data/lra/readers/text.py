"""Reading reviews of films (IMDb), which the release does not hold: parquet files, published folders, or the hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tost.data._tables import check_columns, columns_of, load_hub, read_column
from tost.data.dataset import DataBundle, spread
from tost.data.images.sources.base import check_folder, entries
from tost.data.images.sources.parquet import find_shards
from tost.data.lra.options import LraTextOptions
from tost.data.lra.readers.layout import sequence_bundle, shuffled
from tost.data.lra.sequences import Alphabet, IdsInMemory, end_id, make_alphabet
from tost.errors import ConfigError

HUB = "hub:"
"""Start of a path that names a data set of the Hugging Face hub."""

_EXPECTED = (
    "the folder of train.parquet and test.parquet (columns text and label), or of train/neg, train/pos, test/neg and "
    "test/pos with one review per .txt file; or be hub:NAME, such as hub:stanfordnlp/imdb"
)
_CLASSES = ("neg", "pos")
_COLUMNS = ("text", "label")


class _Reviews(NamedTuple):
    texts: list[str]
    targets: Tensor
    layout: str


def build_lra_text(options: LraTextOptions, path: str) -> DataBundle:
    """Return reviews: inputs int64 ``[length]``, mask bool of the same shape, targets int64 ``[]``, 1 if positive."""
    train = _read(path, "train")
    order = shuffled(len(train.targets), options.split_seed)
    if options.hold_out >= len(order):
        raise ConfigError(
            f"data.options.hold_out={options.hold_out} leaves nothing to train on; {path} has {len(order)} training "
            "reviews."
        )
    rows, held_out = order[options.hold_out :].sort().values, order[: options.hold_out].sort().values
    if options.validation_split == "val" and options.hold_out:
        validation = train
    else:
        validation = _read(path, "test")  # which doubles as the validation set in every code base
        held_out = torch.arange(len(validation.targets))
    alphabet = make_alphabet(options, train.texts, path)
    splits, cut = [], 0
    for reviews, chosen in ((train, spread(rows, options.limit)), (validation, spread(held_out, options.limit))):
        source = _source(reviews.texts, alphabet)
        splits.append((source, reviews.targets, chosen))
        cut += int((np.diff(source.ends, prepend=0)[chosen.numpy()] > options.length - options.eos).sum())
    return sequence_bundle(splits, options, end_id(alphabet), {"layout": train.layout, "cut": cut}, _CLASSES)


def _source(texts: Sequence[str], alphabet: Alphabet | None) -> IdsInMemory:
    if alphabet is None:
        parts: list[Any] = [np.frombuffer(text.encode("utf-8"), dtype=np.uint8) for text in texts]
    else:
        parts = [alphabet.encode(text) for text in texts]
    return IdsInMemory(np.concatenate(parts), np.cumsum([len(part) for part in parts]), offset=int(alphabet is None))


def _read(path: str, split: str) -> _Reviews:
    if path.startswith(HUB):
        loaded = load_hub_split(path, split)
        check_columns(_COLUMNS, loaded.column_names, f"the split {split!r} of {path}")
        return _checked(list(loaded["text"]), list(loaded["label"]), "hub", f"the split {split!r} of {path}")
    folder = Path(path)
    check_folder(folder, _EXPECTED)
    if shards := find_shards(folder, [split]):
        return _read_parquet(shards, split, folder)
    for place in (folder / split, folder / "aclImdb" / split):
        if all((place / name).is_dir() for name in _CLASSES):
            return _read_folders(place)
    raise ConfigError(
        f"{folder} holds no reviews of the split {split!r}, it has: {entries(folder)}; data.path must point at "
        f"{_EXPECTED}."
    )


def load_hub_split(path: str, split: str) -> Any:
    """Load one split of a data set of the hub; the path begins with `HUB`.

    Raises:
        ConfigError: It cannot be loaded.
    """
    remedy = f"the split {split!r} is needed; check the name and the connection, or point data.path at a folder."
    return load_hub(path.removeprefix(HUB), split=split, remedy=remedy)


def _read_parquet(shards: Sequence[Path], split: str, folder: Path) -> _Reviews:
    for shard in shards:
        check_columns(_COLUMNS, columns_of(shard), shard)
    texts, labels = (read_column(shards, name).to_pylist() for name in _COLUMNS)
    return _checked(texts, labels, "parquet", f"the split {split!r} of {folder}")


def _checked(texts: list[Any], labels: list[Any], layout: str, where: str) -> _Reviews:
    if not texts:
        raise ConfigError(f"{where} holds no reviews.")
    for label in labels:
        if type(label) not in (int, bool) or label not in (0, 1):
            raise ConfigError(f"{where} has the label {label!r}; labels are 0 (negative) and 1 (positive).")
    if any(not isinstance(text, str) for text in texts):
        raise ConfigError(f"{where} has reviews that are no text.")
    return _Reviews(texts, torch.tensor(labels, dtype=torch.int64), layout)


def _read_folders(folder: Path) -> _Reviews:
    texts: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(_CLASSES):
        files = sorted((folder / name).glob("*.txt"))
        if not files:
            raise ConfigError(f"{folder / name} holds no .txt files, it has: {entries(folder / name)}.")
        texts += [file.read_bytes().decode("utf-8", errors="replace") for file in files]
        labels += [label] * len(files)
    return _Reviews(texts, torch.tensor(labels), "folders")
