"""Batches of text for distillation, from files of any format that ``tost data prepare`` reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tost.data.text.files import find_files, plan_file, read_rows
from tost.errors import ConfigError

HELD_OUT = 20
"""One document of so many is not trained on."""


class TextBatches:
    """Padded batches of documents, in an order drawn anew each time around, without end.

    Args:
        source: A file or a folder; of text files each line is a document.
        tokenizer: A tokenizer of transformers.
        column: Where the text is, in files of rows.
        batch_size: Documents in a batch.
        length: Tokens of a document, at most; the others are cut off.
        seed: Of the order.
        shortest: Documents with fewer characters are left out.

    Raises:
        ConfigError: There are too few documents.
    """

    def __init__(
        self,
        source: str,
        tokenizer: Any,
        *,
        column: str = "text",
        batch_size: int = 32,
        length: int = 128,
        seed: int = 0,
        shortest: int = 16,
    ) -> None:
        found = [text for text in _documents(source, column) if len(text) >= shortest]
        self.train = [text for place, text in enumerate(found) if place % HELD_OUT]
        self.held_out = found[::HELD_OUT]
        if len(self.train) < batch_size:
            raise ConfigError(
                f"{source} has {len(self.train)} documents of at least {shortest} characters to train on, but a batch "
                f"takes {batch_size}; give more text, or a smaller batch."
            )
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        self.tokenizer, self.batch_size, self.length = tokenizer, batch_size, length
        self.generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Draw batches to train on."""
        while True:
            order = torch.randperm(len(self.train), generator=self.generator).tolist()
            for start in range(0, len(order) - self.batch_size + 1, self.batch_size):
                yield self._encode([self.train[place] for place in order[start : start + self.batch_size]])

    def held_out_batches(self) -> Iterator[dict[str, Tensor]]:
        """Return the documents that are not trained on, in order, again and again."""
        while True:
            for start in range(0, len(self.held_out), self.batch_size):
                yield self._encode(self.held_out[start : start + self.batch_size])

    def _encode(self, texts: list[str]) -> dict[str, Tensor]:
        made = self.tokenizer(texts, padding=True, truncation=True, max_length=self.length, return_tensors="pt")
        return {key: made[key] for key in ("input_ids", "attention_mask")}


def _documents(source: str, column: str) -> Iterator[str]:
    for path, format in find_files(source):
        for span in plan_file(path, "lines" if format == "text" else format, 1 << 24):
            for row in read_rows(span, [column], {}, "strict"):
                yield str(row[column]).strip()
