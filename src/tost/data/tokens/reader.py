"""Reading folders of tokens that `tost data prepare` made, mapped into memory. Loads no torch."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tost._io import sha256_of
from tost._lazy import load
from tost.data.registry import DataOptions, find_data
from tost.data.text.tokenizers import DataTokenizer, tokenizer_from_record
from tost.data.tokens.options import FileRecord, Index, ShardRecord, SplitRecord, read_index
from tost.errors import ConfigError, StorageError

Ids = NDArray[np.int64]


def open_tokens(path: str | Path) -> TokenFolder:
    """Open a folder that `tost data prepare` made.

    The sizes of its files are compared with the index; `tost data check` compares their content too.

    Args:
        path: The folder.

    Raises:
        ConfigError: There is none, or it holds something else.
        StorageError: A file is missing or has another size than it should have.
    """
    folder = TokenFolder(Path(path), read_index(Path(path)))
    for split in folder.index.splits.values():
        for file in split.files:
            folder.check_size(file)
    return folder


def check_tokens(path: Path) -> dict[str, object]:
    """Compare every file of a folder of tokens with its checksum.

    Args:
        path: The folder.

    Returns:
        Facts about it.

    Raises:
        ConfigError: It is no such folder.
        StorageError: A file is missing or damaged; the message names it.
    """
    folder = open_tokens(path)
    splits, tokenizer = folder.index.splits, folder.index.tokenizer.file
    files = [*([tokenizer] if tokenizer else []), *(file for split in splits.values() for file in split.files)]
    for record in files:
        folder.check_size(record)
        if sha256_of(path / record.file) != record.sha256:
            raise StorageError(
                f"{path / record.file} has the right size but not the content that was written; {folder.remedy}"
            )
    return {
        "name": folder.name,
        "files": len(files),
        "bytes": sum(record.size for record in files),
        **{f"{name} tokens": split.tokens for name, split in splits.items()},
        "fingerprint": folder.fingerprint[:12],
    }


class TokenFolder:
    """A prepared folder; made by `open_tokens`.

    Attributes:
        path: The folder.
        index: Content of its ``index.json``.
        name: Name of the corpus.
        vocab_size: Number of ids of its tokenizer.
        fingerprint: SHA-256 that identifies the content, in hexadecimal.
        tokenizer_fingerprint: The same for equal tokenizers, whatever files they come from.
        end_of_text: Id that follows every document; None if none does.
        splits: Names of the splits.
        remedy: Advice for messages about damaged files.
    """

    def __init__(self, path: Path, index: Index) -> None:
        self.path, self.index = path, index
        self.name, self.fingerprint, self.splits = index.name, index.fingerprint, tuple(index.splits)
        self.vocab_size, self.end_of_text = index.tokenizer.vocab_size, index.tokenizer.end_of_text
        self.tokenizer_fingerprint = index.tokenizer.fingerprint
        self.remedy = f"copy it again, or remove {path} and run its `tost data prepare` command again."

    def check_size(self, record: FileRecord) -> None:
        """Compare the size of a file with its record.

        Raises:
            StorageError: The file is missing, cut off, or too long.
        """
        path = self.path / record.file
        try:
            size = path.stat().st_size
        except OSError as error:
            raise StorageError(f"{path} is missing ({error.strerror}); {self.remedy}") from error
        if size != record.size:
            wrong = "cut off" if size < record.size else "too long"
            raise StorageError(f"{path} is {wrong}: it has {size} bytes and should have {record.size}; {self.remedy}")

    def split(self, name: str) -> TokenSplit:
        """Return a split by name.

        Raises:
            ConfigError: There is none of that name.
        """
        if name not in self.index.splits:
            raise ConfigError(f"{self.path} has no split {name!r}; it has: {', '.join(self.splits)}.")
        return TokenSplit(self, name, self.index.splits[name])

    def tokenizer(self) -> DataTokenizer:
        """Return the tokenizer that the folder was prepared with.

        Raises:
            ConfigError: Its file cannot be read.
            StorageError: Its file is another one than it was.
        """
        record = self.index.tokenizer
        if record.file is not None:
            self.check_size(record.file)
        return tokenizer_from_record(record.model_dump(), self.path)


class TokenSplit:
    """One split of a folder; made by `TokenFolder.split`.

    Attributes:
        folder: The folder.
        name: Name of the split.
        record: Its record in ``index.json``.
        tokens: Its tokens, one document after another.
        num_tokens: Number of tokens, those that end documents included.
        num_bytes: UTF-8 bytes of the text that was encoded.
        source_bytes: UTF-8 bytes of the text before it was edited.
        source_words: Words of the text before it was edited, separated by white space.
    """

    def __init__(self, folder: TokenFolder, name: str, record: SplitRecord) -> None:
        self.folder, self.name, self.record = folder, name, record
        self.tokens = TokenArray(folder.path, record.shards, folder.index.dtype)
        self.num_tokens, self.num_bytes = record.tokens, record.bytes
        self.source_bytes, self.source_words = record.source_bytes, record.source_words

    @cached_property
    def documents(self) -> Ids:
        """Where documents begin, and the end: int64 ``[documents + 1]``."""
        parts = [np.fromfile(self.folder.path / shard.lengths.file, dtype="<u8") for shard in self.record.shards]
        ends = np.cumsum(np.concatenate([np.zeros(1, dtype=np.uint64), *parts])).astype(np.int64)
        if ends[-1] != self.num_tokens or (np.diff(ends) < 0).any():
            raise StorageError(
                f"the lengths of the documents of {self.folder.path} do not add up to {self.num_tokens} tokens; "
                f"{self.folder.remedy}"
            )
        return ends

    def document(self, number: int) -> Ids:
        """Return the tokens of one document, without the one that ends it: int64 ``[n]``."""
        ids = self.tokens[int(self.documents[number]) : int(self.documents[number + 1])].astype(np.int64)
        return ids if self.folder.end_of_text is None else ids[:-1]


class TokenArray:
    """Tokens in several files, like one array. Files are mapped when they are needed.

    Args:
        folder: Folder of the files.
        shards: Records of the files, in order.
        dtype: How tokens are stored.
    """

    def __init__(self, folder: Path, shards: list[ShardRecord], dtype: str) -> None:
        self._paths = [folder / shard.data.file for shard in shards]
        self._starts = np.cumsum([0, *(shard.tokens for shard in shards)], dtype=np.int64)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._maps: dict[int, NDArray[Any]] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Another process maps the files itself; a mapped array would be sent with all its content.
        return {**self.__dict__, "_maps": {}}

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, place: slice) -> NDArray[Any]:
        start, stop, _ = place.indices(len(self))
        shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        parts = []
        while start < stop:
            begin, end = int(self._starts[shard]), int(self._starts[shard + 1])
            if start < end:
                parts.append(self._map(shard)[start - begin : stop - begin])
            start, shard = max(start, end), shard + 1
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, dtype=self.dtype)

    def windows(self, starts: Ids, length: int) -> Ids:
        """Return several windows of the same length.

        Args:
            starts: Where they begin, int64 ``[B]``, each at most ``len(self) - length``.
            length: Tokens of each.

        Returns:
            int64 ``[B, length]``.
        """
        rows = np.empty((len(starts), length), dtype=np.int64)
        for row, start in enumerate(starts.tolist()):
            rows[row] = self[start : start + length]
        return rows

    def _map(self, shard: int) -> NDArray[Any]:
        if shard not in self._maps:
            try:
                self._maps[shard] = np.memmap(self._paths[shard], dtype=self.dtype, mode="r")
            except (OSError, ValueError) as error:
                raise StorageError(f"{self._paths[shard]} cannot be read: {error}") from error
        return self._maps[shard]


def check_tokenizer(expected: str | None, folder: TokenFolder, *, model: str = "the model") -> None:
    """Check that a folder of tokens was prepared with the tokenizer of a model.

    Args:
        expected: Fingerprint of the tokenizer that the model was trained with; None if it is not known.
        folder: Tokens for the model.
        model: Name of the model in the message.

    Raises:
        ConfigError: It was prepared with another one.
    """
    if expected is not None and expected != folder.tokenizer_fingerprint:
        raise ConfigError(
            f"{model} was trained with another tokenizer ({expected[:12]}) than {folder.path} was prepared with "
            f"({folder.index.tokenizer.name}, {folder.tokenizer_fingerprint[:12]}): its ids mean other things. Prepare "
            "the text with the tokenizer of the model's training data."
        )


def tokenizer_of(data: DataOptions) -> DataTokenizer:
    """Return the tokenizer that the data of a configuration is made with.

    Args:
        data: The ``data`` part of a configuration.

    Raises:
        ConfigError: The data is no text, or its folder is not there any more.
        StorageError: The folder is damaged.
    """
    spec = find_data(data.name)
    if spec.tokenizer is None:
        raise ConfigError(f"data set {data.name!r} has no tokenizer; it is no text.")
    make = load(spec.tokenizer) if isinstance(spec.tokenizer, str) else spec.tokenizer
    tokenizer: DataTokenizer = make(data.path) if spec.takes_path else make()
    return tokenizer


def read_folder_tokenizer(path: str) -> DataTokenizer:
    """Return the tokenizer with which a folder of tokens was made."""
    return open_tokens(path).tokenizer()


def lambada_pairs(passages: TokenSplit) -> list[tuple[list[int], list[int]]]:
    """Return the documents of a split, each cut before the space in front of its last word, as ids.

    Raises:
        ConfigError: A document has fewer than two words.
    """
    tokenizer = passages.folder.tokenizer()
    pairs = []
    for number in range(passages.record.documents):
        text = tokenizer.decode(passages.document(number).tolist()).rstrip()
        context, _, word = text.rpartition(" ")
        if not context.strip() or not word:
            raise ConfigError(
                f"document {number} of {passages.folder.path} is no passage with a last word: {text[:60]!r}."
            )
        whole, before = tokenizer.encode(text), tokenizer.encode(context)
        # A tokenizer with tokens across words may encode the whole differently; then the parts count.
        rest = whole[len(before) :] if whole[: len(before)] == before else tokenizer.encode(f" {word}")
        pairs.append((before, rest))
    return pairs
