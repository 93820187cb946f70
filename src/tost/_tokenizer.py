"""What a vocabulary is to data and to generation, and the one that needs no file: bytes. Loads no torch."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Protocol

__all__ = ["ByteTokenizer", "TokenDecoder", "Tokenizer"]


class TokenDecoder(Protocol):
    """Turns tokens into text as they come."""

    def feed(self, ids: Iterable[int]) -> str:
        """Return the text that is certain after these tokens; a character that is not complete is held back."""

    def finish(self) -> str:
        """Return what was held back, with a replacement character for what never became complete."""


class Tokenizer(Protocol):
    """What generation needs to know about a vocabulary."""

    @property
    def name(self) -> str:
        """What users call it."""

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

    def encode(self, text: str) -> list[int]:
        """Return the bytes of a text."""
        return list(text.encode("utf-8", errors="surrogateescape"))

    def decode(self, ids: Iterable[int]) -> str:
        """Return bytes as text, with replacement characters for what is not UTF-8."""
        return bytes(ids).decode("utf-8", errors="replace")

    def decoder(self) -> TokenDecoder:
        """Return a decoder at the start of a text."""
        return _ByteDecoder()


class _ByteDecoder:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, ids: Iterable[int]) -> str:
        return self._decoder.decode(bytes(ids))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)
