from __future__ import annotations

from pathlib import Path

import pytest

from tests.recipes.given import given
from tost.recipes import list_configs, load_config
from tost.train.config import config_hash, dump_config


@pytest.mark.parametrize("name", list_configs())
def test_cat_output_is_the_same_configuration(run, tmp_path, name):
    changes = [*given(name), "train.seed=5", "optim.lr=3e-3"]
    outcome = run("cat", name, *changes)
    assert (outcome.code, outcome.err) == (0, "")
    path = tmp_path / "again.yaml"
    path.write_text(outcome.out)
    config = load_config(str(path))
    assert config == load_config(name, changes)
    assert config.train.seed == 5
    heading = f"# {name} {' '.join(changes)}, resolved; hash {config_hash(config)}\n"
    assert outcome.out == heading + dump_config(config)


def test_cat_explains_every_key(run):
    lines = run("cat", "demo/digits").out.splitlines()
    steps = load_config("demo/digits").train.steps
    assert f"  steps: {steps}                     # optimizer steps of the whole run; required" in lines
    for line in lines:
        assert not line or "# " in line
        assert len(line) <= 120


def test_cat_takes_a_file_of_the_user(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my own.yaml").write_text(dump_config(load_config("demo/digits"), comments=False))
    outcome = run("cat", "my own.yaml")
    assert outcome.out.startswith("# 'my own.yaml', resolved")
    Path("again.yaml").write_text(outcome.out)
    assert load_config("again.yaml") == load_config("demo/digits")


def test_cat_of_a_wrong_configuration_shows_the_problems_only(run):
    outcome = run("cat", "demo/digits", "lr=1")
    assert outcome == (
        2,
        "",
        "ConfigError: demo/digits cannot be used, 1 problem:\n"
        "  lr (command line): unknown key; did you mean optim.lr?\n",
    )
