"""Reviews as bytes and as characters, from parquet files, folders and `datasets`."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tost.data import DataOptions, build_data
from tost.errors import ConfigError

TRAIN = {"text": ["bad", "good A", "worse — é", "best"], "label": [0, 1, 0, 1]}
TEST = {"text": ["poor", "fine"], "label": [0, 1]}


def write(folder, train=TRAIN, test=TEST):
    folder.mkdir(exist_ok=True)
    for split, table in (("train", train), ("test", test)):
        pq.write_table(pa.table(table), folder / f"{split}.parquet")
    return folder


def build(path, **options):
    return build_data(DataOptions(name="lra_text", path=str(path), options=options), seed=0)


def rows(dataset):
    return dataset.gather(torch.arange(len(dataset)))


def texts(dataset):
    return [bytes(token - 1 for token in ids if 0 < token < 257).decode() for ids in rows(dataset)["inputs"].tolist()]


def test_reviews_are_bytes_and_the_test_set_validates(tmp_path):
    bundle = build(write(tmp_path))
    assert texts(bundle.train) == TRAIN["text"]
    assert rows(bundle.train)["targets"].tolist() == TRAIN["label"]
    assert texts(bundle.validation) == TEST["text"]
    assert bundle.train[1]["inputs"][:8].tolist() == [104, 112, 112, 101, 33, 66, 257, 0]  # "A" is 66, then the end
    assert bundle.info.details["layout"] == "parquet"
    assert bundle.info.class_names == ("neg", "pos")


def test_presets_cut_as_the_code_bases_do(tmp_path):
    long = {"text": ["x" * 5000, "y"], "label": [0, 1]}
    write(tmp_path, long, long)
    for preset, length, ended in (("official", 1000, False), ("skyformer", 4000, False), ("paper", 4001, True)):
        bundle = build(tmp_path, preset=preset)
        ids = bundle.train[0]["inputs"]
        assert ids.shape == (length,)
        assert ids.unique().tolist() == ([121, 257] if ended else [121])
        assert bundle.info.details["cut"] == 2


def test_characters(tmp_path):
    bundle = build(write(tmp_path), unit="chars", vocab_size=40, length=12, eos=False)
    ids = rows(bundle.train)["inputs"]
    assert (ids[2, :9] != 1).all(), "every training character is known"
    assert len(set(ids[2, :9].tolist())) == 8, "a character of three bytes is one id"
    assert ids.max() < 40
    strange = write(tmp_path / "strange", test={"text": ["ж"], "label": [0]})
    assert rows(build(strange, unit="chars", vocab_size=40).validation)["inputs"][0, :3].tolist() == [1, 2, 0]


def test_preset_s4_ends_every_review(tmp_path):
    bundle = build(write(tmp_path), preset="s4", min_frequency=1)
    sample = bundle.train[0]
    assert sample["inputs"].shape == (4096,)
    assert sample["inputs"][sample["mask"]].tolist()[3] == 2


def test_held_out_reviews_leave_the_training_set(tmp_path):
    many = {"text": [f"review {number}" for number in range(20)], "label": [0, 1] * 10}
    bundle = build(write(tmp_path, many), hold_out=5)
    assert (len(bundle.train), len(bundle.validation)) == (15, 5)
    assert sorted(texts(bundle.train) + texts(bundle.validation)) == sorted(many["text"])
    assert texts(build(tmp_path, hold_out=5, validation_split="test").validation) == TEST["text"]
    assert texts(build(tmp_path, hold_out=5, split_seed=1).validation) != texts(bundle.validation)
    with pytest.raises(ConfigError, match=r"hold_out=20 leaves nothing to train on; .* has 20 training reviews"):
        build(tmp_path, hold_out=20)


def test_the_published_folders(tmp_path):
    for split in ("train", "test"):
        for name in ("neg", "pos", "unsup"):
            folder = tmp_path / "aclImdb" / split / name
            folder.mkdir(parents=True)
            for number in range(2):
                (folder / f"{number}_7.txt").write_bytes(f"{split} {name} {number}\r\n".encode())
    bundle = build(tmp_path)
    assert texts(bundle.train) == [f"train {name} {number}\r\n" for name in ("neg", "pos") for number in range(2)]
    assert rows(bundle.validation)["targets"].tolist() == [0, 0, 1, 1]
    assert bundle.info.details["layout"] == "folders"
    for file in (tmp_path / "aclImdb" / "train" / "pos").iterdir():
        file.unlink()
    with pytest.raises(ConfigError, match=r"pos holds no \.txt files, it has: nothing"):
        build(tmp_path)


def test_datasets_loads_what_the_hub_would(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    import datasets

    monkeypatch.setattr(
        datasets,
        "load_dataset",
        lambda name, config, split: datasets.Dataset.from_dict({"a/imdb": {"train": TRAIN, "test": TEST}}[name][split]),
    )
    bundle = build("hub:a/imdb")
    assert texts(bundle.train) == TRAIN["text"]
    assert bundle.info.details["layout"] == "hub"
    with pytest.raises(ConfigError, match=r"b/imdb cannot be loaded from the hub: .*check the name and the connection"):
        build("hub:b/imdb")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"review": ["x"], "label": [0]}, r"train\.parquet has no column 'text'; its columns are: review, label"),
        ({"text": ["x"], "label": [2]}, "has the label 2; labels are 0"),
        ({"text": ["x"], "label": [None]}, "has the label None; labels are 0"),
        ({"text": [7], "label": [0]}, "reviews that are no text"),
    ],
)
def test_bad_tables_are_refused(tmp_path, table, message):
    with pytest.raises(ConfigError, match=message):
        build(write(tmp_path, table))


def test_missing_reviews_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere does not exist; it must point at the folder of train\.parquet"):
        build(tmp_path / "nowhere")
    with pytest.raises(
        ConfigError, match=r"holds no reviews of the split 'train', it has: nothing; data\.path must point"
    ):
        build(tmp_path)
    write(tmp_path)
    (tmp_path / "train.parquet").write_bytes(b"PAR1 cut off")
    with pytest.raises(ConfigError, match=r"train\.parquet cannot be read as a parquet file"):
        build(tmp_path)
