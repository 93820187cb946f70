"""From text to ids for data: bytes, characters, or any tokenizer of the Hugging Face library. Loads no torch.

Text is encoded as it stands: a document that contains the words ``<|endoftext|>`` gets the ids of these letters, never
the special id. All of them can decode piece by piece, so that generation can use the tokenizer of its training data.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tost._tokenizer import ByteTokenizer, TokenDecoder, Tokenizer
from tost.errors import ConfigError

__all__ = ["TOKENIZER_FILE", "ByteText", "CharText", "DataTokenizer", "HubText"]

Ids = NDArray[Any]

TOKENIZER_FILE = "tokenizer.json"
# Whoever encodes this and has the same vocabulary and the same merges is the same tokenizer, whatever file it is from.
_PROBE = (
    "The quick brown fox, aged 1234567, didn't jump over  the lazy dog's\n\n   back\t-- said \u201cShe\u201d: "
    "na\u00efve \u00c5ngstr\u00f6m \u4f60\u597d \U0001f642 x_y = {'a': [1.50, None]}; "
    "<|endoftext|> </s> UPPER lower\r\n "
)


class DataTokenizer(Tokenizer, Protocol):
    """What data needs to know about a vocabulary, beyond what generation asks for."""

    @property
    def fingerprint(self) -> str:
        """Hexadecimal text that two tokenizers share only if they give the same ids."""

    @property
    def cuts(self) -> str:
        """Where a text can be cut without changing its ids: ``anywhere``, ``lines`` or ``nowhere``."""

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of several texts, each ``[n]``."""

    def record(self) -> dict[str, Any]:
        """Return what `from_record` builds it from, together with the file that `save` writes."""

    def save(self, folder: Path) -> None:
        """Write what does not fit into the record."""


class ByteText(ByteTokenizer):
    """One id per byte of UTF-8, 0 to 255.

    Example:
        >>> ByteText().encode_batch(["a\u00e9"])
        [array([ 97, 195, 169], dtype=uint8)]
    """

    cuts = "anywhere"

    @property
    def fingerprint(self) -> str:
        """SHA-256 of its name."""
        return hashlib.sha256(b"bytes").hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return the bytes of several texts."""
        return [np.frombuffer(text.encode("utf-8", errors="surrogateescape"), dtype=np.uint8) for text in texts]

    def record(self) -> dict[str, Any]:
        """Return its kind; there is nothing else."""
        return {"kind": "bytes"}

    def save(self, folder: Path) -> None:
        """Write nothing."""


class CharText:
    """One id per character of a fixed alphabet, in the order of their code points.

    Args:
        characters: The alphabet, sorted, each character once.

    Example:
        >>> CharText("abc").encode("cab")
        [2, 0, 1]
    """

    name = "chars"
    cuts = "anywhere"

    def __init__(self, characters: str) -> None:
        if not characters or list(characters) != sorted(set(characters)):
            raise ConfigError("an alphabet holds each of its characters once, in the order of their code points.")
        self.characters = characters
        self._codes = np.array([ord(character) for character in characters], dtype=np.uint32)

    @property
    def vocab_size(self) -> int:
        """Number of characters."""
        return len(self.characters)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the alphabet."""
        return hashlib.sha256(b"chars\n" + self.characters.encode("utf-8", errors="surrogatepass")).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Return the places of characters in the alphabet."""
        ids: list[int] = self.encode_batch([text])[0].tolist()
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return the places of characters in the alphabet, for several texts.

        Raises:
            ConfigError: A character is not in it.
        """
        return [self._places(text) for text in texts]

    def _places(self, text: str) -> Ids:
        codes = np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype="<u4")
        places = np.searchsorted(self._codes, codes)
        strange = self._codes[np.minimum(places, len(self._codes) - 1)] != codes
        if strange.any():
            character = chr(int(codes[strange.argmax()]))
            raise ConfigError(
                f"the character {character!r} is not in the alphabet of {self.vocab_size} characters that this "
                "vocabulary was made of; leave it out, or use another tokenizer."
            )
        return places

    def decode(self, ids: Iterable[int]) -> str:
        """Return the characters at places of the alphabet."""
        return "".join(self.characters[index] for index in ids)

    def decoder(self) -> TokenDecoder:
        """Return a decoder at the start of a text."""
        return _CharDecoder(self)

    def record(self) -> dict[str, Any]:
        """Return the alphabet."""
        return {"kind": "chars", "characters": self.characters}

    def save(self, folder: Path) -> None:
        """Write nothing: the record holds the alphabet."""


class _CharDecoder:
    def __init__(self, tokenizer: CharText) -> None:
        self.feed = tokenizer.decode

    def finish(self) -> str:
        return ""


class HubText:
    """A tokenizer of the Hugging Face library, such as GPT-2's byte-pair encoding.

    Args:
        tokenizer: ``tokenizers.Tokenizer``. It is changed: nothing is cut, padded or added, and special tokens are not
            recognised in text.
        name: What users call it.
    """

    def __init__(self, tokenizer: Any, name: str) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        self.name = name
        self._tokenizer = tokenizer
        self._content = json.loads(tokenizer.to_str())
        self._vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)

    @property
    def vocab_size(self) -> int:
        """The highest id and one."""
        return max(self._vocabulary.values()) + 1

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the vocabulary, the merges, and the ids of a text that shows the rest."""
        merges = self._content["model"].get("merges") or []
        pairs = [pair.split(" ", 1) if isinstance(pair, str) else list(pair) for pair in merges]
        ordered = sorted(self._vocabulary.items(), key=lambda entry: (entry[1], entry[0]))
        known = json.dumps([ordered, pairs, self.encode(_PROBE)], ensure_ascii=True)
        return hashlib.sha256(known.encode()).hexdigest()

    @property
    def cuts(self) -> str:
        """GPT-2's rule can be cut between lines; of others nothing is known."""
        before = self._content["pre_tokenizer"] or {}
        plain = before.get("type") == "ByteLevel" and before.get("use_regex", True) and not before["add_prefix_space"]
        return "lines" if plain and self._content["normalizer"] is None else "nowhere"

    def id_of(self, token: str) -> int | None:
        """Return the id of a token of the vocabulary, None if it has no such token."""
        return self._vocabulary.get(token)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of several texts."""
        found = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int64) for encoding in found]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids; those that pad the vocabulary have none."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def decoder(self) -> TokenDecoder:
        """Return a decoder at the start of a text."""
        return _HubDecoder(self._tokenizer)

    def record(self) -> dict[str, Any]:
        """Return its kind and the name of its file."""
        return {"kind": "tokenizers", "name": self.name, "file": TOKENIZER_FILE}

    def save(self, folder: Path) -> None:
        """Write ``tokenizer.json``."""
        temporary = folder / f"{TOKENIZER_FILE}.tmp"
        temporary.write_text(self._tokenizer.to_str(), encoding="utf-8")
        temporary.replace(folder / TOKENIZER_FILE)


class _HubDecoder:
    def __init__(self, tokenizer: Any) -> None:
        from tokenizers.decoders import DecodeStream

        self._tokenizer, self._stream = tokenizer, DecodeStream(skip_special_tokens=False)
        self._held: list[int] = []

    def feed(self, ids: Iterable[int]) -> str:
        pieces = []
        for token in ids:
            self._held.append(token)
            piece = self._stream.step(self._tokenizer, token)
            if piece is not None:
                pieces.append(piece)
                self._held.clear()
        return "".join(pieces)

    def finish(self) -> str:
        text: str = self._tokenizer.decode(self._held, skip_special_tokens=False) if self._held else ""
        self._held.clear()
        return text
