"""Where a run goes that was given no folder."""

from __future__ import annotations

import json

import pytest

from tests.train.runs import TINY


@pytest.mark.parametrize(("config", "folder"), [("demo/digits", "runs/demo/digits"), ("sub/mine.yaml", "runs/mine")])
def test_the_default_folder_has_the_name_of_the_configuration(run, tmp_path, monkeypatch, config, folder):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "mine.yaml").write_text(run("cat", "demo/digits").out)
    done = run("train", config, *TINY, "train.steps=2", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out.splitlines()[-1])["out"] == folder
    assert (tmp_path / folder / "summary.json").is_file()
