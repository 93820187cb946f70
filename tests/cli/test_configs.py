"""`tost cat`, `tost validate` and `tost cp`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recipes.given import given
from tost.recipes import find_config, list_configs, load_config
from tost.train.config import config_hash, dump_config


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def content() -> bytes:
    return find_config("demo/digits").read_bytes()


@pytest.mark.parametrize("name", list_configs())
def test_cat_is_the_same_configuration_and_validate_accepts_it(run, name):
    changes = [*given(name), "train.seed=5", "optim.lr=3e-3"]
    outcome = run("cat", name, *changes)
    assert (outcome.code, outcome.err) == (0, "")
    Path("again.yaml").write_text(outcome.out)
    config = load_config("again.yaml")
    assert config == load_config(name, changes)
    assert outcome.out == f"# {name} {' '.join(changes)}, resolved; hash {config_hash(config)}\n" + dump_config(config)
    valid = run("validate", name, *changes)
    assert (valid.code, valid.err) == (0, "")
    assert valid.out.startswith(f"ok  {name}: ")
    assert valid.out.endswith(f"hash {config_hash(config)}\n")


def test_cat_explains_every_key(run):
    lines = run("cat", "demo/digits").out.splitlines()
    steps = load_config("demo/digits").train.steps
    assert f"  steps: {steps}                     # optimizer steps of the whole run; required" in lines
    assert all((not line or "# " in line) and len(line) <= 120 for line in lines)


def test_files_of_the_user(run, content):
    Path("my own.yaml").write_bytes(content)
    outcome = run("cat", "my own.yaml")
    assert outcome.out.startswith("# 'my own.yaml', resolved")
    Path("again.yaml").write_text(outcome.out)
    assert load_config("again.yaml") == load_config("demo/digits")


def test_validate_lists_all_problems(run):
    outcome = run("validate", "demo/digits", "lr=1", "train.steps=0", "model.num_heads=5", "train.accumulate=5")
    assert (outcome.code, outcome.out) == (2, "")
    heading, *lines = outcome.err.splitlines()
    assert heading == "ConfigError: demo/digits cannot be used, 4 problems:"
    assert [line.split()[0].rstrip(":") for line in lines] == ["train.steps", "lr", "model", "train.batch_size"]
    assert "lr (command line): unknown key; did you mean optim.lr?" in run("cat", "demo/digits", "lr=1").err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: {steps: 1}\ntrain: {steps: 2}\n", "my.yaml:2: the key train is given twice, first on line 1"),
        ("train:\n\tsteps: 1\n", "my.yaml:2: the line is indented with a tab"),
        ("- a\n", "my.yaml:1: the file holds a list"),
        (None, "my.yaml: there is no such file"),
    ],
)
def test_validate_names_file_and_line(refuse, text, message):
    if text is not None:
        Path("my.yaml").write_text(text)
    refuse(f"ConfigError: {message}", "validate", "my.yaml")


@pytest.mark.parametrize(("target", "written"), [("mine.yaml", "mine.yaml"), ("folder", "folder/digits.yaml")])
def test_cp(run, content, target, written):
    Path("folder").mkdir()
    copied = f"{written}  copied from demo/digits; edit it, then: tost train {written}\n"
    assert run("cp", "demo/digits", target) == (0, copied, "")
    assert Path(written).read_bytes() == content
    assert run("validate", written).code == 0
    assert run("cp", written, "other.yaml").code == 0
    assert Path("other.yaml").read_bytes() == content


def test_cp_overwrites_only_by_force_and_never_its_source(run, refuse, content):
    path = Path("mine.yaml")
    path.write_text("precious")
    outcome = run("cp", "demo/digits", "mine.yaml")
    assert outcome == (2, "", "ConfigError: mine.yaml exists and was left as it is; add --force to replace it\n")
    assert path.read_text() == "precious"
    assert run("cp", "demo/digits", "mine.yaml", "--force").code == 0
    assert path.read_bytes() == content
    refuse("mine.yaml is the file to be copied; give another destination", "cp", "mine.yaml", "./mine.yaml", "--force")
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ("demo/digits", "no/such/mine.yaml", "the folder no/such does not exist; make it first"),
        ("none.yaml", "mine.yaml", "cannot copy none.yaml to mine.yaml: No such file or directory (none.yaml)"),
        ("demo/digitz", "mine.yaml", "did you mean demo/digits?"),
    ],
)
def test_cp_refuses_with_a_reason(refuse, source, target, message):
    refuse(message, "cp", source, target)
    assert list(Path().iterdir()) == []
