"""Options of the Long Range Arena data sets and their generators, checked without torch. See `docs/lra-data.md`.

Code bases read the same files differently. Every difference is an option; a preset names the choices of one code base
and fills in what is not given. The defaults follow the paper, which used Mega's code for all tasks but Pathfinder, and
Skyformer's for that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field, model_validator

from tost._options import option
from tost.data.embedded import ListOpsLimits
from tost.data.prepare import PrepareOptions
from tost.data.spec import DataSetOptions, DataShape, DataSpec

_LONGEST = 1 << 20  # tokens; a longer sequence is a slip of the finger
_LENGTH = "positions of a sample, the end symbol included; longer sequences are cut"
_INPUT = "a pixel as one of 256 ids, or as a number that is shifted and scaled"
_MASK_ZERO = "mask pixels of value 0, as if they were padding"
_MEAN, _STD = "input: values: subtracted, of pixels in [0, 1]", "input: values: then divided by"
_Number = Annotated[float, Field(allow_inf_nan=False)]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Presets = Mapping[str, Mapping[str, Any]]
_Difficulty = Literal["easy", "intermediate", "hard"]

PATHFINDER_FOLDERS: Final = {
    "easy": "curv_baseline",
    "intermediate": "curv_contour_length_9",
    "hard": "curv_contour_length_14",
}
"""Folder of each difficulty in the official release."""


class LraOptions(DataSetOptions):
    """Options of all tasks."""

    presets: ClassVar[_Presets] = {}
    """Options that each preset but `paper` changes."""
    classes: ClassVar[int]
    """Number of classes."""

    preset: Literal["paper", "official", "s4", "mega", "skyformer"] = option(
        "paper", "code base to follow in all options that are not given"
    )
    validation_split: Literal["val", "test"] = option("val", "split to validate on")
    limit: int | None = option(None, "samples per split, spread evenly over it; null: all", ge=1)

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, given: Any) -> Any:
        return {**cls.presets.get(str(given.get("preset")), {}), **given} if isinstance(given, Mapping) else given


class SequenceOptions(LraOptions):
    """Options of the tasks of symbols."""

    length: int = option(4001, _LENGTH, ge=2, le=_LONGEST)
    eos: bool = option(True, "end every sequence with a symbol of its own")
    keep: Literal["start", "end"] = option("start", "which part of a sequence that is too long")
    padding: Literal["right", "left", "none"] = option(
        "right",
        "side on which short ones are filled up; none: those of a batch are packed into one row, which "
        "saves the work on padding",
    )

    towers: ClassVar[int] = 1
    """Sequences per sample."""
    end: ClassVar[int]
    """Id that ends a sequence."""

    def shape(self, path: str | None = None) -> DataShape:
        """Symbols, padded to the length."""
        return DataShape(
            task="classification",
            input="tokens",
            length=self.length,
            vocab_size=self.end + self.eos,
            num_classes=self.classes,
            towers=self.towers,
        )


class LraListOpsOptions(SequenceOptions):
    """Options of ``lra_listops``."""

    classes = 10
    end = 17  # after 15 symbols, one for padding, and one for unknown ones as in the official code
    presets: ClassVar[_Presets] = {
        "official": {"length": 2000, "eos": False},
        "s4": {"length": 2048},
        "skyformer": {"length": 2048, "eos": False, "brackets": False},
    }

    length: int = option(2001, _LENGTH, ge=2, le=_LONGEST)
    brackets: bool = option(True, "keep the closing brackets, without which the task cannot be solved in general")


class LettersOptions(SequenceOptions):
    """Options of the tasks of texts, which are cut into the bytes of UTF-8."""

    classes = 2
    end = 257

    @model_validator(mode="before")
    @classmethod
    def _check_unit(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        if given.get("preset") == "s4" or given.get("unit", "bytes") != "bytes":
            raise ValueError("S4 cuts texts into characters, which are not supported; choose another preset (bytes).")
        # Options of earlier versions that change nothing.
        return {key: value for key, value in given.items() if key not in ("unit", "min_frequency", "vocab_size")}


class LraTextOptions(LettersOptions):
    """Options of ``lra_text``."""

    presets: ClassVar[_Presets] = {
        "official": {"length": 1000, "eos": False},
        "skyformer": {"length": 4000, "eos": False},
    }

    hold_out: int = option(0, "split val: so many training reviews, not the test reviews; split_seed draws them", ge=0)
    split_seed: int = option(42, "decides which reviews are held out, and the order of validation")


class LraRetrievalOptions(LettersOptions):
    """Options of ``lra_retrieval``, pairs of documents."""

    towers = 2
    presets: ClassVar[_Presets] = {
        "official": {"length": 4000, "eos": False},
        "skyformer": {"length": 4000, "eos": False},
    }


class PixelOptions(LraOptions):
    """Options of the tasks of images."""

    input: Literal["tokens", "values"] = option("values", _INPUT)
    mask_zero: bool = option(False, _MASK_ZERO)
    mean: _Number = option(0.5, _MEAN)
    std: _Positive = option(0.5, _STD)
    split: Literal["order", "shuffled"] = option(
        "shuffled", "cut into splits in the order of the files, or after shuffling by split_seed"
    )
    split_seed: int = option(42, "split: shuffled: decides the order")

    @property
    def side(self) -> int:
        """Height and width of an image."""
        return 32

    def shape(self, path: str | None = None) -> DataShape:
        """The pixels, row after row."""
        kind: dict[str, Any] = {"vocab_size": 256} if self.input == "tokens" else {"in_features": 1}
        return DataShape(task="classification", input=self.input, length=self.side**2, num_classes=self.classes, **kind)


_AS_TOKENS = {"input": "tokens", "mask_zero": True, "grey": "tensorflow", "split": "order"}


class LraImageOptions(PixelOptions):
    """Options of ``lra_image``."""

    classes = 10
    presets: ClassVar[_Presets] = {
        "official": _AS_TOKENS,
        "s4": {"mean": 122.6 / 255, "std": 61 / 255},
        "skyformer": _AS_TOKENS,
    }

    mean: _Number = option(0.48, _MEAN)
    std: _Positive = option(0.24, _STD)
    grey: Literal["pillow", "tensorflow"] = option(
        "pillow", "library whose weights of red, green and blue and whose rounding to use"
    )
    val_share: float = option(0.1, "share of the training images that is split val", gt=0, lt=1)


class LraPathfinderOptions(PixelOptions):
    """Options of ``lra_pathfinder``."""

    classes = 2
    presets: ClassVar[_Presets] = {
        "official": {"split": "order"},
        "s4": {"input": "values", "mask_zero": False, "mean": 0.0, "std": 1.0},
        "mega": {"input": "values", "mask_zero": False},
    }

    resolution: Literal[32, 64, 128, 256] = option(32, "height and width of the images; 128: Path-X")
    difficulty: _Difficulty = option("hard", "which images; the benchmark has the hard ones")
    input: Literal["tokens", "values"] = option("tokens", _INPUT)
    mask_zero: bool = option(True, _MASK_ZERO)
    in_memory: bool | None = option(None, "keep images once they are read; null: up to 512 MiB of them")

    @property
    def side(self) -> int:
        """The resolution."""
        return self.resolution


class LraPathxOptions(LraPathfinderOptions):
    """Options of ``lra_pathx``, which is ``lra_pathfinder`` at 128 x 128 pixels."""

    resolution: Literal[32, 64, 128, 256] = option(128, "height and width of the images")


SPECS = tuple(
    DataSpec(
        name=f"lra_{name}",
        task="classification",
        description=f"Long Range Arena: {description}",
        options=options,
        build=f"tost.data.lra.readers:build_{builder}",
        takes_path=True,
    )
    for name, options, builder, description in (
        ("image", LraImageOptions, "image", "CIFAR-10 in grey, 1024 pixels as a sequence; 10 classes"),
        ("listops", LraListOpsOptions, "listops", "nested list operations of up to 2000 symbols; the value, 0 to 9"),
        ("pathfinder", LraPathfinderOptions, "pathfinder", "are two discs on one dashed curve? 1024 pixels; 2 classes"),
        ("pathx", LraPathxOptions, "pathfinder", "the same with 16,384 pixels (Path-X)"),
        ("retrieval", LraRetrievalOptions, "retrieval", "are two papers related? bytes of both (AAN); 2 classes"),
        ("text", LraTextOptions, "text", "bytes of reviews of films (IMDb), negative or positive"),
    )
)
"""The data sets of this folder."""


class _GeneratedOptions(PrepareOptions):
    seed: int = option(0, "another number gives other data")


class ListOpsFilesOptions(ListOpsLimits, _GeneratedOptions):
    """Options of ``lra/listops``."""

    name = "lra/listops"
    summary = "generated ListOps expressions, in the layout of the Long Range Arena"
    run = "tost.data.lra.listops:prepare_listops"

    count: int = option(100_000, "examples together; 1 in 50 is for validation, and as many for testing", ge=3)
    max_depth: int = option(10, "levels of an expression", ge=2, le=64)
    max_args: int = option(10, "most arguments of one operator; the fewest are 2", ge=2)
    min_length: int = option(500, "expressions are longer than this, in tokens", ge=1)
    max_length: int = option(2000, "expressions are shorter than this, in tokens", ge=5)

    def counts(self) -> dict[str, int]:
        """Return the number of examples of each split."""
        part = max(1, self.count // 50)
        return {"train": self.count - 2 * part, "val": part, "test": part}


class PathfinderFilesOptions(_GeneratedOptions):
    """Options of ``lra/pathfinder*`` and ``lra/pathx``."""

    run = "tost.data.lra.pathfinder:prepare_pathfinder"
    resolution: ClassVar[int] = 32
    name = "lra/pathfinder32"
    summary = "generated Pathfinder images, 32 x 32 pixels, in the layout of the Long Range Arena"

    count: int = option(200_000, "images", ge=1)
    difficulty: _Difficulty = option("hard", "how long the curves are: 6, 9 or 14 dashes")


class _Pathfinder64(PathfinderFilesOptions):
    name, resolution, summary = "lra/pathfinder64", 64, PathfinderFilesOptions.summary.replace("32", "64")


class _Pathfinder256(PathfinderFilesOptions):
    name, resolution, summary = "lra/pathfinder256", 256, PathfinderFilesOptions.summary.replace("32", "256")


class _Pathx(PathfinderFilesOptions):
    name, resolution = "lra/pathx", 128
    summary = PathfinderFilesOptions.summary.replace("32", "128") + " (Path-X)"


GENERATED = (ListOpsFilesOptions, PathfinderFilesOptions, _Pathfinder64, _Pathfinder256, _Pathx)
"""Every generator."""
