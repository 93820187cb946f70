"""Published files: every image with its own label, in the right split; a bad image does not end a run."""

from __future__ import annotations

import logging
import pickle

import numpy as np
import pytest
import torch

from tost.data import DataOptions, build_data, find_data, list_data, make_evaluation_loader, make_loader
from tost.data.images.transforms import BadImageError

from . import files

WEBP = {"form": "WEBP"}


def fashion(root, **settings):
    return files.write_fashion_mnist(root, **settings)


def cifar10_parquet(root):
    for split in ("train", "test"):
        files.write_parquet(root / f"{split}.parquet", [3, 9, 0, 3, 7], columns=("img", "label"), **WEBP)
    return root


def cifar100_parquet(root):
    for split in ("train", "test"):
        path = root / "data" / f"{split}-00000-of-00001.parquet"
        files.write_parquet(path, [99, 5, 0, 42], columns=("img", "fine_label"), names=[f"t{at}" for at in range(100)])
    return root


def parquet(root):
    for split in ("train", "test"):
        for at in range(2):
            name = f"{split}-{at:05d}-of-00002.parquet"
            files.write_parquet(root / name, [2, 0, 1, 1], size=(12, 10), names=["ant", "bee", "cat"])
    return root


SETS = {
    "fashion_mnist": ("fashion_mnist", fashion, {}),
    "fashion_mnist, not packed": ("fashion_mnist", lambda root: fashion(root, packed=False), {}),
    "cifar10, parquet": ("cifar10", cifar10_parquet, {}),
    "cifar10, binary": ("cifar10", lambda root: files.write_cifar_binary(root / "cifar-10-batches-bin").parent, {}),
    "cifar10, one by one": ("cifar10", cifar10_parquet, {"crop": "resized", "erasing": 0.0, "image_size": 16}),
    "cifar10, binary, one by one": ("cifar10", files.write_cifar_binary, {"crop": "resized", "image_size": [8, 12]}),
    "cifar100, parquet": ("cifar100", cifar100_parquet, {}),
    "cifar100, binary": ("cifar100", lambda root: files.write_cifar_binary(root, classes=100), {}),
    "flowers102": ("flowers102", lambda root: files.write_flowers102(root)[0], {"image_size": 16}),
    "pets": ("pets", files.write_pets, {"image_size": 16, "eval_resize": "ratio"}),
    "image_folder": ("image_folder", files.write_folder, {"image_size": 16, "num_classes": 3}),
    "image_folder, in memory": (
        "image_folder",
        files.write_folder,
        {"image_size": 8, "num_classes": 3, "in_memory": True, "crop": "pad", "eval_resize": 12},
    ),
    "image_parquet": ("image_parquet", parquet, {"image_size": 16, "num_classes": 3}),
}
STILL = {"flip": 0.0, "crop_scale": [1.0, 1.0], "padding": 0, **files.PLAIN}


def build(case, root, seed=0, **options):
    name, write, settings = SETS[case]
    write(root)
    return build_data(DataOptions(name=name, path=str(root), options={**settings, **options}), seed)


def everything(dataset):
    return dataset.gather(torch.arange(len(dataset)))


def test_every_image_set_is_tested():
    tested = {name for name, _, _ in SETS.values()}
    assert tested | {"imagenet"} == {name for name in list_data() if find_data(name).task == "image_classification"}


@pytest.mark.parametrize("case", SETS)
def test_samples_are_as_announced(case, tmp_path):
    name, _, settings = SETS[case]
    bundle = build(case, tmp_path)
    shape = DataOptions(name=name, path=str(tmp_path), options=settings).shape()
    assert bundle.info.model_options() == shape.model_options()
    assert (bundle.info.name, len(bundle.info.fingerprint)) == (name, 64)
    assert bundle.info.class_names == () or len(bundle.info.class_names) == shape.num_classes
    assert bundle.info.details["train_images"] == len(bundle.train)
    for dataset in (bundle.train, bundle.validation):
        whole = everything(dataset)
        assert whole["inputs"].shape == (len(dataset), shape.in_chans, *shape.image_size)
        assert (whole["inputs"].dtype, whole["targets"].dtype) == (torch.float32, torch.int64)
        assert torch.equal(dataset[len(dataset) - 1]["inputs"], whole["inputs"][-1])
        assert dataset.gather(torch.empty(0, dtype=torch.int64))["inputs"].shape == (0, *whole["inputs"].shape[1:])
        for index in (-1, len(dataset)):
            with pytest.raises(IndexError):
                dataset[index]
    assert bundle.train.draws
    assert not bundle.validation.draws


