"""Tokenizers for data: bytes, characters, or any tokenizer of the Hugging Face library. Loads no torch.

Text is encoded as it stands: a document that contains the words ``<|endoftext|>`` gets the ids of these letters, never
the special id. All tokenizers can decode piece by piece, so that generation can use the tokenizer of its training data.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tost._io import read_json, write_atomic, write_json
from tost._tokenizer import ByteTokenizer, TokenDecoder
from tost.data._tables import unreachable
from tost.errors import ConfigError

Ids = NDArray[Any]

TOKENIZER_FILE = "tokenizer.json"
"""File of the Hugging Face library."""

RECORD_FILE = "tokenizer_record.json"
"""File that describes the tokenizer of a run or model folder; `TOKENIZER_FILE` is beside it if there is one."""

_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")
# Where GPT-2's rule can be cut without changing a token: between lines that are not blank. A line break then is a token
# of its own, or the end of one, whether or not something follows.
_LINE_CUT = re.compile(r"\n(?= [!-~])|(?<=[!-~])\n(?=[!-~])")
# Tokenizers with the same vocabulary, the same merges and the same ids for this text count as equal.
_MOST_IDS = 1 << 24
_PROBE = (
    "The quick brown fox, aged 1234567, didn't jump over  the lazy dog's\n\n   back\t-- said \u201cShe\u201d: "
    "na\u00efve \u00c5ngstr\u00f6m \u4f60\u597d \U0001f642 x_y = {'a': [1.50, None]}; "
    "<|endoftext|> </s> UPPER lower\r\n "
)


class CharTokenizer:
    """One id per character of a fixed alphabet, in the order of their code points.

    Args:
        characters: The alphabet, sorted, each character once.

    Example:
        >>> CharTokenizer("abc").encode("cab")
        [2, 0, 1]
    """

    name = "chars"
    cuts = "anywhere"

    def __init__(self, characters: str) -> None:
        if not characters or list(characters) != sorted(set(characters)):
            raise ConfigError("an alphabet holds each of its characters once, in the order of their code points.")
        self.characters = characters
        self.vocab_size = len(characters)
        self.fingerprint = hashlib.sha256(b"chars\n" + characters.encode("utf-8", "surrogatepass")).hexdigest()
        self._codes = np.array([ord(character) for character in characters], dtype=np.uint32)

    def encode(self, text: str) -> list[int]:
        """Return the index of each character in the alphabet.

        Raises:
            ConfigError: A character is not in it.
        """
        return list(self._encode(text).tolist())

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return the same for several texts."""
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> Ids:
        codes = np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype="<u4")
        ids = np.searchsorted(self._codes, codes)
        unknown = self._codes[np.minimum(ids, len(self._codes) - 1)] != codes
        if unknown.any():
            character = chr(int(codes[unknown.argmax()]))
            raise ConfigError(
                f"the character {character!r} is not in the alphabet of {self.vocab_size} characters that this "
                "vocabulary was made of; leave it out, or use another tokenizer."
            )
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Return the characters of ids."""
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
    def __init__(self, tokenizer: CharTokenizer) -> None:
        self.feed = tokenizer.decode

    def finish(self) -> str:
        return ""


class HFTokenizer:
    """A tokenizer of the Hugging Face library, such as GPT-2's byte-pair encoding.

    Args:
        tokenizer: ``tokenizers.Tokenizer``. It is changed: nothing is cut, padded or added, and special tokens are not
            recognized in text.
        name: Name to show to users.
    """

    def __init__(self, tokenizer: Any, name: str) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        self.name = name
        self._tokenizer = tokenizer
        self._vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
        if not self._vocabulary:
            raise ConfigError(f"tokenizer {name} has an empty vocabulary.")
        if self.vocab_size > _MOST_IDS:  # the library takes memory for all ids up to the highest, and ends the process
            raise ConfigError(
                f"tokenizer {name} has the id {self.vocab_size - 1}; at most {_MOST_IDS - 1} is possible. "
                "The file is damaged; get it again."
            )
        self._content = json.loads(tokenizer.to_str())

    @property
    def vocab_size(self) -> int:
        """The highest id plus one."""
        return max(self._vocabulary.values()) + 1

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the vocabulary, the merges, and the ids of a text that shows the other rules."""
        merges = self._content["model"].get("merges") or []
        pairs = [pair.split(" ", 1) if isinstance(pair, str) else list(pair) for pair in merges]
        ordered = sorted(self._vocabulary.items(), key=lambda entry: (entry[1], entry[0]))
        content = json.dumps([ordered, pairs, self.encode(_PROBE)], ensure_ascii=True)
        return hashlib.sha256(content.encode()).hexdigest()

    @property
    def cuts(self) -> str:
        """``lines`` for GPT-2's rule, ``nowhere`` for all others."""
        rule = self._content["pre_tokenizer"] or {}
        plain = rule.get("type") == "ByteLevel" and rule.get("use_regex", True) and not rule["add_prefix_space"]
        return "lines" if plain and self._content["normalizer"] is None else "nowhere"

    def id_of(self, token: str) -> int | None:
        """Return the id of a token of the vocabulary, None if there is no such token."""
        return self._vocabulary.get(token)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of several texts."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids; those that pad the vocabulary have none."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def decoder(self) -> TokenDecoder:
        """Return a decoder at the start of a text."""
        return _HFDecoder(self._tokenizer)

    def record(self) -> dict[str, Any]:
        """Return its name and the name of its file."""
        return {"kind": "tokenizers", "name": self.name, "file": TOKENIZER_FILE}

    def save(self, folder: Path) -> None:
        """Write ``tokenizer.json``."""
        write_atomic(folder / TOKENIZER_FILE, self._tokenizer.to_str())


