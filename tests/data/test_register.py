"""Data sets that other packages register: by a decorator, an entry point or the name of a function."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from pydantic import BaseModel, Field, field_validator

import tost
from tost._plugins import allow
from tost.data import DataBundle, DataInfo, DataOptions, DataShape, build_data, find_data, list_data, tokenizer_of
from tost.data.registry import DATA_SETS
from tost.data.text.tokenizers import CharTokenizer
from tost.errors import ConfigError
from tost.recipes import load_config

from .samples import messages


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """The registry as it is without what a test adds."""
    monkeypatch.setattr(DATA_SETS, "_specs", dict(DATA_SETS._specs))
    monkeypatch.setattr(DATA_SETS, "_entry_points", None)


class Series(torch.utils.data.Dataset):
    """Sample i: a window of ones and zeros, and the class i % 2; a plain data set of torch."""

    def __init__(self, count, length=4):
        self.count, self.length = count, length

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return {"inputs": torch.full((self.length, 1), float(index)), "targets": torch.tensor(index % 2)}


class SeriesOptions(BaseModel):
    """Unknown names are ignored by the class itself, as pydantic does by default."""

    horizon: int = Field(default=4, ge=1)
    root: Path = Path("here")

    @field_validator("horizon")
    @classmethod
    def _even(cls, value):
        if value % 2:
            raise ValueError("must be even")
        return value


SHAPE = DataShape(input="values", length=4, in_features=1, num_classes=2)


def test_a_function_is_registered_by_its_signature():
    @tost.register_data("series", task="classification", shape=SHAPE)
    def series(count: int, length: int = 4, *, seed: int):
        """Windows of a series.

        More words.
        """
        return Series(count + seed, length), Series(2, length)

    assert "series" in list_data("ser*")
    assert (find_data("series").description, find_data("series").task) == ("Windows of a series.", "classification")
    options = DataOptions(name="series", options={"count": 10})
    assert options.options == {"count": 10, "length": 4}
    bundle = build_data(options, seed=3)
    assert (len(bundle.train), len(bundle.validation)) == (13, 2)
    assert (bundle.info.name, bundle.info.task) == ("series", "classification")
    known = {"input": "values", "in_features": 1, "num_classes": 2, "max_length": 4}
    assert bundle.info.model_options() == options.shape().model_options() == known
    assert messages(name="series") == {"options.count": "missing; needs a whole number"}
    config = load_config("demo/digits", ["data.name=series", "data.options.count=9"])
    assert {key: config.model.options[key] for key in known} == known
    with pytest.raises(ConfigError, match=r"model\.in_features .*: 3 does not fit the data: series has 1 number"):
        load_config("demo/digits", ["data.name=series", "data.options.count=9", "model.in_features=3"])


def test_a_class_of_options_is_passed_as_an_object():
    seen = []

    @tost.register_data(
        "series", options=SeriesOptions, shape=lambda o: DataShape(input="values", length=o.horizon), takes_path=True
    )
    def series(options, path):
        seen.append((options, path))
        return Series(8, options.horizon), Series(2, options.horizon)

    options = DataOptions(name="series", path="folder", options={"horizon": 6})
    assert options.shape().length == 6
    assert DataOptions(**options.model_dump()) == options
    build_data(options, seed=0)
    assert seen == [(SeriesOptions(horizon=6), "folder")]
    found = messages(name="series", options={"horizon": 5, "horizn": 1})
    assert "set data.path" in found["path"]
    assert found["options.horizon"] == "must be even"
    assert found["options.horizn"] == "unknown key; did you mean options.horizon?"


def test_keywords_take_any_option_and_a_shape_may_be_missing():
    @tost.register_data("series", task="mine")
    def series(**more: int):
        info = DataInfo(fingerprint="ab" * 32, details={"rows": 8}, class_names=("even", "odd"))
        return DataBundle(train=Series(more["count"]), validation=Series(2), info=info)

    options = DataOptions(name="series", options={"count": 5})
    bundle = build_data(options, 0)
    assert (len(bundle.train), options.shape()) == (5, DataShape(task="mine"))
    info = bundle.info
    assert (info.name, info.fingerprint, info.details) == ("series", "ab" * 32, {"rows": 8})
    assert info.class_names == ("even", "odd")


@pytest.mark.parametrize("name", ["digits", "series"])
def test_names_are_taken_once(name):
    tost.register_data("series")(lambda: (Series(8), Series(2)))
    with pytest.raises(ConfigError, match=f"there is a data set '{name}' already"):
        tost.register_data(name)(lambda: (Series(8), Series(2)))


def test_options_that_the_file_sets_for_other_data_are_left_out():
    shape = DataShape(input="tokens", length=16, vocab_size=11)
    tost.register_data("count", task="language_modeling", shape=shape)(lambda: (Series(8), Series(2)))
    config = load_config("demo/stdlib_bytes", ["data.name=count"])
    assert (config.data.options, config.model.options["max_length"]) == ({}, 16)
    with pytest.raises(ConfigError, match=r"data\.options\.length .*: unknown key"):
        load_config("demo/stdlib_bytes", ["data.name=count", "data.options.length=3"])


def test_a_data_set_for_another_task_is_refused():
    tost.register_data("series", task="mine")(lambda: (Series(8), Series(2)))
    with pytest.raises(ConfigError, match=r"data\.name .*series is for the .* mine, but this is classification"):
        load_config("demo/digits", ["data.name=series"])


def test_the_fingerprint_follows_from_options_lengths_and_samples():
    shift = 0

    @tost.register_data("series")
    def series(count: int = 8, scale: float = 1.0):
        return [{"inputs": torch.tensor([i + shift]).bfloat16()} for i in range(count)], Series(2)

    def found(**options):
        return build_data(DataOptions(name="series", options=options), 0).info.fingerprint

    assert found() == found(count=8)
    before = found()
    assert len({before, found(count=9), found(scale=2.0)}) == 3
    shift = 1
    assert found() != before


def test_a_text_comes_with_its_tokenizer():
    tost.register_data("text", tokenizer=lambda: CharTokenizer("abc"))(lambda: (Series(8), Series(2)))
    tost.register_data("file", tokenizer=CharTokenizer, takes_path=True)(lambda path: (Series(8), Series(2)))
    tost.register_data("series")(lambda: (Series(8), Series(2)))
    assert tokenizer_of(DataOptions(name="text")).decode([2, 0]) == "ca"
    assert tokenizer_of(DataOptions(name="file", path="xy")).vocab_size == 2
    with pytest.raises(ConfigError, match="data set 'series' has no tokenizer"):
        tokenizer_of(DataOptions(name="series"))


class Stream(torch.utils.data.IterableDataset):
    """Has no samples by number."""

    def __iter__(self):
        yield {}

    def __len__(self):
        return 1


WRONG = {
    "none": (None, "data set 'series' returned a NoneType; it must return a training and a validation set"),
    "three": ((Series(2),) * 3, "returned a tuple; it must return"),
    "stream": ((Series(2), Stream()), "returned a Stream; it must return .* map-style data sets"),
    "pairs": (([(1, 2)], [(1, 2)]), "returned a list with samples of type tuple; .* dictionaries of tensors"),
    "numbers": (([{"inputs": 1}], Series(2)), "returned a list with samples of type dict; .* dictionaries of tensors"),
}


@pytest.mark.parametrize(("returned", "message"), WRONG.values(), ids=WRONG.keys())
def test_what_is_no_data_is_refused(returned, message):
    tost.register_data("series")(lambda: returned)
    with pytest.raises(ConfigError, match=message):
        build_data(DataOptions(name="series"), 0)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package with entry points, one of them for a decorated function."""
    (tmp_path / "outside_data.py").write_text(
        "import torch, tost\n"
        "from tost.data import DataShape\n"
        "SAMPLE = {'inputs': torch.zeros(3, 1), 'targets': torch.tensor(0)}\n"
        "def plain(count: int = 4):\n"
        "    '''Zeros.'''\n"
        "    return [SAMPLE] * count, [SAMPLE]\n"
        "def from_disk(path: str):\n"
        "    return [SAMPLE] * len(path), [SAMPLE]\n"
        "@tost.register_data('decorated', task='classification', shape=DataShape(input='values', length=3))\n"
        "def decorated(count: int = 4):\n"
        "    return [SAMPLE] * count, [SAMPLE]\n"
        "THING = 3\n"
    )
    info = tmp_path / "outside_data-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside_data\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[tost.data]\nzeros = outside_data:plain\n"
        "decorated = outside_data:decorated\nrenamed = outside_data:decorated\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield "outside_data"
    sys.modules.pop("outside_data", None)