@pytest.mark.parametrize("case", SETS)
def test_every_image_keeps_its_label(case, tmp_path):
    bundle = build(case, tmp_path, **STILL)
    for dataset in (bundle.train, bundle.validation):
        whole = everything(dataset)
        if "fashion" in case:
            assert torch.equal((whole["inputs"].mean(dim=(1, 2, 3)) * 255 / 20).round().long(), whole["targets"])
            continue
        found = files.recognize(whole["inputs"])
        assert [label for label, _ in found] == [label % 12 for label in whole["targets"].tolist()]
        assert len({number for _, number in found}) > 1 or "pets" in case


@pytest.mark.parametrize("case", SETS)
def test_data_sets_can_be_sent_to_workers(case, tmp_path):
    train = build(case, tmp_path).train
    numbers = torch.tensor([0, 2, len(train) + 1])
    sent = pickle.loads(pickle.dumps(train)).gather(numbers)
    assert torch.equal(sent["inputs"], train.gather(numbers)["inputs"])
    plain, loaded = (next(iter(make_loader(train, batch_size=3, seed=0, workers=workers))) for workers in (0, 1))
    assert torch.equal(plain["inputs"], loaded["inputs"])


@pytest.mark.parametrize("case", ["fashion_mnist", "cifar10, parquet", "pets", "image_folder", "image_parquet"])
def test_the_fingerprint_tells_data_apart(case, tmp_path):
    first, second = build(case, tmp_path / "a"), build(case, tmp_path / "b", seed=1)
    assert first.info == second.info, "neither the place nor the seed is part of the data"
    assert build(case, tmp_path / "a", limit=2).info.fingerprint != first.info.fingerprint
    other = {
        "fashion_mnist": lambda root: fashion(root, count=13),
        "cifar10, parquet": lambda root: files.write_parquet(root / "test.parquet", [1, 2], columns=("img", "label")),
        "pets": lambda root: files.write(root / "images" / "breed0_2.jpg", files.jpeg(3, 3, (90, 90))),
        "image_folder": lambda root: files.write(root / "val" / "bee" / "more.jpg", files.jpeg(1, 1)),
        "image_parquet": lambda root: files.write_parquet(root / "test-00001-of-00002.parquet", [1, 2, 0]),
    }[case]
    name, _, settings = SETS[case]
    other(tmp_path / "a")
    changed = build_data(DataOptions(name=name, path=str(tmp_path / "a"), options=settings), 0)
    assert changed.info.fingerprint != first.info.fingerprint


@pytest.mark.parametrize(
    ("case", "file", "mark"),
    [("image_folder", "train/bee/bee_1.jpg", b"JFIF"), ("image_parquet", "test-*.parquet", b"IHDR")],
)
def test_the_fingerprint_follows_the_content_at_equal_sizes(case, file, mark, tmp_path):
    before = build(case, tmp_path).info.fingerprint
    path = next(tmp_path.glob(file))
    path.write_bytes(path.read_bytes().replace(mark, mark[::-1], 1))
    name, _, settings = SETS[case]
    assert build_data(DataOptions(name=name, path=str(tmp_path), options=settings), 0).info.fingerprint != before


def test_flowers_are_in_the_official_splits(tmp_path):
    _, labels, thirds = files.write_flowers102(tmp_path)
    keys = {"train": ["trnid"], "val": ["valid"], "trainval": ["trnid", "valid"], "test": ["tstid"]}
    for split, parts in keys.items():
        other = "test" if split != "test" else "train"
        options = {"validation_split": split, "train_split": other, "image_size": 8, **STILL}
        whole = everything(
            build_data(DataOptions(name="flowers102", path=str(tmp_path), options=options), 0).validation
        )
        numbers = np.sort(np.concatenate([thirds[part] for part in parts]))
        assert whole["targets"].tolist() == (labels[numbers - 1] - 1).tolist()
        assert [number for _, number in files.recognize(whole["inputs"])] == [number % 10 for number in numbers]


