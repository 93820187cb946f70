"""ListOps, pairs of papers and reviews as released, and what becomes of sequences: cut, ended, padded."""

from __future__ import annotations

import pickle
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.data.lra.files import PAIRS, write_listops, write_pairs
from tost.data import DataOptions, build_data, make_loader
from tost.data.lra.listops import SYMBOLS
from tost.data.lra.options import LraRetrievalOptions, LraTextOptions
from tost.data.lra.readers import Sequences, SequenceSource
from tost.errors import ConfigError


def build(name, path, **options):
    return build_data(DataOptions(name=name, path=str(path), options=options), seed=0)


def real(sample):
    """The ids of a sample without the padding."""
    return sample["inputs"][sample["mask"]].tolist()


def symbols(ids):
    return [(*SYMBOLS, "?", "END")[token] for token in ids]


def test_listops_keeps_the_brackets_and_drops_the_parentheses(tmp_path):
    bundle = build("lra_listops", write_listops(tmp_path / "listops-1000"))
    assert symbols(real(bundle.train[0])) == ["[MAX", "2", "9", "]", "END"]
    assert symbols(real(bundle.train[2])) == ["[SM", "7", "8", "[MIN", "4", "3", "]", "]", "END"]
    assert [int(bundle.train[row]["targets"]) for row in range(3)] == [9, 1, 8]
    assert bundle.info.vocab_size == 18
    assert bundle.train[0]["inputs"].shape == (2001,)


def test_the_inner_copy_of_the_release_counts(tmp_path):
    outer = tmp_path / "lra_release"
    write_listops(outer / "listops-1000", [("( ( ( [MAX 1 ) 1 ) ] )", 1)])
    write_listops(outer / "lra_release" / "listops-1000")
    for path in (tmp_path, outer, outer / "lra_release", outer / "lra_release" / "listops-1000"):
        assert len(build("lra_listops", path).train) == 3
    assert len(build("lra_listops", outer / "listops-1000").train) == 1


def test_carriage_returns_and_x_for_brackets(tmp_path):
    bundle = build("lra_listops", write_listops(tmp_path, [("( ( ( [MAX 2 ) 9 ) X )", 9)], end="\r\n"))
    assert symbols(real(bundle.train[0])) == ["[MAX", "2", "9", "]", "END"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("( ( ( [MAX 2 ) 9 ) ] )", r"basic_train\.tsv, line 2 has 1 columns; it must have two"),
        ("( ( ( [MAX 2 ) 9 ) ] )\t9\t9", "line 2 has 3 columns"),
        ("( ( ( [MAX 2 ) 9 ) ] )\t12", "line 2 has the value '12'; it must be a digit"),
        ("( ( ( [MAX 2 ) 9 ) ] )\t", "line 2 has the value ''; it must be a digit"),
        ("( ( ( [FIRST 2 ) 9 ) ] )\t2", "line 2 is no ListOps expression of .*: '. . . .FIRST"),
        ("( ( ( [MAX 2 ) 19 ) ] )\t9", "line 2 is no ListOps expression"),
        ("\t9", "line 2 is no ListOps expression"),
    ],
)
def test_bad_lines_are_named(tmp_path, row, message):
    write_listops(tmp_path)
    (tmp_path / "basic_train.tsv").write_text(f"Source\tTarget\n{row}\n")
    with pytest.raises(ConfigError, match=message):
        build("lra_listops", tmp_path)


def test_missing_and_wrong_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.path .*nowhere does not exist; it must point at lra_release, or at"):
        build("lra_listops", tmp_path / "nowhere")
    (tmp_path / "other").mkdir()
    with pytest.raises(
        ConfigError, match=r"has no basic_train\.tsv and no basic_val\.tsv, it has: other/; .* its folder listops-1000"
    ):
        build("lra_listops", tmp_path)
    write_listops(tmp_path / "listops-1000", splits=["train"])
    with pytest.raises(ConfigError, match=r"listops-1000 has no basic_val\.tsv, it has: basic_train\.tsv"):
        build("lra_listops", tmp_path)
    with pytest.raises(ConfigError, match="is a file; it must point at lra_release"):
        build("lra_listops", tmp_path / "listops-1000" / "basic_train.tsv")
    write_listops(tmp_path / "listops-1000")
    (tmp_path / "listops-1000" / "basic_train.tsv").write_text("a\tb\tc\n")
    with pytest.raises(ConfigError, match=r"begins with .*; it must begin with the line Source<tab>Target"):
        build("lra_listops", tmp_path)
    (tmp_path / "listops-1000" / "basic_train.tsv").write_text("Source\tTarget\n")
    with pytest.raises(ConfigError, match="holds a header and nothing else"):
        build("lra_listops", tmp_path)


