"""Reading the Long Range Arena as released: ListOps, reviews (IMDb), pairs of papers (AAN), CIFAR-10, Pathfinder.

Id 0 is padding. Bytes are the ids 1 to 256, and 257 is their end. The ids of ListOps are
`tost.data.lra.listops.SYMBOLS`; 16 stands for an unknown symbol, which does not occur, and 17 is the end.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tost.data._tables import check_columns, columns_of, read_column
from tost.data.dataset import Batch, DataBundle, Dataset, fingerprint, spread
from tost.data.images.options import Cifar10Options
from tost.data.images.published import CIFAR10_NAMES, open_cifar
from tost.data.images.sources import (
    FileImages,
    check_folder,
    find_folder,
    find_shards,
    hash_lines,
    open_image_folder,
    wrong_place,
)
from tost.data.images.transforms import to_grey
from tost.data.lra import options as lra
from tost.data.lra.listops import FOLDER, SYMBOLS
from tost.data.spec import DataInfo
from tost.errors import ConfigError

_RELEASE = "lra_release"
_LONGEST_LINE = 1 << 26  # bytes
_SHOWN = 40  # bytes of a wrong value in messages


class SequenceSource:
    """Sequences in one array, or in a file that is mapped into memory.

    Args:
        data: Ids, or the file that holds them.
        spans: Where each sequence begins and ends, int64 ``[n, towers, 2]``.
        targets: Labels, int64 ``[n]``.
        offset: Added to every id.
    """

    def __init__(
        self, data: NDArray[np.uint8] | Path, spans: NDArray[np.int64], targets: Tensor, *, offset: int = 0
    ) -> None:
        self.data, self.spans, self.targets, self.offset = data, spans, targets, offset
        self._mapped: NDArray[np.uint8] | None = None

    @classmethod
    def of(cls, parts: Sequence[bytes], targets: Tensor, *, offset: int = 0) -> SequenceSource:
        """Join sequences in memory."""
        ends = np.cumsum([len(part) for part in parts])
        spans = np.stack((np.concatenate(([0], ends[:-1])), ends), axis=-1)[:, None]
        return cls(np.frombuffer(bytearray(b"".join(parts)), dtype=np.uint8), spans, targets, offset=offset)

    def read(self, row: int, tower: int, kept: slice) -> NDArray[np.int64]:
        """Return a part of a sequence."""
        if self._mapped is None:
            source = self.data
            self._mapped = np.memmap(source, dtype=np.uint8, mode="r") if isinstance(source, Path) else source
        begin, end = self.spans[row, tower].tolist()
        return self._mapped[begin:end][kept].astype(np.int64) + self.offset

    def content(self) -> list[Tensor]:
        """Return what identifies the sequences: ids and ends, or places in a file."""
        if isinstance(self.data, Path):
            return [torch.from_numpy(self.spans), self.targets]
        return [torch.from_numpy(self.data), torch.from_numpy(self.spans[:, 0, 1]), self.targets]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_mapped": None}  # a worker maps the file itself


class Sequences(Dataset):
    """Samples: inputs int64 ``[length]``, mask bool of the same shape, targets int64 ``[]``; ``[2, length]`` in pairs.

    Without padding a batch is one row: inputs int64 ``[1, T]`` with the sequences one after the other, those of a pair
    side by side; cu_seqlens int32 ``[S + 1]``, see `tost.Packing`; targets int64 ``[B]``.

    Args:
        source: The sequences.
        rows: Which of them, int64 ``[n]``.
        options: How they are cut, ended and padded.
    """

    def __init__(self, source: SequenceSource, rows: Tensor, options: lra.SequenceOptions) -> None:
        self.source, self.rows, self.options = source, rows, options
        self.end = np.array([options.end] * options.eos, dtype=np.int64)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.rows)

    def gather(self, indices: Tensor) -> Batch:
        """Return samples as a batch."""
        rows, towers, length = self.rows[indices], self.options.towers, self.options.length
        room = length - len(self.end)
        kept = slice(None, room) if self.options.keep == "start" else slice(-room, None)
        each = [
            np.concatenate((self.source.read(row, tower, kept), self.end))
            for row in rows.tolist()
            for tower in range(towers)
        ]
        targets = self.source.targets[rows]
        if self.options.padding == "none":
            ids = torch.from_numpy(np.concatenate([np.zeros(0, dtype=np.int64), *each]))
            ends = torch.tensor([0, *map(len, each)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            return {"inputs": ids[None], "cu_seqlens": ends, "targets": targets}
        inputs = torch.zeros(len(each), length, dtype=torch.int64)
        mask = torch.zeros(len(each), length, dtype=torch.bool)
        for place, one in enumerate(each):
            filled = slice(0, len(one)) if self.options.padding == "right" else slice(length - len(one), length)
            inputs[place, filled], mask[place, filled] = torch.from_numpy(one), True
        shape = (len(rows), towers, length) if towers > 1 else (len(rows), length)
        return {"inputs": inputs.view(shape), "mask": mask.view(shape), "targets": targets}


def _bundle(
    sets: Sequence[Dataset], content: str, details: Mapping[str, int | str], class_names: tuple[str, ...] = ()
) -> DataBundle:
    train, validation = sets
    counts = {"train_samples": len(train), "validation_samples": len(validation)}
    info = DataInfo(fingerprint=content, details={**details, **counts}, class_names=class_names)
    return DataBundle(train=train, validation=validation, info=info)


def _sequence_bundle(
    options: lra.SequenceOptions, sources: Sequence[SequenceSource], details: Mapping[str, int | str]
) -> DataBundle:
    rows = [spread(torch.arange(len(source.targets)), options.limit) for source in sources]
    sets = [Sequences(source, chosen, options) for source, chosen in zip(sources, rows, strict=True)]
    parts = [part for one in sets for part in (*one.source.content(), one.rows)]
    return _bundle(sets, fingerprint(*parts), details)


def _find_release(path: Path, folder: str, needed: Sequence[str]) -> Path:
    """Return the folder that holds some files of the release, given itself or any folder on the way to it.

    The archive unpacks to a folder within a folder of the same name. Some of its content is in the outer folder once
    more; the inner copy is the right one, so places are tried from the innermost out.
    """
    places = [path.joinpath(*[_RELEASE] * depth, folder) for depth in (2, 1, 0)]
    expected = f"lra_release, or at its folder {folder} with {' and '.join(needed)}"
    return find_folder(path, [*places, path], needed, expected)


def _rows(file: IO[bytes], path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file, which end at line feeds only, with the places where they begin."""
    place = 0
    while line := file.readline(_LONGEST_LINE + 1):
        if len(line) > _LONGEST_LINE:
            raise ConfigError(f"{path} has a line of more than {_LONGEST_LINE:,} bytes; it is damaged.")
        yield place, line
        place += len(line)


