"""Images as sequences of pixels: CIFAR-10 in grey, Pathfinder as released."""

from __future__ import annotations

import io
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from tests.data.lra.files import pixels_of, write_pathfinder
from tost.data import DataOptions, build_data, make_loader
from tost.errors import ConfigError, StorageError


def build(name, path, **options):
    return build_data(DataOptions(name=name, path=str(path), options=options), seed=0)


def rows(dataset):
    return dataset.gather(torch.arange(len(dataset)))


@pytest.fixture(scope="module")
def colour():
    return np.random.default_rng(0).integers(0, 256, (20, 32, 32, 3), dtype=np.uint8)


@pytest.fixture
def cifar(tmp_path, colour):
    """Twenty training images, ten of them for testing too; label = number modulo 10."""
    for split, images in (("train", colour), ("test", colour[:10])):
        encoded = []
        for image in images:
            buffer = io.BytesIO()
            Image.fromarray(image).save(buffer, "PNG")
            encoded.append({"bytes": buffer.getvalue(), "path": None})
        table = pa.table({"img": encoded, "label": [number % 10 for number in range(len(images))]})
        pq.write_table(table, tmp_path / f"{split}.parquet")
    return tmp_path


def test_the_official_images_are_tokens_in_order(cifar, colour):
    bundle = build("lra_image", cifar, preset="official")
    train, validation = rows(bundle.train), rows(bundle.validation)
    assert (len(bundle.train), len(bundle.validation)) == (18, 2)
    assert train["inputs"].dtype == torch.int64
    grey = np.rint(colour.astype(np.float64) @ [0.2989, 0.5870, 0.1140]).reshape(20, -1)
    both = torch.cat([train["inputs"], validation["inputs"]])
    assert np.array_equal(both.numpy(), grey)
    assert torch.equal(train["mask"], train["inputs"] != 0)
    assert train["targets"].tolist() == [*range(10), *range(8)]


def test_the_papers_images_are_numbers_in_the_order_of_torch(cifar, colour):
    bundle = build("lra_image", cifar)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(42)).tolist()
    grey = np.stack([np.asarray(Image.fromarray(image).convert("L")) for image in colour]).reshape(20, -1)
    wanted = (grey[order] / 255 - 0.48) / 0.24
    found = torch.cat([rows(bundle.train)["inputs"], rows(bundle.validation)["inputs"]])
    assert found.shape == (20, 1024, 1)
    assert np.allclose(found[..., 0].numpy(), wanted, atol=1e-5)
    assert "mask" not in bundle.train[0]
    assert rows(bundle.validation)["targets"].tolist() == [row % 10 for row in order[18:]]


def test_images_in_folders(tmp_path, colour):
    for split in ("train", "test"):
        for label in range(10):
            folder = tmp_path / split / f"class{label}"
            folder.mkdir(parents=True)
            for number in (label, label + 10):
                Image.fromarray(colour[number]).save(folder / f"{number}.png")
    bundle = build("lra_image", tmp_path, preset="official")
    assert rows(bundle.train)["targets"].tolist() == sorted([*range(10)] * 2)[:18]


def numbers(dataset):
    """Which images a data set holds, by the value that all pixels of one have."""
    inputs = rows(dataset)["inputs"]
    assert (inputs == inputs[:, :1]).all()
    return inputs[:, 0].tolist()


def test_metadata_is_read_in_numeric_order(tmp_path):
    write_pathfinder(tmp_path / "lra_release")
    bundle = build("lra_pathfinder", tmp_path, preset="official")
    everything = [int(pixels_of(batch, number, 1)[0, 0]) for batch in (2, 10) for number in range(10)]
    assert numbers(bundle.train) == everything[:16]
    assert numbers(bundle.validation) == everything[16:18]
    assert (
        numbers(build("lra_pathfinder", tmp_path, preset="official", validation_split="test").validation)
        == (everything[18:])
    )
    assert rows(bundle.train)["targets"].tolist() == [0, 1] * 8


def test_a_shuffled_split_is_that_of_random_split(tmp_path):
    write_pathfinder(tmp_path, batches=(2,), each=25)
    parts = torch.utils.data.random_split(range(25), [21, 2, 2], generator=torch.Generator().manual_seed(42))
    val, test = (build("lra_pathfinder", tmp_path, validation_split=split) for split in ("val", "test"))
    assert val.train.rows.tolist() == list(parts[0])
    assert val.validation.rows.tolist() == list(parts[1])
    assert test.validation.rows.tolist() == list(parts[2])


def test_empty_images_are_left_out(tmp_path):
    folder = write_pathfinder(tmp_path, difficulty="easy")
    (folder / "imgs" / "2" / "sample_3.png").write_bytes(b"")
    bundle = build("lra_pathfinder", tmp_path, preset="official", difficulty="easy")
    assert bundle.info.details["images"] == 19
    assert bundle.info.details["empty"] == 1
    assert 23 not in numbers(bundle.train)