def test_class_names_are_known(tmp_path):
    assert build("cifar10, binary", tmp_path / "a").info.class_names[3] == "cat"
    assert build("cifar100, binary", tmp_path / "b").info.class_names[99] == "thing99"
    assert build("cifar100, parquet", tmp_path / "c").info.class_names[99] == "t99"
    assert build("fashion_mnist", tmp_path / "d").info.class_names[9] == "Ankle boot"
    assert build("image_folder", tmp_path / "e").info.class_names == ("ant", "bee", "cat")


def test_texts_are_labels_too(tmp_path):
    for split in ("train", "test"):
        files.write_parquet(tmp_path / split / "0.parquet", [1, 0, 2, 1], columns=("picture", "kind"))
        table = files.pq.read_table(tmp_path / split / "0.parquet")
        kinds = files.pa.array(["bee", "ant", "cat", "bee"])
        files.pq.write_table(table.set_column(1, "kind", kinds), tmp_path / split / "0.parquet")
    options = {"num_classes": 3, "image_column": "picture", "label_column": "kind", "image_size": 8}
    bundle = build_data(DataOptions(name="image_parquet", path=str(tmp_path), options=options), 0)
    assert bundle.info.class_names == ("ant", "bee", "cat")
    assert everything(bundle.validation)["targets"].tolist() == [1, 0, 2, 1]


def test_large_parquet_files_are_mapped(tmp_path, monkeypatch):
    import datasets

    from tost.data.images import sources

    monkeypatch.setattr(sources, "_IN_MEMORY", 0)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    (tmp_path / "files").mkdir()
    bundle = build("image_parquet", tmp_path / "files", **STILL)
    whole = everything(bundle.validation)
    assert [label for label, _ in files.recognize(whole["inputs"])] == whole["targets"].tolist() == [2, 0, 1, 1] * 2
    assert any((tmp_path / "cache").rglob("*.arrow"))


def test_images_that_are_held_out_are_not_trained_on(tmp_path):
    bundle = build("image_folder", tmp_path, hold_out=4, **STILL)
    train, held = (files.recognize(everything(part)["inputs"]) for part in (bundle.train, bundle.validation))
    assert (len(train), len(held)) == (5, 4)
    assert len({*train, *held}) == 9, "together they are the training split"
    assert {label for label, _ in held} == {0, 1, 2}, "every class is there"
    again = build("image_folder", tmp_path, seed=5, hold_out=4, **STILL)
    assert files.recognize(everything(again.validation)["inputs"]) == held


def test_data_without_splits(tmp_path):
    files.write_folder(tmp_path, splits=("only",))
    for at in range(2):
        files.write_parquet(tmp_path / "tables" / f"part{at}.parquet", [0, 1, 2, 1])
    for name, place, split, count in (("image_folder", "only", ".", 9), ("image_parquet", "tables", "*", 8)):
        options = {"num_classes": 3, "hold_out": 3, "train_split": split, "image_size": 8}
        bundle = build_data(DataOptions(name=name, path=str(tmp_path / place), options=options), 0)
        assert (len(bundle.train), len(bundle.validation)) == (count - 3, 3)
        assert len(set(everything(bundle.validation)["targets"].tolist())) > 1


def test_grey_images_can_have_three_channels_and_colour_images_one(tmp_path):
    one = everything(build("fashion_mnist", tmp_path / "a", **files.PLAIN).validation)["inputs"]
    three = everything(build("fashion_mnist", tmp_path / "a", channels=3, **files.PLAIN).validation)["inputs"]
    assert torch.equal(three, one.expand(-1, 3, -1, -1))
    for case in ("cifar10, parquet", "cifar10, binary", "image_folder", "cifar10, one by one"):
        grey = everything(build(case, tmp_path / case, channels=1, **files.PLAIN).validation)
        red, green, blue = files.colour(int(grey["targets"][0]), 0)
        assert grey["inputs"].shape[1] == 1
        assert grey["inputs"][0].mean() * 255 == pytest.approx(0.299 * red + 0.587 * green + 0.114 * blue, abs=2)


AS_THEY_ARE = {"flip": 0.0, "crop": "none", "image_size": 8, "num_classes": 3, **files.PLAIN}


