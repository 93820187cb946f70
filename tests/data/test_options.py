"""Options of the data sets: complete, strict, and all problems at once."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from tost._lazy import load
from tost.data import DataOptions, find_data, list_data
from tost.data.images.options import ImageOptions
from tost.data.registry import DATA_SETS
from tost.data.spec import DataSetOptions
from tost.errors import ConfigError
from tost.recipes import list_tasks

from .samples import messages

DOCS = Path(__file__).parents[2] / "docs"


def test_defaults_are_filled_in():
    options = DataOptions(name="stdlib_bytes", options={"length": 64})
    assert options.options == {"length": 64, "windows": None}
    assert (options.path, options.workers) == (None, 0)
    assert DataOptions(**options.model_dump()) == options


def all_subclasses(schema):
    return [one for child in schema.__subclasses__() for one in (child, *all_subclasses(child))]


def test_every_field_is_described():
    assert len(all_subclasses(DataSetOptions)) > len(list_data())
    for schema in (DataOptions, *all_subclasses(DataSetOptions)):
        assert all(field.description for field in schema.model_fields.values()), schema


@pytest.mark.parametrize("spec", DATA_SETS.loaded(), ids=lambda spec: spec.name)
def test_every_spec_is_complete(spec):
    assert spec.description
    assert spec.task in list_tasks()
    assert issubclass(spec.options, DataSetOptions)
    arguments = set(inspect.signature(load(spec.build)).parameters) - {"seed"}
    assert arguments == ({"options", "path"} if spec.takes_path else {"options"})
    if issubclass(spec.options, ImageOptions):
        assert callable(load(spec.options.opener))
    assert any(f"`{spec.name}`" in page.read_text() for page in DOCS.glob("*.md")), "no page describes it"


def test_an_unknown_data_set_is_refused():
    expected = f"there is no data set 'digit'; did you mean 'digits'? data sets: {', '.join(list_data())}."
    assert messages(name="digit") == {"name": expected}
    with pytest.raises(ConfigError) as info:
        find_data("digit")
    assert str(info.value) == expected


def test_paths():
    expected = "data set 'digits' reads no files, got path '/data'; leave data.path out."
    assert messages(name="digits", path="/data")["path"] == expected
    expected = "data set 'image_folder' is read from disk; set data.path to its folder or file."
    assert messages(name="image_folder")["path"] == expected


def test_all_problems_are_reported_at_once():
    wrong = {"max_dept": 3, "min_length": "ten", "max_args": 1}
    assert messages(name="listops", path="x", workers=-1, options=wrong) == {
        "path": "data set 'listops' reads no files, got path 'x'; leave data.path out.",
        "workers": "-1 given; needs a whole number >= 0",
        "options.max_dept": "unknown key; did you mean options.max_depth?",
        "options.min_length": "ten given; needs a whole number >= 1",
        "options.max_args": "1 given; needs a whole number >= 2",
    }


@pytest.mark.parametrize("value", [True, "64", 64.0, 0, None])
def test_types_are_not_converted(value):
    assert "options.length" in messages(name="stdlib_bytes", options={"length": value})


IMPOSSIBLE = {
    "no length": ({"min_length": 90, "max_length": 91}, "min_length=90 and max_length=91 leave no length in between"),
    "too shallow": (
        {"max_depth": 3, "max_args": 2},
        "max_depth=3 and max_args=2 give expressions of at most 10 tokens, but min_length=10 asks for more",
    ),
}


@pytest.mark.parametrize(("options", "message"), IMPOSSIBLE.values(), ids=IMPOSSIBLE.keys())
def test_impossible_expressions_are_refused(options, message):
    assert messages(name="listops", options=options)["options"].startswith(message)


SHAPES = {
    "digits": ({}, {"input": "values", "in_features": 1, "num_classes": 10, "max_length": 64}),
    "listops": ({"max_length": 50}, {"input": "tokens", "vocab_size": 16, "num_classes": 10, "max_length": 50}),
    "fashion_mnist": ({}, {"num_classes": 10, "in_chans": 1, "image_size": 28}),
    "pets": ({"image_size": [96, 128]}, {"num_classes": 37, "in_chans": 3, "image_size": (96, 128)}),
    "stdlib_bytes": ({}, {"vocab_size": 256, "max_length": 256}),
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_shape_gives_the_options_of_a_model(name):
    options, expected = SHAPES[name]
    path = "x" if find_data(name).takes_path else None
    assert DataOptions(name=name, path=path, options=options).shape().model_options() == expected