def test_zeros_are_masked_where_the_code_base_does(tmp_path):
    folder = write_pathfinder(tmp_path)
    picture = np.zeros((32, 32), dtype=np.uint8)
    picture[0, :5] = [1, 0, 255, 0, 3]
    Image.fromarray(picture).save(folder / "imgs" / "2" / "sample_0.png")
    first = build("lra_pathfinder", tmp_path, preset="official").train[0]
    assert first["mask"].nonzero().flatten().tolist() == [0, 2, 4]
    assert first["inputs"][:5].tolist() == [1, 0, 255, 0, 3]
    mega = build("lra_pathfinder", tmp_path, preset="mega", split="order").train[0]
    assert "mask" not in mega
    assert torch.allclose(mega["inputs"][:3, 0], torch.tensor([2 / 255 - 1, -1, 1]))
    s4 = build("lra_pathfinder", tmp_path, preset="s4", split="order").train[0]
    assert torch.allclose(s4["inputs"][:3, 0], torch.tensor([1 / 255, 0, 1]))


@pytest.mark.parametrize("in_memory", [True, False])
def test_images_are_the_same_kept_or_not_and_in_workers(tmp_path, in_memory):
    write_pathfinder(tmp_path)
    train = build("lra_pathfinder", tmp_path, in_memory=in_memory).train
    first = rows(train)
    for again in (rows(train), rows(pickle.loads(pickle.dumps(train)))):
        assert all(torch.equal(first[key], again[key]) for key in first)
    assert train.gather(torch.arange(0))["inputs"].shape == (0, 1024)
    plain, loaded = (next(iter(make_loader(train, batch_size=4, seed=0, workers=workers))) for workers in (0, 1))
    assert torch.equal(plain["inputs"], loaded["inputs"])


def test_kept_images_are_read_once(tmp_path):
    folder = write_pathfinder(tmp_path)
    kept, read_again = (build("lra_pathfinder", tmp_path, in_memory=keep).train for keep in (True, False))
    first = rows(kept)["inputs"]
    for file in folder.glob("imgs/*/*.png"):
        Image.fromarray(np.full((32, 32), 7, dtype=np.uint8)).save(file)
    assert torch.equal(rows(kept)["inputs"], first)
    assert set(numbers(read_again)) == {7}


def test_damaged_images_are_named(tmp_path):
    folder = write_pathfinder(tmp_path)
    file = folder / "imgs" / "2" / "sample_1.png"
    file.write_bytes(file.read_bytes()[:60])
    bundle = build("lra_pathfinder", tmp_path, preset="official")
    with pytest.raises(StorageError, match=r"imgs/2/sample_1\.png cannot be read as an image"):
        bundle.train[1]
    Image.fromarray(pixels_of(2, 1, 64)).save(file)
    with pytest.raises(ConfigError, match=r"sample_1\.png has 64 x 64 pixels, but this data set has images of 32 x 32"):
        bundle.train[1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"imgs/2 sample_0.png 0 1\n", r"2\.npy, line 1 has 4 fields: .*; it must have 11"),
        (b"imgs/2 sample_0.png 0 yes 1.0 14 4 2 0.5 1 1\n", r"11 fields: 'imgs/2 sample_0.png 0 yes .* label 0 or 1"),
        (b"imgs/2 sample_99.png 0 1 1.0 14 4 2 0.5 1 1\n", r"names imgs/2/sample_99\.png, but .* does not exist"),
        (b"imgs/7 sample_0.png 0 1 1.0 14 4 2 0.5 1 1\n", r"names images in .*imgs/7, which is no folder"),
        (b"\0/7 sample_0.png 0 1 1.0 14 4 2 0.5 1 1\n", r"which is no folder \(embedded null byte\)"),
        (
            b"imgs" + b"[" * 3000 + b"/7 sample_0.png 0 1 1.0 14 4 2 0.5 1 1\n",
            r"names images in .*\[\[, which is no folder",
        ),
        (b"\xff\xfe\x00", "is no text"),
        (b"\x93NUMPY\x01\x00", "is no text"),
    ],
)
def test_bad_metadata_is_named(tmp_path, content, message):
    folder = write_pathfinder(tmp_path)
    (folder / "metadata" / "2.npy").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        build("lra_pathfinder", tmp_path)


def test_missing_pathfinder_files_are_named(tmp_path):
    with pytest.raises(
        ConfigError,
        match=r"has no curv_contour_length_14, it has: nothing; .* lra_release, or at its folder pathfinder32",
    ):
        build("lra_pathfinder", tmp_path)
    folder = write_pathfinder(tmp_path)
    with pytest.raises(ConfigError, match="pathfinder32 has no curv_baseline, it has: curv_contour_length_14/"):
        build("lra_pathfinder", tmp_path, difficulty="easy")
    for file in (folder / "metadata").iterdir():
        file.rename(file.with_name("combined.npy"))
    with pytest.raises(ConfigError, match=r"metadata holds no metadata; files called 0\.npy, 1\.npy and so on"):
        build("lra_pathfinder", tmp_path)
