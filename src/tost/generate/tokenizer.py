"""From text to token ids and back, piece by piece. Loads no torch."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Protocol

from tost.errors import ConfigError

__all__ = ["ByteTokenizer", "TextStream", "TokenDecoder", "Tokenizer"]


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
        >>> from tost.generate import ByteTokenizer
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


class TextStream:
    """Text as it is generated, up to a stop text.

    What comes out never has to be taken back: characters that are not complete and the beginnings of stop texts are
    held until it is clear what they become.

    Args:
        decoder: Turns tokens into text.
        stops: Texts that end the stream; they are not part of it. If several occur, the one that begins first counts.

    Raises:
        ConfigError: A stop text is empty.

    Example:
        >>> from tost.generate import ByteTokenizer, TextStream
        >>> stream = TextStream(ByteTokenizer().decoder(), stops=["END"])
        >>> stream.feed(b"some text E"), stream.feed(b"ND, more"), stream.stopped
        ('some text ', '', True)
    """

    def __init__(self, decoder: TokenDecoder, stops: Sequence[str] = ()) -> None:
        if "" in stops:
            raise ConfigError("a stop text is empty, so nothing could be generated; leave it out")
        self._decoder, self._stops = decoder, tuple(stops)
        self._held = ""
        self.stopped = False
        """Whether a stop text has come."""

    def feed(self, ids: Iterable[int]) -> str:
        """Return the text that is certain after these tokens; nothing once it has stopped."""
        return self._advance(self._decoder.feed(ids), last=False)

    def finish(self) -> str:
        """Return what was held back, at the end of the text."""
        return self._advance(self._decoder.finish(), last=True)

    def _advance(self, text: str, *, last: bool) -> str:
        if self.stopped:
            return ""
        text = self._held + text
        found = [(place, stop) for stop in self._stops if (place := text.find(stop)) >= 0]
        # Another stop text may be on its way that begins before the one that is complete.
        waiting = 0 if last else self._beginning(text)
        if found and min(found)[0] <= len(text) - waiting:
            self.stopped = True
            self._held = ""
            return text[: min(found)[0]]
        self._held = text[len(text) - waiting :]
        return text[: len(text) - waiting]

    def _beginning(self, text: str) -> int:
        """Return how many of the last characters may be the beginning of a stop text."""
        longest = max(map(len, self._stops), default=1) - 1
        for count in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-count:]) for stop in self._stops):
                return count
        return 0
