"""Finding a tokenizer by what an option or a prepared folder says, and what follows from it for data. No torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tost.data.text.tokenizers import TOKENIZER_FILE, ByteText, CharText, DataTokenizer, HubText
from tost.errors import ConfigError

__all__ = [
    "RECORD",
    "cut_text",
    "find_end_of_text",
    "from_record",
    "load_tokenizer",
    "read_tokenizer",
    "save_tokenizer",
    "token_dtype",
]

RECORD = "tokenizer_record.json"
"""File that says which tokenizer a folder has; next to it lies what does not fit into it."""

_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")
# Where GPT-2's rule can be cut without changing a token: between lines that are not blank. A line break then is a token
# of its own, or the end of one, whether or not something follows.
_LINE_CUT = re.compile(r"\n(?= [!-~])|(?<=[!-~])\n(?=[!-~])")


def load_tokenizer(which: str) -> ByteText | HubText:
    """Return a tokenizer by what an option says.

    Args:
        which: ``bytes``, ``gpt2`` or ``hub:NAME`` for one of the Hugging Face hub, a ``tokenizer.json``, or a folder
            with one or with ``vocab.json`` and ``merges.txt``.

    Raises:
        ConfigError: There is no such thing, or it cannot be read.
    """
    if which == "bytes":
        return ByteText()
    path = Path(which)
    if which == "gpt2" and not path.exists():
        return _from_hub("openai-community/gpt2", "gpt2")
    if which.startswith("hub:"):
        return _from_hub(which.removeprefix("hub:"), which.removeprefix("hub:"))
    if path.is_file():
        return _from_file(path, path.parent.name if path.name == TOKENIZER_FILE else path.stem)
    if (path / TOKENIZER_FILE).is_file():
        return _from_file(path / TOKENIZER_FILE, path.resolve().name)
    if (path / "vocab.json").is_file() and (path / "merges.txt").is_file():
        return _from_pairs(path)
    raise ConfigError(
        f"there is no tokenizer {which!r}; give bytes, chars, gpt2, hub:NAME, a tokenizer.json, or a folder with one "
        "or with vocab.json and merges.txt."
    )


def from_record(record: Mapping[str, Any], folder: Path) -> ByteText | CharText | HubText:
    """Return the tokenizer that a folder was prepared with.

    Args:
        record: What `DataTokenizer.record` returned.
        folder: Where `DataTokenizer.save` wrote.

    Raises:
        ConfigError: It cannot be read.
    """
    if record["kind"] == "bytes":
        return ByteText()
    if record["kind"] == "chars":
        return CharText(record["characters"])
    return _from_file(folder / TOKENIZER_FILE, record["name"])


def save_tokenizer(tokenizer: DataTokenizer, folder: Path) -> None:
    """Write a tokenizer to a folder, such as that of a run, so that it is found without the data.

    Args:
        tokenizer: Any of ours.
        folder: Where to; it exists.
    """
    tokenizer.save(folder)
    temporary = folder / f"{RECORD}.tmp"
    known = {**tokenizer.record(), "fingerprint": tokenizer.fingerprint, "vocab_size": tokenizer.vocab_size}
    temporary.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    temporary.replace(folder / RECORD)


def read_tokenizer(folder: Path) -> ByteText | CharText | HubText | None:
    """Return the tokenizer that `save_tokenizer` wrote to a folder, None if there is none.

    Raises:
        ConfigError: It is damaged, or another one than it was.
    """
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        tokenizer = from_record(record, folder)
        expected = record["fingerprint"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{folder / RECORD} cannot be read as a tokenizer: {error}") from error
    if tokenizer.fingerprint != expected:
        raise ConfigError(
            f"the tokenizer in {folder} is not the one that was written there; get {TOKENIZER_FILE} again."
        )
    return tokenizer


def find_end_of_text(tokenizer: DataTokenizer, wanted: str) -> int | None:
    """Return the id that follows every document, None for none.

    Args:
        tokenizer: Whose id.
        wanted: ``auto`` for the tokenizer's own, ``none``, or a token; of bytes and characters a single one.

    Raises:
        ConfigError: The tokenizer has no such token.
    """
    if wanted == "none":
        return None
    if isinstance(tokenizer, HubText):
        for token in _ENDS if wanted == "auto" else (wanted,):
            if (found := tokenizer.id_of(token)) is not None:
                return found
        missing = f"none of {', '.join(_ENDS)}" if wanted == "auto" else f"no token {wanted!r}"
        raise ConfigError(f"tokenizer {tokenizer.name} has {missing}; set end_of_text to a token of it, or to none.")
    if wanted == "auto":
        return None
    ids = tokenizer.encode(wanted)
    if len(ids) != 1:
        raise ConfigError(f"end_of_text={wanted!r} has {len(ids)} ids in {tokenizer.name}; it must be one, or none.")
    return ids[0]


def cut_text(blocks: Iterable[str], tokenizer: DataTokenizer, size: int) -> Iterator[str]:
    """Cut a text into pieces whose ids, one after another, are the ids of the text.

    Args:
        blocks: The text, in pieces of any size.
        tokenizer: Says where cuts are harmless.
        size: Characters that are enough for a piece. A text without a harmless place stays in one piece.
    """
    held = ""
    for block in blocks:
        held += block
        while len(held) > size:
            place = _last_cut(held, tokenizer.cuts, size)
            if place == 0:
                break
            yield held[:place]
            held = held[place:]
    if held:
        yield held


def _last_cut(text: str, cuts: str, size: int) -> int:
    if cuts == "anywhere":
        return size
    # The end of what is there is no place to cut: what follows is not known yet.
    last = 0
    if cuts == "lines":
        for found in _LINE_CUT.finditer(text):
            if found.end() > size and last:
                break
            last = found.end()
    return last


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the smallest type that holds ids below `vocab_size`: uint8, uint16 or uint32, little-endian."""
    return np.dtype("u1" if vocab_size <= 1 << 8 else "<u2" if vocab_size <= 1 << 16 else "<u4")


def _from_hub(name: str, called: str) -> HubText:
    from tokenizers import Tokenizer

    try:
        return HubText(Tokenizer.from_pretrained(name), called)
    except Exception as error:  # the library raises bare exceptions
        raise ConfigError(
            f"tokenizer {name!r} cannot be loaded from the hub: {error}; give the path of its tokenizer.json, or of a "
            "folder with vocab.json and merges.txt."
        ) from error


def _from_file(path: Path, called: str) -> HubText:
    from tokenizers import Tokenizer

    try:
        return HubText(Tokenizer.from_str(path.read_text(encoding="utf-8")), called)
    except Exception as error:  # the library raises bare exceptions
        raise ConfigError(f"{path} cannot be read as a tokenizer: {error}") from error


def _from_pairs(folder: Path) -> HubText:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    try:
        model = models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    except Exception as error:  # the library raises bare exceptions
        raise ConfigError(f"vocab.json and merges.txt in {folder} cannot be read: {error}") from error
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return HubText(tokenizer, folder.resolve().name)
