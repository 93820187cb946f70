"""Whole runs on images: exact resumption with mixing, first weights, raw and averaged weights, several processes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from tests.recipes.pictures import write_cifar10
from tests.train.runs import Recorder, assert_same_run, command, records
from tost.recipes import get_task, load_config
from tost.train.checkpoint.files import load_tensors
from tost.train.loop import fit

TINY = (
    "model.embed_dim=16",
    "model.depth=1",
    "model.num_heads=2",
    "train.steps=8",
    "train.batch_size=8",
    "schedule.warmup_steps=2",
    "checkpoint.every=4",
    "evaluate.every=4",
    "evaluate.batch_size=16",
    "log.every=1",
)
MIXED = ("regularize.mixup=0.8", "regularize.cutmix=1.0", "train.accumulate=2", "train.ema_decay=0.9")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_cifar10(tmp_path_factory.mktemp("cifar10"))


@pytest.fixture
def run(data):
    def start(out, *overrides, resume=None, stop_after=None):
        config = load_config("small/cifar10", [f"data.path={data}", *TINY, *overrides])
        recorder = Recorder(stop_after)
        return fit(config, get_task(config.recipe), out, resume=resume, reporter=recorder), recorder

    return start


def last(out):
    return (out / "checkpoints" / "last").resolve()


def test_interrupted_and_resumed_with_mixing_equals_undisturbed(tmp_path, run):
    _, whole = run(tmp_path / "whole", *MIXED)
    torch.randn(7)  # nothing outside of the run may matter
    result, first = run(tmp_path / "cut", *MIXED, stop_after=3)
    assert (result.status, result.step) == ("interrupted", 3)
    _, second = run(tmp_path / "cut", *MIXED, resume=last(tmp_path / "cut"))
    assert {**first.losses, **second.losses} == whole.losses
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


def test_every_micro_batch_is_mixed_in_its_own_way(tmp_path, run, monkeypatch):
    seeds, task = [], get_task("image_classification")
    original = type(task).training_batch

    def noted(self, batch, config, seed):
        seeds.append(seed)
        return original(self, batch, config, seed)

    monkeypatch.setattr(type(task), "training_batch", noted)
    run(tmp_path / "a", *MIXED, "train.steps=4")
    run(tmp_path / "b", *MIXED, "train.steps=4", "train.seed=1")
    assert len(seeds) == len(set(seeds)) == 2 * 4 * 2


def test_first_weights_come_from_another_run(tmp_path, run):
    run(tmp_path / "first")
    source = load_tensors(last(tmp_path / "first") / "model.safetensors")
    out = tmp_path / "second"
    options = (
        f"train.init_from={tmp_path / 'first'}",
        "optim.lr=1e-30",
        "optim.weight_decay=0",
        "model.num_classes=12",
    )
    _, recorder = run(out, *options, "schedule.min_lr=0", "train.steps=2")
    found = load_tensors(last(out) / "model.safetensors")
    assert torch.equal(found["cls_token"], source["cls_token"])
    assert found["head.weight"].shape == (12, 16)
    assert any(line.startswith("started from") and "new: head" in line for line in recorder.messages)
    assert "started from" in (out / "log.txt").read_text()
    start = json.loads((out / "start.json").read_text())
    assert start["fresh"] == ["head.weight", "head.bias"]
    assert len(start["sha256"]) == 64


def test_resuming_does_not_start_again(tmp_path, run):
    run(tmp_path / "first")
    options = (f"train.init_from={tmp_path / 'first'}", "train.new_head=true", *MIXED)
    run(tmp_path / "whole", *options)
    run(tmp_path / "cut", *options, stop_after=5)
    started = (tmp_path / "cut" / "start.json").read_bytes()
    assert json.loads(started)["fresh"] == ["head.weight", "head.bias"]
    (tmp_path / "first").rename(tmp_path / "gone")  # it is not even looked at
    _, recorder = run(tmp_path / "cut", *options, resume=last(tmp_path / "cut"))
    assert not any("started from" in line for line in recorder.messages)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")
    assert (tmp_path / "cut" / "start.json").read_bytes() == started


def test_raw_or_averaged_weights_are_measured(tmp_path, run):
    results = {}
    for name, options in {
        "none": (),
        "average": ("train.ema_decay=0.9",),
        "raw": ("train.ema_decay=0.9", "evaluate.weights=raw"),
    }.items():
        results[name], _ = run(tmp_path / name, *options)
    assert results["raw"].metrics == results["none"].metrics
    assert results["average"].metrics != results["none"].metrics
    assert (last(tmp_path / "raw") / "ema.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_take_the_steps_of_one(tmp_path, data, strategy):
    """Batch norms included: they see the images of both."""
    options = (f"data.path={data}", f"parallel.strategy={strategy}", "train.ema_decay=0.9", "model.dropout=0")
    for count in (1, 2):
        done = command(tmp_path / str(count), *options, "--nproc", str(count), config="small/cifar10")
        assert done.returncode == 0, done.stderr[-3000:]
    one, two = ([r["loss"] for r in records(tmp_path / name) if "loss" in r] for name in "12")
    assert two == pytest.approx(one, rel=2e-5)
    tensors = [load_tensors(last(tmp_path / name) / "model.safetensors") for name in "12"]
    for name, tensor in tensors[0].items():
        assert torch.allclose(tensor.double(), tensors[1][name].double(), atol=1e-4), name


@pytest.mark.slow
def test_two_processes_measure_what_one_measures(tmp_path, run):
    run(tmp_path / "run", "train.steps=2")
    found = []
    for count in (1, 2):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
        line = [*launcher, "-m", "tost.cli", "eval", str(tmp_path / "run"), "evaluate.batch_size=7", "--json"]
        done = subprocess.run(line, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        found.append(json.loads(done.stdout.splitlines()[-1]))
    assert found[1].pop("loss") == pytest.approx(found[0].pop("loss"), rel=1e-6)
    assert found[1] == found[0]
    assert found[0]["samples"] == 30
