"""Measuring: tables add up over processes with every sample once; averages keep the statistics of batch norms."""

from __future__ import annotations

import csv
import json
from contextlib import nullcontext

import pytest
import torch

from tests.recipes.pictures import random_bundle
from tost.data import DataBundle
from tost.errors import CheckpointError, ConfigError
from tost.recipes import get_task, load_config
from tost.train.checkpoint.files import save_tensors
from tost.train.evaluate.metrics import Evaluation, evaluate_checkpoint, evaluate_initial, measure
from tost.train.task import Details

TINY = ("model.embed_dim=16", "model.depth=1", "model.num_heads=2", "evaluate.batch_size=4", "train.precision=fp32")
TASK = get_task("image_classification")


class Rank:
    """One of several processes, as `measure` sees it; sums are left to the test."""

    device = torch.device("cpu")
    pin_memory = False

    def __init__(self, rank: int, size: int) -> None:
        self.data_rank, self.data_size = rank, size

    def place(self, batch):
        return batch

    def context(self):
        return nullcontext()

    def sum(self, value):
        return value

    def reshard(self, model):
        pass


def config(*overrides):
    return load_config("small/cifar10", ["data.path=somewhere", *TINY, *overrides])


@pytest.fixture
def bundle(monkeypatch) -> DataBundle:
    """Random images in place of the data that the configuration names."""
    made = random_bundle(config(), validation=23)
    monkeypatch.setattr("tost.train.task.build_data", lambda data, seed: made)
    return made


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_tables_hold_every_sample_once(bundle, size):
    torch.manual_seed(0)
    model = TASK.build_model(config(), bundle).eval()
    found = [measure(model, TASK, bundle.validation, config(), Rank(rank, size)) for rank in range(size)]
    confusion = sum(one.counts["confusion"] for one in found)
    targets = bundle.validation.rows["targets"]
    assert confusion.sum(dim=1).tolist() == torch.bincount(targets, minlength=10).tolist()
    guesses = model(bundle.validation.rows["inputs"]).argmax(dim=1)
    assert confusion.sum(dim=0).tolist() == torch.bincount(guesses, minlength=10).tolist()
    assert int(confusion.diagonal().sum()) == int((guesses == targets).sum())


@pytest.fixture
def checkpoint(tmp_path, bundle):
    """A run folder with one checkpoint whose average is the negated weights."""
    from tost.train.config import dump_config

    torch.manual_seed(0)
    model = TASK.build_model(config(), bundle)
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer.add_(0.3)
    folder = tmp_path / "run" / "checkpoints" / "step-00000001"
    folder.mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text(dump_config(config()))
    save_tensors(folder / "model.safetensors", model.state_dict())
    save_tensors(folder / "ema.safetensors", {name: -p for name, p in model.named_parameters()})
    return folder, model


def logits_loss(model, bundle):
    rows = bundle.validation.rows
    return torch.nn.functional.cross_entropy(model.eval()(rows["inputs"]), rows["targets"]).item()


def test_checkpoint_is_measured_with_its_report(checkpoint, bundle):
    folder, model = checkpoint
    found = evaluate_checkpoint(folder, overrides=[], ema=False)
    assert found.metrics["loss"] == pytest.approx(logits_loss(model, bundle), rel=1e-5)
    assert found.content()["samples"] == 23
    assert found.content()["loss"] == found.metrics["loss"]


def test_averages_take_the_statistics_of_batch_norms_from_the_weights(checkpoint, bundle):
    folder, model = checkpoint
    found = evaluate_checkpoint(folder, overrides=[], ema=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.neg_()
    assert found.metrics["loss"] == pytest.approx(logits_loss(model, bundle), rel=1e-5)


def test_checkpoints_are_refused_with_reasons(checkpoint, tmp_path):
    folder, _ = checkpoint
    with pytest.raises(CheckpointError, match="belongs to another model"):
        evaluate_checkpoint(folder, overrides=["model.depth=2"], ema=False)
    (folder / "ema.safetensors").unlink()
    with pytest.raises(CheckpointError, match="holds no moving average"):
        evaluate_checkpoint(folder, overrides=[], ema=True)
    (tmp_path / "run" / "config.yaml").unlink()
    with pytest.raises(CheckpointError, match=r"does not lie in a run folder.*tost eval CONFIG train\.init_from="):
        evaluate_checkpoint(folder, overrides=[], ema=False)


def test_weights_without_a_run_are_measured_by_a_configuration(checkpoint, bundle):
    folder, model = checkpoint
    weights = config(f"train.init_from={folder / 'model.safetensors'}")
    assert evaluate_initial(weights).metrics["loss"] == pytest.approx(logits_loss(model, bundle), rel=1e-5)
    with pytest.raises(ConfigError, match=r"no weights to measure; add train\.init_from=PATH"):
        evaluate_initial(config())
    with pytest.raises(CheckpointError, match=r"head\.weight: \(10, 16\) there, \(11, 16\) here"):
        evaluate_initial(config(f"train.init_from={folder / 'model.safetensors'}", "model.num_classes=11"))


def test_files_hold_everything(tmp_path):
    confusion = torch.tensor([[3, 1], [0, 2]])
    metrics = {"loss": float("nan"), "accuracy": 0.5}
    found = Evaluation(metrics, Details({"samples": 6}), {"confusion": confusion}, ("a, b", "c"))
    files = found.write(tmp_path / "new" / "folder")
    assert [file.name for file in files] == ["evaluation.json", "confusion.csv"]
    assert json.loads(files[0].read_text()) == {"loss": None, "accuracy": 0.5, "samples": 6}
    with files[1].open(newline="") as file:
        assert list(csv.reader(file)) == [["label", "a, b", "c"], ["a, b", "3", "1"], ["c", "0", "2"]]
