"""The image task: targets in training, sums in evaluation, and the report made of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tost.data import DataInfo
from tost.errors import ConfigError
from tost.recipes import get_task, load_config

K = 10
TASK = get_task("image_classification")


def batch(count: int = 8, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "inputs": torch.randn(count, 3, 8, 8, generator=generator),
        "targets": torch.randint(K, (count,), generator=generator),
        **more,
    }


def config(*regularize: str):
    overrides = ["data.path=somewhere", "regularize.label_smoothing=0", *(f"regularize.{key}" for key in regularize)]
    return load_config("small/cifar10", overrides)


class Fixed(nn.Module):
    """A model that answers with given logits."""

    def __init__(self, logits):
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, images):
        assert len(images) == len(self.logits)
        return self.logits


def loss_on(prepared, logits):
    return TASK.compute(Fixed(logits).train(), prepared).loss


def test_without_options_training_sees_the_batch_as_it_is():
    given = batch()
    assert TASK.training_batch(given, config(), seed=1) is given


def test_label_smoothing_is_that_of_torch():
    logits, given = torch.randn(8, K), batch()
    smoothed = TASK.training_batch(given, config("label_smoothing=0.2"), seed=1)
    expected = F.cross_entropy(logits, given["targets"], label_smoothing=0.2, reduction="sum")
    assert loss_on(smoothed, logits).item() == pytest.approx(expected.item(), rel=1e-5)
    assert TASK.terms(smoothed) == 8


MIXES = {
    "mixup": ["mixup=0.8"],
    "cutmix": ["cutmix=1.0"],
    "both": ["mixup=0.8", "cutmix=1.0", "switch_prob=0.4"],
    "sometimes": ["mixup=0.8", "mix_prob=0.5", "label_smoothing=0.1"],
}


@pytest.mark.parametrize("options", MIXES.values(), ids=MIXES.keys())
def test_mixing_is_timm_s_from_a_seed_of_its_own(options):
    from timm.data.mixup import Mixup

    given, settings = batch(), config(*options).regularize
    images = given["inputs"].clone()
    timm = Mixup(
        settings.mixup,
        settings.cutmix,
        prob=settings.mix_prob,
        switch_prob=settings.switch_prob,
        label_smoothing=settings.label_smoothing,
        num_classes=K,
    )
    for seed in (3, 2**40 + 3):
        np.random.seed(5)
        before = np.random.get_state()[1].tolist()
        mixed = TASK.training_batch(given, config(*options), seed=seed)
        assert np.random.get_state()[1].tolist() == before, (
            "numpy's global generator goes on as if nothing had happened"
        )
        np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
        inputs, targets = timm(images.clone(), given["targets"])
        assert torch.equal(mixed["inputs"], inputs)
        assert torch.equal(mixed["targets"], targets)
    assert torch.equal(given["inputs"], images), "the loader's batch is not written to"


def test_mixed_targets_are_probabilities_and_seeds_matter():
    settings = config("mixup=0.8", "cutmix=1.0", "label_smoothing=0.1")
    drawn = [TASK.training_batch(batch(), settings, seed=seed) for seed in range(20)]
    for mixed in drawn:
        assert torch.allclose(mixed["targets"].sum(dim=1), torch.ones(8))
        assert mixed["targets"].min() > 0
    assert len({mixed["inputs"][0].sum().item() for mixed in drawn}) > 15
    again = TASK.training_batch(batch(), settings, seed=7)
    assert torch.equal(again["inputs"], drawn[7]["inputs"])


def test_odd_numbers_of_images_cannot_be_mixed():
    with pytest.raises(ConfigError, match="mix pairs, but a process has 7 images per micro-batch"):
        TASK.training_batch(batch(7), config("mixup=1"), seed=1)


def evaluated(logits, given):
    outcome = TASK.compute(Fixed(logits).eval(), given)
    sums = {"loss": outcome.loss.item(), **{name: value.item() for name, value in outcome.sums.items()}}
    return TASK.metrics(sums, TASK.terms(given)), outcome.counts


def test_metrics_are_those_counted_one_by_one():
    generator = torch.Generator().manual_seed(2)
    logits, given = torch.randn(50, K, generator=generator), batch(50)
    metrics, counts = evaluated(logits, given)
    order = logits.argsort(dim=1, descending=True).tolist()
    labels = given["targets"].tolist()
    assert metrics["accuracy"] == sum(row[0] == label for row, label in zip(order, labels, strict=True)) / 50
    assert metrics["accuracy_top5"] == sum(label in row[:5] for row, label in zip(order, labels, strict=True)) / 50
    assert metrics["loss"] == pytest.approx(F.cross_entropy(logits, given["targets"]).item())
    confusion = np.zeros((K, K), dtype=int)
    for row, label in zip(order, labels, strict=True):
        confusion[label, row[0]] += 1
    assert counts["confusion"].tolist() == confusion.tolist()
    assert counts["confusion"].dtype == torch.int64


def test_reassessed_labels_are_sets_and_empty_ones_do_not_count():
    logits = torch.eye(K)[:4] * 5  # the guesses are 0, 1, 2, 3
    real = torch.tensor([[0, 9], [5, -1], [-1, -1], [7, 3]])
    metrics, _ = evaluated(logits, batch(4, real=real))
    assert metrics["accuracy_real"] == pytest.approx(2 / 3)
    metrics, _ = evaluated(logits, batch(4, real=torch.full((4, 2), -1)))
    assert "accuracy_real" not in metrics


def info(names=()):
    shape = config().data.shape()
    return DataInfo(**vars(shape), name="cifar10", fingerprint="", class_names=names)


def test_report_orders_classes_and_confusions():
    confusion = torch.zeros(3, 3, dtype=torch.int64)
    confusion[0, 0], confusion[0, 1], confusion[1, 1], confusion[1, 2] = 6, 2, 1, 3
    report = TASK.details({"confusion": confusion}, info(("cat", "dog", "none")))
    assert report.content["samples"] == 12
    assert report.content["classes"][0] == {"class": 0, "name": "cat", "samples": 8, "correct": 6, "accuracy": 0.75}
    assert report.content["classes"][2] == {"class": 2, "name": "none", "samples": 0, "correct": 0, "accuracy": None}
    assert report.content["confusion"] == [(0, 0, 6), (0, 1, 2), (1, 1, 1), (1, 2, 3)]
    worst, confusions = report.tables
    assert [row[0] for row in worst.rows] == ["dog", "cat"]
    assert confusions.rows == (("dog", "none", "3", "0.7500"), ("cat", "dog", "2", "0.2500"))
