"""Every configuration that is shipped: found by walking the folder, read, checked, and built without memory."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import torch

from tost import recipes
from tost.models import create_model
from tost.recipes import config_summary, list_configs, load_config
from tost.train.config import dump_config

ROOT = Path(__file__).parents[2]
FOLDER = Path(recipes.__file__).parent / "configs"
FILES = sorted(path for path in FOLDER.rglob("*") if path.is_file())
NAMES = [path.relative_to(FOLDER).with_suffix("").as_posix() for path in FILES]
KEYS = ("model.name", "data.path", "train.steps", "train.seed", "train.batch_size", "checkpoint.every")
HEADER = re.compile(
    r"# (?P<title>\S.*)\n"
    r"#   run      tost train (?P<name>\S+)\n"
    r"#   cost     (?P<cost>.+)\n"
    r"#   expect   (?P<expect>.+)\n"
    r"#   checked  (?P<checked>.+)\n"
    r"recipe: "
)


def test_the_list_is_what_the_folder_holds():
    assert list_configs() == NAMES
    assert {path.suffix for path in FILES} == {".yaml"}


@pytest.mark.parametrize("name", NAMES)
def test_header_tells_the_story(name):
    match = HEADER.match((FOLDER / f"{name}.yaml").read_text())
    assert match, "the first lines are a title and run, cost, expect, checked; see CONTRIBUTING.md"
    assert match["name"] == name
    assert match["title"] == config_summary(name)
    measured = [match[line] != "not measured yet" for line in ("cost", "expect", "checked")]
    assert len(set(measured)) == 1, "the measured lines are filled together, by scripts/fill_recipe_header.py"


@pytest.mark.parametrize("name", NAMES)
def test_config_is_valid_and_complete(name):
    config = load_config(name)
    for key in KEYS:
        config.value(key)
    assert dump_config(config)


@pytest.mark.parametrize("name", NAMES)
def test_model_builds_on_the_meta_device(name):
    config = load_config(name)
    with torch.device("meta"):
        model = create_model(config.model.name, **config.model.options)
        shape = config.data.shape()
        size = (2, shape.length) if shape.input == "tokens" else (2, shape.length, shape.in_features)
        kind = torch.int64 if shape.input == "tokens" else torch.float32
        logits = model(torch.empty(size, dtype=kind))
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    classes = shape.num_classes or shape.vocab_size
    assert logits.shape[0] == 2
    assert logits.shape[-1] == classes


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("demo/")])
@pytest.mark.parametrize("steps", [1, 5])
def test_demos_can_be_made_short(name, steps):
    assert load_config(name, [f"train.steps={steps}"]).train.steps == steps


def test_every_file_is_packaged():
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["tost"]
    packaged = {path for pattern in patterns for path in (ROOT / "src" / "tost").glob(pattern)}
    assert set(FILES) <= packaged
