"""ImageNet in all its forms, with three classes instead of a thousand, and its reassessed labels."""

from __future__ import annotations

import json
import pickle
import shutil

import numpy as np
import pytest
import torch
from scipy.io import savemat

from tost.data import DataOptions, build_data, make_loader
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


def plain_tars(root):
    files.write(root / "train.tar", files.tar_of(train_files()))
    files.write(
        root / "val.tar", files.tar_of({f"val/{name}": data for name, data in sorted_validation_files().items()})
    )


def official_tars(root):
    inner = {
        f"{name}.tar": files.tar_of({key.split("/")[1]: data for key, data in train_files().items() if name in key})
        for name in CLASSES
    }
    files.write(root / "ILSVRC2012_img_train.tar", files.tar_of(inner))
    files.write(root / "ILSVRC2012_img_train_t3.tar", b"another task")
    files.write(root / "ILSVRC2012_img_val.tar", files.tar_of(validation_files()))
    kaggle_labels(root)


def shards(root):
    """As in timm/imagenet-1k-wds: a file with the label beside each image."""
    for split, content in (("train", train_files()), ("validation", sorted_validation_files())):
        members = {}
        for name, data in content.items():
            folder, _, file = name.partition("/")
            stem = file.removesuffix(".JPEG")
            members |= {f"{stem}.cls": str(CLASSES.index(folder)).encode(), f"{stem}.jpg": data, f"{stem}.json": b"{}"}
        items = list(members.items())
        for part, some in enumerate((items[:9], items[9:])):
            files.write(root / f"imagenet1k-{split}-{part:04d}.tar", files.tar_of(dict(some)))


def parquet(root):
    files.write_parquet(root / "data" / "train-00000-of-00001.parquet", [0, 0, 1, 1, 2, 2], size=(12, 10))
    paths = {k: f"ILSVRC2012_val_{k + 1:08d}_{CLASSES[label]}.JPEG" for k, label in enumerate(TRUTH)}
    files.write_parquet(root / "data" / "validation-00000-of-00001.parquet", list(TRUTH), file_names=paths)


def flat_folder(root):
    write_all(root / "train", train_files())
    write_all(root / "val", validation_files())
    files.write(root / "val.txt", "\n".join(f"{name} {TRUTH[k]}" for k, name in enumerate(validation_files())).encode())


def development_kit(root):
    write_all(root / "train", train_files())
    write_all(root / "val", validation_files())
    folder = root / "ILSVRC2012_devkit_t12" / "data"
    numbers = [2, 3, 1]  # of the classes, in an order of their own
    synsets = np.array(
        [(number, name, 0) for number, name in zip(numbers, CLASSES, strict=True)],
        dtype=[("ILSVRC2012_ID", object), ("WNID", object), ("num_children", object)],
    )
    truth = "\n".join(str(numbers[label]) for label in TRUTH)
    files.write(folder / "ILSVRC2012_validation_ground_truth.txt", truth.encode())
    savemat(folder / "meta.mat", {"synsets": synsets})


def kaggle_labels(root):
    lines = [f"ILSVRC2012_val_{k:08d},{CLASSES[label]} 1 2 3 4" for k, label in enumerate(TRUTH, 1)]
    files.write(root / "LOC_val_solution.csv", "\n".join(["ImageId,PredictionString", *lines]).encode())


FORMS = {
    "folders": (folders, "folder"),
    "plain tar files": (plain_tars, "tar"),
    "tar files in a tar file": (official_tars, "tar"),
    "shards": (shards, "tar"),
    "parquet": (parquet, "parquet"),
    "flat validation folder": (flat_folder, "folder"),
    "development kit": (development_kit, "folder"),
}
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
def test_reassessed_labels_follow_the_images(form, tmp_path):
    FORMS[form][0](tmp_path)
    sets = [[2], [], [1, 0], [1], [2, 0, 1], [0]]
    (tmp_path / "real.json").write_text(json.dumps(sets))
    validation = build(tmp_path, real_labels=str(tmp_path / "real.json")).validation
    whole = everything(validation)
    assert whole["real"].shape == (6, 3)
    assert whole["real"].dtype == torch.int64
    numbers = [number - (form != "parquet") for _, number in files.recognize(whole["inputs"])]
    assert sorted(numbers) == list(range(6))
    for row, number in zip(whole["real"].tolist(), numbers, strict=True):
        assert [label for label in row if label >= 0] == sets[number]
    assert "real" not in build(tmp_path, real_labels=str(tmp_path / "real.json")).train[0]
    assert torch.equal(validation[2]["real"], whole["real"][2])


