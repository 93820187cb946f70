"""Text as it is generated, up to a stop text. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tost._tokenizer import TokenDecoder
from tost.errors import ConfigError


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
        >>> from tost.generation import ByteTokenizer, TextStream
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
        """Return the text that is certain after these tokens; empty once it has stopped."""
        return self._advance(self._decoder.feed(ids), last=False)

    def finish(self) -> str:
        """Return the rest of the text, at its end."""
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
