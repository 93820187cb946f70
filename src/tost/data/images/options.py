"""Options of the image data sets, checked without torch. `docs/image-data.md` explains them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PlainValidator, WithJsonSchema, model_validator

from tost._options import option
from tost.data.spec import DataSetOptions, DataShape, DataSpec
from tost.errors import ConfigError

IMAGENET_MEAN, IMAGENET_STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]

_LARGEST = 16_384  # pixels; a larger side is a typing error
_MAGNITUDES = 30  # of torchvision's RandAugment, from 0 to 30
_POLICY = re.compile(r"(rand|augmix)(-[a-z]+[0-9.]+)*|torchvision-rand-n(\d+)-m(\d+)|torchvision-trivial")


def _are_pixels(*sides: Any) -> bool:
    return all(type(side) is int and 1 <= side <= _LARGEST for side in sides)


def _size(value: Any) -> Any:
    sides = list(value) if isinstance(value, list | tuple) else [value, value]
    if len(sides) != 2 or not _are_pixels(*sides):
        raise ValueError(f"{value!r} given; needs a number of pixels from 1 to {_LARGEST}, or [height, width].")
    return value if _are_pixels(value) else sides


def _resize(value: Any) -> Any:
    if value not in ("ratio", "squash") and not _are_pixels(value):
        raise ValueError(f"{value!r} given; needs ratio, squash, or a number of pixels from 1 to {_LARGEST}.")
    return value


def _policy(value: Any) -> Any:
    found = _POLICY.fullmatch(value) if isinstance(value, str) else None
    if value is not None and (found is None or int(found[4] or 0) > _MAGNITUDES):
        raise ValueError(
            f"{value!r} given; needs null, a policy of timm such as rand-m9-mstd0.5-inc1, or one of torchvision: "
            f"torchvision-trivial, or torchvision-rand-n2-m14 (n: operations, m: magnitude up to {_MAGNITUDES})."
        )
    return value


_PIXELS = {"type": "integer", "minimum": 1}
_SIZES = {"anyOf": [_PIXELS, {"type": "array", "items": _PIXELS}]}
_RESIZES = {"anyOf": [{"enum": ["ratio", "squash"]}, _PIXELS]}
_POLICIES = {"anyOf": [{"type": "string"}, {"type": "null"}]}
_Size = Annotated[int | list[int], PlainValidator(_size), WithJsonSchema(_SIZES)]
_Resize = Annotated[int | str, PlainValidator(_resize), WithJsonSchema(_RESIZES)]
_Policy = Annotated[str | None, PlainValidator(_policy), WithJsonSchema(_POLICIES)]
_Share = Annotated[float, Field(ge=0, le=1)]
_Pair = Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=2, max_length=2)]
_PerChannel = Annotated[list[float], Field(min_length=1, max_length=3)]


def split_names(split: str) -> tuple[str, ...]:
    """Return the names that files and folders of a split may have, the given one first."""
    usual = ("val", "validation", "valid")
    return (split, *(name for name in usual if name != split)) if split in usual[:2] else (split,)


def class_folders(folder: Path) -> list[str]:
    """Return the names of the folders in a folder, sorted, without hidden ones."""
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))


_CROP = "training: pad shifts by up to `padding` pixels, resized takes a random part, none does as validation does"
_MEAN = "subtracted from pixels in [0, 1], per channel; by default the mean of the data set, or of ImageNet"
_STD = "then divided by, per channel; by default the standard deviation"
_TRAIN_ON, _VALIDATE_ON = "split to train on", "split to validate on"
_SIZE = "size of the samples in pixels, or [height, width]"
_EVAL_RESIZE = (
    "validation: squash resizes both sides to image_size; a number resizes the shorter side to it before the centre "
    "is cut out, ratio to 8/7 of image_size (256 for 224)"
)


class ImageOptions(DataSetOptions):
    """Options that all image data sets have; each has defaults of its own."""

    opener: ClassVar[str]
    """``"module:function"`` that returns a `Split` for the options, a path and the name of a split."""
    known_classes: ClassVar[int | None] = None
    """Number of classes where the data set fixes it."""

    image_size: _Size = option(224, _SIZE)
    channels: Literal[1, 3] = option(3, "3 for colour, grey images repeat theirs; 1 for grey")
    train_split: str = option("train", _TRAIN_ON)
    validation_split: str = option("test", _VALIDATE_ON)
    hold_out: int = option(0, "number of images of the training split to validate on instead of validation_split", ge=0)
    limit: int | None = option(None, "images per split, spread evenly over it; null: all", ge=1)

    crop: Literal["pad", "resized", "none"] = option("resized", _CROP)
    padding: int = option(4, "largest shift of crop: pad, in pixels; black moves in", ge=0)
    crop_scale: _Pair = option([0.08, 1.0], "share of the area that crop: resized takes")
    crop_ratio: _Pair = option([0.75, 4 / 3], "width / height of what crop: resized takes")
    flip: _Share = option(0.5, "probability that a training image is mirrored")
    auto_augment: _Policy = option(
        None, "policy such as rand-m9-mstd0.5-inc1 (timm) or torchvision-rand-n2-m14; null: none"
    )
    color_jitter: float = option(0.0, "strength of random brightness, contrast, colour", ge=0, le=1)
    erasing: _Share = option(0.0, "probability that a part of a training image is erased")
    erasing_mode: Literal["const", "rand", "pixel"] = option(
        "pixel", "erase to the mean colour, to one random colour, or to noise per pixel"
    )
    erasing_count: int = option(1, "most parts that are erased in one image", ge=1)
    repeats: int = option(1, "repeated augmentation: how often each image comes in a row, each different", ge=1, le=16)

    interpolation: Literal["bilinear", "bicubic"] = option("bicubic", "how images are resized")
    eval_resize: _Resize = option("squash", _EVAL_RESIZE)
    mean: _PerChannel = option(IMAGENET_MEAN, _MEAN)
    std: _PerChannel = option(IMAGENET_STD, _STD)
    on_bad_image: Literal["replace", "error"] = option(
        "replace", "an image that cannot be read: train on its neighbour and validate on a blank one, or stop"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if wrong := list(self._conflicts()):
            raise ValueError(" ".join(wrong))
        return self

    def _conflicts(self) -> Iterator[str]:
        if isinstance(self.eval_resize, int) and self.eval_resize < max(self.size):
            yield (
                f"eval_resize={self.eval_resize} is smaller than image_size={self.image_size}, which is cut out of it; "
                "make it at least as large, or use squash."
            )
        for key in ("crop_scale", "crop_ratio"):
            low, high = getattr(self, key)
            if low > high or (key == "crop_scale" and high > 1):
                yield f"{key}={[low, high]} is no range; give [least, most], shares of the area being at most 1."
        for key in ("mean", "std"):
            if len(getattr(self, key)) not in (1, self.channels):
                yield f"{key}={getattr(self, key)} does not fit channels={self.channels}; give one number, or one each."
        if min(self.std) <= 0:
            yield f"std={self.std} divides the pixels; every number must be above 0."
        if self.train_split == self.validation_split and not self.hold_out:
            yield (
                f"train_split and validation_split are both {self.train_split!r}; to validate on a part of it that is "
                "not trained on, set hold_out to a number of images."
            )

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the samples."""
        height, width = self.image_size if isinstance(self.image_size, list) else [self.image_size] * 2
        return height, width

    @property
    def is_vectorized(self) -> bool:
        """Whether training images can be augmented a batch at a time: they are shifted and mirrored at most."""
        return self.crop != "resized" and not (self.auto_augment or self.color_jitter or self.erasing)

    def class_count(self, path: str | None = None) -> int:
        """Return the number of classes.

        Args:
            path: Folder of the data, whose classes are counted if the number is neither fixed nor given.

        Raises:
            ConfigError: It cannot be known.
        """
        assert self.known_classes is not None  # subclasses without a fixed number take it from their options
        return self.known_classes

    def shape(self, path: str | None = None) -> DataShape:
        """Images of one size."""
        count = self.class_count(path)
        return DataShape(
            task="image_classification", input="image", num_classes=count, in_chans=self.channels, image_size=self.size
        )


