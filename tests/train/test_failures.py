"""Failures during training and at a resume: nothing that is good is lost, and the exit is not zero."""

import errno
import json
import math
import os

import pytest
import torch

from tests.train.runs import assert_same_run, run
from tost.data import Dataset, build_data
from tost.errors import CheckpointError, StorageError, TrainingError
from tost.recipes.classification import Classification
from tost.train.checkpoint import files
from tost.train.checkpoint.files import CheckpointStore, load_tensors
from tost.train.task import BatchResult


class _Poison(torch.autograd.Function):
    """Identity with a gradient that is not a number."""

    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        return gradient * math.nan


def poisoned_after(monkeypatch, step):
    """Let the loss of later training steps be finite and their gradients not."""
    original, calls = Classification.compute, [0]

    def compute(task, model, batch):
        result = original(task, model, batch)
        calls[0] += model.training
        if model.training and calls[0] > step:
            return BatchResult(_Poison.apply(result.loss), result.sums)
        return result

    monkeypatch.setattr(Classification, "compute", compute)


@pytest.mark.parametrize(
    "option", ["train.clip_norm=null", "train.clip_norm=1.0", "train.clip_norm=null train.clip_value=1.0"]
)
def test_a_gradient_that_is_not_finite_stops_the_run_before_the_step(tmp_path, monkeypatch, option):
    out, options = tmp_path / "run", (*option.split(), "checkpoint.every=1", "checkpoint.keep=1", "evaluate.every=50")
    poisoned_after(monkeypatch, 6)
    with pytest.raises(TrainingError, match=r"gradient norm is nan.* at step 7 .*last good state is .*step-00000006"):
        run(out, *options)
    kept = CheckpointStore(out / "checkpoints").newest(pytest.fail)
    assert all(tensor.isfinite().all() for tensor in load_tensors(kept / "model.safetensors").values())
    monkeypatch.undo()
    run(out, *options, resume="auto")
    run(tmp_path / "whole", *options)
    assert_same_run(tmp_path / "whole", out)


def test_weights_that_are_not_finite_are_never_saved(tmp_path, monkeypatch):
    original, steps = torch.optim.AdamW.step, [0]

    def step(optimizer, *arguments, **keywords):
        original(optimizer, *arguments, **keywords)
        steps[0] += 1
        if steps[0] == 4:
            with torch.no_grad():
                optimizer.param_groups[0]["params"][0].view(-1)[0] = math.inf

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    with pytest.raises(TrainingError, match=r"weights are not finite after step 4.*last good state is .*step-00000003"):
        run(tmp_path / "run", "checkpoint.every=1", "checkpoint.keep=1", "evaluate.every=50")


def metrics_from(monkeypatch, values):
    """Let the accuracies of the evaluations be these."""
    left = iter(values)
    monkeypatch.setattr(Classification, "metrics", lambda task, sums, terms: {"loss": 1.0, "accuracy": next(left)})


BEST = ("checkpoint.best_metric=accuracy", "checkpoint.best_mode=max", "checkpoint.keep=1", "evaluate.every=2")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_metric_that_is_not_finite_is_never_best(tmp_path, monkeypatch, bad):
    metrics_from(monkeypatch, [0.1, 0.5, bad, 0.2, bad, 0.3])
    run(tmp_path / "run", *BEST)
    assert (tmp_path / "run" / "checkpoints" / "best").resolve().name == "step-00000004"
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["best"] == 0.5


def test_a_run_that_ends_with_a_metric_that_is_not_finite_fails(tmp_path, monkeypatch):
    metrics_from(monkeypatch, [math.nan, 0.5, 0.5, math.nan, math.nan, math.nan])
    with pytest.raises(TrainingError, match=r"finished at step 12, but .*since the evaluation of step 8.*accuracy nan"):
        run(tmp_path / "run", *BEST)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO])
def test_checkpoints_that_cannot_be_read_stop_the_resume(tmp_path, monkeypatch, code):
    out = tmp_path / "run"
    run(out)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}

    def fails(path):
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(files, "sha256_of", fails)
    with pytest.raises(StorageError, match=f"cannot read the checkpoint .*step-00000012: .*{os.strerror(code)}"):
        run(out, resume="auto")
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_checkpoints_that_are_all_damaged_stop_the_resume(tmp_path):
    out = tmp_path / "run"
    run(out)
    for path in (out / "checkpoints").glob("step-*"):
        (path / "model.safetensors").write_bytes(b"x")
    metrics = (out / "metrics.jsonl").read_text()
    with pytest.raises(CheckpointError, match=r"none of the \d checkpoints in .* is whole; nothing was changed"):
        run(out, resume="auto")
    with pytest.raises(CheckpointError, match=r"none of the \d checkpoints"):
        run(tmp_path / "other", resume=out)
    assert (out / "metrics.jsonl").read_text() == metrics


def test_drafts_of_killed_processes_are_removed(tmp_path):
    out = tmp_path / "run"
    run(out)
    for name, file in (("old", ""), ("ours", "config.yaml"), ("new", "evaluation.json")):
        (out / f".writing-{name}").mkdir()
        if file:
            (out / f".writing-{name}" / file).touch()
    os.utime(out / ".writing-old", (0, 0))
    run(out, resume="auto")
    assert [path.name for path in out.glob(".writing-*")] == [".writing-new"]


class _Shorter(Dataset):
    def __init__(self, whole):
        self.whole = whole

    def __len__(self):
        return len(self.whole) - 10

    def gather(self, indices):
        return self.whole.gather(indices)


def test_a_changed_data_set_is_named_and_can_be_accepted(tmp_path, monkeypatch):
    out = tmp_path / "run"
    run(out, stop_after=5)

    def build(options, seed):
        bundle = build_data(options, seed)
        object.__setattr__(bundle, "train", _Shorter(bundle.train))
        object.__setattr__(bundle.info, "fingerprint", "0" * 64)
        return bundle

    monkeypatch.setattr("tost.train.task.build_data", build)
    message = r"other data: data \(fingerprint\): \w+ -> 000000000000, data \(training samples\): (\d+) -> \d+"
    with pytest.raises(CheckpointError, match=rf"{message}.*--accept-data-change"):
        run(out, resume="auto")
    result, told = run(out, resume="auto", accept_data_change=True)
    assert (result.status, result.step) == ("finished", 12)
    assert any(line.startswith("changed from step 5 on: data (training samples): ") for line in told.messages)
    assert "data (fingerprint)" in json.loads((out / "changes.jsonl").read_text())["changes"]


def test_another_order_of_samples_is_named(tmp_path):
    run(tmp_path / "run", stop_after=5)
    with pytest.raises(CheckpointError, match="cannot be resumed here: the position was saved with seed=0"):
        run(tmp_path / "run", "train.seed=1", resume="auto", accept_data_change=True)


def test_a_budget_of_time_ends_with_an_evaluation_and_a_checkpoint(tmp_path):
    out = tmp_path / "run"
    result, told = run(out, "train.max_minutes=1e-9")
    assert (result.status, result.step) == ("stopped", 1)
    assert 1 in told.evaluations
    assert (out / "checkpoints" / "last").resolve().name == "step-00000001"
    run(out, resume="auto")
    run(tmp_path / "whole")
    assert (out / "checkpoints/last/model.safetensors").read_bytes() == (
        tmp_path / "whole/checkpoints/last/model.safetensors"
    ).read_bytes()
