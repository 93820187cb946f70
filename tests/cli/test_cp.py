from __future__ import annotations

from pathlib import Path

import pytest

from tost.recipes import find_config


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def content() -> bytes:
    return find_config("demo/digits").read_bytes()


def test_cp_to_a_file(run, content):
    outcome = run("cp", "demo/digits", "mine.yaml")
    assert outcome == (0, "mine.yaml  copied from demo/digits; edit it, then: tost train mine.yaml\n", "")
    assert Path("mine.yaml").read_bytes() == content
    assert run("validate", "mine.yaml").code == 0


def test_cp_into_a_folder(run, content):
    Path("folder").mkdir()
    assert run("cp", "demo/digits", "folder").code == 0
    assert Path("folder/digits.yaml").read_bytes() == content


def test_cp_of_a_file(run, content):
    Path("mine.yaml").write_bytes(content)
    assert run("cp", "mine.yaml", "other.yaml").code == 0
    assert Path("other.yaml").read_bytes() == content


def test_cp_overwrites_only_by_force(run, content):
    path = Path("mine.yaml")
    path.write_text("precious")
    outcome = run("cp", "demo/digits", "mine.yaml")
    assert outcome == (2, "", "ConfigError: mine.yaml exists and was left as it is; add --force to replace it\n")
    assert path.read_text() == "precious"
    assert run("cp", "demo/digits", "mine.yaml", "--force").code == 0
    assert path.read_bytes() == content


def test_cp_never_empties_its_source(run, content):
    Path("mine.yaml").write_bytes(content)
    outcome = run("cp", "mine.yaml", "./mine.yaml", "--force")
    assert (outcome.code, outcome.err) == (
        2,
        "ConfigError: mine.yaml is the file to be copied; give another destination\n",
    )
    assert Path("mine.yaml").read_bytes() == content


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ("demo/digits", "no/such/mine.yaml", "the folder no/such does not exist; make it first"),
        ("none.yaml", "mine.yaml", "cannot copy none.yaml to mine.yaml: No such file or directory (none.yaml)"),
        ("demo/digitz", "mine.yaml", "did you mean demo/digits?"),
    ],
)
def test_cp_refuses_with_a_reason(run, source, target, message):
    outcome = run("cp", source, target)
    assert (outcome.code, outcome.out) == (2, "")
    assert message in outcome.err
    assert list(Path().iterdir()) == []
