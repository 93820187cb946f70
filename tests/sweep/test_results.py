"""Gathering what runs left behind."""

from __future__ import annotations

import json
import math
from statistics import fmean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sweep.samples import leave, make_plan, make_runs
from tost.errors import ConfigError
from tost.sweep import collect, metric_problem, read_results, table, write_results
from tost.sweep.results import _spread
from tost.train.config import config_hash


@pytest.fixture
def plan():
    return make_plan()


@pytest.fixture
def runs(plan, tmp_path):
    return make_runs(plan, tmp_path / "out", "data.workers=0")


def test_every_run_is_recorded(plan, runs, monkeypatch):
    monkeypatch.setattr("sys.argv", ["tost", "sweep", "/private/mine.yaml", "--out", "/private/out"])
    for run, accuracy in zip(runs, (0.5, 0.75, 0.6, 0.75), strict=True):
        leave(run, accuracy=accuracy, loss=1.0)
    results = collect("/private/mine.yaml", plan, ["data.workers=0", "data.path=/private/data"], runs)
    assert results["complete"] is True
    assert results["name"] == "mine"
    assert results["changes"] == ["data.workers=0", "data.path=data"]
    assert results["command"] == ["tost", "sweep", "mine.yaml", "--out", "out"]
    assert "/private" not in json.dumps(results)
    record = results["runs"][0]
    expected = {
        "arm": "thin",
        "seed": 0,
        "status": "finished",
        "config": "demo/digits",
        "config_hash": config_hash(runs[0].settings),
        "changes": ["train.steps=7", "model.embed_dim=16", "data.workers=0"],
        "command": ["tost", "train", "demo/digits"],
        "parameters": 1000,
        "steps": 7,
        "samples": 7 * 64,
        "metrics": {"accuracy": 0.5, "loss": 1.0},
        "seconds": 60.0,
        "resumed": False,
        "peak_memory_bytes": 512_000_000,
        "revision": "abc1234",
        "start": None,
        "finished": "2001-02-03T00:00:00Z",
    }
    assert {key: record[key] for key in expected} == expected
    assert record["machine"]["cpu"] == "A CPU"
    assert record["machine"]["torch"] == "9.9"
    arm = results["arms"]["thin"]
    assert arm["metrics"]["accuracy"] == {
        "mean": pytest.approx(0.55),
        "std": pytest.approx(stdev([0.5, 0.6])),
        "min": 0.5,
        "max": 0.6,
    }
    assert arm["best"]["max"] == pytest.approx(0.61)
    assert (arm["seeds"], arm["parameters"], arm["steps"], arm["samples"]) == ([0, 1], 1000, 7, 448)


def test_what_is_not_finished_does_not_count(plan, runs):
    leave(runs[0], accuracy=0.5)
    leave(runs[2], "interrupted", accuracy=0.1)
    results = collect("mine", plan, [], runs)
    assert results["complete"] is False
    assert [record["status"] for record in results["runs"]] == ["finished", "new", "interrupted", "new"]
    assert results["arms"]["thin"]["seeds"] == [0]
    assert results["arms"]["thin"]["metrics"]["accuracy"]["mean"] == 0.5
    assert results["arms"]["thin"]["metrics"]["accuracy"]["std"] is None
    assert results["runs"][2]["metrics"] == {}
    assert results["arms"]["wide"]["metrics"] == {}


def test_a_metric_that_is_no_number_spoils_only_itself(plan, runs, tmp_path):
    leave(runs[0], accuracy=0.5, loss=math.nan)
    leave(runs[2], accuracy=0.5, loss=math.inf)
    results = collect("mine", plan, [], runs)
    assert results["arms"]["thin"]["metrics"]["loss"] is None
    assert results["arms"]["thin"]["metrics"]["accuracy"]["mean"] == 0.5
    write_results(tmp_path / "r.json", results)
    assert read_results(tmp_path / "r.json") == results


def test_the_weights_it_started_from_and_a_resume_are_recorded(plan, runs):
    leave(runs[0], log="resumed from step-00000004 at step 4\n")
    start = {"path": "/private/x", "sha256": "f00", "loaded": 3, "fresh": ["head.weight"]}
    (runs[0].folder / "start.json").write_text(json.dumps(start))
    record = collect("mine", plan, [], runs)["runs"][0]
    assert record["resumed"] is True
    assert record["start"] == {"sha256": "f00", "loaded": 3, "fresh": ["head.weight"]}


def test_a_missing_metric_is_named(plan, runs):
    leave(runs[0], accuracy=0.5)
    assert metric_problem(collect("mine", plan, [], runs)) == ""
    leave(runs[1], loss=0.5)
    assert "wide has no metric accuracy; it has: loss." in metric_problem(collect("mine", plan, [], runs))


def test_other_files_are_refused(tmp_path):
    for content in ("{}", "[1]", "nonsense", '{"format": 0}'):
        (tmp_path / "r.json").write_text(content)
        with pytest.raises(ConfigError, match="does not hold the results of a sweep"):
            read_results(tmp_path / "r.json")


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("plan",), {}, "plan.title: Field required"),
        (("command",), "tost", "command: "),
        (("runs", 0), None, "runs.0: "),
        (("runs", 0, "machine"), {}, "runs.0.machine.cpu: Field required"),
        (("arms", "thin"), {}, "arms.thin.seeds: Field required"),
        (("arms", "thin", "parameters"), 0, "arms.thin.parameters: "),
        (("arms", "thin", "metrics", "accuracy"), {"mean": 1.0}, "arms.thin.metrics.accuracy.std: "),
        (("arms",), {}, "arms of the plan or of the results: thin, wide"),
    ],
)
def test_damaged_results_are_refused(plan, runs, tmp_path, place, value, message):
    for run in runs:
        leave(run)
    results = json.loads(json.dumps(collect("mine", plan, [], runs)))
    *sections, last = place
    holder = results
    for section in sections:
        holder = holder[section]
    holder[last] = value
    write_results(tmp_path / "r.json", results)
    with pytest.raises(ConfigError, match="is damaged") as refused:
        read_results(tmp_path / "r.json")
    assert f"({message}" in str(refused.value)


@pytest.mark.parametrize("damage", [{"steps": {}}, {"final": "x"}, {"seconds": "long"}, {"parameters": -1}])
def test_a_damaged_summary_is_named(plan, runs, damage):
    leave(runs[0])
    path = runs[0].folder / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | damage))
    with pytest.raises(ConfigError, match=r"summary.json is damaged \(\w+: .*remove it"):
        collect("mine", plan, [], runs)


@pytest.mark.parametrize("name", ["env.json", "start.json"])
@pytest.mark.parametrize("content", ["{}", "[]", '{"versions": null, "sha256": 1, "threads": []}'])
def test_what_results_can_do_without_may_be_damaged(plan, runs, name, content):
    leave(runs[0])
    (runs[0].folder / name).write_text(content)
    results = collect("mine", plan, [], runs)
    assert results["runs"][0]["status"] == "finished"
    assert results["runs"][0]["machine" if name == "env.json" else "start"] is None
    assert table(results).rows


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=6))
def test_spread_is_that_of_the_standard_library(values):
    spread = _spread(values)
    assert spread["mean"] == fmean(values)
    assert spread["std"] == (stdev(values) if len(values) > 1 else None)
    assert (spread["min"], spread["max"]) == (min(values), max(values))
    assert _spread([*values, None]) is None
