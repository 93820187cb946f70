"""Options of the Long Range Arena data sets, checked without torch. `docs/lra-data.md` explains them.

Code bases read the same files differently. Every difference is an option; a preset names the choices of one code base
and fills in what is not given. The defaults follow the paper, which used Mega's code for all tasks but Pathfinder, and
Skyformer's for that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from tost.data.lra.generate.pathfinder.settings import Difficulty
from tost.data.spec import DataSetOptions, DataShape, DataSpec

_LONGEST = 1 << 20  # tokens; a longer sequence is a slip of the finger
_LENGTH = "positions of a sample, the end symbol included; longer sequences are cut"
_INPUT = "a pixel as one of 256 ids, or as a number that is shifted and scaled"
_MASK_ZERO = "mask pixels of value 0, as if they were padding"
_MEAN, _STD = "input: values: subtracted, of pixels in [0, 1]", "input: values: then divided by"
_Number = Annotated[float, Field(allow_inf_nan=False)]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Overrides = Mapping[str, Mapping[str, Any]]


class LraOptions(DataSetOptions):
    """Options of all tasks."""

    presets: ClassVar[Overrides] = {}
    """Options that each preset but `paper` changes."""
    classes: ClassVar[int]
    """Number of classes."""
    reader: ClassVar[str]
    """``"module:function"`` that builds the data, below `tost.data.lra.readers`."""

    preset: Literal["paper", "official", "s4", "mega", "skyformer"] = Field(
        default="paper", description="code base to follow in all options that are not given"
    )
    validation_split: Literal["val", "test"] = Field(default="val", description="split to validate on")
    limit: int | None = Field(default=None, ge=1, description="samples per split, spread evenly over it; null: all")

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        return {**cls.presets.get(str(given.get("preset")), {}), **given}


class SequenceOptions(LraOptions):
    """Options of the tasks of symbols."""

    length: int = Field(default=4001, ge=2, le=_LONGEST, description=_LENGTH)
    eos: bool = Field(default=True, description="end every sequence with a symbol of its own")
    keep: Literal["start", "end"] = Field(default="start", description="which part of a sequence that is too long")
    padding: Literal["right", "left", "none"] = Field(
        default="right",
        description="side on which short ones are filled up; none: those of a batch are packed into one row, which "
        "saves the work on padding",
    )

    towers: ClassVar[int] = 1
    """Sequences per sample."""

    def ids(self) -> int:
        """Return the number of ids."""
        raise NotImplementedError

    def shape(self, path: str | None = None) -> DataShape:
        """Symbols, padded to the length."""
        return DataShape(
            task="classification",
            input="tokens",
            length=self.length,
            vocab_size=self.ids(),
            num_classes=self.classes,
            towers=self.towers,
        )


class LraListOpsOptions(SequenceOptions):
    """Options of ``lra_listops``."""

    reader = "listops:build_lra_listops"
    classes = 10
    presets: ClassVar[Overrides] = {
        "official": {"length": 2000, "eos": False},
        "s4": {"length": 2048},
        "skyformer": {"length": 2048, "eos": False, "brackets": False},
    }

    length: int = Field(default=2001, ge=2, le=_LONGEST, description=_LENGTH)
    brackets: bool = Field(
        default=True, description="keep the closing brackets, without which the task cannot be solved in general"
    )

    def ids(self) -> int:
        """15 symbols, one for padding, one for unknown ones as in the official code, and the end."""
        return 17 + self.eos


class LettersOptions(SequenceOptions):
    """Options of the tasks of texts."""

    classes = 2
    unit: Literal["bytes", "chars"] = Field(default="bytes", description="what texts are cut into; bytes are of UTF-8")
    min_frequency: int = Field(
        default=1, ge=1, description="unit: chars: rarer ones in the training texts are one unknown symbol"
    )
    vocab_size: int | None = Field(
        default=None,
        ge=4,
        description="unit: chars: number of ids, special ones included; it must suffice. null for bytes",
    )

    @model_validator(mode="after")
    def _ids_are_known(self) -> Self:
        if self.unit == "chars" and self.vocab_size is None:
            raise ValueError(
                "unit=chars needs vocab_size: the number of ids must be known before the texts are read; give an upper "
                "limit, such as 256, and building the data fails if it is too low."
            )
        if self.unit == "bytes" and (self.vocab_size is not None or self.min_frequency != 1):
            raise ValueError("vocab_size and min_frequency belong to unit=chars; leave them out for bytes.")
        return self

    def ids(self) -> int:
        """Return the number of ids."""
        return self.vocab_size or 257 + self.eos


class LraTextOptions(LettersOptions):
    """Options of ``lra_text``."""

    reader = "text:build_lra_text"
    presets: ClassVar[Overrides] = {
        "official": {"length": 1000, "eos": False},
        "s4": {"length": 4096, "unit": "chars", "min_frequency": 15, "vocab_size": 136},
        "skyformer": {"length": 4000, "eos": False},
    }

    hold_out: int = Field(
        default=0, ge=0, description="split val: so many training reviews, not the test reviews; split_seed draws them"
    )
    split_seed: int = Field(default=42, description="decides which reviews are held out")


class LraRetrievalOptions(LettersOptions):
    """Options of ``lra_retrieval``, pairs of documents."""

    reader = "retrieval:build_lra_retrieval"
    towers = 2
    presets: ClassVar[Overrides] = {
        "official": {"length": 4000, "eos": False},
        "s4": {"length": 4000, "unit": "chars", "vocab_size": 256},
        "skyformer": {"length": 4000, "eos": False},
    }


class PixelOptions(LraOptions):
    """Options of the tasks of images."""

    input: Literal["tokens", "values"] = Field(default="values", description=_INPUT)
    mask_zero: bool = Field(default=False, description=_MASK_ZERO)
    mean: _Number = Field(default=0.5, description=_MEAN)
    std: _Positive = Field(default=0.5, description=_STD)
    split: Literal["order", "shuffled"] = Field(
        default="shuffled", description="cut into splits in the order of the files, or after shuffling by split_seed"
    )
    split_seed: int = Field(default=42, description="split: shuffled: decides the order")

    @property
    def side(self) -> int:
        """Height and width of an image."""
        raise NotImplementedError

    def shape(self, path: str | None = None) -> DataShape:
        """The pixels, row after row."""
        kind: dict[str, Any] = {"vocab_size": 256} if self.input == "tokens" else {"in_features": 1}
        return DataShape(task="classification", input=self.input, length=self.side**2, num_classes=self.classes, **kind)


_AS_TOKENS = {"input": "tokens", "mask_zero": True}


class LraImageOptions(PixelOptions):
    """Options of ``lra_image``."""

    reader = "pixels:build_lra_image"
    classes = 10
    presets: ClassVar[Overrides] = {
        "official": {**_AS_TOKENS, "grey": "tensorflow", "split": "order"},
        "s4": {"mean": 122.6 / 255, "std": 61 / 255},
        "skyformer": {**_AS_TOKENS, "grey": "tensorflow", "split": "order"},
    }

    mean: _Number = Field(default=0.48, description=_MEAN)
    std: _Positive = Field(default=0.24, description=_STD)
    grey: Literal["pillow", "tensorflow"] = Field(
        default="pillow", description="library whose weights of red, green and blue and whose rounding to use"
    )
    val_share: float = Field(default=0.1, gt=0, lt=1, description="share of the training images that is split val")

    @property
    def side(self) -> int:
        """32 pixels."""
        return 32


class LraPathfinderOptions(PixelOptions):
    """Options of ``lra_pathfinder``."""

    reader = "pixels:build_lra_pathfinder"
    classes = 2
    presets: ClassVar[Overrides] = {
        "official": {"split": "order"},
        "s4": {"input": "values", "mask_zero": False, "mean": 0.0, "std": 1.0},
        "mega": {"input": "values", "mask_zero": False},
    }

    resolution: Literal[32, 64, 128, 256] = Field(default=32, description="height and width of the images; 128: Path-X")
    difficulty: Difficulty = Field(default="hard", description="which images; the benchmark has the hard ones")
    input: Literal["tokens", "values"] = Field(default="tokens", description=_INPUT)
    mask_zero: bool = Field(default=True, description=_MASK_ZERO)
    in_memory: bool | None = Field(
        default=None, description="keep images once they are read; null: up to 512 MiB of them"
    )

    @property
    def side(self) -> int:
        """The resolution."""
        return self.resolution


class LraPathxOptions(LraPathfinderOptions):
    """Options of ``lra_pathx``, which is ``lra_pathfinder`` at 128 x 128 pixels."""

    resolution: Literal[32, 64, 128, 256] = Field(default=128, description="height and width of the images")


SPECS = tuple(
    DataSpec(
        name=name,
        task="classification",
        description=f"Long Range Arena: {description}",
        options=options,
        build=f"tost.data.lra.readers.{options.reader}",
        takes_path=True,
    )
    for name, options, description in (
        ("lra_image", LraImageOptions, "CIFAR-10 in grey, 1024 pixels as a sequence; 10 classes"),
        ("lra_listops", LraListOpsOptions, "nested list operations of up to 2000 symbols; the value, 0 to 9"),
        ("lra_pathfinder", LraPathfinderOptions, "are two discs on one dashed curve? 1024 pixels; 2 classes"),
        ("lra_pathx", LraPathxOptions, "the same with 16,384 pixels (Path-X)"),
        ("lra_retrieval", LraRetrievalOptions, "are two papers related? bytes of both (AAN); 2 classes"),
        ("lra_text", LraTextOptions, "bytes of reviews of films (IMDb), negative or positive"),
    )
)
"""The data sets of this folder."""