@given(
    ids=st.lists(st.lists(st.integers(1, 255), max_size=12), min_size=2, max_size=4).filter(lambda ids: len(ids) != 3),
    length=st.integers(2, 9),
    eos=st.booleans(),
    keep=st.sampled_from(["start", "end"]),
    padding=st.sampled_from(["right", "left", "none"]),
    towers=st.sampled_from([1, 2]),
)
def test_sequences_are_cut_then_ended_then_padded_or_packed(ids, length, eos, keep, padding, towers):
    choice = {"length": length, "eos": eos, "keep": keep, "padding": padding}
    options = (LraRetrievalOptions if towers == 2 else LraTextOptions)(**choice)
    ends = np.cumsum([len(one) for one in ids])
    spans = np.stack((ends - [len(one) for one in ids], ends), axis=-1).reshape(-1, towers, 2)
    targets = torch.arange(len(spans))
    source = SequenceSource(np.array(list(chain(*ids)), dtype=np.uint8), spans, targets)
    batch = Sequences(source, targets, options).gather(targets)
    room = length - eos
    wanted = [(one[:room] if keep == "start" else one[-room:]) + [257] * eos for one in ids]
    assert torch.equal(batch["targets"], targets)
    if padding == "none":
        assert batch["inputs"].tolist() == [list(chain(*wanted))]
        assert batch["cu_seqlens"].tolist() == [0, *np.cumsum([len(one) for one in wanted])]
        assert batch["cu_seqlens"].dtype == torch.int32
        return
    assert batch["inputs"].shape == ((len(targets), 2, length) if towers == 2 else (len(targets), length))
    for row, mask, one in zip(*(batch[key].view(-1, length) for key in ("inputs", "mask")), wanted, strict=True):
        assert row[mask].tolist() == one
        assert (row[~mask] == 0).all()
        filled = [True] * len(one) + [False] * (length - len(one))
        assert mask.tolist() == filled[:: 1 if padding == "right" else -1]


def text(ids):
    """Bytes from ids, the end left out."""
    return bytes(token - 1 for token in ids if token < 257)


def test_pairs_have_no_header_and_no_quoting(tmp_path):
    bundle = build("lra_retrieval", write_pairs(tmp_path / "tsv_data"))
    assert len(bundle.train) == len(PAIRS)
    for row, (label, *_, first, second) in enumerate(PAIRS):
        sample = bundle.train[row]
        assert sample["inputs"].shape == sample["mask"].shape == (2, 4001)
        for tower, document in enumerate((first, second)):
            ids = sample["inputs"][tower][sample["mask"][tower]].tolist()
            assert text(ids) == document
            assert ids[-1] == 257
        assert int(sample["targets"]) == int(float(label))
    assert bundle.info.towers == 2
    assert bundle.info.model_options()["towers"] == 2
    assert bundle.info.vocab_size == 258


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ((b"1.0", b"a", b"b", b"text"), r"new_aan_pairs\.train\.tsv, line 4 has 4 columns; it must have 5"),
        ((b"2.0", b"a", b"b", b"c", b"d"), r"line 4 has the label '2\.0'; it must be 0\.0 or 1\.0"),
    ],
)
def test_bad_pairs_are_named(tmp_path, row, message):
    write_pairs(tmp_path, [*PAIRS, row])
    with pytest.raises(ConfigError, match=message):
        build("lra_retrieval", tmp_path)


@pytest.mark.parametrize("name", ["lra_listops", "lra_retrieval"])
def test_samples_reach_workers_unchanged(tmp_path, name):
    write_pairs(tmp_path)
    write_listops(tmp_path)
    train = build(name, tmp_path, length=60).train
    copy = pickle.loads(pickle.dumps(train))
    batches = [next(iter(make_loader(train, batch_size=3, seed=0, workers=workers))) for workers in (0, 1)]
    for other in (copy.gather(torch.arange(3)), train.gather(torch.arange(3))):
        assert all(torch.equal(other[key], train.gather(torch.arange(3))[key]) for key in other)
    assert all(torch.equal(batches[0][key], batches[1][key]) for key in batches[0])


REVIEWS = {"text": ["bad", "good A", "worse — é", "best"], "label": [0, 1, 0, 1]}
TEST = {"text": ["poor", "fine"], "label": [0, 1]}


def write_reviews(folder, train=REVIEWS, test=TEST):
    folder.mkdir(exist_ok=True)
    for split, table in (("train", train), ("test", test)):
        pq.write_table(pa.table(table), folder / f"{split}.parquet")
    return folder


def build_reviews(path, **options):
    return build_data(DataOptions(name="lra_text", path=str(path), options=options), seed=0)


def gathered(dataset):
    return dataset.gather(torch.arange(len(dataset)))


def reviews(dataset):
    return [
        bytes(token - 1 for token in ids if 0 < token < 257).decode() for ids in gathered(dataset)["inputs"].tolist()
    ]


