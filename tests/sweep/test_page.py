"""The script that makes the page of results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.sweep.samples import leave, make_plan, make_runs
from tests.test_docs import load_script
from tost.sweep import collect, page, section, write_results

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script():
    return load_script("update_results")


@pytest.fixture
def results(tmp_path):
    plan = make_plan()
    runs = make_runs(plan, tmp_path / "out")
    for run in runs:
        leave(run)
    return collect("mine", plan, [], runs)


@pytest.fixture
def stored(tmp_path, results):
    folder = tmp_path / "results"
    write_results(folder / "a.json", results)
    write_results(folder / "b.json", results)
    (folder / "b.md").write_text("It is {wide.accuracy.mean:.1f}.\n")
    return folder


def test_the_page_has_a_section_for_each_file_with_its_text(script, stored, results):
    text = script.generate(stored)
    assert text == page([section(results), section(results, "It is {wide.accuracy.mean:.1f}.")])
    assert text.count("## Two sizes") == 2
    assert text.count("It is 50.0.") == 1


def test_files_that_cannot_be_used_are_named(script, stored, results):
    (stored / "b.md").write_text("It is {wide.accuracyy.mean}.")
    with pytest.raises(SystemExit, match=r"b\.md: .*did you mean wide\.accuracy\.mean"):
        script.generate(stored)
    (stored / "b.json").unlink()
    with pytest.raises(SystemExit, match=r"there is no b\.json"):
        script.generate(stored)
    (stored / "b.json").write_text("{}")
    with pytest.raises(SystemExit, match=r"b\.json does not hold the results"):
        script.generate(stored)
    (stored / "b.json").write_text(json.dumps({**results, "complete": False}))
    with pytest.raises(SystemExit, match="not finished"):
        script.generate(stored)


def test_check_changes_nothing(script, stored, tmp_path, monkeypatch, capsys):
    target = tmp_path / "docs" / "results.md"
    target.parent.mkdir()
    for name, value in {"ROOT": tmp_path, "RESULTS": stored, "PAGE": target}.items():
        monkeypatch.setattr(script, name, value)
    monkeypatch.setattr(script.generate, "__defaults__", (stored,))
    assert script.main(["--check"]) == 1
    assert not target.exists()
    assert script.main([]) == 0
    assert target.read_text() == script.generate(stored)
    assert capsys.readouterr().out.splitlines() == ["docs/results.md is out of date", "docs/results.md updated"]
    assert script.main(["--check"]) == 0
