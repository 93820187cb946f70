"""A bad image does not end a run, and does not change what is scored; many of them do end it."""

from __future__ import annotations

import logging
import random

import numpy as np
import pytest
import torch

from tost.data import DataOptions, build_data, make_evaluation_loader, make_loader
from tost.data.images.transforms import BadImageError

from . import files

STILL = {"flip": 0.0, "crop": "none", "image_size": 8, "num_classes": 3, **files.PLAIN}


def build(root, **options):
    return build_data(DataOptions(name="image_folder", path=str(root), options={**STILL, **options}), 0)


@pytest.fixture
def folder(tmp_path):
    return files.write_folder(tmp_path)


def damage(folder, *names, split="train"):
    for name in names:
        (folder / split / name.partition("_")[0] / f"{name}.jpg").write_bytes(b"no image")


def test_the_neighbour_takes_the_place_of_a_bad_image(folder, caplog):
    whole = build(folder).train.gather(torch.arange(9))
    damage(folder, "bee_1")
    train = build(folder).train
    with caplog.at_level(logging.WARNING, logger="tost.data"):
        found = train.gather(torch.arange(9))
        train.gather(torch.arange(9) + 9)
    expected = torch.tensor([0, 1, 2, 3, 5, 5, 6, 7, 8])
    assert torch.equal(found["inputs"], whole["inputs"][expected])
    assert torch.equal(found["targets"], whole["targets"][expected])
    (record,) = caplog.records  # once, though it was met twice
    assert record.getMessage().startswith(f"{folder}/train/bee/bee_1.jpg cannot be read as an image: unknown format; ")
    assert record.getMessage().endswith("; its neighbour is taken instead")


def test_the_last_image_is_replaced_by_the_first(folder):
    damage(folder, "cat_2")
    assert build(folder).train[8]["targets"] == 0


def test_the_replacement_is_the_same_for_any_number_of_workers(folder):
    damage(folder, "ant_2")
    options = {"crop": "resized", "flip": 0.5}
    streams = [iter(make_loader(build(folder, **options).train, batch_size=4, seed=1, workers=n)) for n in (0, 2)]
    for _ in range(5):
        first, second = (next(stream) for stream in streams)
        assert torch.equal(first["inputs"], second["inputs"])
        assert torch.equal(first["targets"], second["targets"])
    for stream in streams:
        stream.close()


def test_a_blank_image_is_scored_with_the_label_of_the_bad_one(folder, caplog):
    damage(folder, "bee_1", split="val")
    batch = next(iter(make_evaluation_loader(build(folder).validation, batch_size=9)))
    assert batch["targets"].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2], "the number of scored images stays the same"
    assert (batch["inputs"][4] == 0).all()
    assert "bee_1.jpg cannot be read as an image: unknown format" in caplog.text
    assert "; a blank image is scored instead" in caplog.text


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_image_is_an_error_if_that_is_wanted(folder, split, workers):
    damage(folder, "bee_1", split=split)
    bundle = build(folder, on_bad_image="error")
    dataset = bundle.train if split == "train" else bundle.validation
    with pytest.raises(BadImageError) as info:
        list(make_evaluation_loader(dataset, batch_size=9, workers=workers))
    assert str(info.value) == (
        f"{folder}/{split}/bee/bee_1.jpg cannot be read as an image: unknown format; repair or remove it, or set "
        "data.options.on_bad_image to replace to go on without it."
    )


@pytest.mark.parametrize("split", ["train", "val"])
def test_many_bad_images_end_the_run(folder, split):
    damage(folder, "ant_0", "bee_1", split=split)
    bundle = build(folder)
    dataset = bundle.train if split == "train" else bundle.validation
    with pytest.raises(BadImageError, match="2 of 9 images cannot be read, more than one in 100; repair") as info:
        dataset.gather(torch.arange(9))
    assert "ant_0.jpg" in str(info.value)
    assert "bee_1.jpg" in str(info.value)


def test_a_share_of_bad_images_is_tolerated(tmp_path, caplog):
    files.write_folder(tmp_path, each=100)
    damage(tmp_path, "ant_0", "bee_1", "cat_5")
    train = build(tmp_path).train
    assert len(train.gather(torch.arange(300))["targets"]) == 300
    assert len(caplog.records) == 3
    damage(tmp_path, "cat_50")
    with pytest.raises(BadImageError, match="4 of 300 images cannot be read"):
        train.gather(torch.arange(300))


def test_only_the_first_are_named(tmp_path, caplog):
    from tost.data.images import dataset as images_dataset

    files.write_folder(tmp_path, each=100)
    damage(tmp_path, "ant_0", "bee_1", "cat_5")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(images_dataset, "_SHOWN", 2)
        build(tmp_path).train.gather(torch.arange(300))
    assert len(caplog.records) == 2
    assert caplog.records[1].getMessage().endswith("instead; further ones are not named")


def test_a_folder_that_went_away_is_noticed_at_once(folder, monkeypatch):
    monkeypatch.setattr("tost.data.images.dataset._TOLERATED", 1)  # as if there were a million images
    train = build(folder).train
    (folder / "train").rename(folder / "elsewhere")
    with pytest.raises(BadImageError, match=r"no image can be read any more; the last that failed:\n .*No such file"):
        train[3]


def test_a_link_to_nowhere_is_a_bad_image(folder, caplog):
    target = folder / "train" / "ant" / "ant_1.jpg"
    target.unlink()
    target.symlink_to(folder / "nowhere.jpg")
    assert build(folder).train[1]["targets"] == 0
    assert "ant_1.jpg cannot be opened: No such file or directory" in caplog.text


def test_images_in_memory_are_replaced_when_they_are_read(folder, caplog):
    damage(folder, "bee_1")
    damage(folder, "cat_0", split="val")
    bundle = build(folder, in_memory=True)
    assert files.recognize(bundle.train.gather(torch.arange(3, 6))["inputs"]) == [(1, 0), (1, 2), (1, 2)]
    assert bundle.validation[6]["targets"] == 2
    assert (bundle.validation[6]["inputs"] == 0).all()
    assert len(caplog.records) == 2


def test_a_bad_image_leaves_the_generators_alone(folder):
    damage(folder, "bee_1")
    train = build(folder, crop="resized", flip=0.5).train
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    train.gather(torch.arange(9))
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before


def test_a_small_set_names_its_bad_image(tmp_path):
    for split in ("train", "test"):
        files.write_parquet(tmp_path / f"{split}.parquet", [1, 2], columns=("img", "label"))
    table = files.pq.read_table(tmp_path / "test.parquet")
    rows = table.column("img").to_pylist()
    rows[1]["bytes"] = rows[1]["bytes"][:50]
    table = table.set_column(0, "img", files.pa.array(rows))
    files.pq.write_table(table, tmp_path / "test.parquet")
    with pytest.raises(BadImageError, match=r"test\.parquet: row 1 cannot be read as an image"):
        build_data(DataOptions(name="cifar10", path=str(tmp_path)), 0)
