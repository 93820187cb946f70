"""The script that makes the page of results, and numbers filled into its text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.sweep.samples import leave, make_plan, make_runs
from tests.test_docs import load_script
from tost.errors import ConfigError
from tost.sweep import collect, write_results

ROOT = Path(__file__).parents[2]
_TEXT = load_script("results_page")
fill, page, section = _TEXT.fill, _TEXT.page, _TEXT.section


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


def test_section_tells_command_table_notes_text_and_machine(gathered):
    text = section(gathered(), "Wide wins by {wide.accuracy.mean - thin.accuracy.mean:.1f} points.\n")
    parts = text.split("\n\n")
    assert parts[0] == "## Two sizes"
    assert parts[1] == "```shell\ntost sweep mine --out 'some where'\n```"
    assert parts[2].startswith("| arm |")
    assert parts[4] == "- `thin`: narrow"
    assert parts[5] == "Wide wins by 20.0 points."
    assert parts[6] == "*A CPU, 1 thread, torch 9.9, tost 0.0, revision abc1234, 2001-02-03.*"
    assert page([text]).endswith(f"{text}\n")
    assert "No results are stored yet." in page([])


VALUES = {
    "{thin.accuracy.mean:.1f}": "55.0",
    "{thin.accuracy.std:.2f}": "7.07",
    "{wide.parameters:,}": "1,020",
    "{thin.loss.min:.3f}": "1.000",
    "{thin.best.max:.0f}": "61",
    "{wide.parameters / thin.parameters:.2f}": "1.02",
    "{thin.accuracy.mean - wide.accuracy.mean:+.1f}": "-20.0",
    "{thin.steps}": "7",
    "{{thin.steps}}": "{thin.steps}",
    "`code 1.5` and {thin.samples}": "`code 1.5` and 448",
}


@pytest.mark.parametrize(("text", "filled"), VALUES.items())
def test_fill_replaces_placeholders(gathered, text, filled):
    assert fill(text, gathered()) == filled


REFUSED = {
    "{thiin.accuracy.mean}": "no such number in the results; did you mean thin.accuracy.mean",
    "{zzz}": "the names look like thin.parameters",
    "{}": "no such number",
    "{thin.reference}": "the results do not have it",
    "{thin.steps:q}": "write for example {thin.steps:.1f}",
    "{thin.steps + thin.steps + thin.steps}": "at most two names",
    "{thin.steps / thin.zero}": "no such number",
    "It has 91.2 points.": "91.2 was typed by hand",
    "It is 5 % better.": "5 % was typed by hand",
}


@pytest.mark.parametrize(("text", "message"), REFUSED.items())
def test_fill_refuses_what_it_cannot_compute(gathered, text, message):
    with pytest.raises(ConfigError) as caught:
        fill(text, gathered())
    assert message in str(caught.value)


def test_fill_does_not_divide_by_zero(gathered):
    with pytest.raises(ConfigError, match=r"wide\.accuracy\.std is 0"):
        fill("{thin.steps / wide.accuracy.std}", gathered())
