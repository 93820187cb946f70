"""Wrong folders, wrong counts and wrong options: what was found, what was expected."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from tost.data import DataOptions, build_data
from tost.errors import ConfigError

from . import files


def build(name, path, **options):
    return build_data(DataOptions(name=name, path=str(path), options=options), 0)


def cut(path):
    path.write_bytes(path.read_bytes()[:-5])


# Folders of images: how they are changed, what data.path points at, options, and the error.

PLACES = {
    "parent": ("..", {}, r"data has no folder 'train', it has: things/; .*; did you mean .*/data/things\?"),
    "split": ("train", {}, r"train has no folder 'train', it has: ant/, bee/, cat/; .*did you mean .*/data/things\?"),
    "file": ("train/ant/ant_0.jpg", {}, r"is a file; it must point at the folder that holds <split>/<class>/<image>"),
    "nowhere": ("nowhere", {}, "nowhere does not exist; it must point at the folder that holds <split>/<class>"),
    "other split": (".", {"validation_split": "x"}, r"no folder 'x', .*or name the splits with .*hold_out=N"),
    "images": (".", {"validation_split": "val/ant"}, "ant has no folder per class, it has: ant_0.jpg"),
    "count": (".", {"num_classes": 5}, r"has 3 classes \(ant, bee, cat\), but 5 are expected; correct data.options"),
    "all held out": (".", {"hold_out": 9}, "hold_out=9 leaves nothing to train on; the split in .* has 9 images"),
}


@pytest.fixture
def folder(tmp_path):
    return files.write_folder(tmp_path / "data" / "things")


@pytest.mark.parametrize(("place", "options", "message"), PLACES.values(), ids=PLACES.keys())
def test_wrong_places_and_options(folder, place, options, message):
    with pytest.raises(ConfigError, match=message):
        build("image_folder", (folder / place).resolve(), **{"num_classes": 3, **options})


def test_the_first_error_about_classes_without_splits_names_all_that_is_needed(folder):
    classes = folder.parent / "classes"
    (folder / "train").rename(classes)
    with pytest.raises(ConfigError, match=r"has no folder 'train', it has: ant/, bee/, cat/; .*3 classes") as first:
        build("image_folder", classes, num_classes=10)  # as a recipe for other images has it
    with pytest.raises(ConfigError) as by_shape:
        DataOptions(name="image_folder", path=str(classes)).shape()
    assert str(by_shape.value) == str(first.value)
    added = dict(part.removeprefix("data.options.").split("=") for part in str(first.value).split(" add ")[1].split())
    assert added == {"train_split": ".", "hold_out": "1", "num_classes": "3"}
    options = {"train_split": ".", "hold_out": 1, "num_classes": 3}
    assert build("image_folder", classes, image_size=16, **options).info.num_classes == 3
    with pytest.raises(ConfigError, match=r"data\.options\.hold_out=1"):
        build("image_folder", classes, train_split=".")


def test_splits_with_different_classes(folder):
    (folder / "val" / "cat").rename(folder / "val" / "dog")
    with pytest.raises(ConfigError, match=r"different classes: only 'train' has cat; only 'val' has dog\."):
        build("image_folder", folder, num_classes=3)
    files.write(folder / "train" / "dog" / "notes.txt", b"x")
    with pytest.raises(ConfigError, match=r"train/dog holds no images, it has: notes.txt; a class needs at least one"):
        build("image_folder", folder, num_classes=4)


def test_hidden_files_are_left_out_and_classes_counted(folder):
    files.write(folder / "train" / ".cache" / "x.jpg", b"x")
    files.write(folder / "train" / "notes.txt", b"x")
    files.write(folder / "train" / "ant" / "._ant_0.jpg", b"x")
    files.write(folder / "train" / "ant" / "more" / "deep.JPG", files.jpeg(0, 1))
    options = DataOptions(name="image_folder", path=str(folder))
    assert options.shape().num_classes == 3
    assert len(build("image_folder", folder).train) == 10
    for name in ("image_folder", "image_parquet"):
        with pytest.raises(ConfigError, match=r"data.options.num_classes is missing; .*set it to the number"):
            DataOptions(name=name, path="x").shape()
        assert DataOptions(name=name, path="x", options={"num_classes": 7}).shape().num_classes == 7


@pytest.mark.parametrize("name", ["validation", "test"])
def test_other_names_of_the_validation_split(tmp_path, name):
    files.write_folder(tmp_path, splits=("train", name))
    assert len(build("image_folder", tmp_path).validation) == 9


# Published files, each changed in one way.


def parquet(root, labels, name="train", **settings):
    return files.write_parquet(root / f"{name}.parquet", labels, **settings)


def set_column(path, name, values):
    table = files.pq.read_table(path)
    files.pq.write_table(table.set_column(table.column_names.index(name), name, files.pa.array(values)), path)


def fashion(change):
    return lambda root: change(files.write_fashion_mnist(root, packed=False))


def cifar(change):
    return lambda root: change(files.write_cifar_binary(root))


def flowers(change):
    return lambda root: (files.write_flowers102(root / "flowers-102"), change(root / "flowers-102"))


def pets(change):
    return lambda root: change(files.write_pets(root))


LABELS = "train-labels-idx1-ubyte"
PICKLE = b"cposix\nsystem\n(S'touch broken'\ntR."
WRONG = {
    "parquet, columns": (
        "image_parquet",
        lambda root: parquet(root, [0, 1], columns=("picture", "label")),
        "no column 'image' or 'img', its columns are: picture, label; name it with data.options.image_column",
    ),
    "parquet, labels": (
        "image_parquet",
        lambda root: parquet(root, [0.5, 1.5]),
        "column 'label' of .* holds double; labels are whole numbers or texts",
    ),
    "parquet, no label": (
        "image_parquet",
        lambda root: set_column(parquet(root, [0, 1]), "label", [0, None]),
        "has 1 empty labels; every image needs one",
    ),
    "parquet, range": (
        "image_parquet",
        lambda root: (parquet(root, [0, 1]), parquet(root, [0, 2], "test")),
        "split 'test' of .* has labels from 0 to 2, but 2 classes are numbered 0 to 1",
    ),
    "parquet, shards": (
        "image_parquet",
        lambda root: parquet(root, [0, 1], "train-00001-of-00003"),
        "holds 1 of 3 parquet files of a split; missing are the numbers 0, 2",
    ),
    "parquet, bytes": (
        "image_parquet",
        lambda root: files.write(root / "train.parquet", b"PAR1 no more"),
        "train.parquet cannot be read as a parquet file",
    ),
    "parquet, nothing": ("image_parquet", lambda root: None, "no parquet files of the split 'train', it has: nothing"),
    "idx, missing": ("fashion_mnist", fashion(lambda root: (root / LABELS).unlink()), f"has no {LABELS} or .*gz, it"),
    "idx, cut": (
        "fashion_mnist",
        fashion(lambda root: cut(root / "t10k-images-idx3-ubyte")),
        r"\[12, 28, 28\] values are stated, but it holds 9403",
    ),
    "idx, labels for images": (
        "fashion_mnist",
        fashion(lambda root: (root / LABELS).rename(root / "train-images-idx3-ubyte")),
        "is no idx file, or damaged or incomplete: 3 dimensions of bytes begin with 00000803, not 00000801",
    ),
    "idx, gzip": (
        "fashion_mnist",
        fashion(lambda root: (root / LABELS).write_bytes(files.gzip.compress(b"0" * 99)[:-12])),
        "is no idx file, or damaged or incomplete",
    ),
    "idx, count": (
        "fashion_mnist",
        fashion(lambda root: (root / LABELS).write_bytes(files.idx(files.np.zeros(5, files.np.uint8)))),
        "holds 12 images but 5 labels of the split 'train'",
    ),
    "cifar, nothing": ("cifar10", lambda root: None, "holds no CIFAR-10, it has: nothing; data.path must point at"),
    "cifar, pickles": (
        "cifar10",
        lambda root: files.write(root / "cifar-10-batches-py" / "data_batch_1", PICKLE),
        "whose files are pickles: .*not read. Use parquet files .*data_batch_1.bin",
    ),
    "cifar, cut": (
        "cifar10",
        cifar(lambda root: cut(root / "data_batch_3.bin")),
        "data_batch_3.bin has 12287 bytes, which is no whole number of records of 3073",
    ),
    "cifar, missing": (
        "cifar10",
        cifar(lambda root: (root / "data_batch_3.bin").unlink()),
        "holds only 4 of data_batch_1.bin, .*; the others are missing",
    ),
    "cifar, size": (
        "cifar10",
        lambda root: (parquet(root, [1, 2], size=(30, 32)), parquet(root, [1, 2], "test")),
        "row 0 has 30 x 32 pixels, but this data set has images of 32 x 32",
    ),
    "flowers, nothing": ("flowers102", lambda root: None, "has no jpg and no imagelabels.mat and no setid.mat, it has"),
    "flowers, image": (
        "flowers102",
        flowers(lambda root: [file.unlink() for file in (root / "jpg").glob("*.jpg")]),
        r"lacks 6 of the 6 images of the split, such as image_000\d\d.jpg; the download",
    ),
    "flowers, list": (
        "flowers102",
        flowers(lambda root: files.write(root / "setid.mat", b"MATLAB 5.0 but no more")),
        "setid.mat cannot be read as a MATLAB file with trnid",
    ),
    "flowers, numbers": (
        "flowers102",
        flowers(lambda root: files.savemat(root / "imagelabels.mat", {"labels": [1, 2]})),
        "but imagelabels.mat has 2 labels; the two files do not belong together",
    ),
    "pets, line": (
        "pets",
        pets(lambda root: files.write(root / "annotations" / "test.txt", b"Abyssinian_1 one\n")),
        "test.txt, line 1: 'Abyssinian_1 one' is no entry of an image, such as",
    ),
    "pets, list": (
        "pets",
        pets(lambda root: (root / "annotations" / "test.txt").unlink()),
        "has no annotations/test.txt, it has: annotations/, images/; data.path must",
    ),
    "pets, breeds": (
        "pets",
        lambda root: files.write_pets(root, breeds=5),
        "has 5 classes .*, but 37 are expected; this is another data set",
    ),
}


@pytest.mark.parametrize(("name", "write", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_files(name, write, message, tmp_path):
    write(tmp_path)
    with pytest.raises(ConfigError, match=message):
        build(name, tmp_path, **({"num_classes": 2} if name == "image_parquet" else {}))


def test_one_parquet_file_needs_images_to_be_held_out(tmp_path):
    path = parquet(tmp_path, [0, 1, 0, 1], "all")
    with pytest.raises(ConfigError, match=r"all.parquet is one file; .*set data.options.hold_out"):
        build("image_parquet", path, num_classes=2)
    bundle = build("image_parquet", path, num_classes=2, hold_out=2)
    assert (len(bundle.train), len(bundle.validation)) == (2, 2)


def test_rows_without_an_image_are_bad_images(tmp_path, caplog):
    for split in ("train", "test"):
        path = parquet(tmp_path, [0, 1], split)
        images = files.pq.read_table(path).column("image").to_pylist()
        set_column(path, "image", [{"bytes": None, "path": "elsewhere.jpg"}, images[1]])
    assert build("image_parquet", tmp_path, num_classes=2, image_size=8).train[0]["targets"] == 1
    assert "train.parquet: row 0 cannot be opened: it holds no image" in caplog.text


# Options.

OPTIONS = {
    "size": ("cifar10", {"image_size": [32]}, "image_size", "needs a number of pixels from 1 to 16384, or"),
    "size, boolean": ("cifar10", {"image_size": [32, True]}, "image_size", "needs a number"),
    "policy": ("cifar10", {"auto_augment": "torchvision-rand-n2-m99"}, "auto_augment", "m: magnitude up to 30"),
    "resize": ("imagenet", {"eval_resize": 0.875}, "eval_resize", "0.875 given; needs ratio, squash, or a number"),
    "too small": ("imagenet", {"eval_resize": 200}, "", "eval_resize=200 is smaller than image_size=224"),
    "scale": ("cifar10", {"crop_scale": [0.5, 2.0]}, "", r"crop_scale=\[0.5, 2.0\] is no range"),
    "two": ("cifar10", {"crop_ratio": [2.0, 1.0], "std": [0.0]}, "", r"crop_ratio=\[2.0, 1.0\] is no.*std=\[0.0\]"),
    "mean": ("cifar10", {"mean": [0.1, 0.2]}, "", r"mean=\[0.1, 0.2\] does not fit channels=3"),
    "splits": ("cifar10", {"validation_split": "train"}, "", "are both 'train'; to validate on a part of it"),
    "unknown split": ("pets", {"train_split": "train"}, "train_split", "Input should be 'trainval' or 'test'"),
    "bad images": ("cifar10", {"on_bad_image": "skip"}, "on_bad_image", "'replace' or 'error'"),
}


@pytest.mark.parametrize(("name", "options", "key", "message"), OPTIONS.values(), ids=OPTIONS.keys())
def test_wrong_options(name, options, key, message):
    with pytest.raises(ValidationError, match=message) as info:
        DataOptions(name=name, path="x", options=options)
    assert info.value.errors()[0]["loc"] == ("options", *([key] if key else []))


@pytest.mark.parametrize("options", [{}, {"crop": "pad", "erasing": 0.2}, {"crop": "none", "color_jitter": 0.4}])
def test_images_in_memory_have_their_final_size(options):
    with pytest.raises(ValidationError, match=r"in_memory=True keeps images of the final size; add .*crop=none"):
        DataOptions(name="image_folder", path="x", options={"in_memory": True, **options})
