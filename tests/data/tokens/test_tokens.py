"""Prepared folders: reading them, training on them, and noticing that they are damaged."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.data.text.samples import DOCUMENTS, make, write_jsonl, write_tokenizer
from tost.data import DataOptions, build_data, make_loader, tokenizer_of
from tost.data.prepare import check_folder
from tost.data.tokens.options import FileRecord, ShardRecord
from tost.data.tokens.reader import TokenArray, check_tokenizer, open_tokens
from tost.errors import ConfigError, StorageError


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    place = tmp_path_factory.mktemp("prepared")
    source = write_jsonl(place / "source.jsonl", DOCUMENTS * 3)
    return make(place / "out", source=str(source), shard_bytes=400, validation=0.3)


@pytest.fixture
def folder(tmp_path):
    source = write_jsonl(tmp_path / "source.jsonl")
    tokenizer = str(write_tokenizer(tmp_path / "bpe"))
    return make(tmp_path / "out", source=str(source), shard_bytes=400, tokenizer=tokenizer, validation=0.3)


def data(folder, **options):
    return DataOptions(name="tokens", path=str(folder.path), options={"length": 16, **options})


@given(
    shards=st.lists(st.lists(st.integers(0, 65535), max_size=6), min_size=1, max_size=6),
    start=st.integers(-40, 40),
    stop=st.integers(-40, 40),
)
def test_tokens_read_like_one_array(tmp_path_factory, shards, start, stop):
    place = tmp_path_factory.mktemp("shards")
    nothing = FileRecord(file="none", size=0, sha256="")
    records = []
    for number, ids in enumerate(shards):
        file = FileRecord(file=f"{number}.bin", size=2 * len(ids), sha256="")
        np.array(ids, dtype="<u2").tofile(place / file.file)
        records.append(ShardRecord(tokens=len(ids), documents=0, data=file, lengths=nothing))
    array = TokenArray(place, records, "uint16")
    whole = [token for ids in shards for token in ids]
    assert len(array) == len(whole)
    assert array[start:stop].tolist() == whole[start:stop]
    assert array.windows(np.arange(len(whole)), 1).flatten().tolist() == whole


def test_documents_lie_where_offsets_say(prepared):
    split = prepared.split("train")
    assert split.documents[0] == 0
    assert split.documents[-1] == split.num_tokens == len(split.tokens)
    assert split.record.documents == len(split.documents) - 1
    assert len(split.record.shards) > 3


def test_windows_at_random_places(prepared):
    bundle = build_data(data(prepared, windows=7), seed=5)
    whole = np.asarray(prepared.split("train").tokens[:]).astype(np.int64)
    assert len(bundle.train) == 7
    batch = bundle.train.gather(torch.arange(200))  # draw numbers go on beyond the samples of an epoch
    starts = bundle.train.starts(torch.arange(200))
    assert 0 <= starts.min() <= starts.max() < len(whole) - 16
    assert len(set(starts.tolist())) > 100
    for row, start in enumerate(starts.tolist()):
        assert batch["inputs"][row].tolist() == whole[start : start + 16].tolist()
        assert batch["targets"][row].tolist() == whole[start + 1 : start + 17].tolist()
    assert batch["inputs"].dtype == batch["targets"].dtype == torch.int64
    other = build_data(data(prepared, windows=7), seed=6)
    assert not torch.equal(other.train.starts(torch.arange(9)), starts[:9])


@pytest.mark.parametrize("mode", ["windows", "pass"])
def test_documents_are_kept_apart(prepared, mode):
    sets = build_data(data(prepared, mode=mode, length=50, separate_documents=True), seed=0)
    joined = build_data(data(prepared, mode=mode, length=50), seed=0).train
    documents = open_tokens(prepared.path).split("train").documents
    batch, plain = (each.gather(torch.arange(len(joined))) for each in (sets.train, joined))
    assert torch.equal(batch["inputs"], plain["inputs"])
    places = sets.train.starts(torch.arange(len(joined)))[:, None] + torch.arange(50)
    for row, place in ((row, place) for row in range(len(places)) for place in range(50)):
        document = int(batch["segment_ids"][row, place])
        at = int(places[row, place])
        assert documents[document] <= at < documents[document + 1]
        target = -100 if at + 1 == documents[document + 1] else plain["targets"][row, place]
        assert batch["targets"][row, place] == target
    assert (batch["segment_ids"][:, 0] != batch["segment_ids"][:, -1]).any(), "windows hold several documents"
    assert "segment_ids" in sets.validation[0]


def test_a_pass_takes_every_token_once(prepared):
    bundle = build_data(data(prepared, mode="pass"), seed=0)
    whole = np.asarray(prepared.split("train").tokens[:]).tolist()
    count = (len(whole) - 1) // 16
    assert len(bundle.train) == count
    batches = list(make_loader(bundle.train, batch_size=3, seed=0, infinite=False))
    rows = [row for batch in batches for row in batch["inputs"].tolist()]
    assert sorted(rows) == sorted(whole[start : start + 16] for start in range(0, 16 * count, 16))
    in_order = bundle.validation.gather(torch.arange(len(bundle.validation)))["targets"].flatten().tolist()
    held_out = np.asarray(prepared.split("validation").tokens[:]).tolist()
    assert in_order == held_out[1 : 1 + len(in_order)]


@pytest.mark.parametrize("mode", ["windows", "pass"])
def test_position_is_saved(prepared, mode):
    train = build_data(data(prepared, mode=mode), seed=0).train
    loader = make_loader(train, batch_size=3, seed=0)
    batches = iter(loader)
    for _ in range(len(train) // 3 + 2):  # into the second epoch
        next(batches)
    again = make_loader(pickle.loads(pickle.dumps(train)), batch_size=3, seed=0)
    again.load_state_dict(loader.state_dict())
    assert torch.equal(next(batches)["inputs"], next(iter(again))["inputs"])


def test_what_is_sent_to_a_process_is_small(prepared):
    train = build_data(data(prepared), seed=0).train
    train.gather(torch.arange(30))  # maps the files
    assert len(pickle.dumps(train)) < 4000


def test_the_model_is_sized_by_the_folder(folder):
    assert data(folder).shape().vocab_size == folder.vocab_size == 400
    assert data(folder, vocab_size=448).shape().model_options() == {"max_length": 16, "vocab_size": 448}
    info = build_data(data(folder), seed=0).info
    assert info.details["tokenizer_fingerprint"] == folder.tokenizer_fingerprint
    with pytest.raises(ConfigError, match=r"vocab_size=100, but .* has 400 different ids"):
        build_data(data(folder, vocab_size=100), seed=0)


def test_only_the_shape_may_be_asked_for_before_the_folder_and_its_splits_are_there(folder, tmp_path):
    options = DataOptions(name="tokens", path=str(tmp_path / "later"), options={"vocab_size": 50304})
    assert options.shape().vocab_size == 50304
    for read in (lambda: build_data(options, seed=0), DataOptions(name="tokens", path=options.path).shape):
        with pytest.raises(ConfigError, match=r"later does not exist; make it with `tost data prepare NAME"):
            read()
    with pytest.raises(ConfigError, match=r"too few for data\.options\.length=100000"):
        build_data(data(folder, length=100_000), seed=0)
    with pytest.raises(ConfigError, match="no split 'dev'; it has: train, validation"):
        build_data(data(folder, validation_split="dev"), seed=0)


def test_the_tokenizer_of_a_configuration(folder):
    assert tokenizer_of(data(folder)).fingerprint == folder.tokenizer_fingerprint
    assert tokenizer_of(DataOptions(name="stdlib_bytes")).vocab_size == 256
    with pytest.raises(ConfigError, match="is no text"):
        tokenizer_of(DataOptions(name="digits"))


def test_another_tokenizer_is_refused(folder, prepared):
    check_tokenizer(None, folder)
    check_tokenizer(folder.tokenizer_fingerprint, folder)
    with pytest.raises(ConfigError, match="run7 was trained with another tokenizer"):
        check_tokenizer(prepared.tokenizer_fingerprint, folder, model="run7")


def victim(folder, ending):
    return folder.path / ("tokenizer.json" if ending == "json" else f"train-00001.{ending}")


@pytest.mark.parametrize("ending", ["bin", "lengths", "json"])
def test_damaged_files_are_named(folder, ending):
    assert check_folder(folder.path)["name"] == "text"
    path = victim(folder, ending)
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(StorageError, match=rf"{path.name} has the right size but not the content"):
        check_folder(folder.path)
    path.write_bytes(content[:-1])
    with pytest.raises(StorageError, match=rf"{path.name} is cut off: .* remove .*prepare"):
        check_folder(folder.path)
    with pytest.raises(StorageError, match="is cut off"):
        open_tokens(folder.path).tokenizer()


def test_the_fingerprint_follows_the_content_at_equal_sizes(folder):
    before = build_data(data(folder, length=4), seed=0).info.fingerprint
    path = folder.path / folder.split("validation").record.shards[0].data.file
    path.write_bytes(path.read_bytes()[::-1])
    assert build_data(data(folder, length=4), seed=0).info.fingerprint != before


def test_missing_files(folder):
    (folder.path / "validation-00000.bin").unlink()
    with pytest.raises(StorageError, match=r"validation-00000\.bin is missing"):
        open_tokens(folder.path)
    (folder.path / "index.json").unlink()
    with pytest.raises(ConfigError, match="is incomplete; run the same `tost data prepare` command"):
        open_tokens(folder.path)
    (folder.path / "prepare.json").unlink()
    with pytest.raises(ConfigError, match="holds no prepared tokens"):
        open_tokens(folder.path)


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index["splits"]["train"]["shards"][0]["data"].update(file="../../secret"),
        lambda index: index["splits"]["train"].update(tokens=-1),
        lambda index: index["splits"]["train"].update(tokens=10**30),
        lambda index: index["splits"]["train"]["shards"][0].update(tokens=10**9),
        lambda index: index["splits"]["train"].update(documents=7),
        lambda index: index["splits"]["train"].update(answers=[0] * 9, choices=9),
        lambda index: index.update(dtype="object"),
        lambda index: index.update(dtype="uint32"),
        lambda index: index.clear(),
        lambda index: index.update(version=2),
        lambda index: index.update(version="x"),
    ],
)
def test_an_index_that_does_not_fit(folder, change):
    path = folder.path / "index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    change(index)
    path.write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(
        StorageError, match=r"is damaged or was written by another version \(.*\); update tost, or prepare"
    ):
        open_tokens(folder.path)


def test_lengths_that_do_not_add_up(folder):
    path = folder.path / "train-00000.lengths"
    np.full(path.stat().st_size // 8, 2**63, dtype="<u8").tofile(path)
    with pytest.raises(StorageError, match=r"lengths of the documents .* do not add up"):
        open_tokens(folder.path).split("train").document(0)
