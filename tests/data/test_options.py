"""Options of the data sets: complete, strict, and all problems at once."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from tost._lazy import load
from tost.data import DataOptions, DataShape, find_data, list_data, registry
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


def test_options_cannot_be_changed():
    with pytest.raises(ValidationError, match="frozen"):
        DataOptions(name="digits").name = "listops"


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


def test_a_name_like_no_other_gets_no_suggestion():
    assert messages(name="qqq")["name"].startswith("there is no data set 'qqq'; data sets: brackets, cifar10, ")


def test_a_path_to_embedded_data_is_refused():
    assert messages(name="digits", path="/data")["path"] == (
        "data set 'digits' reads no files, got path '/data'; leave data.path out."
    )


def test_a_missing_path_is_refused(monkeypatch):
    monkeypatch.setitem(registry.DATA_SETS._specs, "digits", replace(find_data("digits"), takes_path=True))
    assert messages(name="digits")["path"] == (
        "data set 'digits' is read from disk; set data.path to its folder or file."
    )
    assert DataOptions(name="digits", path="/data").path == "/data"


def test_all_problems_are_reported_at_once():
    found = messages(
        name="listops", path="x", workers=-1, options={"max_dept": 3, "min_length": "ten", "max_args": 1, "brace{": 0}
    )
    assert set(found) == {
        "path",
        "workers",
        "options.max_dept",
        "options.min_length",
        "options.max_args",
        "options.brace{",
    }
    assert found["options.max_dept"] == "unknown key; did you mean options.max_depth?"
    assert found["options.min_length"] == "ten given; needs a whole number >= 1"
    assert found["options.max_args"] == "1 given; needs a whole number >= 2"
    assert found["workers"] == "-1 given; needs a whole number >= 0"
    assert found["options.brace{"].startswith("unknown key; the keys here are: max_depth, max_args, ")


def test_findings_keep_their_kind():
    # Whoever puts findings into other words relies on pydantic's names for them.
    with pytest.raises(ValidationError) as info:
        DataOptions(name="listops", options={"max_args": 1, "min_length": "ten"})
    assert [(found["type"], found.get("ctx") or None) for found in info.value.errors()] == [
        ("greater_than_equal", {"ge": 2}),
        ("int_type", None),
    ]


def test_a_data_set_without_options_says_so():
    assert messages(name="digits", options={"size": 3})["options.size"] == ("unknown key; options takes no keys")


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


def test_the_shape_says_what_a_model_needs():
    assert DataOptions(name="digits").shape().model_options() == {
        "input": "values",
        "in_features": 1,
        "num_classes": 10,
        "max_length": 64,
    }
    assert DataOptions(name="listops", options={"max_length": 50}).shape().model_options() == {
        "input": "tokens",
        "vocab_size": 16,
        "num_classes": 10,
        "max_length": 50,
    }
    assert DataOptions(name="fashion_mnist", path="x").shape().model_options() == {
        "num_classes": 10,
        "in_chans": 1,
        "image_size": 28,
    }
    assert DataOptions(name="pets", path="x", options={"image_size": [96, 128]}).shape().model_options() == {
        "num_classes": 37,
        "in_chans": 3,
        "image_size": (96, 128),
    }
    assert DataOptions(name="stdlib_bytes").shape().model_options() == {"vocab_size": 256, "max_length": 256}


def test_data_sets_must_say_their_shape():
    with pytest.raises(NotImplementedError):
        DataSetOptions().shape()
    assert DataShape(task="language_modeling", input="tokens", length=3, vocab_size=2).num_classes is None
