"""Embedded data sets: what holds for all of them, and what is particular to each."""

from __future__ import annotations

import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from tost.data import DataOptions, build_data, decode, find_data, list_data, make_loader
from tost.data.embedded import PROBES
from tost.data.prepare import prepare
from tost.data.tokens.dataset import TokenWindows
from tost.data.toy import ByteArray, read_corpus
from tost.errors import ConfigError

SMALL = {
    "digits": {},
    "listops": {"train_count": 60, "validation_count": 30},
    "stdlib_bytes": {"length": 32, "windows": 60},
}


def build(name, seed=0, **options):
    return build_data(DataOptions(name=name, options=SMALL[name] | options), seed)


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def test_every_data_set_is_tested_here():
    probes = [spec.name for spec in PROBES]  # tests/data/probes
    assert [name for name in list_data() if not find_data(name).takes_path] == sorted([*SMALL, *probes])
    assert list_data("*bytes") == ["stdlib_bytes"]


@pytest.mark.parametrize("name", SMALL)
def test_samples_are_as_announced(name):
    options = DataOptions(name=name, options=SMALL[name])
    bundle = build_data(options, 0)
    shape = options.shape()
    assert bundle.info.model_options() == shape.model_options()
    assert bundle.info.name == name
    for dataset in (bundle.train, bundle.validation):
        sample = dataset[len(dataset) - 1]
        is_tokens = shape.input == "tokens"
        assert sample["inputs"].shape == ((shape.length,) if is_tokens else (shape.length, shape.in_features))
        assert sample["inputs"].dtype == (torch.int64 if is_tokens else torch.float32)
        whole = dataset.gather(torch.arange(len(dataset)))
        if is_tokens:
            assert 0 <= whole["inputs"].min() <= whole["inputs"].max() < shape.vocab_size
        assert whole["targets"].dtype == torch.int64
        assert 0 <= whole["targets"].min() <= whole["targets"].max() < (shape.num_classes or shape.vocab_size)
        assert same({key: value[-1] for key, value in whole.items()}, sample)


@pytest.mark.parametrize(("name", "start"), [("digits", "2096c0be8230f551"), ("listops", "4d37c56f3b5b2257")])
def test_the_data_is_what_it_was(name, start):
    # Published results name the data by seed and options: neither split nor draws may change under them.
    assert build(name).info.fingerprint.startswith(start)


@pytest.mark.parametrize("name", SMALL)
def test_data_sets_can_be_sent_to_workers(name):
    train = build(name).train
    assert same(pickle.loads(pickle.dumps(train))[5], train[5])
    plain, loaded = (next(iter(make_loader(train, batch_size=4, seed=0, workers=workers))) for workers in (0, 1))
    assert same(plain, loaded)


def test_options_are_read_without_torch():
    probe = (
        "import sys; from tost.data import DataOptions; "
        "images = DataOptions(name='imagenet', path='x'); "
        "print(DataOptions(name='listops').shape().length, images.shape().num_classes, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["100", "1000", "False"]


def test_digits_are_split_once_and_evenly():
    from sklearn.datasets import load_digits

    bundle = build("digits")
    assert (len(bundle.train), len(bundle.validation)) == (1437, 360)
    rows = [dataset.gather(torch.arange(len(dataset))) for dataset in (bundle.train, bundle.validation)]
    images, labels = load_digits(return_X_y=True)
    both = torch.cat([part["inputs"] for part in rows]).squeeze(-1) * 16
    found = zip(both.tolist(), torch.cat([part["targets"] for part in rows]).tolist(), strict=True)
    assert sorted(found) == sorted(zip(images.tolist(), labels.tolist(), strict=True))
    train, validation = (torch.bincount(part["targets"], minlength=10) for part in rows)
    assert ((validation - (train + validation) / 5).abs() <= 1).all()


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(
        ConfigError, match=r"'digits' is read from scikit-learn, .*run `pip install 'tost-transformer\[train\]'`"
    ):
        build("digits")


@pytest.fixture
def library(tmp_path):
    """A standard library of twelve small files and some that do not count."""
    for number in range(10):
        (tmp_path / f"module{number}.py").write_bytes(bytes([97 + number]) * 10)
    for path in ("package/__init__.py", "xml/last.py"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(path[:1].encode() * 10)
    for path in (
        "test/test_x.py",
        "unittest/test/x.py",
        "json/tests/x.py",
        "idlelib/x.py",
        "lib2to3/x.py",
        "site-packages/torch/x.py",
        "config-3.11-x86_64-linux-gnu/python-config.py",
        "_sysconfigdata__linux_x86_64-linux-gnu.py",
        "sitecustomize.py",
        "notes.txt",
    ):
        (tmp_path / path).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / path).write_bytes(b"!" * 10)
    (tmp_path / "empty.py").touch()
    return tmp_path


def test_the_corpus_is_the_sorted_sources(library):
    corpus = read_corpus(library)
    assert decode(corpus.train) == "".join(letter * 10 for letter in "abcdefghijp")
    assert decode(corpus.validation) == "x" * 10
    assert corpus.files == 12
    (library / "module3.py").write_bytes(b"dddddddddD")
    read_corpus.cache_clear()
    assert read_corpus(library).fingerprint != corpus.fingerprint


def test_the_real_corpus_is_python():
    bundle = build("stdlib_bytes")
    details = bundle.info.details
    assert details["files"] > 300
    assert 2e6 < details["train_bytes"] < 5e7
    assert 0.02 < details["validation_bytes"] / details["train_bytes"] < 0.5
    text = decode(bundle.validation.gather(torch.arange(len(bundle.validation)))["inputs"].flatten())
    assert text.count("def ") > 500
    assert text.count("\ufffd") / len(text) < 0.01


@pytest.mark.parametrize(("size", "count"), [(33, 2), (34, 2), (48, 2), (49, 3), (17, 1)])
def test_validation_windows_lie_side_by_side(size, count):
    windows = TokenWindows(ByteArray(torch.arange(size, dtype=torch.uint8)), 16)
    assert len(windows) == count
    assert windows.gather(torch.arange(count))["inputs"].flatten().tolist() == list(range(16 * count))


def test_images_and_split_are_those_of_the_sequences(tmp_path):
    facts = prepare("digits", {}, tmp_path / "digits")
    assert facts == {"train_images": 1437, "validation_images": 360}
    bundle = build_data(DataOptions(name="digits"), seed=0)
    for split, rows in (("train", bundle.train.rows), ("val", bundle.validation.rows)):
        files = sorted((tmp_path / "digits" / split).glob("*/*.png"), key=lambda file: int(file.stem))
        assert [int(file.parent.name) for file in files] == rows["targets"].tolist()
        pixels = np.stack([np.asarray(Image.open(file)) for file in files[::50]])
        assert pixels.shape[1:] == (8, 8)
        known = rows["inputs"].view(-1, 8, 8)[::50].numpy()
        np.testing.assert_allclose(pixels / 255, known, atol=0.5 / 255 + 1e-6)