def _shown(data: bytes) -> str:
    return data[:_SHOWN].decode("utf-8", errors="replace")


# ListOps: a header, then source and target. Parentheses add nothing to the brackets and are left out.

_CLOSE, _BAD = SYMBOLS.index("]"), 255
_OPERATORS = {name.encode(): bytes([0x80 + place]) for place, name in enumerate(SYMBOLS) if name.startswith("[")}
_CODES = {0x80 + place: place for place in range(len(SYMBOLS))}
_CODES |= {ord(name): place for place, name in enumerate(SYMBOLS) if len(name) == 1}
_CODES[ord("X")] = _CLOSE  # as others write it after they took the brackets off
_IDS = bytes(_CODES.get(code, _BAD) for code in range(256))


def build_listops(options: lra.LraListOpsOptions, path: str) -> DataBundle:
    """Return ListOps: inputs int64 ``[length]``, mask bool of the same shape, targets int64 ``[]``."""
    names = [f"basic_{split}.tsv" for split in ("train", options.validation_split)]
    folder = _find_release(Path(path), FOLDER, names)
    sources = [_read_listops(folder / name, brackets=options.brackets) for name in names]
    return _sequence_bundle(options, sources, {"folder": str(folder)})


def _read_listops(path: Path, *, brackets: bool) -> SequenceSource:
    expressions, targets = [], []
    with path.open("rb") as file:
        lines = _rows(file, path)
        _, first = next(lines, (0, b""))
        if first.rstrip(b"\r\n") != b"Source\tTarget":
            raise ConfigError(f"{path} begins with {_shown(first)!r}; it must begin with the line Source<tab>Target.")
        for number, (_, line) in enumerate(lines, start=2):
            try:
                expression, value = parse_listops(line.rstrip(b"\r\n"))
            except ConfigError as error:
                raise ConfigError(f"{path}, line {number} {error}") from error
            expressions.append(expression if brackets else expression.replace(bytes([_CLOSE]), b""))
            targets.append(value)
    if not targets:
        raise ConfigError(f"{path} holds a header and nothing else; it is incomplete.")
    return SequenceSource.of(expressions, torch.tensor(targets))


