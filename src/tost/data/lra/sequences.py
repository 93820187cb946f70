"""Data sets of symbols: ids that are cut, ended and padded when a batch is gathered.

Ids of letters: 0 is padding. Bytes follow from 1 to 256, the end is 257. With characters 1 stands for unknown ones, 2
is the end if there is one, then come the characters, the most frequent ones first.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tost.data.dataset import Batch, Dataset
from tost.data.lra.options import LettersOptions, SequenceOptions
from tost.errors import ConfigError

_BYTE_END = 257
_BYTES_PER_CHARACTER = 4  # at most, in UTF-8


@dataclass(frozen=True)
class Form:
    """How a sequence is cut, ended and padded.

    Attributes:
        length: Positions of a sample.
        end: Id that ends every sequence; None for none.
        keep: Which part of a sequence that is too long.
        padding: Side on which short ones are filled up with 0; ``"none"`` packs those of a batch into one row.
    """

    length: int
    end: int | None
    keep: Literal["start", "end"]
    padding: Literal["right", "left", "none"]

    @classmethod
    def of(cls, options: SequenceOptions, end: int) -> Form:
        """Return the form of options; `end` is the id of the end symbol, if they ask for one."""
        return cls(options.length, end if options.eos else None, options.keep, options.padding)

    @property
    def room(self) -> int:
        """Positions for the sequence itself."""
        return self.length - (self.end is not None)

    def cut(self, ids: NDArray[Any]) -> NDArray[Any]:
        """Return the part of a sequence that fits."""
        return ids[: self.room] if self.keep == "start" else ids[max(0, len(ids) - self.room) :]

    def ended(self, ids: NDArray[Any]) -> NDArray[Any]:
        """Return the part of a sequence that fits, with its end."""
        ids = self.cut(ids)
        return ids if self.end is None else np.append(ids, self.end)

    def fill(self, ids: NDArray[Any], row: NDArray[np.int64], mask: NDArray[np.bool_]) -> None:
        """Write a sequence into a row of zeros, and mark its positions in the mask."""
        ids = self.ended(ids)
        first = 0 if self.padding == "right" else self.length - len(ids)
        row[first : first + len(ids)] = ids
        mask[first : first + len(ids)] = True


class Alphabet:
    """The ids of characters; a character that is not among them is unknown.

    Args:
        characters: Those that are known, in the order of their ids.
        eos: Whether the id 2 is the end; else it is the first character's.
    """

    UNKNOWN, END = 1, 2

    def __init__(self, characters: Sequence[str], *, eos: bool) -> None:
        first = self.END + eos
        self._ids = np.full(sys.maxunicode + 1, self.UNKNOWN, dtype=np.uint16)
        self._ids[[ord(character) for character in characters]] = np.arange(first, first + len(characters))

    def encode(self, text: str) -> NDArray[np.uint16]:
        """Return the ids of a text."""
        codes = np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype="<u4")
        return np.asarray(self._ids[codes])


def make_alphabet(options: LettersOptions, texts: Iterable[str], where: Path | str) -> Alphabet | None:
    """Return ids for the characters of the training texts, None if the texts are cut into bytes.

    Args:
        options: Unit, frequency of the rarest character that has an id, and number of ids.
        texts: The training texts.
        where: File or folder of the texts, for the message.

    Raises:
        ConfigError: There are more ids than the options allow.
    """
    if options.unit == "bytes":
        return None
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    first, limit = Alphabet.END + options.eos, options.ids()
    # Ties by the character itself: the ids must not depend on the order of the texts.
    frequent = [letter for letter in counts if counts[letter] >= options.min_frequency]
    frequent.sort(key=lambda letter: (-counts[letter], letter))
    if first + len(frequent) > limit:
        raise ConfigError(
            f"the training texts of {where} have {len(frequent)} different characters that occur at least "
            f"{options.min_frequency} times, which makes {first + len(frequent)} ids with the special ones; "
            f"data.options.vocab_size={limit} is too small, raise it or data.options.min_frequency."
        )
    return Alphabet(frequent, eos=options.eos)


def end_id(alphabet: Alphabet | None) -> int:
    """Return the id that ends a sequence of characters, or of bytes if there is no alphabet."""
    return _BYTE_END if alphabet is None else alphabet.END


class IdsInMemory:
    """Ids in one array, one sequence after the other.

    Args:
        ids: All of them, unsigned integers.
        ends: Where each sequence ends, int64 ``[n]``.
        offset: Added to every id.
    """

    def __init__(self, ids: NDArray[Any], ends: NDArray[np.int64], *, offset: int = 0) -> None:
        self.ids, self.ends, self.offset = ids, ends, offset

    def fetch(self, row: int, tower: int, form: Form) -> NDArray[np.int64]:
        """Return the ids of a sequence that `form` keeps."""
        begin = self.ends[row - 1] if row else 0
        return form.cut(self.ids[begin : self.ends[row]]).astype(np.int64) + self.offset

    def content(self) -> list[Tensor]:
        """Return what identifies the sequences."""
        return [torch.from_numpy(self.ids), torch.from_numpy(self.ends)]


class BytesInFile:
    """Pieces of a file that stays on disk, mapped into memory.

    Args:
        path: The file.
        spans: Where each piece begins and ends, int64 ``[n, towers, 2]``.
        alphabet: Ids of characters; None for bytes.
    """

    def __init__(self, path: Path, spans: NDArray[np.int64], alphabet: Alphabet | None) -> None:
        self.path, self.spans, self.alphabet = path, spans, alphabet
        self._bytes: NDArray[np.uint8] | None = None

    def fetch(self, row: int, tower: int, form: Form) -> NDArray[np.int64]:
        """Return the ids of a piece that `form` keeps."""
        if self._bytes is None:
            self._bytes = np.memmap(self.path, dtype=np.uint8, mode="r")
        begin, end = (int(place) for place in self.spans[row, tower])
        data = self._bytes[begin:end]
        if self.alphabet is None:
            return form.cut(data).astype(np.int64) + 1
        if form.keep == "start":  # more than this cannot be needed
            data = data[: form.room * _BYTES_PER_CHARACTER]
        return form.cut(self.alphabet.encode(data.tobytes().decode("utf-8", errors="replace"))).astype(np.int64)

    def content(self) -> list[Tensor]:
        """Return what identifies the pieces: their places."""
        return [torch.from_numpy(self.spans)]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_bytes": None}  # a worker maps the file itself


SequenceSource = IdsInMemory | BytesInFile


class Sequences(Dataset):
    """Samples: inputs int64 ``[length]``, mask bool of the same shape, targets int64 ``[]``; ``[2, length]`` in pairs.

    Without padding a batch is one row: inputs int64 ``[1, T]`` with the sequences one after the other, those of a pair
    side by side; cu_seqlens int32 ``[S + 1]``, see `tost.Packing`; targets int64 ``[B]``.

    Args:
        source: The sequences.
        rows: Which of them, int64 ``[n]``.
        targets: Labels by row of the source, int64.
        form: How they are cut and padded.
        towers: Sequences of a sample.
    """

    def __init__(self, source: SequenceSource, rows: Tensor, targets: Tensor, form: Form, *, towers: int = 1) -> None:
        self.source, self.rows, self.targets, self.form, self.towers = source, rows, targets, form, towers

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.rows)

    def gather(self, indices: Tensor) -> Batch:
        """Return samples as a batch."""
        rows = self.rows[indices]
        if self.form.padding == "none":
            return self._packed(rows)
        shape = (len(rows), self.towers, self.form.length)
        ids, mask = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=bool)
        for place, row in enumerate(rows.tolist()):
            for tower in range(self.towers):
                self.form.fill(self.source.fetch(row, tower, self.form), ids[place, tower], mask[place, tower])
        if self.towers == 1:
            ids, mask = ids[:, 0], mask[:, 0]
        return {"inputs": torch.from_numpy(ids), "mask": torch.from_numpy(mask), "targets": self.targets[rows]}

    def _packed(self, rows: Tensor) -> Batch:
        towers = range(self.towers)
        each = [self.form.ended(self.source.fetch(row, tower, self.form)) for row in rows.tolist() for tower in towers]
        ids = np.concatenate([np.zeros(0, dtype=np.int64), *each])
        cu_seqlens = torch.tensor([0, *(len(one) for one in each)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return {"inputs": torch.from_numpy(ids)[None], "cu_seqlens": cu_seqlens, "targets": self.targets[rows]}
