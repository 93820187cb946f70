"""Wrong folders, wrong counts and wrong options: what was found, what was expected."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from tost.data import DataOptions, build_data
from tost.errors import ConfigError

from . import files


def build(name, path, **options):
    return build_data(DataOptions(name=name, path=str(path), options=options), 0)


@pytest.fixture
def folder(tmp_path):
    return files.write_folder(tmp_path / "data" / "things")


PLACES = {
    "parent": ("..", r"data has no folder 'train', it has: things/; .*; did you mean .*/data/things\?"),
    "split": ("train", r"train has no folder 'train', it has: ant/, bee/, cat/; .*; did you mean .*/data/things\?"),
    "class": ("train/ant", r"ant has no folder 'train', it has: ant_0.jpg, .*; did you mean .*/data/things\?"),
    "file": ("train/ant/ant_0.jpg", r"ant_0.jpg is a file; it must point at the folder that holds <split>/<class>/<im"),
    "nowhere": ("nowhere", "nowhere does not exist; it must point at the folder that holds <split>/<class>/<image>"),
}


@pytest.mark.parametrize(("place", "message"), PLACES.values(), ids=PLACES.keys())
def test_a_path_that_points_elsewhere(folder, place, message):
    with pytest.raises(ConfigError, match=message):
        build("image_folder", (folder / place).resolve(), num_classes=3)


def test_a_folder_of_something_else(tmp_path):
    for name in range(12):
        files.write(tmp_path / f"file{name:02d}.txt", b"x")
    with pytest.raises(
        ConfigError, match=r"it has: file00.txt, .*file07.txt and 4 more; .*or name the splits with data"
    ):
        build("image_folder", tmp_path, num_classes=3)
    files.write(tmp_path / "a.jpg", b"x")
    with pytest.raises(ConfigError, match="this one holds images itself"):
        build("image_folder", tmp_path, num_classes=3)


def test_the_first_error_about_classes_without_splits_names_all_that_is_needed(folder):
    classes = folder.parent / "classes"
    (folder / "train").rename(classes)
    with pytest.raises(ConfigError, match=r"has no folder .train., it has: ant/, bee/, cat/; .*3 classes") as first:
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


def test_a_class_without_images(folder):
    files.write(folder / "train" / "dog" / "notes.txt", b"x")
    with pytest.raises(ConfigError, match=r"train/dog holds no images, it has: notes.txt; a class needs at least one"):
        build("image_folder", folder, num_classes=4)


def test_hidden_files_are_no_classes_and_no_images(folder):
    files.write(folder / "train" / ".cache" / "x.jpg", b"x")
    files.write(folder / "train" / "ant" / "._ant_0.jpg", b"x")
    files.write(folder / "train" / "ant" / "more" / "deep.JPG", files.jpeg(0, 1))
    assert len(build("image_folder", folder, num_classes=3).train) == 10


def test_other_names_of_the_validation_split(tmp_path):
    files.write_folder(tmp_path, splits=("train", "validation"))
    assert len(build("image_folder", tmp_path, num_classes=3).validation) == 9
    with pytest.raises(ConfigError, match="has no folder 'test'"):
        build("image_folder", tmp_path, num_classes=3, validation_split="test")


def test_splits_with_different_classes(folder):
    (folder / "val" / "cat").rename(folder / "val" / "dog")
    with pytest.raises(ConfigError, match=r"different classes: only 'train' has cat; only 'val' has dog\."):
        build("image_folder", folder, num_classes=3)


def test_another_number_of_classes(folder):
    with pytest.raises(
        ConfigError, match=r"has 3 classes \(ant, bee, cat\), but 5 are expected; correct data.options.num"
    ):
        build("image_folder", folder, num_classes=5)
    files.write_pets(folder / "pets", breeds=5)
    with pytest.raises(ConfigError, match=r"has 5 classes .*, but 37 are expected; this is another data set"):
        build("pets", folder / "pets")


def test_labels_out_of_range(tmp_path):
    files.write_parquet(tmp_path / "train.parquet", [0, 1])
    files.write_parquet(tmp_path / "test.parquet", [0, 2])
    with pytest.raises(
        ConfigError, match=r"split 'test' of .* has labels from 0 to 2, but 2 classes are numbered 0 to 1"
    ):
        build("image_parquet", tmp_path, num_classes=2)


def test_holding_out_everything(folder):
    with pytest.raises(ConfigError, match=r"hold_out=9 leaves nothing to train on; the split in .* has 9 images"):
        build("image_folder", folder, num_classes=3, hold_out=9)


def test_one_parquet_file_needs_images_to_be_held_out(tmp_path):
    path = files.write_parquet(tmp_path / "all.parquet", [0, 1, 0, 1])
    with pytest.raises(ConfigError, match=r"all.parquet is one file; .*set data.options.hold_out"):
        build("image_parquet", path, num_classes=2)
    bundle = build("image_parquet", path, num_classes=2, hold_out=2)
    assert (len(bundle.train), len(bundle.validation)) == (2, 2)


def break_columns(root):
    files.write_parquet(root / "train.parquet", [0, 1], columns=("picture", "label"))


def break_labels(root):
    files.write_parquet(root / "train.parquet", [0.5, 1.5], columns=("image", "label"))


def break_shards(root):
    files.write_parquet(root / "train-00001-of-00003.parquet", [0, 1])


def break_bytes(root):
    files.write(root / "train.parquet", b"PAR1 no more")


def leave_labels_out(root):
    table = files.pq.read_table(files.write_parquet(root / "train.parquet", [0, 1]))
    files.pq.write_table(table.set_column(1, "label", files.pa.array([0, None])), root / "train.parquet")


PARQUET = {
    "columns": (
        break_columns,
        r"no column 'image' or 'img', its columns are: picture, label; name it with data.options.im",
    ),
    "labels": (break_labels, "column 'label' of .* holds double; labels are whole numbers or texts"),
    "shards": (break_shards, "holds 1 of 3 parquet files of a split; missing are the numbers 0, 2"),
    "bytes": (break_bytes, "cannot be read"),
    "empty labels": (leave_labels_out, "has 1 empty labels; every image needs one"),
    "nothing": (
        lambda root: None,
        "has no parquet files of the split 'train', it has: nothing; data.path must point at",
    ),
}


@pytest.mark.parametrize(("write", "message"), PARQUET.values(), ids=PARQUET.keys())
def test_wrong_parquet_files(write, message, tmp_path):
    write(tmp_path)
    with pytest.raises(ConfigError, match=message):
        build("image_parquet", tmp_path, num_classes=2)


def test_rows_without_an_image_are_bad_images(tmp_path, caplog):
    for split in ("train", "test"):
        files.write_parquet(tmp_path / f"{split}.parquet", [0, 1])
        table = files.pq.read_table(tmp_path / f"{split}.parquet")
        rows = [{"bytes": None, "path": "elsewhere.jpg"}, table.column("image")[1].as_py()]
        files.pq.write_table(table.set_column(0, "image", files.pa.array(rows)), tmp_path / f"{split}.parquet")
    assert build("image_parquet", tmp_path, num_classes=2, image_size=8).train[0]["targets"] == 1
    assert "train.parquet: row 0 cannot be opened: it holds no image" in caplog.text


def cut(path):
    path.write_bytes(path.read_bytes()[:-5])


IDX = {
    "missing": (
        lambda root: (root / "train-labels-idx1-ubyte").unlink(),
        "has no train-labels-idx1-ubyte or .*gz, it has: t10k",
    ),
    "cut": (
        lambda root: cut(root / "t10k-images-idx3-ubyte"),
        r"\[12, 28, 28\] values are stated, but it holds 9403",
    ),
    "labels for images": (
        lambda root: (root / "train-labels-idx1-ubyte").rename(root / "train-images-idx3-ubyte"),
        "is no idx file, or damaged or incomplete: 3 dimensions of bytes begin with 00000803, not 00000801",
    ),
    "damaged gzip": (
        lambda root: (root / "train-labels-idx1-ubyte").write_bytes(
            files.gzip.compress(files.idx(files.np.arange(12, dtype=files.np.uint8)))[:-12]
        ),
        "is no idx file, or damaged or incomplete: Compressed file ended",
    ),
    "other count": (
        lambda root: (root / "train-labels-idx1-ubyte").write_bytes(files.idx(files.np.zeros(5, files.np.uint8))),
        "holds 12 images but 5 labels of the split 'train'",
    ),
}


@pytest.mark.parametrize(("change", "message"), IDX.values(), ids=IDX.keys())
def test_wrong_idx_files(change, message, tmp_path):
    files.write_fashion_mnist(tmp_path, packed=False)
    change(tmp_path)
    with pytest.raises(ConfigError, match=message):
        build("fashion_mnist", tmp_path)


def test_pickles_are_not_read(tmp_path):
    files.write(tmp_path / "cifar-10-batches-py" / "data_batch_1", b"cposix\nsystem\n(S'touch broken'\ntR.")
    with pytest.raises(ConfigError, match=r"whose files are pickles: .*not read. Use parquet files .*data_batch_1.bin"):
        build("cifar10", tmp_path)
    with pytest.raises(ConfigError, match="whose files are pickles"):
        build("cifar10", tmp_path / "cifar-10-batches-py")
    files.write(tmp_path / "cifar-100-python" / "train", b"")
    with pytest.raises(ConfigError, match=r"Use parquet files .*train.bin"):
        build("cifar100", tmp_path)


def test_wrong_cifar_files(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no CIFAR-10, it has: nothing; data.path must point at"):
        build("cifar10", tmp_path)
    files.write_cifar_binary(tmp_path)
    cut(tmp_path / "data_batch_3.bin")
    with pytest.raises(
        ConfigError, match=r"data_batch_3.bin has 12287 bytes, which is no whole number of records of 3073"
    ):
        build("cifar10", tmp_path)
    (tmp_path / "data_batch_3.bin").unlink()
    with pytest.raises(ConfigError, match=r"holds only 4 of data_batch_1.bin, .*; the others are missing"):
        build("cifar10", tmp_path)
    files.write_parquet(tmp_path / "train.parquet", [1, 2], size=(30, 32))
    files.write_parquet(tmp_path / "test.parquet", [1, 2])
    with pytest.raises(ConfigError, match=r"row 0 has 30 x 32 pixels, but this data set has images of 32 x 32"):
        build("cifar10", tmp_path)


def test_wrong_flowers(tmp_path):
    with pytest.raises(ConfigError, match=r"has no jpg and no imagelabels.mat and no setid.mat, it has: nothing"):
        build("flowers102", tmp_path)
    files.write_flowers102(tmp_path / "flowers-102")
    assert len(build("flowers102", tmp_path).train) == 6
    (tmp_path / "flowers-102" / "jpg" / "image_00007.jpg").unlink()
    with pytest.raises(
        ConfigError, match=r"lacks 1 of the \d+ images of the split, such as image_00007.jpg; the download"
    ):
        build("flowers102", tmp_path, train_split="trainval", validation_split="test")
    files.write(tmp_path / "flowers-102" / "setid.mat", b"MATLAB 5.0 but no more")
    with pytest.raises(ConfigError, match=r"setid.mat cannot be read as a MATLAB file with trnid"):
        build("flowers102", tmp_path)


def test_wrong_pets(tmp_path):
    files.write_pets(tmp_path)
    files.write(tmp_path / "annotations" / "test.txt", b"Abyssinian_1 one\n")
    with pytest.raises(ConfigError, match=r"test.txt, line 1: 'Abyssinian_1 one' is no entry of an image, such as"):
        build("pets", tmp_path)
    (tmp_path / "annotations" / "test.txt").unlink()
    with pytest.raises(
        ConfigError, match=r"has no annotations/test.txt, it has: annotations/, images/; data.path must"
    ):
        build("pets", tmp_path)


OPTIONS = {
    "size": ("cifar10", {"image_size": [32]}, "image_size", "needs a number of pixels from 1 to 16384, or"),
    "size, text": ("cifar10", {"image_size": "32"}, "image_size", "'32' given; needs a number"),
    "size, boolean": ("cifar10", {"image_size": [32, True]}, "image_size", "needs a number"),
    "policy": ("cifar10", {"auto_augment": "torchvision-rand-n2-m99"}, "auto_augment", "m: magnitude up to 30"),
    "resize": ("imagenet", {"eval_resize": 0.875}, "eval_resize", "0.875 given; needs ratio, squash, or a number"),
    "too small": ("imagenet", {"eval_resize": 200}, "", "eval_resize=200 is smaller than image_size=224"),
    "jitter": ("imagenet", {"color_jitter": 0.4, "auto_augment": "rand-m9"}, "", "color_jitter=0.4 has no effect"),
    "scale": ("cifar10", {"crop_scale": [0.5, 2.0]}, "", r"crop_scale=\[0.5, 2.0\] is no range"),
    "ratio": ("cifar10", {"crop_ratio": [2.0, 1.0]}, "", r"crop_ratio=\[2.0, 1.0\] is no range"),
    "mean": ("cifar10", {"mean": [0.1, 0.2]}, "", r"mean=\[0.1, 0.2\] does not fit channels=3"),
    "deviation": ("cifar10", {"std": [0.0]}, "", r"std=\[0.0\] divides the pixels"),
    "splits": ("cifar10", {"validation_split": "train"}, "", "are both 'train'; to validate on a part of it"),
    "unknown split": ("pets", {"train_split": "train"}, "train_split", "Input should be 'trainval' or 'test'"),
    "real": (
        "imagenet",
        {"real_labels": "timm", "hold_out": 5},
        "",
        "real_labels=timm belong to the validation images",
    ),
    "memory": ("image_folder", {"in_memory": True}, "", "in_memory=True keeps images of the final size"),
    "bad images": ("cifar10", {"on_bad_image": "skip"}, "on_bad_image", "'replace' or 'error'"),
    "unknown": ("cifar10", {"flips": 0.1}, "flips", "Extra inputs are not permitted"),
}


@pytest.mark.parametrize(("name", "options", "key", "message"), OPTIONS.values(), ids=OPTIONS.keys())
def test_wrong_options(name, options, key, message):
    with pytest.raises(ValidationError, match=message) as info:
        DataOptions(name=name, path="x", options=options)
    assert info.value.errors()[0]["loc"] == ("options", *([key] if key else []))


def test_the_number_of_classes_must_be_given():
    for name in ("image_folder", "image_parquet"):
        with pytest.raises(
            ConfigError, match=r"data.options.num_classes is missing; .*set it to the number of class fol"
        ):
            DataOptions(name=name, path="x").shape()
        assert DataOptions(name=name, path="x", options={"num_classes": 7}).shape().num_classes == 7


def test_classes_are_counted_from_the_folders(folder):
    files.write(folder / "train" / ".cache" / "x.jpg", b"x")
    files.write(folder / "train" / "notes.txt", b"x")
    assert DataOptions(name="image_folder", path=str(folder)).shape().num_classes == 3
    assert len(build("image_folder", folder).train) == 9
    chosen = DataOptions(
        name="image_folder", path=str(folder), options={"train_split": "val", "validation_split": "train"}
    )
    assert chosen.shape().num_classes == 3
    given = DataOptions(name="image_folder", path=str(folder), options={"num_classes": 7})
    assert given.shape().num_classes == 7, "what is given is not replaced, but compared when the data is read"
    with pytest.raises(ConfigError, match=r"correct data\.options\.num_classes"):
        build("image_folder", folder, num_classes=7)


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({}, "add data.options.crop=none"),
        ({"crop": "pad", "erasing": 0.2}, "add data.options.erasing=0,"),
        ({"color_jitter": 0.4, "auto_augment": None}, "add data.options.crop=none data.options.color_jitter=0"),
    ],
    ids=["crop", "erasing", "two"],
)
def test_images_in_memory_say_what_to_add(folder, options, remedy):
    with pytest.raises(ValidationError) as info:
        DataOptions(name="image_folder", path=str(folder), options={"in_memory": True, **options})
    message = str(info.value)
    assert remedy in message
    assert "or leave in_memory out" in message
    typed = dict(pair.split("=") for pair in message.partition("; add ")[2].partition(", or")[0].split())
    read = {"none": "none", "0": 0.0, "null": None}
    mended = {key.removeprefix("data.options."): read[value] for key, value in typed.items()}
    DataOptions(name="image_folder", path=str(folder), options={"in_memory": True, **options, **mended})