def parse_listops(line: bytes) -> tuple[bytes, int]:
    """Return the ids and the value of an expression; raise `ConfigError` if the line is something else."""
    source, tab, target = line.partition(b"\t")
    if not tab or b"\t" in target:
        raise ConfigError(f"has {line.count(tab or b'-') + 1} columns; it must have two, an expression and its value.")
    if len(target) != 1 or not target.isdigit():
        raise ConfigError(f"has the value {_shown(target)!r}; it must be a digit, 0 to 9.")
    codes = source
    for name, code in _OPERATORS.items():
        codes = codes.replace(name, code)
    expression = codes.translate(_IDS, b"() ")
    words = codes.count(b" ") + 1  # of one byte each by now, if they are what they should be
    if not expression or _BAD in expression or words != len(expression) + codes.count(b"(") + codes.count(b")"):
        raise ConfigError(f"is no ListOps expression of symbols with one space between them: {_shown(source)!r}.")
    return expression, int(target)


# Retrieval: no header and no quoting, a quotation mark is text like any other. The texts stay on disk.

_PAIRS = {"train": "new_aan_pairs.train.tsv", "val": "new_aan_pairs.eval.tsv", "test": "new_aan_pairs.test.tsv"}
_LABELS = {b"0.0": 0, b"1.0": 1, b"0": 0, b"1": 1}


def build_retrieval(options: lra.LraRetrievalOptions, path: str) -> DataBundle:
    """Return pairs: inputs int64 ``[2, length]``, mask bool of the same shape, targets int64 ``[]``."""
    names = [_PAIRS["train"], _PAIRS[options.validation_split]]
    folder = _find_release(Path(path), "tsv_data", names)
    sources = [index_pairs(folder / name) for name in names]
    return _sequence_bundle(options, sources, {"folder": str(folder)})


def index_pairs(path: Path) -> SequenceSource:
    """Find the labels and the places of the texts in a file of label, two names of papers, two texts.

    Raises:
        ConfigError: The file is something else.
    """
    spans, targets = [], []
    with path.open("rb") as file:  # texts hold other things that look like line ends
        for number, (place, line) in enumerate(_rows(file, path), start=1):
            columns = line.rstrip(b"\n").split(b"\t")
            if len(columns) != 5:
                what = "label, two names of papers, two texts"
                raise ConfigError(f"{path}, line {number} has {len(columns)} columns; it must have 5: {what}.")
            if columns[0] not in _LABELS:
                raise ConfigError(f"{path}, line {number} has the label {_shown(columns[0])!r}; it must be 0.0 or 1.0.")
            begin = place + sum(len(column) + 1 for column in columns[:3])
            middle = begin + len(columns[3]) + 1
            spans.append(((begin, middle - 1), (middle, middle + len(columns[4]))))
            targets.append(_LABELS[columns[0]])
    if not targets:
        raise ConfigError(f"{path} is empty; it must hold lines of label, two names of papers, two texts.")
    return SequenceSource(path, np.array(spans, dtype=np.int64), torch.tensor(targets), offset=1)


# Text: reviews of films, which the release does not hold.

