"""Arms that choose a value for themselves, and arms of equal size."""

from __future__ import annotations

import pytest

from tests.sweep.samples import leave, make_plan, make_runs
from tost.errors import ConfigError
from tost.sweep import collect, load_plan, table
from tost.sweep.equal import parameters

TUNE = {"key": "optim.lr", "values": [1e-3, 3e-3]}


def test_every_arm_tries_all_values_with_the_first_seed_and_keeps_the_best(tmp_path):
    plan = make_plan(tune=TUNE, seeds=[5, 6])
    trials = make_runs(plan, tmp_path)
    assert [run.name for run in trials] == [
        f"{arm}/optim.lr={value}/seed5" for arm in ("thin", "wide") for value in ("0.001", "0.003")
    ]
    assert [run.settings.optim.lr for run in trials] == [1e-3, 3e-3] * 2
    for run, accuracy in zip(trials[:3], (0.4, 0.6, 0.7), strict=True):
        leave(run, accuracy=accuracy)
    runs = make_runs(plan, tmp_path)  # the second arm has not finished its trials
    assert [run.name for run in runs if run.seed == 6] == ["thin/optim.lr=0.003/seed6"]
    leave(trials[3], accuracy=0.5)
    runs = make_runs(plan, tmp_path)
    assert [run.trial for run in runs if run.seed == 6] == ["optim.lr=0.003", "optim.lr=0.001"]
    for run in runs[-2:]:
        leave(run, accuracy=0.8)
    results = collect("mine", plan, [], make_runs(plan, tmp_path))
    assert results["complete"]
    assert results["arms"]["thin"]["trial"] == "optim.lr=0.003"
    assert results["arms"]["thin"]["metrics"]["accuracy"]["mean"] == pytest.approx(0.7)
    assert results["arms"]["wide"]["metrics"]["accuracy"]["mean"] == pytest.approx(0.75)
    shown = table(results)
    assert [row[list(shown.headers).index("optim.lr")] for row in shown.rows] == ["0.003", "0.001"]


def test_the_lowest_value_wins_where_less_is_better(tmp_path):
    plan = make_plan(tune=TUNE, mode="min", metric="loss", arms={"a": {}})
    for run, loss in zip(make_runs(plan, tmp_path), (0.4, 0.6), strict=True):
        leave(run, loss=loss)
    assert make_runs(plan, tmp_path)[-1].name == "a/optim.lr=0.001/seed1"


def test_arms_start_from_the_best_run_of_a_sweep_that_tuned(tmp_path):
    before = make_plan(tune=TUNE, seeds=[5], arms={"base": {}})
    for run, accuracy in zip(make_runs(before, tmp_path / "there"), (0.4, 0.6), strict=True):
        leave(run, accuracy=accuracy)
        (run.folder / "checkpoints" / "last").mkdir(parents=True)
    plan = make_plan(arms={"longer": {"after": "other/base"}}, seeds=[5])
    (run,) = make_runs(plan, tmp_path, start=tmp_path / "there")
    best = tmp_path / "there" / "base" / "optim.lr=0.003" / "seed5" / "checkpoints" / "last"
    assert run.settings.train.init_from == str(best)


def test_arms_get_the_parameters_of_one_of_them_by_the_width_of_their_mlps(tmp_path):
    arms = {mixer: {"set": [f"model.mixer={mixer}"]} for mixer in ("softmax", "none", "gated_delta")}
    plan = make_plan(config="probes/recall", arms=arms, equal="softmax", seeds=[0], set=["model.embed_dim=32"])
    sizes = {run.arm: parameters(run.settings) for run in make_runs(plan, tmp_path)}
    assert sizes["none"] == pytest.approx(sizes["softmax"], abs=2 * 32)  # half of two layers of one unit each
    assert sizes["gated_delta"] == pytest.approx(sizes["softmax"], abs=2 * 32)
    ratios = {run.arm: run.settings.model.options["mlp_ratio"] for run in make_runs(plan, tmp_path)}
    assert ratios["gated_delta"] < ratios["softmax"] == 4.0 < ratios["none"]
    with pytest.raises(ConfigError, match="without MLPs it still has more"):
        make_runs(plan, tmp_path, "softmax:model.depth=1", "gated_delta:model.depth=9")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("equal: c", "there is no arm c in this plan; the arms are: a, b"),
        ("tune: {key: optim.lr, values: [1.0, 2.0]}", "an arm that starts from another one cannot be tuned, as b"),
        ("tune: {kye: optim.lr, values: [1.0, 2.0]}", "did you mean tune.key"),
    ],
)
def test_plans_that_cannot_work_are_refused(tmp_path, text, message):
    path = tmp_path / "plan.yaml"
    arms = "arms: {a: {}, b: {after: a}}"
    path.write_text(f"title: t\nconfig: demo/digits\nmetric: accuracy\n{arms}\n{text}\n")
    with pytest.raises(ConfigError, match=message):
        load_plan(str(path))
