"""Corpora that `tost data prepare` reads: one class of options each. Loads no torch and no numpy.

To add a corpus, write its class and list it in `CORPORA`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Annotated, Literal, NamedTuple

from pydantic import BeforeValidator

from tost._options import option
from tost.data.prepare import PrepareOptions
from tost.errors import ConfigError

Documents = Literal["file", "line"]
SplitRule = Literal["auto", "random", "tail", "named"]


def detokenize_wikitext(text: str) -> str:
    r"""Undo WikiText's spaces around punctuation and its marks ``@-@``, ``@,@`` and ``@.@`` inside words and numbers.

    Headings, line ends and ``<unk>`` stay.

    Example:
        >>> detokenize_wikitext(' The " 1 @,@ 000 @-@ ton " ship ( 1912 ) didn \'t sink . \n')
        'The "1,000-ton" ship (1912) didn\'t sink.\n'
    """
    text = re.sub(r" @([-,.])@ ", r"\1", text)
    return _close_up(re.sub(r'" ([^"]*?) "', r'"\1"', text))


def detokenize_ptb(text: str) -> str:
    """Undo the spaces of the Penn Treebank around punctuation and inside contractions; ``<unk>`` and ``N`` stay.

    Example:
        >>> detokenize_ptb("he did n't pay $ N , said <unk> 's lawyer .")
        "he didn't pay $N, said <unk>'s lawyer."
    """
    return _close_up(re.sub(r"([$#]) (?=[N\d])| (n't)\b", r"\1\2", text))


def _close_up(text: str) -> str:
    text = re.sub(r" ('(?:s|re|ve|ll|d|m|t)?)(?= |$)", r"\1", text, flags=re.IGNORECASE)
    text = re.sub(r" ([.,;:!?%)\]}]+)(?= |$|\n|['\"])", r"\1", text)
    text = re.sub(r"([(\[{]) ", r"\1", text)
    return re.sub(r"^ | (?=\n|$)", "", text)


_QUOTES = str.maketrans({"\u201c": '"', "\u201d": '"', "\u2018": "'", "\u2019": "'"})
_TOKENIZER = "bytes, chars, gpt2 (from the hub), a folder with vocab.json and merges.txt, a tokenizer.json, or hub:NAME"
_FROM_COMMAS = BeforeValidator(lambda given: re.findall(r"[^\s,]+", given) if isinstance(given, str) else given)
_Names = Annotated[tuple[str, ...], _FROM_COMMAS]


class HubSet(NamedTuple):
    """A data set of the Hugging Face hub.

    Attributes:
        name: Such as ``"Salesforce/wikitext"``.
        config: Its configuration, if it has several.
        revision: Branch or commit; None for the newest.
    """

    name: str
    config: str | None = None
    revision: str | None = None


@dataclass(frozen=True, kw_only=True)
class TextJob:
    """How a corpus is read and turned into tokens; every class of options is translated to this.

    Attributes:
        name: Name of the corpus.
        source: File or folder; None to take `hub`.
        tokenizer: ``bytes``, ``chars``, ``gpt2``, a path, or ``hub:NAME``.
        end_of_text: ``auto``, ``none``, or the token that ends a document.
        shard_bytes: Bytes of text that make up a shard, about.
        hub: The corpus on the hub; None if it is not there.
        column: Key of jsonl lines, column of parquet files and hub data sets.
        documents: A document of a plain text file: the file or a line.
        joined: All rows of a split make up one document.
        newlines: Lines keep the character that ends them, except for blank lines, which become empty.
        edit: Function that changes each line or row of the text; None for none.
        split: How a validation set is taken from a corpus without splits.
        validation: Its share.
        seed: Decides which documents are drawn for it.
        splits: Splits to take of a corpus with its own; empty for all.
        format: Format of the files; ``auto`` goes by their endings.
    """

    name: str
    source: str | None
    tokenizer: str
    end_of_text: str
    shard_bytes: int
    hub: HubSet | None = None
    column: str = "text"
    documents: Documents = "line"
    joined: bool = False
    newlines: bool = False
    edit: Callable[[str], str] | None = None
    split: SplitRule = "named"
    validation: float = 0.0
    seed: int = 0
    splits: tuple[str, ...] = ()
    format: str = "auto"

    @property
    def errors(self) -> str:
        """How bytes that are not UTF-8 are decoded: only the byte tokenizer takes them."""
        return "surrogateescape" if self.tokenizer == "bytes" else "strict"

    @property
    def title(self) -> str:
        """The source, for messages."""
        return f"the source {self.source}" if self.source else f"the hub data set {self.hub.name if self.hub else ''}"


class CorpusOptions(PrepareOptions):
    """Options of every corpus."""

    run = "tost.data.text.prepare:prepare_text"
    check = "tost.data.tokens.reader:check_tokens"

    source: str | None = option(None, "file or folder with the text; left out: the hub")
    tokenizer: str = option("gpt2", _TOKENIZER)
    format: Literal["auto", "text", "jsonl", "parquet"] = option(
        "auto", "format of the files; auto goes by their endings"
    )
    end_of_text: str = option(
        "auto",
        "token that follows every document: auto takes the tokenizer's own, for bytes and characters a "
        "line feed if there are several documents; none adds none",
    )
    shard_bytes: int = option(64 << 20, "bytes of text that make up a shard, about", ge=1)

    def job(self) -> TextJob:
        """Return how the corpus is read. Options are passed on to the field of their name, if there is one."""
        passed = [known.name for known in fields(TextJob) if known.name in type(self).model_fields]
        return TextJob(name=self.name, **{key: getattr(self, key) for key in passed})


class TextOptions(CorpusOptions):
    """Options of ``text``: any text."""

    name, summary = "text", "any files of text, JSON lines or parquet, or a data set of the hub"

    source: str | None = option(
        None,
        "a file (.txt, .jsonl, also .gz; .parquet), a folder of them or of datasets.save_to_disk, or hub:NAME; folders "
        "and files called train, validation and "
        "test are taken as splits",
    )
    tokenizer: str = option("bytes", _TOKENIZER)
    column: str = option("text", "key of JSON lines, column of tables")
    documents: Documents = option("file", "documents of a plain text file: the file or its lines")
    split: SplitRule = option(
        "auto",
        "random draws validation documents, tail takes the last ones (of a single document the last "
        "characters), named takes the splits of the source; auto: named if there are any, else random, or tail for a "
        "single document",
    )
    validation: float = option(0.01, "share of the validation set if it is cut off", ge=0.0, lt=1.0)
    seed: int = option(0, "decides which documents are drawn for validation", ge=0)
    config: str | None = option(None, "configuration of the hub data set, if it has several")
    revision: str | None = option(None, "branch or commit of the hub data set")

    def job(self) -> TextJob:
        """Return how the corpus is read."""
        if not self.source:
            raise ConfigError("text needs a source; give --source FILE, --source FOLDER or --source hub:NAME.")
        if not self.source.startswith("hub:"):
            return super().job()
        hub = HubSet(self.source.removeprefix("hub:"), self.config, self.revision)
        return replace(super().job(), source=None, hub=hub)


class OpenWebTextOptions(CorpusOptions):
    """Options of ``openwebtext``: by default the split of nanoGPT, which is also the authors'."""

    name, summary = "openwebtext", "8 million web pages, in nanoGPT's split"

    column: str = option("text", "key or column with the text")
    validation: float = option(0.0005, "share of documents for validation", gt=0.0, lt=1.0)
    seed: int = option(2357, "decides which documents are drawn for validation", ge=0)

    def job(self) -> TextJob:
        """Return how the corpus is read."""
        return replace(super().job(), hub=HubSet("Skylion007/openwebtext"), documents="file", split="random")