_REVIEWS = (
    "the folder of train.parquet and test.parquet (columns text and label), or of train/neg, train/pos, test/neg and "
    "test/pos with one review per .txt file"
)
_CLASSES = ("neg", "pos")


def build_text(options: lra.LraTextOptions, path: str) -> DataBundle:
    """Return reviews: inputs int64 ``[length]``, mask bool of the same shape, targets int64 ``[]``, 1 if positive.

    Published files are sorted by label. Validation reviews come in an order that `split_seed` draws, so that the first
    batches of an evaluation hold both.
    """
    train, layout = _read_reviews(path, "train")
    order = _shuffled(len(train.targets), options.split_seed)
    if options.hold_out >= len(order):
        raise ConfigError(
            f"data.options.hold_out={options.hold_out} leaves nothing to train on; {path} has {len(order)} training "
            "reviews."
        )
    validation = train
    rows, held_out = order[options.hold_out :].sort().values, order[: options.hold_out].sort().values
    if options.validation_split == "test" or not options.hold_out:
        validation, _ = _read_reviews(path, "test")  # which doubles as the validation set in every code base
        held_out = torch.arange(len(validation.targets))
    sets: list[Sequences] = []
    parts, cut = [], 0
    for source, chosen in ((train, spread(rows, options.limit)), (validation, spread(held_out, options.limit))):
        parts += [*source.content(), chosen]
        cut += int((np.diff(source.spans[chosen.numpy(), 0])[:, 0] > options.length - options.eos).sum())
        if sets:
            chosen = chosen[_shuffled(len(chosen), options.split_seed)]
        sets.append(Sequences(source, chosen, options))
    return _bundle(sets, fingerprint(*parts), {"layout": layout, "cut": cut}, _CLASSES)


def _read_reviews(path: str, split: str) -> tuple[SequenceSource, str]:
    """Return reviews and the kind of files."""
    where, columns = f"the split {split!r} of {path}", ("text", "label")
    folder = Path(path)
    check_folder(folder, _REVIEWS)
    if shards := find_shards(folder, [split]):
        for shard in shards:
            check_columns(columns, columns_of(shard), shard)
        texts, labels = (read_column(shards, name).to_pylist() for name in columns)
        return _review_source(texts, labels, where), "parquet"
    place = next((place for place in (folder / split, folder / "aclImdb" / split) if (place / "neg").is_dir()), None)
    if place is None:
        raise wrong_place(folder, f"holds no reviews of the split {split!r}", _REVIEWS)
    files = {name: sorted((place / name).glob("*.txt")) for name in _CLASSES}
    if missing := [name for name, found in files.items() if not found]:
        raise wrong_place(place / missing[0], "holds no .txt files", _REVIEWS)
    texts = [file.read_bytes().decode("utf-8", errors="replace") for name in _CLASSES for file in files[name]]
    labels = [label for label, name in enumerate(_CLASSES) for _ in files[name]]
    return _review_source(texts, labels, where), "folders"


def _review_source(texts: Sequence[Any], labels: Sequence[Any], where: str) -> SequenceSource:
    if wrong := [label for label in labels if type(label) not in (int, bool) or label not in (0, 1)]:
        raise ConfigError(f"{where} has the label {wrong[0]!r}; labels are 0 (negative) and 1 (positive).")
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"{where} holds no reviews, or some that are no text.")
    return SequenceSource.of([text.encode() for text in texts], torch.tensor(labels, dtype=torch.int64), offset=1)


# Grey images as sequences of pixels, row after row: CIFAR-10 and Pathfinder.

_IN_MEMORY = 1 << 29  # bytes of pixels that are kept by default
_AT_ONCE = 2048  # images that are turned grey together: numbers take more room than bytes
_FIELDS = 11  # of a line of metadata
_LARGEST = 1 << 26  # bytes of metadata of one folder


