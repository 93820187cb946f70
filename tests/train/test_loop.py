"""Whole runs: exact resumption, interruption, failure, and what a run leaves behind."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal

import pytest
import torch
from safetensors import SafetensorError

from tests.train.runs import TINY, Recorder, assert_same_run, command, records, run
from tost._progress import Pace
from tost.errors import CheckpointError, ConfigError, StorageError, TrainingError
from tost.recipes import get_task, load_config
from tost.train import distributed, loop
from tost.train.checkpoint import files as checkpoint
from tost.train.distributed import Distributed
from tost.train.loop import StopRequest, fit
from tost.train.runfolder import RunFolder

EVERYTHING = ("train.ema_decay=0.9", "train.accumulate=2", "train.clip_norm=1.0")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("config", ["demo/digits", "demo/listops"])
def test_interrupted_and_resumed_equals_undisturbed(tmp_path, workers, config):
    few = ("data.options.train_count=300", "data.options.validation_count=50") if config == "demo/listops" else ()
    options = (*EVERYTHING, *few, f"data.workers={workers}")
    result, whole = run(tmp_path / "whole", *options, config=config)
    assert result.status == "finished"
    result, first = run(tmp_path / "cut", *options, config=config, stop_after=5)
    assert (result.status, result.step) == ("interrupted", 5)
    start = tmp_path / "cut" / "checkpoints" / "last"
    result, second = run(tmp_path / "cut", *options, config=config, resume=start.resolve())
    assert (result.status, result.step) == ("finished", 12)
    assert {**first.losses, **second.losses} == whole.losses
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


def test_a_run_speaks_by_default_and_never_stays_silent_for_long(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tost.train.loop.Pace", lambda: Pace(seconds=0))  # every step and batch is due
    settings = load_config("demo/digits", [*TINY, "train.steps=3", "log.every=100", "evaluate.every=3"])
    fit(settings, get_task(settings.recipe), tmp_path / "run")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("step ")] == ["1/3", "2/3", "3/3"]
    assert any(line.startswith("eval step 3: 1 of 3 (33%), eta ") for line in lines)
    recorded = (tmp_path / "run" / "metrics.jsonl").read_text().count('"kind": "step"')
    assert recorded == 2  # the first and the last: what is stored does not depend on the time


def test_resuming_an_older_checkpoint_takes_the_same_steps_again(tmp_path):
    run(tmp_path / "whole")
    run(tmp_path / "again", "checkpoint.keep=5")
    run(tmp_path / "again", "checkpoint.keep=5", resume=tmp_path / "again" / "checkpoints" / "step-00000004")
    assert [r["step"] for r in records(tmp_path / "again") if r["kind"] == "step"] == list(range(1, 13))
    assert_same_run(tmp_path / "whole", tmp_path / "again")


def test_new_work_is_gone_on_with_and_changed_settings_are_told(tmp_path):
    out, keep = tmp_path / "run", "checkpoint.keep=2"
    run(out, keep, "checkpoint.every=2")
    start = out / "checkpoints" / "step-00000010"
    assert start.is_dir()
    result, told = run(out, keep, "checkpoint.every=1", "optim.lr=2e-3", resume=start, stop_after=11)
    assert (result.status, result.step) == ("interrupted", 11)
    assert checkpoint.CheckpointStore(out / "checkpoints").newest(pytest.fail).name == "step-00000011"
    assert (out / "checkpoints" / "set-aside-1-step-00000012" / "model.safetensors").is_file()
    assert "changed from step 10 on: optim.lr: 0.001 -> 0.002" in told.messages
    assert any("set aside 1 checkpoint of later steps" in line for line in told.messages)
    (line,) = (out / "changes.jsonl").read_text().splitlines()
    changes = {"checkpoint.every": [2, 1], "optim.lr": [0.001, 0.002]}
    assert json.loads(line) == {"step": 10, "changes": changes}
    assert [record["step"] for record in records(out) if record["kind"] == "step"] == list(range(1, 12))


def test_steps_before_the_first_checkpoint_are_recorded_once(tmp_path, monkeypatch):
    """A kill at step 3 leaves records, and the run begins again."""
    original = Recorder.step

    def dies(recorder, record):
        original(recorder, record)
        if record.step == 3:
            raise SystemExit

    monkeypatch.setattr(Recorder, "step", dies)
    with pytest.raises(SystemExit):
        run(tmp_path / "cut")
    monkeypatch.undo()
    assert len(records(tmp_path / "cut")) == 3
    run(tmp_path / "cut", resume="auto")
    run(tmp_path / "whole")
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


def test_a_killed_data_worker_is_told_in_words(tmp_path):
    class Killer(Recorder):
        def step(self, record):
            super().step(record)
            if record.step == 4:
                for worker in multiprocessing.active_children():
                    os.kill(worker.pid, signal.SIGKILL)

    config = load_config("demo/digits", [*TINY, "data.workers=1", "train.steps=500", "evaluate.every=500"])
    with pytest.raises(StorageError, match=r"a process that prepares batches was killed.*--resume auto"):
        fit(config, get_task(config.recipe), tmp_path / "run", reporter=Killer())


def test_where_to_start_is_decided_with_the_lock(tmp_path, monkeypatch):
    """Another run that ends while this one is starting is neither overwritten nor taken over half."""
    original, out = RunFolder.locked, tmp_path / "run"

    def late(folder, report):
        monkeypatch.setattr(RunFolder, "locked", original)
        run(out, "train.steps=8")
        return original(folder, report)

    monkeypatch.setattr(RunFolder, "locked", late)
    with pytest.raises(ConfigError, match="already holds a run"):
        run(out)
    monkeypatch.setattr(RunFolder, "locked", lambda folder, report: original(folder, report))
    _, told = run(out, resume="auto")
    assert "resumed from step-00000008 at step 8" in told.messages


def test_micro_batches_do_not_change_the_steps(tmp_path):
    no_dropout = "model.dropout=0.0"
    _, whole = run(tmp_path / "1", no_dropout)
    _, parts = run(tmp_path / "4", no_dropout, "train.accumulate=4")
    assert list(parts.losses.values()) == pytest.approx(list(whole.losses.values()), rel=1e-5)


@pytest.mark.parametrize("fast", ["fp32", "bf16"])
def test_auto_precision_is_stored_and_kept_when_the_machine_changes(tmp_path, monkeypatch, fast):
    def machine(precision):
        monkeypatch.setattr(distributed, "fast_precision", lambda device: precision)

    machine(fast)
    run(tmp_path / "given", f"train.precision={fast}")
    _, first = run(tmp_path / "cut", "train.precision=auto", stop_after=6)
    assert any(f"on cpu, {fast} (train.precision=auto); " in line for line in first.messages)
    assert load_config(tmp_path / "cut" / "config.yaml").train.precision == fast
    machine("bf16" if fast == "fp32" else "fp32")
    _, second = run(tmp_path / "cut", "train.precision=auto", resume="auto")
    assert not any(line.startswith("changed from step") for line in second.messages)
    assert_same_run(tmp_path / "given", tmp_path / "cut")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_runs_and_resumes(tmp_path, precision):
    run(tmp_path / "whole", f"train.precision={precision}")
    run(tmp_path / "cut", f"train.precision={precision}", stop_after=6)
    last = (tmp_path / "cut" / "checkpoints" / "last").resolve()
    run(tmp_path / "cut", f"train.precision={precision}", resume=last)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


def test_run_folder_says_how_it_was_made(tmp_path):
    out = tmp_path / "run"
    options = ("checkpoint.best_metric=accuracy", "checkpoint.best_mode=max", "log.trackers=[tensorboard]")
    result, recorder = run(out, *options)
    names = {path.name for path in out.iterdir()}
    assert {"config.yaml", "env.json", "metrics.jsonl", "summary.json", "log.txt", "checkpoints"} <= names
    summary, environment = (json.loads((out / name).read_text()) for name in ("summary.json", "env.json"))
    assert (summary["status"], summary["steps"], summary["final"]) == ("finished", 12, result.metrics)
    assert summary["best"] == max(metrics["accuracy"] for metrics in recorder.evaluations.values())
    assert environment["versions"]["torch"] == torch.__version__
    assert (out / "checkpoints" / "best" / "model.safetensors").exists()
    assert any("operators:" in line and "native" in line for line in recorder.messages)
    assert list(out.rglob("events.out.tfevents*"))


def test_full_disk_is_an_error_and_loses_nothing(tmp_path, monkeypatch):
    out, original = tmp_path / "run", checkpoint.save_file

    def fills_up(tensors, path):
        if "step-00000008" in str(path):
            raise SafetensorError("I/O error: No space left on device (os error 28)")
        original(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", fills_up)
    with pytest.raises(StorageError, match=r"cannot write the checkpoint of step 8.*No space left.*--resume auto"):
        run(out)
    monkeypatch.undo()
    last = checkpoint.CheckpointStore(out / "checkpoints").newest(pytest.fail)
    assert last.name == "step-00000006"
    assert not list((out / "checkpoints").glob(".tmp-*"))
    run(out, resume=last)
    run(tmp_path / "whole")
    assert_same_run(tmp_path / "whole", out)


def test_checkpoint_of_another_model_is_refused(tmp_path):
    run(tmp_path / "run")
    last = (tmp_path / "run" / "checkpoints" / "last").resolve()
    with pytest.raises(CheckpointError, match=r"belongs to another model: \d+ of \d+ tensors differ; nothing"):
        run(tmp_path / "run", "model.embed_dim=32", resume=last)
    with pytest.raises(CheckpointError, match=r"was trained on other data: data .fingerprint.: .*same data set"):
        run(tmp_path / "run", "data.name=listops", "model.name=lra_listops", resume=last)
    with pytest.raises(CheckpointError, match=r"holds no moving average, but train\.ema_decay=0\.5"):
        run(tmp_path / "run", "train.ema_decay=0.5", resume=last)
    with pytest.raises(CheckpointError, match=r"belongs to another model \(model\.pooling: mean -> first\)"):
        run(tmp_path / "run", "model.pooling=first", resume=last)
    _, told = run(tmp_path / "run", "model.dropout=0.2", "train.steps=13", resume=last)
    assert "changed from step 12 on: model.dropout: 0.1 -> 0.2" in told.messages


def test_command_line_round_trip(tmp_path):
    """Train, be refused, resume, evaluate, hand in a pickle; in real processes."""
    out = tmp_path / "run"
    done = command(out, "--json")
    assert done.returncode == 0, done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["status"] == "finished"
    assert "step  1/12 | loss " in done.stderr
    assert "\x1b" not in done.stderr
    refused = command(out)
    assert refused.returncode == 2
    assert "already holds a run" in refused.stderr
    pickle = tmp_path / "model.pt"
    torch.save({"w": torch.zeros(1)}, pickle)
    bad = command(tmp_path / "new", "--resume", str(pickle))
    assert bad.returncode == 2
    assert "a pickle is never opened" in bad.stderr
    assert not (tmp_path / "new").exists()


def test_losses_on_a_device_are_checked_before_anything_is_written(tmp_path, monkeypatch):
    """Reading a loss waits for the device. Checked several at a time, the failure is found at the same step."""
    steps = []
    for asynchronous in (False, True):
        monkeypatch.setattr(Distributed, "asynchronous", asynchronous)
        out = tmp_path / str(asynchronous)
        with pytest.raises(TrainingError) as error:
            run(out, "optim.lr=1e25", "checkpoint.every=7", "log.every=20", "train.steps=60")
        steps.append(str(error.value).partition("(")[0])
        assert all(math.isfinite(record["loss"]) for record in records(out))
        assert json.loads((out / "summary.json").read_text())["status"] == "failed"
    assert steps[0] == steps[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_a_request_and_only_a_later_ctrl_c_stops_at_once(monkeypatch, number):
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert not stop.requested
        for again in (number, signal.SIGINT, signal.SIGTERM):  # a launcher passes on what its terminal sent
            os.kill(os.getpid(), again)
            assert stop.requested
        monkeypatch.setattr(loop, "GRACE_SECONDS", 0.0)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(number) is before