def test_entry_points_are_found(package):
    assert {"zeros", "decorated", "renamed"} <= set(list_data())
    assert package not in sys.modules, "names are listed without loading anything"
    assert find_data("zeros").description == "Zeros."
    assert find_data("decorated").task == find_data("renamed").task == "classification"
    assert DataOptions(name="renamed").shape().length == 3
    bundle = build_data(DataOptions(name="zeros", options={"count": 6}), 0)
    assert (len(bundle.train), bundle.info.name) == (6, "zeros")
    assert "did you mean options.count?" in messages(name="zeros", options={"coun": 1})["options.coun"]


def test_code_is_not_imported_by_its_name_alone(package):
    found = messages(name="outside_data:plain")["name"]
    assert "is code outside tost, and only you can allow it to run" in found
    assert "--plugin outside_data" in found
    assert package not in sys.modules


def test_allowed_functions_are_called_by_their_name(package):
    allow(package)
    assert len(build_data(DataOptions(name="outside_data:plain", options={"count": 7}), 0).train) == 7
    assert len(build_data(DataOptions(name="outside_data:from_disk", path="xyz"), 0).train) == 3
    assert DataOptions(name="outside_data:decorated").shape().length == 3
    assert find_data("outside_data:decorated").name == "outside_data:decorated"
    assert "outside_data has no 'plan'; did you mean 'plain'?" in messages(name="outside_data:plan")["name"]
    assert "'outside_data:THING' is a int, but" in messages(name="outside_data:THING")["name"]
