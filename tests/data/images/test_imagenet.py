"""ImageNet in all its forms, with three classes instead of a thousand, and its reassessed labels."""

from __future__ import annotations

import shutil

import pytest
import torch

from tost.data import DataOptions, build_data
from tost.data.images import published as images_imagenet
from tost.data.images.options import ImageNetOptions
from tost.data.images.published import imagenet_classes
from tost.errors import ConfigError

from . import files

CLASSES = ("n01440764", "n02102040", "n03888257")
NAMES = ("tench", "springer", "parachute")
# The labels of six validation images, in the order of their numbers.
TRUTH = (2, 0, 1, 1, 2, 0)


@pytest.fixture(autouse=True)
def three_classes(monkeypatch):
    monkeypatch.setattr(ImageNetOptions, "known_classes", 3)
    monkeypatch.setattr(images_imagenet, "imagenet_classes", lambda: (CLASSES, NAMES))


def train_files():
    return {f"{name}/{name}_{k}.JPEG": files.jpeg(c, k) for c, name in enumerate(CLASSES) for k in range(2)}


def validation_files():
    return {f"ILSVRC2012_val_{k:08d}.JPEG": files.jpeg(label, k) for k, label in enumerate(TRUTH, 1)}


def sorted_validation_files():
    return {f"{CLASSES[TRUTH[k]]}/{name}": data for k, (name, data) in enumerate(validation_files().items())}


def write_all(root, content):
    for name, data in content.items():
        files.write(root / name, data)


def folders(root):
    write_all(root / "train", train_files())
    write_all(root / "val", sorted_validation_files())


def parquet(root):
    files.write_parquet(root / "data" / "train-00000-of-00001.parquet", [0, 0, 1, 1, 2, 2], size=(12, 10))
    paths = {k: f"ILSVRC2012_val_{k + 1:08d}_{CLASSES[label]}.JPEG" for k, label in enumerate(TRUTH)}
    files.write_parquet(root / "data" / "validation-00000-of-00001.parquet", list(TRUTH), file_names=paths)


FORMS = {"folders": (folders, "folder"), "parquet": (parquet, "parquet")}
STILL = {"image_size": 8, "flip": 0.0, **files.PLAIN}


def build(root, **options):
    return build_data(DataOptions(name="imagenet", path=str(root), options={**STILL, **options}), 0)


def everything(dataset):
    return dataset.gather(torch.arange(len(dataset)))


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_images(form, tmp_path):
    write, layout = FORMS[form]
    write(tmp_path)
    bundle = build(tmp_path)
    assert (bundle.info.details["layout"], bundle.info.class_names) == (layout, NAMES)
    for dataset in (bundle.train, bundle.validation):
        whole = everything(dataset)
        assert len(whole["targets"]) == 6
        assert sorted(whole["targets"].tolist()) == [0, 0, 1, 1, 2, 2]
        found = files.recognize(whole["inputs"])
        assert [label for label, _ in found] == whole["targets"].tolist()
        assert len(set(found)) == 6


@pytest.mark.parametrize("form", FORMS)
def test_reassessed_labels_follow_the_images(form, tmp_path, monkeypatch):
    FORMS[form][0](tmp_path)
    sets = [[2], [], [1, 0], [1], [2, 0, 1], [0]]
    monkeypatch.setattr(images_imagenet, "_timm_labels", lambda: sets)
    bundle = build(tmp_path, real_labels="timm")
    validation = bundle.validation
    whole = everything(validation)
    assert whole["real"].shape == (6, 3)
    assert whole["real"].dtype == torch.int64
    numbers = [number - (form != "parquet") for _, number in files.recognize(whole["inputs"])]
    assert sorted(numbers) == list(range(6))
    for row, number in zip(whole["real"].tolist(), numbers, strict=True):
        assert [label for label in row if label >= 0] == sets[number]
    assert "real" not in bundle.train[0]
    assert torch.equal(validation[2]["real"], whole["real"][2])


def test_the_copy_of_timm_scores_46837_images():
    class Names:
        def __len__(self):
            return 50_000

        def name(self, row):
            return self.file_name(row)

        def file_name(self, row):
            return f"val/x/ILSVRC2012_val_{row + 1:08d}.JPEG"

    labels = images_imagenet.real_labels(Names())
    assert labels.shape[0] == 50_000
    assert (labels >= 0).any(dim=1).sum() == 46_837
    assert labels.max() == 999


def test_the_classes_are_those_of_imagenet():
    identifiers, names = imagenet_classes()
    assert (len(identifiers), len(set(names)) > 900) == (1000, True)
    assert list(identifiers) == sorted(identifiers), "folders in alphabetical order have these labels"
    assert (identifiers[0], names[0]) == ("n01440764", "tench, Tinca tinca")


WRONG = {
    "other classes": (
        folders,
        lambda root: (root / "val" / CLASSES[1]).rename(root / "val" / "n99999999"),
        "2 are missing or unknown, such as n02102040; for other classes use the data set image_folder",
    ),
    "nothing": (folders, shutil.rmtree, "data.path .* does not exist; it must point at a folder with train/<wnid>"),
}


@pytest.mark.parametrize(("write", "change", "message"), WRONG.values(), ids=WRONG.keys())
def test_what_is_wrong_is_said(write, change, message, tmp_path):
    write(tmp_path)
    change(tmp_path)
    with pytest.raises(ConfigError, match=message):
        build(tmp_path)


def test_reassessed_labels_need_the_original_names(tmp_path, monkeypatch):
    monkeypatch.setattr(images_imagenet, "_timm_labels", lambda: [[1], [2]])
    folders(tmp_path)
    with pytest.raises(ConfigError, match=r"needs the original file names, .*; 4 images have others"):
        build(tmp_path, real_labels="timm")