class PixelSequences(Dataset):
    """Samples: inputs int64 ``[N]`` or float32 ``[N, 1]``, targets int64 ``[]``, and a mask if zeros are masked.

    Args:
        source: The images by row, uint8 ``[n, pixels]``, in memory or on disk.
        rows: Which of them, int64 ``[n]``.
        targets: Labels by row of the source, int64.
        options: How pixels are encoded.
    """

    def __init__(self, source: Tensor | _Files, rows: Tensor, targets: Tensor, options: lra.PixelOptions) -> None:
        self.source, self.rows, self.targets, self.options = source, rows, targets, options

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.rows)

    def gather(self, indices: Tensor) -> Batch:
        """Return images as a batch."""
        rows = self.rows[indices]
        pixels = self.source[rows]
        if self.options.input == "tokens":
            inputs = pixels.long()
        else:
            inputs = pixels.float().div_(255).sub_(self.options.mean).div_(self.options.std).unsqueeze(-1)
        batch = {"inputs": inputs, "targets": self.targets[rows]}
        return batch | {"mask": pixels != 0} if self.options.mask_zero else batch


class _Files:
    """Image files of one size, read on first use, and kept if there is room."""

    def __init__(self, files: FileImages, side: int, *, keep: bool) -> None:
        self.files, self.side, self.keep = files, side, keep
        self._kept: Tensor | None = None
        self._known = torch.zeros(len(files), dtype=torch.bool)

    def __getitem__(self, rows: Tensor) -> Tensor:
        if not self.keep:
            return self._read(rows)
        if self._kept is None:  # memory that is not written to is not used yet
            self._kept = torch.empty(len(self.files), self.side**2, dtype=torch.uint8)
        missing = rows[~self._known[rows]]
        self._kept[missing] = self._read(missing)
        self._known[missing] = True
        return self._kept[rows]

    def _read(self, rows: Tensor) -> Tensor:
        return self.files.decode(rows, (self.side, self.side), channels=1).flatten(1)

    def __getstate__(self) -> dict[str, Any]:
        # A worker reads for itself: the pixels so far would take longer to send than to read.
        return self.__dict__ | {"_kept": None, "_known": torch.zeros_like(self._known)}


