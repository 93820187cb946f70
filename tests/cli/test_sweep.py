"""`tost sweep`: with stand-ins for the processes, and once for real."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.sweep.samples import leave
from tost.sweep import list_plans, runner

PLAN = """title: Two widths
config: demo/digits
metric: accuracy
percent: true
seeds: [0, 1]
set: [train.steps=7]
arms:
  thin: {set: [model.embed_dim=16]}
  wide: {}
"""
TINY = (
    "model.embed_dim=16",
    "model.depth=1",
    "model.num_heads=2",
    "train.steps=2",
    "train.batch_size=8",
    "evaluate.every=1",
    "evaluate.batches=1",
)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(PLAN)
    return tmp_path


class Stub:
    """A process that ends at once: well, with a failure, or only when it is asked to."""

    waiting: tuple[str, ...] = ()
    failing: tuple[str, ...] = ()

    def __init__(self, run) -> None:
        self.run, self.asked = run, False

    def poll(self):
        if self.run.arm in self.waiting and not self.asked:
            return None
        status = "interrupted" if self.asked else "failed" if self.run.arm in self.failing else "finished"
        leave(self.run, status, accuracy=0.5 + self.run.seed / 10)
        (self.run.folder / "output.txt").write_text("first\nTrainingError: the loss is nan\n")
        return {"finished": 0, "failed": 1, "interrupted": 130}[status]

    def send_signal(self, sig):
        self.asked = True


@pytest.fixture
def started(monkeypatch):
    """Replace the processes; return the list of runs for which one was started, with threads."""
    runs = []

    def start(run, *, threads, keep_open):
        assert len(keep_open) == 1
        runs.append((run.name, threads))
        return Stub(run)

    monkeypatch.setattr("tost.sweep.start_process", start, raising=False)
    monkeypatch.setattr(Stub, "waiting", ())
    monkeypatch.setattr(Stub, "failing", ())
    return runs


def test_sweep_ends_with_a_table_and_a_file(run, here, started):
    outcome = run("sweep", "mine.yaml", "--out", "out", "--jobs", "2", "--threads", "3")
    assert outcome.code == 0
    assert [name for name, _ in started] == ["thin/seed0", "wide/seed0", "thin/seed1", "wide/seed1"]
    assert {threads for _, threads in started} == {3}
    lines = outcome.out.splitlines()
    assert lines[0] == "Two widths"
    assert [cell.strip() for cell in lines[2].split("\t")] == ["thin", "1,000", "7", "2", "55.00 ± 7.07", "61.00"]
    assert lines[-1] == "out/results.json"
    assert json.loads(Path("out/results.json").read_text())["complete"] is True
    assert "[4/4] wide/seed1: finished" in outcome.err


def test_on_a_terminal_bars_move(run, here, started, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(
        "tost.sweep.progress_of", lambda run: {"step": 3, "loss": 1.25, "eta_seconds": 90.0}, raising=False
    )
    looks = iter([None, None, 0])
    real = Stub.poll
    monkeypatch.setattr(Stub, "poll", lambda self: real(self) if next(looks) == 0 else None)
    outcome = run("sweep", "mine.yaml", "--out", "out", "--only", "thin/seed0")
    assert outcome.code == 0
    assert "[1/1] thin/seed0: finished" in outcome.err
    assert "step 3 of 7, loss 1.2500, eta 1m30s" in outcome.err
    assert "thin" in outcome.out


def test_finished_runs_are_not_repeated_and_json_is_the_last_line(run, here, started):
    run("sweep", "mine.yaml", "--out", "out", "--only", "thin")
    assert [name for name, _ in started] == ["thin/seed0", "thin/seed1"]
    outcome = run("sweep", "mine.yaml", "--out", "out", "--json")
    assert [name for name, _ in started[2:]] == ["wide/seed0", "wide/seed1"]
    content = json.loads(outcome.out.splitlines()[-1])
    assert content == json.loads(Path("out/results.json").read_text())
    outcome = run("sweep", "mine.yaml", "--out", "out")
    assert (outcome.code, outcome.err, len(started)) == (0, "", 4)


def test_threads_are_shared_out_unless_told_otherwise(run, here, started, monkeypatch):
    monkeypatch.setattr("tost.cli._sweep.available_cpus", lambda: 6)
    run("sweep", "mine.yaml", "--out", "one", "--only", "thin")
    run("sweep", "mine.yaml", "--out", "two", "--only", "thin", "--jobs", "2")
    assert [threads for _, threads in started] == [None, None, 3, 3]


def test_failures_are_told_with_the_end_of_their_output_and_the_others_complete(run, here, started, monkeypatch):
    monkeypatch.setattr(Stub, "failing", ("thin",))
    outcome = run("sweep", "mine.yaml", "--out", "out")
    assert outcome.code == 1
    assert len(started) == 4
    assert "thin/seed0: exit code 1; the end of what it said:" in outcome.err
    assert "    TrainingError: the loss is nan" in outcome.err
    assert "Not finished: thin/seed0 (failed), thin/seed1 (failed)." in outcome.out
    assert "55.00 ± 7.07" in outcome.out


def test_ctrl_c_stops_gently_and_the_same_command_goes_on(run, here, started, monkeypatch):
    monkeypatch.setattr(Stub, "waiting", ("wide",))
    real = runner.time.sleep

    def sleep(seconds):
        os.kill(os.getpid(), signal.SIGINT)
        real(seconds)

    monkeypatch.setattr(runner.time, "sleep", sleep)
    outcome = run("sweep", "mine.yaml", "--out", "out")
    assert outcome.code == 130
    assert [name for name, _ in started] == ["thin/seed0", "wide/seed0"]
    assert "wide/seed0: interrupted" in outcome.err
    assert "thin/seed1: stopped before its turn" in outcome.err
    assert "the end of what it said" not in outcome.err
    assert json.loads(Path("out/results.json").read_text())["runs"][0]["status"] == "finished"
    monkeypatch.setattr(Stub, "waiting", ())
    assert run("sweep", "mine.yaml", "--out", "out").code == 0
    assert [name for name, _ in started[2:]] == ["wide/seed0", "thin/seed1", "wide/seed1"]


def test_dry_run_lists_and_writes_nothing(run, here, started):
    outcome = run("sweep", "mine.yaml", "train.steps=9", "--dry-run", "--json")
    assert outcome.code == 0
    assert started == []
    assert sorted(path.name for path in here.iterdir()) == ["mine.yaml"]
    rows = json.loads(outcome.out.splitlines()[-1])["runs"]
    assert [row["would"] for row in rows] == ["start"] * 4
    assert rows[0]["command"].startswith(
        "tost train demo/digits train.steps=7 model.embed_dim=16 train.steps=9 train.seed"
    )
    assert "--out runs/mine/thin/seed0 --resume auto" in rows[0]["command"]


def test_store_keeps_only_what_is_complete(run, here, started):
    outcome = run("sweep", "mine.yaml", "--out", "out", "--only", "thin", "--store", "kept/mine.json")
    assert outcome.code == 1
    assert "not stored in kept/mine.json" in outcome.err
    assert not Path("kept").exists()
    assert run("sweep", "mine.yaml", "--out", "out", "--store", "kept/mine.json").code == 0
    assert Path("kept/mine.json").read_text() == Path("out/results.json").read_text()


def test_seeds_can_be_given(run, here, started):
    run("sweep", "mine.yaml", "--out", "out", "--seeds", "5,3", "--only", "thin")
    assert [name for name, _ in started] == ["thin/seed5", "thin/seed3"]
    assert json.loads(Path("out/results.json").read_text())["plan"]["seeds"] == [5, 3]


def test_a_metric_that_no_run_has_is_a_mistake_of_the_plan(run, here, started):
    Path("mine.yaml").write_text(PLAN.replace("metric: accuracy", "metric: accuracyy"))
    outcome = run("sweep", "mine.yaml", "--out", "out")
    assert outcome.code == 2
    assert "has no metric accuracyy; it has: accuracy" in outcome.err
    assert Path("out/results.json").exists()


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["vision_cifar"], "did you mean vision_cifar10?"),
        (["mine.yaml", "train.stps=3"], "did you mean train.steps?"),
        (["mine.yaml", "--only", "x"], "Arms: thin, wide"),
        (["mine.yaml", "--seeds", "1,1"], "write for example --seeds 0,1,2"),
        (["mine.yaml", "--seeds", "one"], "write for example --seeds 0,1,2"),
        (["mine.yaml", "--jobs", "0"], "greater than or equal to 1"),
        (["vision_finetune", "data.path=x"], "give the folder of that with --from"),
    ],
)
def test_mistakes_exit_2_and_write_nothing(run, here, started, arguments, hint):
    outcome = run("sweep", *arguments)
    assert outcome.code == 2
    assert hint in outcome.err
    assert (outcome.out, started) == ("", [])
    assert sorted(path.name for path in here.iterdir()) == ["mine.yaml"]


def test_other_settings_in_the_folder_are_refused(run, here, started):
    run("sweep", "mine.yaml", "--out", "out")
    outcome = run("sweep", "mine.yaml", "train.steps=8", "--out", "out")
    assert outcome.code == 2
    assert "train.steps is 7 there and 8 now" in outcome.err
    assert len(started) == 4


def test_ls_lists_the_plans(run):
    outcome = run("ls", "sweeps")
    assert [line.split("\t")[0] for line in outcome.out.splitlines()] == list_plans()


def command(*arguments: str, **options) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "tost.cli", "sweep", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    return subprocess.Popen(line, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def test_two_real_runs_one_of_which_fails(here, run):
    text = "title: T\nconfig: demo/digits\nmetric: accuracy\narms:\n  good: {}\n  bad: {set: [optim.lr=1e30]}\n"
    Path("real.yaml").write_text(text)
    code, out, err = run("sweep", "real.yaml", *TINY, "--out", "out", "--jobs", "2", "--threads", "1", "--json")
    assert code == 1, err
    content = json.loads(out.splitlines()[-1])
    good, bad = content["runs"]
    assert (good["status"], bad["status"]) == ("finished", "failed")
    assert (good["steps"], good["samples"], good["machine"]["threads"]) == (2, 16, 1)
    assert good["parameters"] > 0
    assert content["arms"]["good"]["metrics"]["accuracy"]["mean"] == good["metrics"]["accuracy"]
    assert "bad/seed0: exit code 1; the end of what it said:" in err
    assert "the loss is nan" in err


@pytest.mark.slow
def test_a_real_sweep_is_interrupted_and_completed(here):
    arms = "  base: {}\n  tuned: {after: base, set: [train.steps=2]}\n"
    Path("real.yaml").write_text(f"title: T\nconfig: demo/digits\nmetric: accuracy\narms:\n{arms}")
    steps = (
        "train.steps=40",
        "log.every=1",
        "checkpoint.every=1000",
        "evaluate.every=1000",
        "checkpoint.best_metric=null",
    )
    arguments = ("real.yaml", *TINY, *steps, "train.batch_size=256", "--out", "out")
    sweep = command(*arguments)
    metrics = Path("out/base/seed0/metrics.jsonl")
    while not metrics.exists() and sweep.poll() is None:
        time.sleep(0.05)
    sweep.send_signal(signal.SIGINT)
    _, err = sweep.communicate(timeout=120)
    assert sweep.returncode == 130, err
    assert json.loads(Path("out/base/seed0/summary.json").read_text())["status"] == "interrupted"
    assert list(Path("out/base/seed0/checkpoints").glob("step-*"))
    sweep = command(*arguments)
    _, err = sweep.communicate(timeout=240)
    assert sweep.returncode == 0, err
    results = json.loads(Path("out/results.json").read_text())
    assert results["complete"] is True
    assert results["runs"][0]["resumed"] is True
    assert results["runs"][1]["start"]["loaded"] > 0
