"""Classification of sequences and of images, the latter with the regularization of vision transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tost._text import Table
from tost.data import Batch, DataInfo
from tost.errors import ConfigError
from tost.models.registry import flops_per_image
from tost.train.config import RegularizeConfig, RunConfig
from tost.train.task import BatchResult, Details, Task, sequence_arguments

TOP = 5
SHOWN = 10


class Classification(Task):
    """Cross-entropy over classes; accuracy in [0, 1] on the validation set."""

    metric = "accuracy"

    def compute(self, model: nn.Module, batch: Batch) -> BatchResult:
        """Return the summed cross-entropy and the number of correct samples."""
        logits = model(batch["inputs"], **sequence_arguments(batch))
        loss = F.cross_entropy(logits.float(), batch["targets"], reduction="sum")
        return BatchResult(loss, {"accuracy": (logits.argmax(dim=-1) == batch["targets"]).sum()})


class ImageClassification(Task):
    """Cross-entropy over classes, on smoothed or mixed targets in training; top-1 and top-5 on the validation set."""

    metric = "accuracy"
    unit = "img"

    def tokens(self, batch: Batch) -> int:
        """Return the number of images: the unit in which progress is counted."""
        return batch["inputs"].shape[0]

    def flops(self, model: nn.Module, batch: Batch) -> float | None:
        """Return the arithmetic of a forward pass over these images; None if the model does not say."""
        per_image = flops_per_image(model, *batch["inputs"].shape[-2:])
        return None if per_image is None else per_image * self.tokens(batch)

    def training_batch(self, batch: Batch, config: RunConfig, seed: int) -> Batch:
        """Smooth labels and mix pairs of images as configured; targets then are probabilities ``[B, K]``."""
        settings = config.regularize
        classes = int(config.model.options.get("num_classes") or config.data.shape().num_classes or 0)
        if settings.mixup or settings.cutmix:
            images, targets = _mix(batch["inputs"], batch["targets"], settings, classes, seed)
            return {**batch, "inputs": images, "targets": targets}
        if settings.label_smoothing:
            even = settings.label_smoothing / classes
            targets = F.one_hot(batch["targets"], classes) * (1 - settings.label_smoothing) + even
            return {**batch, "targets": targets}
        return batch

    def compute(self, model: nn.Module, batch: Batch) -> BatchResult:
        """Return the summed cross-entropy; on labels, how many images were right, and which class became which."""
        logits = model(batch["inputs"]).float()
        targets = batch["targets"]
        loss = F.cross_entropy(logits, targets, reduction="sum")
        if model.training:
            return BatchResult(loss)
        guesses = logits.topk(min(TOP, logits.shape[1])).indices  # [B, 5], the best first
        hits = guesses == targets.unsqueeze(1)
        sums = {"correct": hits[:, 0].sum(), "correct_top": hits.any(dim=1).sum()}
        if "real" in batch:  # sets of labels [B, M], padded with -1; images with no label do not count
            sums["real_correct"] = (guesses[:, :1] == batch["real"]).any(dim=1).sum()
            sums["real_images"] = (batch["real"] >= 0).any(dim=1).sum()
        classes = logits.shape[1]
        pairs = torch.bincount(targets * classes + guesses[:, 0], minlength=classes * classes)
        return BatchResult(loss, sums, {"confusion": pairs.view(classes, classes)})  # by label and guess

    def metrics(self, sums: Mapping[str, float], terms: float) -> dict[str, float]:
        """Return the mean loss, and accuracies in [0, 1]: top-1, top-5 and, where samples have them, on ReaL labels."""
        found = {
            "loss": sums["loss"] / terms,
            "accuracy": sums["correct"] / terms,
            "accuracy_top5": sums["correct_top"] / terms,
        }
        if sums.get("real_images"):
            found["accuracy_real"] = sums["real_correct"] / sums["real_images"]
        return found

    def details(self, counts: Mapping[str, Tensor], info: DataInfo) -> Details:
        """Return accuracies by class and the confusions; the tables show the worst classes and commonest confusions."""
        confusion = counts["confusion"]
        names = info.class_names or tuple(map(str, range(len(confusion))))
        totals, right = confusion.sum(dim=1).tolist(), confusion.diagonal().tolist()
        classes = [
            {"class": label, "name": name, "samples": seen, "correct": hits, "accuracy": hits / seen if seen else None}
            for label, (name, seen, hits) in enumerate(zip(names, totals, right, strict=True))
        ]
        labels, guesses = confusion.nonzero(as_tuple=True)
        found = (labels, guesses, confusion[labels, guesses])
        entries = list(zip(*(column.tolist() for column in found), strict=True))
        content = {"samples": int(confusion.sum()), "classes": classes, "confusion": entries}
        return Details(content, (_worst_classes(classes), _confusions(entries, classes)))


def _worst_classes(classes: Sequence[Mapping[str, Any]]) -> Table:
    seen = sorted((row for row in classes if row["samples"]), key=lambda row: (row["accuracy"], row["class"]))
    rows = tuple((row["name"], f"{row['accuracy']:.4f}", str(row["samples"])) for row in seen[:SHOWN])
    title = "all classes" if len(seen) <= SHOWN else f"the {SHOWN} worst of {len(seen)} classes"
    return Table(title=f"{title}, worst first", headers=("class", "accuracy", "images"), rows=rows)


def _confusions(entries: Sequence[tuple[int, int, int]], classes: Sequence[Mapping[str, Any]]) -> Table:
    wrong = sorted((entry for entry in entries if entry[0] != entry[1]), key=lambda entry: (-entry[2], entry))
    rows = tuple(
        (classes[label]["name"], classes[guess]["name"], str(count), f"{count / classes[label]['samples']:.4f}")
        for label, guess, count in wrong[:SHOWN]
    )
    headers = ("class", "taken for", "images", "share of the class")
    return Table(title="commonest confusions", headers=headers, rows=rows, labels=2)


def _mix(images: Tensor, labels: Tensor, settings: RegularizeConfig, classes: int, seed: int) -> tuple[Tensor, Tensor]:
    """Mix each image with the one at the mirrored place of the batch, all with one weight, as DeiT and XCiT do."""
    if len(images) % 2:
        raise ConfigError(
            f"Mixup and CutMix mix pairs, but a process has {len(images)} images per micro-batch; choose "
            "train.batch_size, train.accumulate and the number of processes so that it is even."
        )
    from timm.data.mixup import Mixup

    import tost._torchvision  # noqa: F401 - timm imports torchvision, which this repairs on CPU builds of torch

    mixer = Mixup(  # type: ignore[no-untyped-call]
        mixup_alpha=settings.mixup,
        cutmix_alpha=settings.cutmix,
        prob=settings.mix_prob,
        switch_prob=settings.switch_prob,
        label_smoothing=settings.label_smoothing,
        num_classes=classes,
    )
    with _numpy_seeded(seed):
        mixed: tuple[Tensor, Tensor] = mixer(images.clone(), labels)  # it would write into the loader's batch
    return mixed


@contextmanager
def _numpy_seeded(seed: int) -> Iterator[None]:
    """Let numpy's global generator, which timm draws from, start from a seed; restore its state afterwards."""
    before = np.random.get_state()
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
    try:
        yield
    finally:
        np.random.set_state(before)
