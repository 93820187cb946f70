"""Tokenizer protocols, and the byte tokenizer, which needs no files. Loads no torch."""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol


class TokenDecoder(Protocol):
    """Turns tokens into text as they come."""

    def feed(self, ids: Iterable[int]) -> str:
        """Return the text that is certain after these tokens; an incomplete character is held back."""

    def finish(self) -> str:
        """Return what was held back, with a replacement character for what never became complete."""


class Tokenizer(Protocol):
    """Tokenizer for generation."""

    @property
    def name(self) -> str:
        """Name to show to users."""

    @property
    def vocab_size(self) -> int:
        """Number of ids."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids."""

    def decoder(self) -> TokenDecoder:
        """Return a decoder at the start of a text."""


class ByteTokenizer:
    """One id per byte of UTF-8, 0 to 255.

    Bytes that are not UTF-8 pass through `encode` if they come as surrogates, which is how Python reads them from the
    command line and from files opened with ``errors="surrogateescape"``.

    Example:
        >>> from tost.generation import ByteTokenizer
        >>> ByteTokenizer().encode("a\u00e9")
        [97, 195, 169]
        >>> ByteTokenizer().decode([97, 195, 169])
        'a\u00e9'
    """

    name = "bytes"
    vocab_size = 256
    cuts = "anywhere"
    fingerprint = hashlib.sha256(b"bytes").hexdigest()

    def encode(self, text: str) -> list[int]:
        """Return the bytes of a text."""
        return list(text.encode("utf-8", errors="surrogateescape"))

    def encode_batch(self, texts: Sequence[str]) -> list[Any]:
        """Return the bytes of several texts, each a numpy array uint8 ``[n]``."""
        import numpy as np  # generation needs no arrays

        return [np.frombuffer(text.encode("utf-8", errors="surrogateescape"), dtype=np.uint8) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Return bytes as text, with replacement characters for what is not UTF-8."""
        return bytes(ids).decode("utf-8", errors="replace")

    def decoder(self) -> TokenDecoder:
        """Return a decoder at the start of a text."""
        return _ByteDecoder()

    def record(self) -> dict[str, Any]:
        """Return its kind, which is all there is to save."""
        return {"kind": "bytes"}

    def save(self, folder: Path) -> None:
        """Write nothing."""


class _ByteDecoder:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, ids: Iterable[int]) -> str:
        return self._decoder.decode(bytes(ids))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)
