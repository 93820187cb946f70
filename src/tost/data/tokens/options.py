"""Options of the data set ``tokens``, and ``index.json`` of its folders. Loads no torch and no numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tost._io import read_json
from tost._options import option
from tost.data.spec import DataSetOptions, DataShape, DataSpec
from tost.errors import ConfigError, StorageError

INDEX = "index.json"
MAX_INDEX_BYTES = 1 << 30  # it lists every source file, and there may be millions
_REMEDY = "update tost, or prepare the data again"

# Names only, no paths: an index must not be able to point out of its folder.
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")]
Count = Annotated[int, Field(ge=0)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class FileRecord(_Record):
    """A file of the folder, with its size in bytes and its SHA-256."""

    file: FileName
    size: Count
    sha256: str


class ShardRecord(_Record):
    """A part of a split: its tokens one after another, and the lengths of its documents (uint64, little-endian)."""

    tokens: Count
    documents: Count
    data: FileRecord
    lengths: FileRecord


class SplitRecord(_Record):
    """One split.

    Attributes:
        tokens: Number of tokens, those that end documents included.
        documents: Number of documents.
        bytes: UTF-8 bytes of the text that was encoded.
        source_bytes: The same before it was edited.
        source_words: Words, separated by white space, before it was edited.
        shards: Its files, in order.
    """

    tokens: Count
    documents: Count
    bytes: Count
    source_bytes: Count
    source_words: Count
    shards: list[ShardRecord]
    # Written by earlier versions, empty but for questions of the Children's Book Test.
    answers: Annotated[list[int], Field(max_length=0, exclude=True)] = []
    choices: Annotated[Literal[0], Field(exclude=True)] = 0

    @property
    def files(self) -> list[FileRecord]:
        """Records of all files."""
        return [file for shard in self.shards for file in (shard.data, shard.lengths)]

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        for total, parts in ((self.tokens, "tokens"), (self.documents, "documents")):
            if total != (count := sum(getattr(shard, parts) for shard in self.shards)):
                raise ValueError(f"{total} {parts} are stated, but its shards have {count}")
        return self


class TokenizerRecord(_Record):
    """The tokenizer of a folder, and its fingerprint, which a model has too."""

    kind: Literal["bytes", "chars", "tokenizers"]
    name: str
    vocab_size: Annotated[int, Field(ge=1)]
    fingerprint: str
    end_of_text: int | None
    characters: str | None = None
    file: FileRecord | None = None


class Index(_Record):
    """Content of ``index.json``."""

    format: Literal["tost-tokens"]
    version: Literal[1]
    name: str
    fingerprint: str
    dtype: Literal["uint8", "uint16", "uint32"]
    tokenizer: TokenizerRecord
    splits: dict[FileName, SplitRecord]
    source: list[dict[str, Any]]
    settings: dict[str, Any]

    @model_validator(mode="after")
    def _fits_its_files(self) -> Self:
        width = {"uint8": 1, "uint16": 2, "uint32": 4}[self.dtype]
        for shard in (shard for split in self.splits.values() for shard in split.shards):
            if (shard.tokens * width, shard.documents * 8) != (shard.data.size, shard.lengths.size):
                raise ValueError(f"{shard.data.file} does not have the size of its {shard.tokens} tokens")
        return self


def read_index(folder: Path) -> Index:
    """Return the index of a folder.

    Raises:
        ConfigError: There is no such folder, or its preparation was interrupted.
        StorageError: The index is damaged, or of another version.
    """
    path = folder / INDEX
    if not path.is_file():
        problem = f"holds no prepared tokens (no {INDEX}); make them with `tost data prepare NAME --out DIR`"
        if not folder.exists():
            problem = f"does not exist; make it with `tost data prepare NAME --out {folder}`"
        elif (folder / "prepare.json").is_file():
            problem = "is incomplete; run the same `tost data prepare` command again"
        raise ConfigError(f"{folder} {problem}.")
    content = read_json(path, error=StorageError, max_bytes=MAX_INDEX_BYTES, hint=f"{_REMEDY}.")
    try:
        return Index.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise StorageError(
            f"{path} is damaged or was written by another version ({place}: {first['msg']}); {_REMEDY}."
        ) from error


class TokensOptions(DataSetOptions):
    """Options of ``tokens``."""

    length: int = option(1024, "tokens that the model reads at once; the targets are one later", ge=1)
    mode: Literal["windows", "pass"] = option(
        "windows",
        "windows: at random places, with replacement, as in nanoGPT; pass: side by side, every token once "
        "per epoch, in a shuffled order",
    )
    windows: int | None = option(
        None, "training samples per epoch in mode windows; null takes as many as fit side by side", ge=1
    )
    separate_documents: bool = option(
        False,
        "read each document alone: a window holds pieces of several, packed side by side, which do not see "
        "each other, and no token is predicted from another document",
    )
    vocab_size: int | None = option(
        None,
        "number of ids of the model; null takes the number of the prepared folder, more pads it (50304 for "
        "GPT-2's 50257)",
        ge=1,
    )
    train_split: str = option("train", "split of the folder that is trained on")
    validation_split: str = option("validation", "split of the folder that is evaluated")

    def shape(self, path: str | None = None) -> DataShape:
        """Ids, read `length` at a time, as many different ones as the folder's tokenizer has.

        Args:
            path: The prepared folder; it is not looked at if `vocab_size` is set.

        Raises:
            ConfigError: There is no such folder, or it holds something else; or neither it nor `vocab_size` is set.
            StorageError: Its index is damaged.
        """
        size = self.vocab_size
        if size is None:
            if path is None:
                raise ConfigError("the number of ids follows from the prepared folder; set data.path, or vocab_size.")
            size = read_index(Path(path)).tokenizer.vocab_size
        return DataShape(task="language_modeling", input="tokens", length=self.length, vocab_size=size)


SPECS = (
    DataSpec(
        name="tokens",
        task="language_modeling",
        description="any text, as the folder of tokens that `tost data prepare` makes",
        options=TokensOptions,
        build="tost.data.tokens.dataset:build_tokens",
        takes_path=True,
        tokenizer="tost.data.tokens.reader:read_folder_tokenizer",
    ),
)
"""The data sets of this folder."""