class Cifar10Options(ImageOptions):
    """Options of ``cifar10``."""

    opener = "tost.data.images.published:open_cifar"
    known_classes = 10

    image_size: _Size = option(32, _SIZE)
    train_split: Literal["train", "test"] = option("train", _TRAIN_ON)
    validation_split: Literal["train", "test"] = option("test", _VALIDATE_ON)
    crop: Literal["pad", "resized", "none"] = option("pad", _CROP)
    mean: _PerChannel = option([0.4914, 0.4822, 0.4465], _MEAN)
    std: _PerChannel = option([0.2470, 0.2435, 0.2616], _STD)


class Cifar100Options(Cifar10Options):
    """Options of ``cifar100``; its labels are the fine ones."""

    known_classes = 100

    mean: _PerChannel = option([0.5071, 0.4866, 0.4409], _MEAN)
    std: _PerChannel = option([0.2673, 0.2564, 0.2762], _STD)


class FashionMnistOptions(Cifar10Options):
    """Options of ``fashion_mnist``."""

    opener = "tost.data.images.published:open_fashion_mnist"
    image_size: _Size = option(28, _SIZE)
    channels: Literal[1, 3] = option(1, "1 for grey, as the images are; 3 repeats it")
    padding: int = option(2, "largest shift of crop: pad, in pixels; black moves in", ge=0)
    mean: _PerChannel = option([0.2860], _MEAN)
    std: _PerChannel = option([0.3530], _STD)


