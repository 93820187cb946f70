"""Options of preparing text, and what each named corpus knows about itself. No torch and no numpy here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from tost.errors import ConfigError

__all__ = [
    "NAMED_TEXT",
    "CbtOptions",
    "CorpusOptions",
    "HubSet",
    "LambadaOptions",
    "NamedText",
    "OpenWebTextOptions",
    "PtbOptions",
    "ShakespeareOptions",
    "TextJob",
    "TextOptions",
    "WikiText2Options",
    "WikiText103Options",
]

Documents = Literal["file", "line"]
SplitRule = Literal["auto", "random", "tail", "named"]


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
    """What is to be read and how it becomes tokens; every option says it in these terms.

    Attributes:
        name: Name of the corpus.
        source: File or folder; None to take `hub`.
        hub: Where the corpus is on the hub; None if it is not there.
        tokenizer: ``bytes``, ``chars``, ``gpt2``, a path, or ``hub:NAME``.
        end_of_text: ``auto``, ``none``, or the token that ends a document.
        column: Key of jsonl lines, column of parquet files and hub data sets.
        documents: What a document is in a plain text file.
        joined: All rows of a split make up one document.
        newlines: Lines keep the character that ends them, except for blank lines, which become empty.
        edit: Changes to the text, a name of `tost.data.text.detokenize`; empty for none.
        split: How a validation set is taken from a corpus that comes in one piece.
        validation: Its share.
        seed: Decides which documents it gets if they are drawn.
        splits: Splits to take of a corpus that comes with its own; empty for all.
        sources: Further sources by the split that they are.
        choices: Rows are questions with a choice of answers (see `tost.data.text.cbt`).
        shard_bytes: Size of the text that makes up a shard.
    """

    name: str
    source: str | None
    hub: HubSet | None = None
    tokenizer: str
    end_of_text: str
    column: str = "text"
    documents: Documents = "line"
    joined: bool = False
    newlines: bool = False
    edit: str = ""
    split: SplitRule = "named"
    validation: float = 0.0
    seed: int = 0
    splits: tuple[str, ...] = ()
    sources: dict[str, str] = field(default_factory=dict)
    choices: str | None = None
    shard_bytes: int


class CorpusOptions(BaseModel):
    """What the options of every corpus have in common."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    corpus: ClassVar[str]

    source: str | None = Field(default=None, description="file or folder with the text; left out: the hub")
    tokenizer: str = Field(
        default="gpt2",
        description="bytes, chars, gpt2 (from the hub), a folder with vocab.json and merges.txt, a tokenizer.json, "
        "or hub:NAME",
    )
    end_of_text: str = Field(
        default="auto",
        description="token that follows every document: auto takes the tokenizer's own, none adds none",
    )
    shard_bytes: int = Field(default=64 << 20, ge=1, description="bytes of text that make up a shard, about")

    def job(self) -> TextJob:
        """Return what is to be done."""
        raise NotImplementedError

    def _common(self) -> dict[str, object]:
        return {
            "name": self.corpus,
            "source": self.source,
            "tokenizer": self.tokenizer,
            "end_of_text": self.end_of_text,
            "shard_bytes": self.shard_bytes,
        }


class TextOptions(CorpusOptions):
    """Options of ``text``: any text."""

    corpus: ClassVar[str] = "text"

    source: str | None = Field(
        default=None,
        description="a .txt, .jsonl (also .gz) or .parquet file, a folder of them, or hub:NAME; folders and files "
        "called train, validation and test are taken as splits",
    )
    tokenizer: str = Field(default="bytes", description=CorpusOptions.model_fields["tokenizer"].description)
    column: str = Field(default="text", description="key of jsonl lines, column of parquet files and hub data sets")
    documents: Documents = Field(default="file", description="what a document is in a plain text file: file or line")
    split: SplitRule = Field(
        default="auto",
        description="random draws validation documents, tail takes the last ones (of a single document the last "
        "characters), named takes the splits of the source; auto: named if there are any, else random, or tail for a "
        "single document",
    )
    validation: float = Field(default=0.01, ge=0.0, lt=1.0, description="share of the validation set if it is cut off")
    seed: int = Field(default=0, ge=0, description="decides which documents are drawn for validation")
    validation_source: str | None = Field(default=None, description="another file or folder that is the validation set")
    test_source: str | None = Field(default=None, description="another file or folder that is the test set")
    config: str | None = Field(default=None, description="configuration of the hub data set, if it has several")
    revision: str | None = Field(default=None, description="branch or commit of the hub data set")

    def job(self) -> TextJob:
        """Return what is to be done."""
        if not self.source:
            raise ConfigError("text needs a source; give --source FILE, --source FOLDER or --source hub:NAME.")
        given = {"validation": self.validation_source, "test": self.test_source}
        hub = None
        if self.source.startswith("hub:"):
            if any(given.values()):
                raise ConfigError(
                    "validation_source and test_source go with files; a hub data set has splits of its own."
                )
            hub = HubSet(self.source.removeprefix("hub:"), self.config, self.revision)
        return TextJob(
            **{**self._common(), "source": None if hub else self.source},  # type: ignore[arg-type]
            hub=hub,
            column=self.column,
            documents=self.documents,
            split=self.split,
            validation=self.validation,
            seed=self.seed,
            sources={split: source for split, source in given.items() if source},
        )