def test_tar_files_are_read_by_workers(tmp_path):
    official_tars(tmp_path)
    train = build(tmp_path).train
    whole = train.gather(torch.arange(6))["inputs"]  # opens the file before the workers exist
    assert torch.equal(pickle.loads(pickle.dumps(train)).gather(torch.arange(6))["inputs"], whole)
    first, second = (list(make_loader(train, batch_size=2, seed=0, infinite=False, workers=n)) for n in (0, 2))
    assert all(torch.equal(a["inputs"], b["inputs"]) for a, b in zip(first, second, strict=True))


def test_the_copy_of_timm_scores_46837_images():
    class Names:
        def __len__(self):
            return 50_000

        def name(self, row):
            return self.file_name(row)

        def file_name(self, row):
            return f"val/x/ILSVRC2012_val_{row + 1:08d}.JPEG"

    labels = images_imagenet.real_labels("timm", Names())
    assert labels.shape[0] == 50_000
    assert (labels >= 0).any(dim=1).sum() == 46_837
    assert labels.max() == 999


def test_the_classes_are_those_of_imagenet():
    identifiers, names = imagenet_classes()
    assert (len(identifiers), len(set(names)) > 900) == (1000, True)
    assert list(identifiers) == sorted(identifiers), "folders in alphabetical order have these labels"
    assert (identifiers[0], names[0]) == ("n01440764", "tench, Tinca tinca")


NOTHING = files.tar_of({"README": b"nothing"})
WRONG = {
    "other classes": (
        folders,
        lambda root: (root / "val" / CLASSES[1]).rename(root / "val" / "n99999999"),
        "1 are missing .such as n02102040., 1 are unknown .such as n99999999.; for other",
    ),
    "no labels": (
        official_tars,
        lambda root: (root / "LOC_val_solution.csv").unlink(),
        "not sorted into classes, and there is no file with their labels; add one of LOC_val_sol",
    ),
    "too few labels": (
        flat_folder,
        lambda root: (root / "val.txt").write_text("ILSVRC2012_val_00000001.JPEG 1\n"),
        "5 images have no label, such as ILSVRC2012_val_00000002",
    ),
    "cut": (
        plain_tars,
        lambda root: files.write(root / "val.tar", (root / "val.tar").read_bytes()[:3000]),
        "val.tar cannot be read as a tar file: .*; it must be complete, and not compressed",
    ),
    "empty": (plain_tars, lambda root: files.write(root / "train.tar", NOTHING), "train.tar: no images are in it"),
    "nothing": (folders, shutil.rmtree, "data.path .* does not exist; it must point at a folder with train/<wnid>"),
}


@pytest.mark.parametrize(("write", "change", "message"), WRONG.values(), ids=WRONG.keys())
def test_what_is_wrong_is_said(write, change, message, tmp_path):
    write(tmp_path)
    change(tmp_path)
    with pytest.raises(ConfigError, match=message):
        build(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[[1], [2]]", "needs the original file names, such as ILSVRC2012_val_00000001.JPEG; 4 images have others"),
        ("[[1], [2000]]", "is something else; it must hold a list of labels per validation image"),
        ("{}", "is something else"),
        ("[", "cannot read .*real.json, it is not JSON"),
        (None, "cannot read .*real.json: .*No such file"),
    ],
)
def test_wrong_reassessed_labels_are_refused(content, message, tmp_path):
    folders(tmp_path)
    if content:
        (tmp_path / "real.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        build(tmp_path, real_labels=str(tmp_path / "real.json"))
