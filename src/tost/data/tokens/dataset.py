"""Windows of a prepared folder as a data set."""

from __future__ import annotations

import hashlib
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tost.data._random import mix, mix_array
from tost.data.dataset import IGNORED, Batch, DataBundle, Dataset, hash_files
from tost.data.spec import DataInfo
from tost.data.tokens.options import TokensOptions
from tost.data.tokens.reader import open_tokens
from tost.errors import ConfigError


class TokenSource(Protocol):
    """A sequence of tokens from which windows are read, such as `TokenArray`."""

    def __len__(self) -> int: ...

    def windows(self, starts: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        """Return the `length` tokens from each start on, int64 ``[B, length]``."""


class TokenWindows(Dataset):
    """Windows of a sequence of tokens.

    Sample i: inputs, the `length` tokens from a start on; targets, the tokens that follow each of them. Both int64
    ``[length]``. Windows at random places are drawn anew in every epoch: the draw number and the seed decide where
    each of them starts, so that the same ones come after a resume and with any number of processes.

    Args:
        tokens: The tokens, more than `length` of them.
        length: Tokens per window.
        count: Number of windows at random places per epoch; None for as many as fit side by side.
        seed: Decides where windows start; None puts them side by side.
        documents: Where documents begin, and the end, int64 ``[documents + 1]``, to keep them apart: samples then have
            segment_ids, int64 ``[length]``, and the targets of last tokens are `IGNORED`. None joins them.
    """

    def __init__(
        self,
        tokens: TokenSource,
        length: int,
        *,
        count: int | None = None,
        seed: int | None = None,
        documents: NDArray[np.int64] | None = None,
    ) -> None:
        side_by_side = (len(tokens) - 1) // length  # the last token is only a target
        self.tokens, self.length, self.seed, self.documents = tokens, length, seed, documents
        self.draws = seed is not None
        self.count = side_by_side if count is None or seed is None else count

    def __len__(self) -> int:
        """Return the number of windows per epoch."""
        return self.count

    def starts(self, indices: Tensor) -> Tensor:
        """Return where windows start, int64 of the shape of `indices`."""
        if self.seed is None:
            return indices * self.length
        drawn = mix_array(mix(self.seed), indices.numpy().astype(np.uint64))
        return torch.from_numpy((drawn % np.uint64(len(self.tokens) - self.length)).astype(np.int64))

    def gather(self, indices: Tensor) -> Batch:
        """Return windows as a batch."""
        starts = self.starts(indices).numpy()
        window = torch.from_numpy(self.tokens.windows(starts, self.length + 1))
        batch = {"inputs": window[:, :-1].contiguous(), "targets": window[:, 1:].contiguous()}
        if self.documents is None:
            return batch
        places = starts[:, None] + np.arange(self.length + 1)
        segments = torch.from_numpy(np.searchsorted(self.documents[1:], places, side="right"))
        targets = batch["targets"].where(segments[:, 1:] == segments[:, :-1], IGNORED)
        return {**batch, "targets": targets, "segment_ids": segments[:, :-1].contiguous()}


def build_tokens(options: TokensOptions, path: str, seed: int) -> DataBundle:
    """Return windows for training, and windows side by side for validation.

    Args:
        options: Length, number and kind of the windows.
        path: The prepared folder.
        seed: Decides where windows at random places start.

    Raises:
        ConfigError: There is no such folder, a split is missing or shorter than a window, or `vocab_size` is too small.
        StorageError: A file of the folder is damaged.
    """
    folder = open_tokens(path)
    shape = options.shape(path)
    if shape.vocab_size is not None and shape.vocab_size < folder.vocab_size:
        raise ConfigError(
            f"data.options.vocab_size={shape.vocab_size}, but {path} has {folder.vocab_size} different ids; make it at "
            "least that, or null."
        )
    splits = [folder.split(name) for name in (options.train_split, options.validation_split)]
    for split in splits:
        if split.num_tokens <= options.length:
            raise ConfigError(
                f"split {split.name!r} of {path} has {split.num_tokens} tokens, too few for data.options.length="
                f"{options.length}; it can be at most {split.num_tokens - 1}."
            )
    train, validation = (split.tokens for split in splits)
    documents = [split.documents if options.separate_documents else None for split in splits]
    tokenizer = {"tokenizer": folder.index.tokenizer.name, "tokenizer_fingerprint": folder.tokenizer_fingerprint}
    counts = {"train_tokens": len(train), "validation_tokens": len(validation)}
    files = [folder.path / shard.data.file for split in splits for shard in split.record.shards]
    content = hashlib.sha256(f"{folder.fingerprint}\n{hash_files(files)}".encode()).hexdigest()
    info = DataInfo(fingerprint=content, details={"corpus": folder.name, **tokenizer, **counts})
    drawn = seed if options.mode == "windows" else None
    return DataBundle(
        train=TokenWindows(train, options.length, count=options.windows, seed=drawn, documents=documents[0]),
        validation=TokenWindows(validation, options.length, documents=documents[1]),
        info=info,
    )
