from __future__ import annotations

from pathlib import Path

import pytest

from tests.recipes.given import given
from tost.recipes import list_configs, load_config
from tost.train.config import config_hash


@pytest.mark.parametrize("name", list_configs())
def test_validate_says_ok(run, name):
    outcome = run("validate", name, *given(name), "train.seed=3")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith(f"ok  {name}: ")
    assert outcome.out.endswith(f"hash {config_hash(load_config(name, [*given(name), 'train.seed=3']))}\n")


def test_validate_lists_all_problems(run):
    outcome = run("validate", "demo/digits", "lr=1", "train.steps=0", "model.num_heads=5", "train.accumulate=5")
    assert (outcome.code, outcome.out) == (2, "")
    heading, *lines = outcome.err.splitlines()
    assert heading == "ConfigError: demo/digits cannot be used, 4 problems:"
    assert [line.split()[0].rstrip(":") for line in lines] == ["train.steps", "lr", "model", "train.batch_size"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("train: {steps: 1}\ntrain: {steps: 2}\n", "my.yaml:2: the key train is given twice, first on line 1"),
        ("train:\n\tsteps: 1\n", "my.yaml:2: the line is indented with a tab"),
        ("- a\n", "my.yaml:1: the file holds a list"),
        (None, "my.yaml: there is no such file"),
    ],
)
def test_validate_names_file_and_line(run, tmp_path, monkeypatch, content, message):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path("my.yaml").write_text(content)
    outcome = run("validate", "my.yaml")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith(f"ConfigError: {message}")
