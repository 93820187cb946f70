"""Code of other packages on the command line: typed names are allowed, names in files are not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tost import _env
from tost.recipes import registry

TASK = '''
import tost
from tost.recipes.classification import Classification


@tost.register_task("weighted")
class Weighted(Classification):
    """Classification with weights."""


class Plain(Classification):
    """Classification without weights."""
'''
SMALL = ["train.steps=2", "train.batch_size=8", "model.embed_dim=16", "model.depth=1", "evaluate.batch_size=400"]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A module beside the user's work, which nothing has imported yet."""
    monkeypatch.setattr(registry.TASKS, "_specs", dict(registry.TASKS._specs))
    monkeypatch.setenv(_env.PLUGINS, "")
    monkeypatch.chdir(tmp_path)
    name = f"stranger_{tmp_path.parent.name}_{tmp_path.name}".replace("-", "_")
    Path(f"{name}.py").write_text(TASK)
    return name


def test_a_name_in_a_file_needs_permission(run, package):
    run("cp", "demo/digits", "mine.yaml")
    text = Path("mine.yaml").read_text().replace("recipe: classification", f"recipe: {package}:Plain")
    Path("mine.yaml").write_text(text)
    refused = run("validate", "mine.yaml")
    assert refused.code == 2
    assert f"'{package}:Plain' is code outside tost" in refused.err
    assert f"--plugin {package}" in refused.err
    assert run("validate", "mine.yaml", "--plugin", package).code == 0


def test_a_typed_name_is_permission(run, package):
    assert run("validate", "demo/digits", f"recipe={package}:Plain").code == 0
    assert f"recipe: {package}:Plain" in run("cat", "demo/digits", f"recipe={package}:Plain").out
    assert run("validate", "demo/digits", "recipe=../x:y").code == 2
    assert run("validate", "demo/digits", f"recipe={package}:Plian").err.count("did you mean 'Plain'") == 1


def test_registered_names_are_listed_suggested_trained_and_evaluated(run, package):
    assert "weighted" not in run("ls", "tasks").out
    assert "weighted\tClassification with weights." in run("ls", "tasks", "--plugin", package).out
    assert "did you mean 'weighted'" in run("validate", "demo/digits", "recipe=weigted", "--plugin", package).err
    done = run("train", "demo/digits", "recipe=weighted", *SMALL, "--plugin", package, "--out", "run", "--json")
    assert json.loads(done.out)["step"] == 2
    found = json.loads(run("eval", "run", "--plugin", package, "--json").out.splitlines()[-1])
    assert 0 <= found["accuracy"] <= 1


@pytest.mark.parametrize("name", ["no package", "a-b", "../x"])
def test_plugins_are_importable_names(run, package, name):
    outcome = run("ls", "tasks", "--plugin", name)
    assert outcome.code == 2
    assert "is not the name of a package" in outcome.err


def test_a_package_that_is_not_there(run, package):
    outcome = run("ls", "tasks", "--plugin", "not_there_at_all")
    assert outcome.code == 2
    assert "there is no module 'not_there_at_all'" in outcome.err