def test_reviews_are_bytes_and_the_test_set_validates(tmp_path):
    bundle = build_reviews(write_reviews(tmp_path))
    assert reviews(bundle.train) == REVIEWS["text"]
    assert gathered(bundle.train)["targets"].tolist() == REVIEWS["label"]
    assert sorted(reviews(bundle.validation)) == sorted(TEST["text"])
    assert bundle.train[1]["inputs"][:8].tolist() == [104, 112, 112, 101, 33, 66, 257, 0]  # "A" is 66, then the end
    assert bundle.info.details["layout"] == "parquet"
    assert bundle.info.class_names == ("neg", "pos")


def test_presets_cut_as_the_code_bases_do(tmp_path):
    long = {"text": ["x" * 5000, "y"], "label": [0, 1]}
    write_reviews(tmp_path, long, long)
    for preset, length, ended in (("official", 1000, False), ("skyformer", 4000, False), ("paper", 4001, True)):
        bundle = build_reviews(tmp_path, preset=preset)
        ids = bundle.train[0]["inputs"]
        assert ids.shape == (length,)
        assert ids.unique().tolist() == ([121, 257] if ended else [121])
        assert bundle.info.details["cut"] == 2


@pytest.mark.parametrize("hold_out", [0, 200])
def test_the_first_batches_of_a_validation_hold_both_classes(tmp_path, hold_out):
    """Published files are sorted by label, and an evaluation may end after a few batches."""
    many = {"text": [f"review {number}" for number in range(400)], "label": [0] * 200 + [1] * 200}
    write_reviews(tmp_path, many, many)
    validation = build_reviews(tmp_path, hold_out=hold_out).validation
    first = validation.gather(torch.arange(64))
    assert 16 < int(first["targets"].sum()) < 48
    assert torch.equal(first["targets"], build_reviews(tmp_path, hold_out=hold_out).validation.gather(
        torch.arange(64))["targets"])  # fmt: skip
    few = build_reviews(tmp_path, hold_out=hold_out, limit=10)
    assert sorted(reviews(few.validation)) == sorted(set(reviews(few.validation)) & set(reviews(validation)))
    assert gathered(few.validation)["targets"].sum() == 5 or hold_out


def test_held_out_reviews_leave_the_training_set(tmp_path):
    many = {"text": [f"review {number}" for number in range(20)], "label": [0, 1] * 10}
    bundle = build_reviews(write_reviews(tmp_path, many), hold_out=5)
    assert (len(bundle.train), len(bundle.validation)) == (15, 5)
    assert sorted(reviews(bundle.train) + reviews(bundle.validation)) == sorted(many["text"])
    assert sorted(reviews(build_reviews(tmp_path, hold_out=5, validation_split="test").validation)) == sorted(
        TEST["text"]
    )
    assert reviews(build_reviews(tmp_path, hold_out=5, split_seed=1).validation) != reviews(bundle.validation)
    with pytest.raises(ConfigError, match=r"hold_out=20 leaves nothing to train on; .* has 20 training reviews"):
        build_reviews(tmp_path, hold_out=20)


def test_the_published_folders(tmp_path):
    for split in ("train", "test"):
        for name in ("neg", "pos", "unsup"):
            folder = tmp_path / "aclImdb" / split / name
            folder.mkdir(parents=True)
            for number in range(2):
                (folder / f"{number}_7.txt").write_bytes(f"{split} {name} {number}\r\n".encode())
    bundle = build_reviews(tmp_path)
    assert reviews(bundle.train) == [f"train {name} {number}\r\n" for name in ("neg", "pos") for number in range(2)]
    assert sorted(gathered(bundle.validation)["targets"].tolist()) == [0, 0, 1, 1]
    assert bundle.info.details["layout"] == "folders"
    for file in (tmp_path / "aclImdb" / "train" / "pos").iterdir():
        file.unlink()
    with pytest.raises(ConfigError, match=r"pos holds no \.txt files"):
        build_reviews(tmp_path)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"review": ["x"], "label": [0]}, r"train\.parquet has no column 'text'; its columns are: review, label"),
        ({"text": [7], "label": [0]}, "holds no reviews, or some that are no text"),
    ],
)
def test_bad_tables_are_refused(tmp_path, table, message):
    with pytest.raises(ConfigError, match=message):
        build_reviews(write_reviews(tmp_path, table))


def test_missing_reviews_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere does not exist; it must point at the folder of train\.parquet"):
        build_reviews(tmp_path / "nowhere")
    with pytest.raises(
        ConfigError, match=r"holds no reviews of the split 'train', it has: nothing; data\.path must point"
    ):
        build_reviews(tmp_path)
    write_reviews(tmp_path)
    (tmp_path / "train.parquet").write_bytes(b"PAR1 cut off")
    with pytest.raises(ConfigError, match=r"train\.parquet cannot be read as a parquet file"):
        build_reviews(tmp_path)