class OpenWebTextOptions(CorpusOptions):
    """Options of ``openwebtext``: by default the split of nanoGPT, which is also the authors'."""

    corpus: ClassVar[str] = "openwebtext"

    column: str = Field(default="text", description="key or column with the text")
    validation: float = Field(default=0.0005, gt=0.0, lt=1.0, description="share of documents for validation")
    seed: int = Field(default=2357, ge=0, description="decides which documents are drawn for validation")

    def job(self) -> TextJob:
        """Return what is to be done."""
        return TextJob(
            **self._common(),  # type: ignore[arg-type]
            hub=HubSet("Skylion007/openwebtext"),
            column=self.column,
            documents="file",
            split="random",
            validation=self.validation,
            seed=self.seed,
        )


class _LinesOptions(CorpusOptions):
    """Corpora that come as lines: as the authors take them, or as running text."""

    joined: bool = Field(
        default=False, description="one document per split; false: every line is one, which end_of_text then follows"
    )
    detokenize: bool = Field(default=False, description="undo the spaces that the corpus puts around punctuation")
    splits: tuple[str, ...] = Field(default=(), description="which of the corpus's splits; left out: all")


class _WikiTextOptions(_LinesOptions):
    raw: bool = Field(
        default=True, description="which version to take from the hub; false: the one with <unk> for rare words"
    )

    def job(self) -> TextJob:
        """Return what is to be done."""
        size = self.corpus.removeprefix("wikitext")
        return TextJob(
            **self._common(),  # type: ignore[arg-type]
            hub=HubSet("Salesforce/wikitext", f"wikitext-{size}-{'raw-' if self.raw else ''}v1"),
            joined=self.joined,
            newlines=True,
            edit="wikitext" if self.detokenize else "",
            splits=self.splits,
        )


class WikiText2Options(_WikiTextOptions):
    """Options of ``wikitext2``."""

    corpus: ClassVar[str] = "wikitext2"


class WikiText103Options(_WikiTextOptions):
    """Options of ``wikitext103``."""

    corpus: ClassVar[str] = "wikitext103"


class PtbOptions(_LinesOptions):
    """Options of ``ptb``. ``<unk>`` stays as it is."""

    corpus: ClassVar[str] = "ptb"

    def job(self) -> TextJob:
        """Return what is to be done."""
        return TextJob(
            **self._common(),  # type: ignore[arg-type]
            # The hub's own conversion: the data set itself is a script, which is not run.
            hub=HubSet("ptb-text-only/ptb_text_only", None, "refs/convert/parquet"),
            column="sentence",
            joined=self.joined,
            edit="ptb" if self.detokenize else "",
            splits=self.splits,
        )


class LambadaOptions(CorpusOptions):
    """Options of ``lambada``: every passage a document."""

    corpus: ClassVar[str] = "lambada"

    variant: Literal["original", "openai"] = Field(
        default="original",
        description="which text to take from the hub: the authors of LAMBADA's (which ToST's authors use), or that of "
        "GPT-2's authors",
    )
    straight_quotes: bool = Field(default=False, description="replace curly quotes by straight ones")
    splits: tuple[str, ...] = Field(default=("test",), description="which of the corpus's splits")

    def job(self) -> TextJob:
        """Return what is to be done."""
        original = HubSet("cimec/lambada")
        return TextJob(
            **self._common(),  # type: ignore[arg-type]
            hub=original if self.variant == "original" else HubSet("EleutherAI/lambada_openai", "default"),
            edit="quotes" if self.straight_quotes else "",
            splits=self.splits,
        )


class CbtOptions(CorpusOptions):
    """Options of ``cbt``: every question as ten documents, one for each candidate."""

    corpus: ClassVar[str] = "cbt"

    task: Literal["CN", "NE", "V", "P"] = Field(
        default="CN", description="kind of the missing word: common noun, named entity, verb, preposition"
    )
    splits: tuple[str, ...] = Field(default=("validation", "test"), description="which of the corpus's splits")

    def job(self) -> TextJob:
        """Return what is to be done."""
        return TextJob(
            **self._common(),  # type: ignore[arg-type]
            hub=HubSet("cam-cst/cbt", self.task),
            documents="file",
            splits=self.splits,
            choices=self.task,
        )


class ShakespeareOptions(CorpusOptions):
    """Options of ``shakespeare``: one text file, by default as characters."""

    corpus: ClassVar[str] = "shakespeare"

    source: str | None = Field(default=None, description="the text file, input.txt of tinyshakespeare")
    tokenizer: str = Field(default="chars", description=CorpusOptions.model_fields["tokenizer"].description)
    validation: float = Field(
        default=0.1, gt=0.0, lt=1.0, description="share of characters, at the end, for validation"
    )

    def job(self) -> TextJob:
        """Return what is to be done."""
        if not self.source:
            raise ConfigError("shakespeare is read from a file; give --source input.txt (of tinyshakespeare).")
        return TextJob(
            **self._common(),  # type: ignore[arg-type]
            documents="file",
            split="tail",
            validation=self.validation,
        )


class NamedText(NamedTuple):
    """A corpus that is known by name."""

    summary: str
    options: type[CorpusOptions]


NAMED_TEXT: dict[str, NamedText] = {
    "openwebtext": NamedText("8 million web pages, in nanoGPT's split", OpenWebTextOptions),
    "wikitext2": NamedText("WikiText-2, in its own splits", WikiText2Options),
    "wikitext103": NamedText("WikiText-103, in its own splits", WikiText103Options),
    "ptb": NamedText("Penn Treebank as language models use it, in its own splits", PtbOptions),
    "lambada": NamedText("passages whose last word is to be guessed", LambadaOptions),
    "cbt": NamedText("Children's Book Test: ten candidates for a missing word", CbtOptions),
    "shakespeare": NamedText("1.1 MB of Shakespeare as characters, the last tenth for validation", ShakespeareOptions),
}
"""Corpora by name."""
