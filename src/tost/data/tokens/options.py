"""Options of the data set ``tokens``. No torch here."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from tost.data.spec import DataSetOptions, DataShape, DataSpec
from tost.data.tokens.format import read_index
from tost.errors import ConfigError


class TokensOptions(DataSetOptions):
    """Options of ``tokens``."""

    length: int = Field(
        default=1024, ge=1, description="tokens that the model reads at once; the targets are one later"
    )
    mode: Literal["windows", "pass"] = Field(
        default="windows",
        description="windows: at random places, with replacement, as in nanoGPT; pass: side by side, every token once "
        "per epoch, in a shuffled order",
    )
    windows: int | None = Field(
        default=None,
        ge=1,
        description="training samples per epoch in mode windows; null takes as many as fit side by side",
    )
    separate_documents: bool = Field(
        default=False,
        description="read each document alone: a window holds pieces of several, packed side by side, which do not see "
        "each other, and no token is predicted from another document",
    )
    vocab_size: int | None = Field(
        default=None,
        ge=1,
        description="number of ids that the model gets; null takes that of the prepared folder, more pads it (50304 "
        "for GPT-2's 50257)",
    )
    train_split: str = Field(default="train", description="split of the folder that is trained on")
    validation_split: str = Field(default="validation", description="split of the folder that is evaluated")

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