class Flowers102Options(ImageOptions):
    """Options of ``flowers102``."""

    opener = "tost.data.images.published:open_flowers102"
    known_classes = 102

    train_split: Literal["train", "val", "trainval", "test"] = option("train", _TRAIN_ON)
    validation_split: Literal["train", "val", "trainval", "test"] = option("test", _VALIDATE_ON)


class PetsOptions(ImageOptions):
    """Options of ``pets``."""

    opener = "tost.data.images.published:open_pets"
    known_classes = 37

    train_split: Literal["trainval", "test"] = option("trainval", _TRAIN_ON)
    validation_split: Literal["trainval", "test"] = option("test", _VALIDATE_ON)


class CustomImageOptions(ImageOptions):
    """Options of data sets of the user, whose classes are not known beforehand."""

    num_classes: int | None = option(
        None, "number of classes, which is compared with the data; null: that of the folders", ge=2
    )
    in_memory: bool = option(False, "read every image once, resized as for validation; needs crop: pad or none")

    def class_count(self, path: str | None = None) -> int:
        """Return the number of classes that was given."""
        if self.num_classes is None:
            raise ConfigError(
                "data.options.num_classes is missing; the number of classes of this data set must be known before it "
                "is read: set it to the number of class folders or of different labels."
            )
        return self.num_classes

    def _conflicts(self) -> Iterator[str]:
        yield from super()._conflicts()
        if self.in_memory and not self.is_vectorized:
            yield (
                "in_memory=True keeps images of the final size; add data.options.crop=none (or pad) and leave out "
                "auto_augment, color_jitter and erasing, which cannot be applied to them."
            )


class ImageFolderOptions(CustomImageOptions):
    """Options of ``image_folder``."""

    opener = "tost.data.images.sources:open_image_folder"
    validation_split: str = option("val", "split, that is sub-folder, to validate on")

    def class_count(self, path: str | None = None) -> int:
        """Return the number of classes that was given, or that the folders have."""
        if self.num_classes is None and path and Path(path).is_dir():
            for name in split_names(self.train_split):
                if Path(path, name).is_dir():
                    return len(class_folders(Path(path, name)))
            from tost.data.images.sources import no_split  # loads torch

            raise no_split(Path(path), self.train_split)
        return super().class_count(path)


class ImageParquetOptions(CustomImageOptions):
    """Options of ``image_parquet``."""

    opener = "tost.data.images.sources:open_image_parquet"
    image_column: str | None = option(None, "column of the images; null: image or img")
    label_column: str | None = option(None, "column of the labels; null: label, labels, fine_label or target")


class ImageNetOptions(ImageOptions):
    """Options of ``imagenet``."""

    opener = "tost.data.images.published:open_imagenet"
    known_classes = 1000

    validation_split: str = option("val", _VALIDATE_ON)
    eval_resize: _Resize = option("ratio", _EVAL_RESIZE)
    real_labels: Literal["timm"] | None = option(
        None, "reassessed validation labels (ReaL); timm: the copy that timm holds"
    )


_BUILD = "tost.data.images.dataset:build_images"
SPECS = tuple(
    DataSpec(name=name, task="image_classification", description=text, options=options, build=_BUILD, takes_path=True)
    for name, options, text in (
        ("cifar10", Cifar10Options, "photographs of 32 x 32 pixels, 10 classes; parquet or the binary version"),
        ("cifar100", Cifar100Options, "photographs of 32 x 32 pixels, 100 classes; parquet or the binary version"),
        ("fashion_mnist", FashionMnistOptions, "clothes, 28 x 28 grey pixels, 10 classes; idx files, packed or not"),
        ("flowers102", Flowers102Options, "Oxford flowers, 102 classes, in the official splits"),
        ("image_folder", ImageFolderOptions, "any images, sorted into folders: <split>/<class>/<image>"),
        ("image_parquet", ImageParquetOptions, "any images in parquet files with a column of images and one of labels"),
        ("imagenet", ImageNetOptions, "ImageNet-1k, 1000 classes; folders or parquet files; ReaL labels"),
        ("pets", PetsOptions, "Oxford-IIIT cats and dogs, 37 breeds, in the official splits"),
    )
)
"""The data sets of this folder."""