def build_folder(root, **options):
    return build_data(DataOptions(name="image_folder", path=str(root), options={**AS_THEY_ARE, **options}), 0)


@pytest.fixture
def folder(tmp_path):
    return files.write_folder(tmp_path)


def damage(folder, *names, split="train"):
    for name in names:
        (folder / split / name.partition("_")[0] / f"{name}.jpg").write_bytes(b"no image")


def test_the_neighbour_takes_the_place_of_a_bad_image(folder, caplog):
    whole = build_folder(folder).train.gather(torch.arange(9))
    damage(folder, "bee_1")
    train = build_folder(folder).train
    with caplog.at_level(logging.WARNING, logger="tost.data"):
        found = train.gather(torch.arange(9))
        train.gather(torch.arange(9) + 9)
    expected = torch.tensor([0, 1, 2, 3, 5, 5, 6, 7, 8])
    assert torch.equal(found["inputs"], whole["inputs"][expected])
    assert torch.equal(found["targets"], whole["targets"][expected])
    (record,) = caplog.records  # once, though it was met twice
    assert record.getMessage().startswith(f"{folder}/train/bee/bee_1.jpg cannot be read as an image: unknown format; ")
    assert record.getMessage().endswith("; its neighbour is taken instead")


def test_the_replacement_is_the_same_for_any_number_of_workers(folder):
    damage(folder, "ant_2")
    train = build_folder(folder, crop="resized", flip=0.5).train
    plain, loaded = (list(make_loader(train, batch_size=4, seed=1, workers=n, infinite=False)) for n in (0, 2))
    assert all(torch.equal(a[key], b[key]) for a, b in zip(plain, loaded, strict=True) for key in a)


def test_a_blank_image_is_scored_with_the_label_of_the_bad_one(folder, caplog):
    damage(folder, "bee_1", split="val")
    batch = next(iter(make_evaluation_loader(build_folder(folder).validation, batch_size=9)))
    assert batch["targets"].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2], "the number of scored images stays the same"
    assert (batch["inputs"][4] == 0).all()
    assert "bee_1.jpg cannot be read as an image: unknown format" in caplog.text
    assert "; a blank image is scored instead" in caplog.text


@pytest.mark.parametrize(("split", "workers"), [("train", 1), ("val", 0)])
def test_a_bad_image_is_an_error_if_that_is_wanted(folder, split, workers):
    damage(folder, "bee_1", split=split)
    bundle = build_folder(folder, on_bad_image="error")
    dataset = bundle.train if split == "train" else bundle.validation
    with pytest.raises(BadImageError) as info:
        list(make_evaluation_loader(dataset, batch_size=9, workers=workers))
    assert str(info.value).startswith(f"{folder}/{split}/bee/bee_1.jpg cannot be read as an image: unknown format; ")
    assert str(info.value).endswith("set data.options.on_bad_image to replace to continue without it.")


def test_many_bad_images_end_an_evaluation(folder):
    damage(folder, "ant_0", "bee_1", split="val")
    with pytest.raises(BadImageError, match=r"2 of 9 .*, more than one in 100; repair[\s\S]*ant_0.jpg[\s\S]*bee_1.jpg"):
        build_folder(folder).validation.gather(torch.arange(9))


def test_a_share_of_bad_images_is_tolerated(tmp_path, caplog):
    files.write_folder(tmp_path, each=100)
    damage(tmp_path, "ant_0", "bee_1", "cat_5")
    train = build_folder(tmp_path).train
    assert len(train.gather(torch.arange(300))["targets"]) == 300
    assert len(caplog.records) == 3
    damage(tmp_path, "cat_50")
    with pytest.raises(BadImageError, match="4 of 300 images cannot be read"):
        train.gather(torch.arange(300))


def test_images_in_memory_are_replaced_when_they_are_read(folder, caplog):
    damage(folder, "bee_1")
    damage(folder, "cat_0", split="val")
    bundle = build_folder(folder, in_memory=True)
    assert files.recognize(bundle.train.gather(torch.arange(3, 6))["inputs"]) == [(1, 0), (1, 2), (1, 2)]
    assert bundle.validation[6]["targets"] == 2
    assert (bundle.validation[6]["inputs"] == 0).all()
    assert len(caplog.records) == 2
