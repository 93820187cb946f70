"""From a plan to runs: order, settings, weights to start from, and what is in the folders already."""

from __future__ import annotations

import re

import pytest

from tests.sweep.samples import leave, make_plan, make_runs
from tost.errors import ConfigError
from tost.sweep import State, check_folders, select, state_of, unfinished

CHAIN = {"last": {"after": "middle"}, "middle": {"after": "first"}, "first": {}}


def test_every_arm_runs_with_every_seed_the_first_seed_first(tmp_path):
    runs = make_runs(make_plan(), tmp_path)
    assert [run.name for run in runs] == ["thin/seed0", "wide/seed0", "thin/seed1", "wide/seed1"]
    assert [run.settings.train.seed for run in runs] == [0, 0, 1, 1]
    assert {run.settings.train.steps for run in runs} == {7}
    assert [run.settings.model.options["embed_dim"] for run in runs[:2]] == [16, 64]
    assert [run.folder for run in runs[:2]] == [tmp_path / "thin" / "seed0", tmp_path / "wide" / "seed0"]


def test_the_command_line_wins_over_the_arm_and_the_arm_over_the_plan(tmp_path):
    plan = make_plan(arms={"a": {"set": ["train.steps=8", "train.batch_size=4"]}})
    run = make_runs(plan, tmp_path, "train.batch_size=2")[0]
    assert (run.settings.train.steps, run.settings.train.batch_size) == (8, 2)
    assert run.arguments[:2] == ["train", "demo/digits"]
    assert run.arguments[-4:] == ["--out", str(run.folder), "--resume", "auto"]


def test_an_arm_may_have_another_configuration(tmp_path):
    runs = make_runs(make_plan(arms={"a": {}, "b": {"config": "demo/listops"}}), tmp_path)
    assert [run.settings.data.name for run in runs[:2]] == ["digits", "listops"]


def test_an_arm_starts_from_the_best_checkpoint_of_the_same_seed(tmp_path):
    runs = {run.name: run for run in make_runs(make_plan(arms=CHAIN), tmp_path)}
    run = runs["last/seed1"]
    assert run.after == "middle/seed1"
    assert run.settings.train.init_from == str(tmp_path / "middle" / "seed1" / "checkpoints" / "best")
    assert runs["first/seed0"].settings.train.init_from is None


def test_without_a_best_checkpoint_it_is_the_last(tmp_path):
    runs = make_runs(make_plan(arms={"a": {}, "b": {"after": "a"}}), tmp_path, "checkpoint.best_metric=null")
    assert runs[1].settings.train.init_from.endswith("a/seed0/checkpoints/last")


def test_an_arm_may_start_from_another_sweep(tmp_path):
    plan = make_plan(arms={"tuned": {"after": "other/base"}}, seeds=[3])
    with pytest.raises(ConfigError, match="the arm base of the sweep other; give the folder of that with --from"):
        make_runs(plan, tmp_path)
    with pytest.raises(ConfigError, match="there is no checkpoint; run `tost sweep other` first"):
        make_runs(plan, tmp_path, start=tmp_path / "there")
    best = tmp_path / "there" / "base" / "seed3" / "checkpoints" / "best"
    best.mkdir(parents=True)
    (run,) = make_runs(plan, tmp_path, start=tmp_path / "there")
    assert (run.after, run.settings.train.init_from) == (None, str(best))


def test_problems_of_all_arms_are_told_once_each(tmp_path):
    plan = make_plan(arms={"a": {}, "b": {"set": ["train.stps=1"]}, "c": {"after": "b"}})
    with pytest.raises(ConfigError) as caught:
        make_runs(plan, tmp_path, "optim.lr=-1")
    text = str(caught.value)
    assert text.count("optim.lr") == 2  # that of a, and that of b, which has another problem besides
    assert "arm a: demo/digits cannot be used, 1 problem" in text
    assert "did you mean train.steps?" in text
    assert "arm c: it starts after b, which has problems" in text
    assert "command line" not in text


@pytest.mark.parametrize("change", ["train.seed=3", "train.init_from=x"])
def test_what_the_sweep_sets_cannot_be_set(tmp_path, change):
    plan = make_plan(arms={"a": {}, "b": {"after": "a"}})
    with pytest.raises(ConfigError, match=re.escape(change.partition("=")[0]) + " is set"):
        make_runs(plan, tmp_path, change)


def test_select_takes_arms_and_runs(tmp_path):
    runs = make_runs(make_plan(), tmp_path)
    assert [run.name for run in select(runs, "thin")] == ["thin/seed0", "thin/seed1"]
    assert [run.name for run in select(runs, "*/seed1")] == ["thin/seed1", "wide/seed1"]
    with pytest.raises(ConfigError, match=r"no run matches 'tin'.*Arms: thin, wide"):
        select(runs, "tin")


def test_the_folder_tells_the_state(tmp_path):
    run = make_runs(make_plan(), tmp_path)[0]
    assert state_of(run) is State.new
    run.folder.mkdir(parents=True)
    (run.folder / "output.txt").write_text("killed before it began")
    assert state_of(run) is State.new
    for state in (State.interrupted, State.failed, State.finished):
        leave(run, state)
        assert state_of(run) is state
    (run.folder / "summary.json").write_text('{"status": "fini')  # killed
    assert state_of(run) is State.interrupted


def test_finished_runs_are_not_repeated(tmp_path):
    runs = make_runs(make_plan(), tmp_path)
    leave(runs[0])
    leave(runs[1], "interrupted")
    assert unfinished(runs, runs) == runs[1:]


def test_a_chosen_run_needs_its_source(tmp_path):
    runs = make_runs(make_plan(arms=CHAIN, seeds=[0]), tmp_path)
    last, middle, first = runs
    with pytest.raises(ConfigError, match="last/seed0 starts from middle/seed0, which is not finished"):
        unfinished(runs, [last])
    leave(first)
    assert unfinished(runs, [last, middle]) == [last, middle]


def test_folders_of_other_settings_are_refused_with_the_difference(tmp_path):
    plan = make_plan()
    for run in make_runs(plan, tmp_path):
        leave(run)
    check_folders(make_runs(plan, tmp_path))
    with pytest.raises(ConfigError) as caught:
        check_folders(make_runs(plan, tmp_path, "optim.lr=0.5", "train.clip_norm=null"))
    lines = str(caught.value).splitlines()
    assert len(lines) == 1 + 4 + 1
    assert "train.clip_norm is 1.0 there and null now; optim.lr is 0.003 there and 0.5 now" in lines[1]


def test_interrupted_runs_of_other_settings_are_refused_too(tmp_path):
    plan = make_plan(seeds=[0])
    leave(make_runs(plan, tmp_path)[0], "interrupted")
    with pytest.raises(ConfigError, match=r"train\.steps is 7 there and 9 now"):
        check_folders(make_runs(plan, tmp_path, "train.steps=9"))


def test_a_folder_written_before_a_key_existed_is_the_same_run(tmp_path):
    plan = make_plan(seeds=[0])
    run = make_runs(plan, tmp_path)[0]
    leave(run)
    path = run.folder / "config.yaml"
    kept = [line for line in path.read_text().splitlines() if "deterministic" not in line]
    path.write_text("\n".join(kept))
    check_folders([run])


def test_an_unreadable_folder_is_refused(tmp_path):
    run = make_runs(make_plan(), tmp_path)[0]
    leave(run)
    (run.folder / "config.yaml").write_text("recipe: [")
    with pytest.raises(ConfigError, match="not usable by this version"):
        check_folders([run])
