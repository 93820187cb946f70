"""Options from classes and signatures, and their problems in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, Field

from tost._options import Options, Problem, check_options, keys_of, options_error, options_of_signature


class Sizes(Options):
    width: int = Field(ge=1, description="width")
    heads: int = Field(default=2, ge=1, description="heads")
    mode: Literal["fast", "exact"] = "fast"

    @classmethod
    def conflicts(cls, values: Mapping[str, Any]) -> list[str]:
        if {"width", "heads"} <= set(values) and values["width"] % values["heads"]:
            return [f"width={values['width']} is not divisible by heads={values['heads']}"]
        return []


def test_options_that_are_right():
    options, problems = check_options(Sizes, {"width": 4})
    assert options == Sizes(width=4, heads=2)
    assert problems == []


def test_all_problems_are_found_at_once():
    options, problems = check_options(Sizes, {"width": 3, "mode": "fsat", "hedas": 1}, prefix="model.")
    assert options is None
    assert problems == [
        Problem("model.mode", "fsat given; needs one of fast, exact; did you mean fast?"),
        Problem("model.hedas", "unknown key; did you mean model.heads?"),
        Problem("model", "width=3 is not divisible by heads=2"),
    ]
    assert check_options(Sizes, {"width": 3})[1] == [Problem("", "width=3 is not divisible by heads=2")]
    assert check_options(Sizes, {"width": 3, "x": 1}, unknown=["width"])[1] == [
        Problem("x", "unknown key; the keys here are: width, heads, mode")
    ]


def test_the_error_lists_problems_with_their_places():
    problems = [Problem("a.b", "wrong"), Problem("", "odd\ntwice"), Problem("a.b", "wrong")]
    error = options_error("x cannot be used", problems, lambda key: "line 3" if key else "")
    assert str(error) == "x cannot be used, 2 problems:\n  a.b (line 3): wrong\n  odd\n    twice"


def network(width: int, *, dropout: float = 0.0, mode: Literal["fast", "exact"] = "fast", shape: Any = None) -> None:
    """Make a network.

    Args:
        width: Width of the tokens,
            in numbers.
        dropout (float): Share that is dropped.
        shape: Given by the data.

    Returns:
        Nothing.
    """


def test_options_of_a_function():
    schema = options_of_signature(network, skip=["shape"])
    assert {name: field.description for name, field in schema.model_fields.items()} == {
        "width": "Width of the tokens, in numbers",
        "dropout": "Share that is dropped",
        "mode": None,
    }
    assert schema(width=3).model_dump() == {"width": 3, "dropout": 0.0, "mode": "fast"}
    assert check_options(schema, {"dropout": "much", "widht": 3})[1] == [
        Problem("width", "missing; needs a whole number"),
        Problem("dropout", "much given; needs a number"),
        Problem("widht", "unknown key; did you mean width?"),
    ]


class Network:
    """A network.

    Args:
        width: Width of the tokens.
    """

    def __init__(self, width: int = 3, other: BaseModel | None = None, **more: Any) -> None:
        self.width = width


def test_options_of_a_class():
    schema = options_of_signature(Network)
    assert schema.model_fields["width"].description == "Width of the tokens"
    assert schema(width=1, anything=2).model_dump() == {"width": 1, "other": None, "anything": 2}


class Typed:
    def __init__(self, module: OnlyForTypeCheckers, width: int = 3) -> None:  # noqa: F821
        pass


def test_annotations_that_cannot_be_resolved_take_anything():
    assert options_of_signature(Typed)(module=object(), width=2).width == 2


class Strange:
    pass


def odd(thing: Strange, width: int = 3) -> None:
    pass


def test_values_that_are_no_plain_data_are_described_too():
    schema = options_of_signature(odd)
    _, (problem,) = check_options(schema, {"thing": 1j})
    assert problem == Problem("thing", "1j given; input should be an instance of Strange")
    assert list(keys_of(schema, "a.")) == ["a.thing", "a.width"]
