"""Options and presets of the Long Range Arena data sets, without any data."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from tost.data import DataOptions
from tost.data.lra.options import SPECS

NAMES = [spec.name for spec in SPECS]
PRESETS = ("paper", "official", "s4", "mega", "skyformer")
# length, number of ids or None for values, zeros masked or None where there are no pixels
SHAPES = {
    ("lra_listops", "paper"): (2001, 18, None),
    ("lra_listops", "official"): (2000, 17, None),
    ("lra_listops", "s4"): (2048, 18, None),
    ("lra_listops", "mega"): (2001, 18, None),
    ("lra_listops", "skyformer"): (2048, 17, None),
    ("lra_text", "paper"): (4001, 258, None),
    ("lra_text", "official"): (1000, 257, None),
    ("lra_text", "mega"): (4001, 258, None),
    ("lra_text", "skyformer"): (4000, 257, None),
    ("lra_retrieval", "paper"): (4001, 258, None),
    ("lra_retrieval", "official"): (4000, 257, None),
    ("lra_retrieval", "mega"): (4001, 258, None),
    ("lra_retrieval", "skyformer"): (4000, 257, None),
    ("lra_image", "paper"): (1024, None, False),
    ("lra_image", "official"): (1024, 256, True),
    ("lra_image", "s4"): (1024, None, False),
    ("lra_image", "mega"): (1024, None, False),
    ("lra_image", "skyformer"): (1024, 256, True),
    ("lra_pathfinder", "paper"): (1024, 256, True),
    ("lra_pathfinder", "official"): (1024, 256, True),
    ("lra_pathfinder", "s4"): (1024, None, False),
    ("lra_pathfinder", "mega"): (1024, None, False),
    ("lra_pathfinder", "skyformer"): (1024, 256, True),
    ("lra_pathx", "paper"): (16384, 256, True),
    ("lra_pathx", "official"): (16384, 256, True),
    ("lra_pathx", "s4"): (16384, None, False),
    ("lra_pathx", "mega"): (16384, None, False),
    ("lra_pathx", "skyformer"): (16384, 256, True),
}


def options(name, **given):
    return DataOptions(name=name, path="somewhere", options=given)


def test_every_preset_of_every_task_is_tested_here():
    refused = {("lra_text", "s4"), ("lra_retrieval", "s4")}
    assert set(SHAPES) == {(name, preset) for name in NAMES for preset in PRESETS} - refused


@pytest.mark.parametrize(("name", "preset"), SHAPES)
def test_presets_have_the_shapes_of_the_code_bases(name, preset):
    length, ids, masked = SHAPES[name, preset]
    found = options(name, preset=preset)
    shape = found.shape()
    assert (shape.length, shape.vocab_size, shape.in_features) == (length, ids, None if ids else 1)
    assert shape.input == ("tokens" if ids else "values")
    assert shape.num_classes == {"lra_listops": 10, "lra_image": 10}.get(name, 2)
    assert found.options.get("mask_zero") == masked
    assert options(name, **found.options).options == found.options, "completed options stay what they are"


@pytest.mark.parametrize(
    ("name", "preset", "split", "mean", "std"),
    [
        ("lra_image", "paper", "shuffled", 0.48, 0.24),
        ("lra_image", "official", "order", 0.48, 0.24),
        ("lra_image", "s4", "shuffled", 122.6 / 255, 61 / 255),
        ("lra_pathfinder", "official", "order", 0.5, 0.5),
        ("lra_pathfinder", "mega", "shuffled", 0.5, 0.5),
        ("lra_pathfinder", "s4", "shuffled", 0.0, 1.0),
    ],
)
def test_splits_and_normalizations_of_the_code_bases(name, preset, split, mean, std):
    found = options(name, preset=preset).options
    assert (found["split"], found["split_seed"], found["mean"], found["std"]) == (split, 42, mean, std)


def test_options_of_earlier_runs_are_read():
    old = {"unit": "bytes", "min_frequency": 1, "vocab_size": None}
    assert options("lra_text", **old).options == options("lra_text").options


def test_what_is_given_wins_over_the_preset():
    found = options("lra_text", preset="official", length=77).options
    assert (found["length"], found["eos"]) == (77, False)


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("lra_text", {"preset": "bert"}, "Input should be 'paper', 'official', 's4', 'mega' or 'skyformer'"),
        ("lra_text", {"unit": "chars", "vocab_size": 99}, "characters, which are not supported"),
        ("lra_retrieval", {"preset": "s4"}, "characters, which are not supported; choose another preset"),
        ("lra_text", {"length_": 3}, "length_\n  Extra inputs are not permitted"),
        ("lra_listops", {"length": 1}, "greater than or equal to 2"),
        ("lra_image", {"std": 0.0}, "greater than 0"),
        ("lra_pathfinder", {"resolution": 48}, "Input should be 32, 64, 128 or 256"),
    ],
)
def test_bad_options_are_refused(name, given, message):
    with pytest.raises(ValidationError, match=message.replace("(", r"\(").replace("?", r"\?")):
        options(name, **given)