class _HFDecoder:
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


DataTokenizer = ByteTokenizer | CharTokenizer | HFTokenizer
"""Tokenizers for data and for generation.

All have `encode_batch`, a `fingerprint` that two tokenizers share only if they give the same ids, and `cuts`: where a
text can be cut without changing its ids, ``anywhere``, ``lines`` or ``nowhere``.
"""


def load_tokenizer(which: str) -> DataTokenizer:
    """Return the tokenizer that an option names.

    Args:
        which: ``bytes``, ``gpt2`` or ``hub:NAME`` for one of the Hugging Face hub, a ``tokenizer.json``, or a folder
            with one or with ``vocab.json`` and ``merges.txt``.

    Raises:
        ConfigError: There is no such tokenizer, or it cannot be read.
    """
    if which == "bytes":
        return ByteTokenizer()
    path = Path(which)
    if which.startswith("hub:") or (which == "gpt2" and not path.exists()):
        return _from_hub(which.removeprefix("hub:"))
    if path.is_file():
        return _from_file(path, path.parent.name if path.name == TOKENIZER_FILE else path.stem)
    if (path / TOKENIZER_FILE).is_file():
        return _from_file(path / TOKENIZER_FILE, path.resolve().name)
    if (path / "vocab.json").is_file() and (path / "merges.txt").is_file():
        return _from_vocabulary(path)
    raise ConfigError(
        f"there is no tokenizer {which!r}; give bytes, chars, gpt2, hub:NAME, a tokenizer.json, or a folder with one "
        "or with vocab.json and merges.txt."
    )


@contextmanager
def _loading(problem: str) -> Iterator[None]:
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises bare exceptions, and panics
        raise ConfigError(f"{problem}: {error}") from error


def _from_hub(name: str) -> HFTokenizer:
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    repository = "openai-community/gpt2" if name == "gpt2" else name
    with _loading(
        f"tokenizer {repository!r} cannot be loaded from the hub; give the path of its tokenizer.json, or of a folder "
        "with vocab.json and merges.txt, or tokenizer=bytes, which needs no files"
    ):
        path = try_to_load_from_cache(repository, TOKENIZER_FILE)
        if not isinstance(path, str):
            if reason := unreachable():  # the library would retry for half a minute
                raise ConfigError(f"it is not on this machine, and {reason}.")
            path = hf_hub_download(repository, TOKENIZER_FILE)
    return _from_file(Path(path), name)


def _from_file(path: Path, name: str) -> HFTokenizer:
    from tokenizers import Tokenizer

    with _loading(f"{path} cannot be read as a tokenizer"):
        return HFTokenizer(Tokenizer.from_str(path.read_text(encoding="utf-8")), name)


