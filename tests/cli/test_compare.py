"""`tost ls runs` and `tost compare` read run folders, also broken ones."""

from __future__ import annotations

import json

import pytest

from tost._yaml import write_value


@pytest.fixture
def runs(tmp_path):
    """Two finished runs that differ in the learning rate, and one that has just begun."""

    def write(name, lr, loss, **summary):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        settings = {
            "recipe": "language_modeling",
            "model": {"name": "tost_lm_base", "depth": 2},
            "data": {"name": "stdlib_bytes"},
            "train": {"steps": 10},
            "optim": {"lr": lr},
        }
        (folder / "config.yaml").write_text(write_value(settings))
        step = {"kind": "step", "loss": 3.0, "unit": "tok"}
        lines = [{**step, "step": i, "tokens_per_second": 100.0 * i} for i in (1, 2, 3)]
        if loss is not None:
            lines += [{"kind": "evaluation", "step": step, "loss": loss + 10 - step} for step in (5, 10)]
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        if summary:
            (folder / "summary.json").write_text(json.dumps(summary))
        return folder

    finished = {"status": "finished", "steps": 10, "parameters": 1234, "seconds": 61.0}
    write("a", 0.1, 1.5, **finished)
    write("b", 0.2, 1.25, **finished)
    write("deep/c", 0.1, None)
    return tmp_path / "runs"


def test_runs_are_listed(run, runs):
    content = json.loads(run("ls", "runs", str(runs), "--json").out)
    entries = {entry["run"]: entry for entry in content["entries"]}
    assert list(entries) == ["a", "b", "c"]
    assert entries["b"]["best"] == "loss 1.25"
    assert entries["a"]["speed"] == "200 tok/s"
    assert (entries["a"]["status"], entries["c"]["status"]) == ("finished", "unfinished")
    assert entries["c"]["steps"] == "3/10"


def test_an_empty_folder_and_none(run, refuse, tmp_path):
    assert "there are no runs" in run("ls", "runs", str(tmp_path)).err
    refuse("there is no folder", "ls", "runs", str(tmp_path / "nowhere"))


def test_compare_shows_the_settings_that_differ(run, runs):
    outcome = run("compare", str(runs / "a"), str(runs / "b"), "--json")
    content = json.loads(outcome.out.splitlines()[-1])
    assert content["differences"] == {"optim.lr": [0.1, 0.2]}
    assert [entry["best"] for entry in content["runs"]] == [1.5, 1.25]
    assert "Settings that differ" in outcome.out
    assert "optim.lr" in outcome.out
    content = json.loads(run("compare", str(runs), "--json").out.splitlines()[-1])
    assert [entry["run"] for entry in content["runs"]] == ["a", "b", "c"]


def test_a_damaged_run_is_listed_all_the_same(run, runs):
    (runs / "a" / "summary.json").write_text("{")
    (runs / "a" / "metrics.jsonl").write_text("no json\n")
    entries = {entry["run"]: entry for entry in json.loads(run("ls", "runs", str(runs), "--json").out)["entries"]}
    assert entries["a"]["status"] == "unfinished"