class _LinesOptions(CorpusOptions):
    """Corpora that come as lines: as the authors take them, or as running text."""

    joined: bool = option(False, "one document per split; false: every line is one, which end_of_text then follows")
    detokenize: bool = option(False, "undo the spaces that the corpus puts around punctuation")
    splits: _Names = option((), "which of the corpus's splits; left out: all")


class _WikiTextOptions(_LinesOptions):
    raw: bool = option(True, "which version to take from the hub; false: the one with <unk> for rare words")

    def job(self) -> TextJob:
        """Return how the corpus is read."""
        size = self.name.removeprefix("wikitext")
        hub = HubSet("Salesforce/wikitext", f"wikitext-{size}-{'raw-' if self.raw else ''}v1")
        return replace(super().job(), hub=hub, newlines=True, edit=detokenize_wikitext if self.detokenize else None)


class WikiText2Options(_WikiTextOptions):
    """Options of ``wikitext2``."""

    name, summary = "wikitext2", "WikiText-2, in its own splits"


class WikiText103Options(_WikiTextOptions):
    """Options of ``wikitext103``."""

    name, summary = "wikitext103", "WikiText-103, in its own splits"


class PtbOptions(_LinesOptions):
    """Options of ``ptb``. ``<unk>`` stays as it is."""

    name, summary = "ptb", "Penn Treebank as language models use it, in its own splits"

    def job(self) -> TextJob:
        """Return how the corpus is read."""
        # The hub's own conversion: the data set itself is a script, which is not run.
        hub = HubSet("ptb-text-only/ptb_text_only", None, "refs/convert/parquet")
        return replace(super().job(), hub=hub, column="sentence", edit=detokenize_ptb if self.detokenize else None)


class LambadaOptions(CorpusOptions):
    """Options of ``lambada``: every passage a document."""

    name, summary = "lambada", "passages whose last word is to be guessed"

    variant: Literal["original", "openai"] = option(
        "original", "text of LAMBADA's authors (which ToST's authors use), or of GPT-2's"
    )
    straight_quotes: bool = option(False, "replace curly quotes by straight ones")
    splits: _Names = option(("test",), "which of the corpus's splits")

    def job(self) -> TextJob:
        """Return how the corpus is read."""
        hubs = {"original": HubSet("cimec/lambada"), "openai": HubSet("EleutherAI/lambada_openai", "default")}
        edit = (lambda text: text.translate(_QUOTES)) if self.straight_quotes else None
        return replace(super().job(), hub=hubs[self.variant], edit=edit)


class ShakespeareOptions(CorpusOptions):
    """Options of ``shakespeare``: one text file, by default as characters."""

    name, summary = "shakespeare", "1.1 MB of Shakespeare as characters, the last tenth for validation"

    source: str | None = option(None, "the text file, input.txt of tinyshakespeare")
    tokenizer: str = option("chars", _TOKENIZER)
    validation: float = option(0.1, "share of characters, at the end, for validation", gt=0.0, lt=1.0)

    def job(self) -> TextJob:
        """Return how the corpus is read."""
        if not self.source:
            raise ConfigError("shakespeare is read from a file; give --source input.txt (of tinyshakespeare).")
        return replace(super().job(), documents="file", split="tail")


CORPORA: tuple[type[CorpusOptions], ...] = (
    TextOptions,
    OpenWebTextOptions,
    WikiText2Options,
    WikiText103Options,
    PtbOptions,
    LambadaOptions,
    ShakespeareOptions,
)
"""Every corpus."""
