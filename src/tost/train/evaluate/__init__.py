"""Evaluation: metrics on a validation set, and protocols for texts. This module loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tost.errors import ConfigError

__all__ = ["Protocol", "TextTest"]


class Protocol(StrEnum):
    """How a language model is measured."""

    blocks = "blocks"
    sliding = "sliding"
    authors = "authors"
    stream = "stream"
    last_word = "last-word"
    last_word_authors = "last-word-authors"


_TAKES = {
    "length": (Protocol.blocks, Protocol.sliding, Protocol.authors),
    "stride": (Protocol.sliding,),
    "windows": (Protocol.authors,),
}


@dataclass(frozen=True, kw_only=True)
class TextTest:
    """What is measured.

    Attributes:
        protocol: How.
        length: Tokens of a window; None for the length that the configuration trains with.
        stride: Tokens between sliding windows; None for half a window.
        windows: Windows that the authors' protocol draws; None for 16,000 as there, 1,000 batches of 16, or as many
            as the text has room for side by side, if these are fewer.

    Raises:
        ConfigError: An option is given that the protocol does not have.
    """

    protocol: Protocol
    length: int | None = None
    stride: int | None = None
    windows: int | None = None

    def __post_init__(self) -> None:
        """Refuse what would have no effect."""
        for name, protocols in _TAKES.items():
            value = getattr(self, name)
            if value is not None and self.protocol not in protocols:
                raise ConfigError(
                    f"{name}={value} has no effect on the protocol {self.protocol}; it belongs to "
                    f"{', '.join(protocols)}."
                )
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} cannot be used; it needs at least 1.")