def _from_vocabulary(folder: Path) -> HFTokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    with _loading(f"vocab.json and merges.txt in {folder} cannot be read"):
        tokenizer = Tokenizer(models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        return HFTokenizer(tokenizer, folder.resolve().name)


def tokenizer_from_record(record: Mapping[str, Any], folder: Path) -> DataTokenizer:
    """Return the tokenizer that a folder was prepared with.

    Args:
        record: Result of `DataTokenizer.record`.
        folder: Folder that `DataTokenizer.save` wrote to.

    Raises:
        ConfigError: It cannot be read.
    """
    if record["kind"] == "bytes":
        return ByteTokenizer()
    if record["kind"] == "chars":
        return CharTokenizer(record["characters"])
    return _from_file(folder / TOKENIZER_FILE, record["name"])


def save_tokenizer(tokenizer: DataTokenizer, folder: Path) -> None:
    """Write a tokenizer to an existing folder, such as that of a run, so that it is found without the data."""
    tokenizer.save(folder)
    record = {**tokenizer.record(), "fingerprint": tokenizer.fingerprint, "vocab_size": tokenizer.vocab_size}
    write_json(folder / RECORD_FILE, record)


def read_tokenizer(folder: Path) -> DataTokenizer | None:
    """Return the tokenizer that `save_tokenizer` wrote to a folder, None if there is none.

    Raises:
        ConfigError: It is damaged, or another one than it was.
    """
    path = folder / RECORD_FILE
    if not path.is_file():
        return None
    record = read_json(path, error=ConfigError)
    try:
        tokenizer, expected = tokenizer_from_record(record, folder), record["fingerprint"]
    except (LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} cannot be read as a tokenizer: {error}") from error
    if tokenizer.fingerprint != expected:
        raise ConfigError(
            f"the tokenizer in {folder} is not the one that was written there; get {TOKENIZER_FILE} again."
        )
    return tokenizer


def end_of_text_id(tokenizer: DataTokenizer, wanted: str, *, separate: bool = False) -> int | None:
    """Return the id that follows every document, None for none.

    Args:
        tokenizer: Tokenizer to look it up in.
        wanted: ``auto`` for the tokenizer's own, ``none``, or a token; of bytes and characters a single one.
        separate: Whether ``auto`` means a line feed for bytes and characters, which have no token of their own.

    Raises:
        ConfigError: The tokenizer has no such token.
    """
    if wanted == "none":
        return None
    if isinstance(tokenizer, HFTokenizer):
        for token in _END_TOKENS if wanted == "auto" else (wanted,):
            if (number := tokenizer.id_of(token)) is not None:
                return number
        missing = f"none of {', '.join(_END_TOKENS)}" if wanted == "auto" else f"no token {wanted!r}"
        raise ConfigError(f"tokenizer {tokenizer.name} has {missing}; set end_of_text to a token of it, or to none.")
    if wanted == "auto" and not separate:
        return None
    wanted = "\n" if wanted == "auto" else wanted
    ids = tokenizer.encode(wanted)
    if len(ids) != 1:
        raise ConfigError(f"end_of_text={wanted!r} has {len(ids)} ids in {tokenizer.name}; it must be one, or none.")
    return ids[0]


def cut_text(blocks: Iterable[str], tokenizer: DataTokenizer, size: int) -> Iterator[str]:
    """Cut a text into pieces whose ids, one after another, are the ids of the text.

    Args:
        blocks: The text, in pieces of any size.
        tokenizer: Its `cuts` decide where the text may be cut.
        size: Characters of a piece, about. A text that cannot be cut stays in one piece.
    """
    rest = ""
    for block in blocks:
        rest += block
        while len(rest) > size and tokenizer.cuts != "nowhere":
            end = size if tokenizer.cuts == "anywhere" else 0
            # The pattern does not match at the end of the text, because what follows is not known yet.
            for match in _LINE_CUT.finditer(rest) if end == 0 else ():
                if match.end() > size and end:
                    break
                end = match.end()
            if end == 0:
                break
            yield rest[:end]
            rest = rest[end:]
    if rest:
        yield rest
