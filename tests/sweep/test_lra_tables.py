"""A table over tasks with both averages, changes for some arms, levels that need no training, and the plans."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
import pytest

from tests.sweep.samples import leave, make_plan, make_runs
from tests.test_docs import load_script
from tost.data.lra.grammar import SYMBOLS, ListOpsGenerator
from tost.data.toy.options import ListOpsOptions
from tost.errors import ConfigError
from tost.sweep import collect, expand, load_plan, statements, table
from tost.sweep.summary import averages

MIXERS = ("tssa", "softmax", "reformer", "bigbird", "linformer", "linear", "performer", "nystrom", "s4", "none")
TASKS = {"a": {"chance": 10}, "b": {"chance": 20}, "x": {"chance": 50, "extra": True}}
ARMS = {
    "a_one": {"reference": 37.25},
    "b_one": {"reference": 66.75},
    "x_one": {},
    "a_two": {},
    "b_two": {},
    "x_two": {},
}


def test_averages_by_hand():
    plan = load_plan("lra")
    reformer = dict(zip(plan.tasks, (37.27, 56.10, 53.40, 38.07, 68.50), strict=False))
    # 253.34 / 5, and (253.34 + 50) / 6 as the leaderboard prints it
    assert averages(reformer, plan) == pytest.approx((50.668, 50.55667), abs=1e-4)
    assert averages({**reformer, "pathx": 96.0}, plan) == pytest.approx((50.668, 349.34 / 6))
    assert averages({**reformer, "text": None}, plan) == (None, None)


@pytest.mark.parametrize(
    ("mixer", "five", "six"),
    [
        ("tssa", 59.90, None),
        ("softmax", 59.24, None),
        ("s4", 84.03, None),
        ("reformer", 50.67, 50.56),
        ("linear", 50.55, 50.46),
        ("performer", 51.41, 51.18),
        ("linformer", 51.36, None),
    ],
)
def test_references_have_the_published_averages(mixer, five, six):
    plan = load_plan("lra")
    values = {task: plan.arms[f"{task}_{mixer}"].reference for task in plan.tasks}
    found = averages(values, plan)
    assert found[0] == pytest.approx(five, abs=0.0101)
    assert six is None or found[1] == pytest.approx(six, abs=0.0101)


def results(tmp_path, **reached):
    plan = make_plan(tasks=TASKS, arms=ARMS, source="somewhere", seeds=[0])
    runs = make_runs(plan, tmp_path)
    for run in runs:
        if run.arm in reached:
            leave(run, accuracy=reached[run.arm])
    return collect("mine", plan, [], runs)


def test_one_row_per_setting_and_one_column_per_task(tmp_path):
    made = table(results(tmp_path, a_one=0.30, b_one=0.60, x_one=0.75, a_two=0.20, b_two=0.40))
    assert made.headers == ["setting", "a", "b", "x", "mean of 2", "mean of 3"]
    assert made.rows == [
        ["one", "30.00", "60.00", "75.00", "45.00", "55.00"],
        ["one, reported", "37.25", "66.75", "-", "52.00", "51.33"],
        ["two", "20.00", "40.00", "-", "30.00", "36.67"],
    ]


def test_a_missing_task_leaves_no_average(tmp_path):
    gathered = results(tmp_path, a_one=0.30)
    assert table(gathered).rows[0] == ["one", "30.00", "-", "-", "-", "-"]
    said = " ".join(statements(gathered))
    assert "leaves out x" in said
    assert "counts it at chance (x at 50)" in said
    assert "parameters" not in said.lower(), "tasks differ in their models"


def test_changes_for_some_arms_only(tmp_path):
    plan = make_plan()
    runs = expand(plan, ["train.steps=9", "wi*:train.steps=11"], tmp_path, name="mine")
    assert {run.arm: run.settings.train.steps for run in runs} == {"thin": 9, "wide": 11}
    assert all("wi*" not in text for run in runs for text in run.arguments)
    with pytest.raises(ConfigError, match=r"no arm matches wd\*.*arms: thin, wide"):
        expand(plan, ["wd*:train.steps=11"], tmp_path, name="mine")


def test_levels_are_told_and_can_be_named(tmp_path):
    plan = make_plan(levels={"root_operator": 36.3}, source="a count.")
    runs = make_runs(plan, tmp_path)
    for run in runs:
        leave(run)
    gathered = collect("mine", plan, [], runs)
    assert "Without learning: root operator 36.3. Reported: a count." in " ".join(statements(gathered))
    assert load_script("results_page").fill("{wide.accuracy.mean - levels.root_operator:+.1f}", gathered) == "+13.7"


def test_problems_of_tasks_and_levels_are_explained(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("title: t\nconfig: c\nmetric: m\nlevels: {x: 1.0}\ntasks: {a: {}}\narms: {b_one: {}}\n")
    with pytest.raises(ConfigError) as error:
        load_plan(str(path))
    said = str(error.value)
    assert "tasks.a.chance" in said
    assert "an arm is named TASK_SETTING, and the tasks are: a" in said
    assert "there is levels, so name the source of the values" in said


def test_the_plan_of_all_tasks_is_complete(tmp_path):
    plan = load_plan("lra")
    assert list(plan.arms) == [f"{task}_{mixer}" for task in plan.tasks for mixer in MIXERS]
    one = plan.model_copy(update={"seeds": [0]})
    for run in expand(one, ["data.path=somewhere"], tmp_path, name="lra"):
        task, mixer = plan.task_of(run.arm)
        assert run.config == f"lra/{task}" + ("_s4" if mixer == "s4" else "")
        assert run.settings.model.options["mixer"] == mixer
        assert run.settings.data.options["validation_split"] == "test"


def test_levels_of_listops_are_those_of_the_generated_expressions():
    """The note in lra/listops_cpu says how the expressions are made; here fewer are."""
    count = 2500
    options = ListOpsOptions(max_depth=10, max_args=10, min_length=20, max_length=128)
    ids, values = ListOpsGenerator(options, seed=0).split(1, count)
    by_root: dict[str, Counter[int]] = defaultdict(Counter)
    for root, value in zip(ids[:, 0], values, strict=True):
        by_root[SYMBOLS[root]][int(value)] += 1
    assert set(by_root) == {"[MIN", "[MAX", "[MED", "[SM"}
    levels = load_plan("lra_cpu_listops").levels
    assert 100 * sum(max(counts.values()) for counts in by_root.values()) / count == pytest.approx(
        levels["root_operator"], abs=3.0
    )
    assert 100 * np.bincount(values).max() / count == pytest.approx(levels["majority"], abs=2.5)


@pytest.mark.parametrize("task", ["listops", "image", "text"])
def test_small_plans_compare_mixers_in_one_encoder(task, tmp_path):
    plan = load_plan(f"lra_cpu_{task}")
    assert list(plan.arms) == ["tssa", "softmax", "linear", "s4d", "none"]
    runs = expand(plan, ["data.path=somewhere"], tmp_path, name="mine")
    same = ("embed_dim", "depth", "num_heads", "mlp_ratio", "pooling", "position", "dropout")
    assert len({tuple(run.settings.model.options[name] for name in same) for run in runs}) == 1
    assert {run.settings.model.options["mixer"] for run in runs} == set(plan.arms)