def _shuffled(count: int, seed: int) -> Tensor:
    """Return the numbers below `count` in the order that torch's `random_split` takes with this seed."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def build_image(options: lra.LraImageOptions, path: str) -> DataBundle:
    """Return CIFAR-10 in grey, each image a sequence of 1024 pixels."""
    pixels, targets = _read_cifar(path, "train", options.grey)
    count = len(targets)
    order = torch.arange(count) if options.split == "order" else _shuffled(count, options.split_seed)
    held = int(count * options.val_share)
    rows, held_out = order[: count - held], order[count - held :]
    train = PixelSequences(pixels, spread(rows, options.limit), targets, options)
    if options.validation_split == "test":
        pixels, targets = _read_cifar(path, "test", options.grey)
        held_out = torch.arange(len(targets))
    validation = PixelSequences(pixels, spread(held_out, options.limit), targets, options)
    if not len(train) or not len(validation):
        raise ConfigError(f"{path} holds {count} training images, too few to hold out a share of {options.val_share}.")
    parts = [part[split.rows] for split in (train, validation) for part in (split.source, split.targets)]
    return _bundle((train, validation), fingerprint(*parts), {}, CIFAR10_NAMES)


def _read_cifar(path: str, split: str, grey: str) -> tuple[Tensor, Tensor]:
    """Return pixels uint8 ``[n, 1024]`` and labels int64 ``[n]``."""
    folder = Path(path)
    check_folder(folder, "the folder of CIFAR-10: parquet files, the binary version, or <split>/<class>/<image>")
    is_folder = (folder / split).is_dir() and any(entry.is_dir() for entry in (folder / split).iterdir())
    found = (open_image_folder if is_folder else open_cifar)(Cifar10Options(), folder, split)
    targets = found.targets
    colour = found.source.decode(torch.arange(len(targets)), (32, 32), channels=3)
    if len(targets) and not 0 <= int(targets.min()) <= int(targets.max()) < len(CIFAR10_NAMES):
        raise ConfigError(f"the split {split!r} of {path} has labels up to {int(targets.max())}; there are 10 classes.")
    turn = to_grey if grey == "pillow" else _tensorflow_grey
    return torch.cat([turn(part).flatten(1) for part in torch.split(colour, _AT_ONCE)]), targets


def _tensorflow_grey(colour: Tensor) -> Tensor:
    red, green, blue = colour.double().unbind(1)
    return (0.2989 * red + 0.5870 * green + 0.1140 * blue).round_().to(torch.uint8).unsqueeze(1)


def build_pathfinder(options: lra.LraPathfinderOptions, path: str) -> DataBundle:
    """Return Pathfinder images, each a sequence of its pixels; the target is 1 if one curve joins the discs."""
    level, root = lra.PATHFINDER_FOLDERS[options.difficulty], Path(path)
    is_level = (root / "metadata").is_dir()
    folder = root if is_level else _find_release(root, f"pathfinder{options.side}", [level]) / level
    names, labels, empty = _read_metadata(folder)
    files, targets, count = FileImages(folder, names), torch.tensor(labels), len(names)
    order = torch.arange(count) if options.split == "order" else _shuffled(count, options.split_seed)
    tenth = count // 10
    train, held_out = order[: count - 2 * tenth], order[count - 2 * tenth :]
    held_out = held_out[:tenth] if options.validation_split == "val" else held_out[tenth:]
    if not len(train) or not len(held_out):
        raise ConfigError(f"{folder} holds {count} images, too few to be split into training, validation and testing.")
    chosen = [spread(rows, options.limit) for rows in (train, held_out)]
    keep = options.in_memory if options.in_memory is not None else count * options.side**2 <= _IN_MEMORY
    source = _Files(files, options.side, keep=keep)
    content = hash_lines([files.fingerprint(), fingerprint(targets, *chosen)])
    sets = [PixelSequences(source, rows, targets, options) for rows in chosen]
    return _bundle(sets, content, {"folder": str(folder), "images": count, "empty": empty})


def _read_metadata(folder: Path) -> tuple[list[str], list[int], int]:
    """Return the images below a folder in the order of the metadata, their labels, and how many files are empty."""
    place = folder / "metadata"
    files = sorted((file for file in place.glob("*.npy") if file.stem.isdigit()), key=lambda file: int(file.stem))
    if not files:
        raise ConfigError(f"{place} holds no metadata; files called 0.npy, 1.npy and so on are needed.")
    sizes: dict[str, dict[str, int]] = {}
    names, labels, empty = [], [], 0
    for file in files:
        for number, fields in enumerate(read_metadata_rows(file), start=1):
            if len(fields) != _FIELDS or fields[3] not in ("0", "1"):
                raise ConfigError(
                    f"{file}, line {number} has {len(fields)} fields: {' '.join(fields)[:_SHOWN]!r}; it must have "
                    f"{_FIELDS}: the folder, the file, a number, the label 0 or 1, and settings."
                )
            inside, image = fields[:2]
            if inside not in sizes:
                sizes[inside] = _sizes(folder / inside, file)
            size = sizes[inside].get(image)
            if size is None:
                raise ConfigError(f"{file} names {inside}/{image}, but {folder / inside / image} does not exist.")
            if size:
                names.append(f"{inside}/{image}")
                labels.append(int(fields[3]))
            empty += not size
    return names, labels, empty


def _sizes(folder: Path, metadata: Path) -> dict[str, int]:
    try:
        with os.scandir(folder) as found:
            return {entry.name: entry.stat().st_size for entry in found}
    except (OSError, ValueError) as error:  # there is none, its name is longer than any, or holds a zero
        shown, reason = str(folder)[:500], error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{metadata} names images in {shown}, which is no folder ({reason}).") from error


def read_metadata_rows(file: Path) -> list[list[str]]:
    """Read metadata, which is text in spite of the name of the file.

    Raises:
        ConfigError: It is something else.
    """
    if file.stat().st_size > _LARGEST:
        raise ConfigError(f"{file} has {file.stat().st_size:,} bytes, more than metadata ever has; it was not read.")
    try:
        return [line.split() for line in file.read_text("utf-8").splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is no text, as the metadata of the release is: {error}.") from error
