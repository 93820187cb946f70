"""Plans, a sweep for real, tables by hand, and pages that are up to date."""

from __future__ import annotations

import json

import pytest

from research.__main__ import main
from research.pages import update
from research.paper import entries, section
from research.plan import PLANS, Plan, load_plan
from research.results import RESULTS, is_committed, read_results, state_bytes
from research.runs import expand
from research.tables import averages, fill, table
from tost.errors import ConfigError

pytestmark = pytest.mark.slow

MINE = """title: Two depths.
config: demo/digits
metric: accuracy
percent: true
seeds: [0, 1]
set: [train.steps=3, train.batch_size=8, model.embed_dim=16, model.num_heads=2, schedule.warmup_steps=1]
tune: {key: optim.lr, values: [1e-3, 2e-3]}
equal: one
measure: {again: [evaluate.batches=1]}
arms:
  one: {set: [model.depth=1]}
  two: {set: [model.depth=2], seeds: [0]}
"""


@pytest.fixture
def plan(tmp_path):
    (tmp_path / "mine.yaml").write_text(MINE)
    return str(tmp_path / "mine.yaml")


@pytest.mark.parametrize("name", sorted(path.stem for path in PLANS.glob("*.yaml")))
def test_every_plan_can_be_run(name, tmp_path):
    runs = expand(load_plan(name), [] if name == "probes" else ["data.path=somewhere"], tmp_path)
    assert {run.arm for run in runs} == set(load_plan(name).arms)
    assert any(run.settings.model.options.get("mixer") == "none" for run in runs) or name == "vision_ablation"


def test_a_sweep_is_run_tuned_resumed_and_stored(plan, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("research.__main__.RESULTS", tmp_path)
    command = ["sweep", plan, "--out", str(tmp_path / "out"), "--jobs", "2", "--threads", "1", "--store"]
    assert main([*command, "--dry-run"]) == 0
    assert capfd.readouterr().out.count("tost train demo/digits") == 4  # two trials of both arms
    assert main(command) == 0
    results = read_results(tmp_path / "mine.json")
    assert len(results["runs"]) == 5
    assert results["arms"]["one"]["seeds"] == [0, 1]
    assert results["arms"]["one"]["parameters"] == pytest.approx(results["arms"]["two"]["parameters"], rel=0.05)
    assert set(results["arms"]["two"]["metrics"]) >= {"accuracy", "accuracy_again"}
    assert [row[0].split()[0] for row in table(results)] == ["arm", "one", "two"]
    assert main(command) == 0
    assert json.loads((tmp_path / "mine.json").read_text())["arms"] == results["arms"], "nothing is run twice"


def test_a_failed_run_is_reported(plan, tmp_path, capfd):
    assert main(["sweep", plan, "data.options.validation_size=nonsense", "--out", str(tmp_path / "out")]) == 2
    assert "arm one" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("levels: {guess: 10}\n", "source"),
        ("tasks: {text: {chance: 50}}\n", "TASK_SETTING"),
        ("unknown: 1\n", "unknown"),
        ("equal: three\n", "equal|three"),
    ],
)
def test_mistakes_in_a_plan_are_refused(plan, tmp_path, change, message):
    text = MINE.replace("equal: one\n", "") if change.startswith("equal") else MINE
    (tmp_path / "wrong.yaml").write_text(text + change)
    with pytest.raises(ConfigError, match=message):
        load_plan(str(tmp_path / "wrong.yaml"))


def test_a_change_for_some_arms(plan, tmp_path):
    runs = expand(load_plan(plan), ["train.steps=4", "tw*:train.steps=5"], tmp_path)
    assert {run.arm: run.settings.train.steps for run in runs} == {"one": 4, "two": 5}


@pytest.mark.parametrize(
    ("mixer", "five", "six"),
    [("tssa", 59.90, None), ("softmax", 59.24, None), ("reformer", 50.67, 50.56), ("performer", 51.41, 51.18)],
)
def test_references_of_the_arena_have_the_published_averages(mixer, five, six):
    plan = load_plan("lra")
    found = averages({task: plan.arms[f"{task}_{mixer}"].reference for task in plan.tasks}, plan)
    assert found[0] == pytest.approx(five, abs=0.0101)
    assert six is None or found[1] == pytest.approx(six, abs=0.0101)
    assert averages({"listops": 1.0}, plan) == (None, None)


def test_sizes_of_states(tmp_path):
    plan = load_plan("probes")
    settings = {run.arm: run.settings for run in expand(plan, [], tmp_path) if run.arm.startswith("recall_")}
    stored = read_results("probes")["arms"]
    found = {
        arm: state_bytes(settings[arm]) for arm in ("recall_none", "recall_tssa", "recall_tssa_8", "recall_softmax")
    }
    assert found == {arm: stored[arm]["state_bytes"] for arm in found}


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_stored_results_are_complete_and_say_where_they_are_from(path):
    results = read_results(path)
    assert set(Plan.model_validate(results["plan"]).arms) == set(results["arms"])
    assert all(run["revision"] and run["machine"]["cpu"] for run in results["runs"])


def test_only_committed_results_can_be_named():
    assert fill("{vision_ablation: mlp_norm.accuracy.mean:.2f} {x}") == "48.42 {x}"
    assert not is_committed(read_results("lra_ingredients"), "none")
    with pytest.raises(ConfigError, match="not committed"):
        fill("{lra_ingredients: none.accuracy.mean:.1f}")
    with pytest.raises(ConfigError, match="no mlp_nrm"):
        fill("{vision_ablation: mlp_nrm.accuracy.mean:.1f}")


def test_pages_are_up_to_date():
    assert update(check=True) == 0, "run `python -m research pages`"


def test_the_papers_digits_are_kept_and_other_sizes_shown():
    page = "\n".join(map(section, entries()))
    assert "| ToST | 37.25 | 66.75 | 79.46 | 46.62 | 69.41 | 59.90 |" in page
    assert "| parameters, here | 5.8M | 22.6M | 71.5M | 26.1M | 84.1M | 22.1M | 86.6M |" in page
    assert page.count(", here |") == 2, "other sizes and schedules are the paper's"
