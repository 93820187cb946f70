"""Trained weights that a sweep measures once more, with other settings; and tasks with settings of their own."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from tests.sweep.samples import leave, make_plan, make_runs
from tests.test_docs import load_script
from tost.errors import ConfigError
from tost.recipes import get_task
from tost.sweep import collect, measure_runs, measured_tables, read_results, state_picture, statements, table
from tost.sweep.measure import MEASURED
from tost.sweep.results import write_results
from tost.train.evaluate.metrics import evaluate_checkpoint
from tost.train.loop import SilentReporter, fit

SMALL = [
    "model.embed_dim=16",
    "model.depth=1",
    "model.num_heads=2",
    "model.mixer=mingru",
    "data.options.length=8",
    "data.options.validation_count=20",
    "train.steps=2",
    "train.batch_size=4",
    "schedule.warmup_steps=1",
]
LONG = ["data.options.length=32", "data.options.validation_count=10"]
TUNE = {"key": "optim.lr", "values": [1e-3, 3e-3]}


def plan_of(**changes):
    options = {"config": "probes/brackets", "set": SMALL, "seeds": [0], "arms": {"a": {}}, "measure": {"long": LONG}}
    return make_plan(**(options | changes))


def test_finished_runs_are_measured_once_with_the_changes_of_the_plan(tmp_path):
    plan = plan_of()
    (run,) = make_runs(plan, tmp_path)
    fit(run.settings, get_task("token_prediction"), run.folder, reporter=SilentReporter())
    told = []
    measure_runs(plan, [run], lambda *progress: told.append(progress))
    assert told == [(0, 1)]
    expected = evaluate_checkpoint(run.folder / "checkpoints" / "last", get_task, overrides=LONG, ema=False).metrics
    results = collect("mine", plan, [], [run])
    found = results["arms"]["a"]["metrics"]
    assert {name: found[f"{name}_long"]["mean"] for name in expected} == expected
    assert expected["loss"] != found["loss"]["mean"]

    measure_runs(plan, [run], lambda *progress: pytest.fail("measured twice"))
    other = plan_of(measure={"long": LONG[:1]})
    assert "accuracy_long" not in collect("mine", other, [], [run])["arms"]["a"]["metrics"], "of other changes"
    (run.folder / MEASURED).write_text(json.dumps({"long": {"metrics": 1}}))
    told.clear()
    measure_runs(plan, [run], lambda *progress: told.append(progress))
    assert told, "what is damaged is measured again"


def test_only_runs_that_count_are_measured(tmp_path, monkeypatch):
    plan, seen = plan_of(tune=TUNE, arms={"a": {}, "b": {}, "c": {}}), []
    runs = make_runs(plan, tmp_path)
    for run, accuracy in zip(runs[:3], (0.4, 0.6, 0.7), strict=True):  # the trials of b and c are not complete
        leave(run, accuracy=accuracy)
    monkeypatch.setattr("tost.train.checkpoint.files.resolve_checkpoint", lambda folder, report: seen.append(folder))
    monkeypatch.setattr("tost.train.evaluate.metrics.evaluate_checkpoint", stand_in)
    measure_runs(plan, runs)
    assert seen == [tmp_path / "a" / "optim.lr=0.003" / "seed0"]
    assert collect("mine", plan, [], runs)["arms"]["a"]["metrics"]["accuracy_long"]["mean"] == 0.25


def stand_in(checkpoint, get_task, *, overrides, ema):
    assert overrides == LONG
    return SimpleNamespace(metrics={"accuracy": 0.25, "loss": float("inf")})


def measured(plan, out, monkeypatch):
    runs = make_runs(plan, out)
    for run in runs:
        leave(run, accuracy=0.5 + 0.1 * run.seed)
    monkeypatch.setattr("tost.train.checkpoint.files.resolve_checkpoint", lambda folder, report: folder)
    monkeypatch.setattr("tost.train.evaluate.metrics.evaluate_checkpoint", stand_in)
    measure_runs(plan, runs)
    return collect("mine", plan, [], runs)


def test_measured_values_are_shown_told_stored_and_can_be_named(tmp_path, monkeypatch):
    results = measured(plan_of(arms={"a": {}, "b": {}}, seeds=[0, 1]), tmp_path / "runs", monkeypatch)
    (shown,) = measured_tables(results)
    assert shown.headers == ["arm", "as trained", "long"]
    assert shown.rows == [[arm, "55.00 ± 7.07", "25.00 ± 0.00"] for arm in ("a", "b")]
    assert any("long with data.options.length=32, data.options.valid" in text for text in statements(results))
    script = load_script("results_page")
    assert script.fill("{a.accuracy_long.mean:.1f}", results) == "25.0"
    assert shown.markdown() in script.section(results)
    write_results(tmp_path / "mine.json", results)
    assert read_results(tmp_path / "mine.json") == results
    plain = make_plan()
    assert measured_tables(collect("mine", plain, [], make_runs(plain, tmp_path / "plain"))) == []


def test_tasks_have_settings_of_their_own_a_table_and_a_panel_each(tmp_path, monkeypatch):
    tasks = {"near": {"chance": 6.25}, "far": {"chance": 6.25, "set": ["data.options.length=16"]}}
    arms = {
        f"{task}_{name}": {"set": [f"model.mixer={mixer}"]}
        for task in tasks
        for name, mixer in (("gru", "mingru"), ("full", "softmax"))
    }
    results = measured(plan_of(tasks=tasks, arms=arms, states=True), tmp_path, monkeypatch)
    lengths = {
        run.arm: run.settings.data.options["length"] for run in make_runs(plan_of(tasks=tasks, arms=arms), tmp_path)
    }
    assert lengths == {"near_gru": 8, "near_full": 8, "far_gru": 16, "far_full": 16}
    assert [shown.headers[0] for shown in measured_tables(results)] == ["near", "far"]
    assert measured_tables(results)[1].rows == [["gru", "50.00", "25.00"], ["full", "50.00", "25.00"]]
    made = table(results)
    assert made.headers == ["setting", "near", "far", "mean of 2", "state, bytes"]
    assert [row[-1] for row in made.rows] == ["64", "-"], "softmax attention keeps more of longer samples"
    picture = state_picture(results).decode()
    assert all(f"<!-- {label} -->" in picture for label in ("near", "far", "gru", "full"))


def test_changes_that_a_configuration_refuses_are_found_before_anything_is_trained(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.options\.lengths.*did you mean.*length"):
        make_runs(plan_of(measure={"long": ["data.options.lengths=32"]}), tmp_path)
