"""ListOps and retrieval as released, and what becomes of sequences: cut, ended, padded."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.data.lra.files import PAIRS, write_listops, write_pairs
from tost.data import DataOptions, build_data, make_loader
from tost.data.lra.grammar import SYMBOLS
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


@pytest.mark.parametrize(
    ("preset", "ids", "length", "vocab_size"),
    [
        ("paper", ["[MAX", "2", "9", "]", "END"], 2001, 18),
        ("mega", ["[MAX", "2", "9", "]", "END"], 2001, 18),
        ("official", ["[MAX", "2", "9", "]"], 2000, 17),
        ("s4", ["[MAX", "2", "9", "]", "END"], 2048, 18),
        ("skyformer", ["[MAX", "2", "9"], 2048, 17),
    ],
)
def test_presets_of_listops(tmp_path, preset, ids, length, vocab_size):
    bundle = build("lra_listops", write_listops(tmp_path), preset=preset)
    assert symbols(real(bundle.train[0])) == ids
    assert bundle.train[0]["inputs"].shape == (length,)
    assert bundle.info.vocab_size == vocab_size


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


def test_the_validation_split_can_be_the_test_split(tmp_path):
    write_listops(tmp_path)
    write_listops(tmp_path, [("( ( ( [MAX 2 ) 4 ) ] )", 4)], splits=["test"])
    assert len(build("lra_listops", tmp_path).validation) == 3
    assert len(build("lra_listops", tmp_path, validation_split="test").validation) == 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("( ( ( [MAX 2 ) 9 ) ] )", r"basic_train\.tsv, line 2 has 1 columns; it must have two"),
        ("( ( ( [MAX 2 ) 9 ) ] )\t9\t9", "line 2 has 3 columns"),
        ("( ( ( [MAX 2 ) 9 ) ] )\t12", "line 2 has the value '12'; it must be a digit"),
        ("( ( ( [MAX 2 ) 9 ) ] )\t", "line 2 has the value ''; it must be a digit"),
        ("( ( ( [FIRST 2 ) 9 ) ] )\t2", "line 2 is no ListOps expression: '. . . .FIRST"),
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
    with pytest.raises(ConfigError, match=r"begins with 3 columns, 'a'; it must begin with the line Source<tab>Target"):
        build("lra_listops", tmp_path)
    (tmp_path / "listops-1000" / "basic_train.tsv").write_text("Source\tTarget\n")
    with pytest.raises(ConfigError, match="holds a header and nothing else"):
        build("lra_listops", tmp_path)


@given(
    ids=st.lists(st.integers(1, 255), max_size=12),
    length=st.integers(2, 9),
    eos=st.booleans(),
    keep=st.sampled_from(["start", "end"]),
    padding=st.sampled_from(["right", "left"]),
)
def test_sequences_are_cut_then_ended_then_padded(ids, length, eos, keep, padding):
    import numpy as np

    from tost.data.lra.sequences import Form

    form = Form(length, 999 if eos else None, keep, padding)
    row, mask = np.zeros(length, dtype=np.int64), np.zeros(length, dtype=bool)
    form.fill(np.array(ids, dtype=np.int64), row, mask)
    room = length - eos
    wanted = (ids[:room] if keep == "start" else ids[-room:]) + [999] * eos
    assert row[mask].tolist() == wanted
    assert (row[~mask] == 0).all()
    assert (
        mask.tolist() == ([True] * len(wanted) + [False] * (length - len(wanted)))[:: 1 if padding == "right" else -1]
    )


@given(
    texts=st.lists(st.lists(st.integers(1, 255), max_size=12), max_size=4),
    length=st.integers(2, 9),
    eos=st.booleans(),
    keep=st.sampled_from(["start", "end"]),
    towers=st.sampled_from([1, 2]),
)
def test_packed_batches_hold_the_real_tokens_of_padded_ones(texts, length, eos, keep, towers):
    import numpy as np
    import torch

    from tost.data.lra.sequences import Form, IdsInMemory, Sequences

    ends = np.cumsum([0, *map(len, texts)])[1:]
    source = IdsInMemory(np.array([one for each in texts for one in each], dtype=np.uint8), ends)
    rows, targets = torch.arange(len(texts)), torch.arange(len(texts)) % 2
    batches = {}
    for padding in ("right", "none"):
        form = Form(length, 999 if eos else None, keep, padding)
        batches[padding] = Sequences(source, rows, targets, form, towers=towers).gather(rows)
    padded, packed = batches["right"], batches["none"]
    assert packed["inputs"].tolist() == [padded["inputs"][padded["mask"]].tolist()]
    assert packed["cu_seqlens"].dtype == torch.int32
    assert packed["cu_seqlens"].diff().tolist() == padded["mask"].sum(dim=-1).flatten().tolist()
    assert torch.equal(packed["targets"], padded["targets"])


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


def test_bytes_start_at_one(tmp_path):
    bundle = build("lra_retrieval", write_pairs(tmp_path, [(b"0.0", b"a", b"b", b"A", b"\xff\x01")]), preset="official")
    assert bundle.train[0]["inputs"][:, :3].tolist() == [[66, 0, 0], [256, 2, 0]]
    assert bundle.info.vocab_size == 257


def test_long_documents_are_cut(tmp_path):
    write_pairs(tmp_path, [(b"1", b"a", b"b", bytes(range(1, 8)), b"xy")])
    start = build("lra_retrieval", tmp_path, length=4, eos=False).train[0]
    assert start["inputs"].tolist() == [[2, 3, 4, 5], [121, 122, 0, 0]]
    end = build("lra_retrieval", tmp_path, length=4, eos=True, keep="end", padding="left").train[0]
    assert end["inputs"].tolist() == [[6, 7, 8, 257], [0, 121, 122, 257]]


def test_characters_have_ids_by_frequency(tmp_path):
    write_pairs(tmp_path, [(b"1.0", b"a", b"b", "ééé ab".encode(), b"aab"), (b"0.0", b"a", b"b", b"z", b"a")])
    options = {"unit": "chars", "vocab_size": 8, "length": 8, "min_frequency": 2, "eos": True}
    sample = build("lra_retrieval", tmp_path, **options).train[0]
    # a 4 times, é 3, b 2: ids 3, 4, 5; the space and z are too rare; the end is 2
    assert real({key: value[0] for key, value in sample.items() if key != "targets"}) == [4, 4, 4, 1, 3, 5, 2]
    with pytest.raises(ConfigError, match=r"have 3 different characters .* makes 6 ids .*vocab_size=5 is too small"):
        build("lra_retrieval", tmp_path, **options | {"vocab_size": 5})
    cut = build("lra_retrieval", tmp_path, **options | {"length": 4, "keep": "end"}).train[0]
    assert cut["inputs"][0].tolist() == [1, 3, 5, 2]


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


def test_missing_and_empty_pairs_are_named(tmp_path):
    with pytest.raises(
        ConfigError,
        match=r"has no new_aan_pairs\.train\.tsv and no new_aan_pairs\.eval\.tsv, it has: nothing; .* folder tsv_data",
    ):
        build("lra_retrieval", tmp_path)
    write_pairs(tmp_path, [])
    with pytest.raises(ConfigError, match="is empty; it must hold lines"):
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


def test_limits_spread_over_the_split(tmp_path):
    write_pairs(tmp_path, [(b"0.0", b"a", b"b", bytes([65 + row]), b"x") for row in range(10)])
    bundle = build("lra_retrieval", tmp_path, limit=5)
    assert [text(real({k: v[0] for k, v in bundle.train[row].items() if k != "targets"})) for row in range(5)] == [
        b"A", b"C", b"E", b"G", b"I"
    ]  # fmt: skip
    assert bundle.info.fingerprint != build("lra_retrieval", tmp_path).info.fingerprint
