"""Pretraining on hidden parts of the inputs: what is hidden, what is asked, and what the second stage takes over."""

import pytest
import torch
import torch.nn.functional as F

from tests.recipes.pictures import write_cifar10
from tost.errors import ConfigError
from tost.recipes import get_task, list_configs, load_config
from tost.train import fit
from tost.train.checkpoint.model import load_initial
from tost.train.loop import LineReporter

QUICK = ["train.steps=2", "train.batch_size=4", "schedule.warmup_steps=1", "checkpoint.every=2", "evaluate.every=2"]
QUICK += ["evaluate.batches=2", "evaluate.batch_size=4"]
SMALL = ["model.embed_dim=16", "model.depth=1", "model.num_heads=2"]


HIDING = ["recipe=masked_prediction", "train.hide=0.3", "checkpoint.best_metric=loss", "checkpoint.best_mode=min"]


def make_task(*overrides, name="lra/listops_cpu"):
    data = "data.name=listops" if name == "lra/listops_cpu" else "data.path=somewhere"
    config = load_config(name, [data, *HIDING, *SMALL, *overrides])
    task = get_task(config.recipe)
    return task, config, task.build_model(config, None)


def test_hidden_ids_are_asked_for_and_nothing_else_counts():
    task, config, model = make_task("train.hide=0.4")
    ids = torch.randint(1, 16, (6, 30))
    mask = torch.arange(30) < torch.tensor([30, 20, 10, 30, 1, 30]).unsqueeze(1)
    batch = {"inputs": ids * mask, "mask": mask, "targets": torch.zeros(6, dtype=torch.int64)}
    hidden = task.training_batch(batch, config, 7)
    again, other = (task.training_batch(batch, config, seed)["hidden"] for seed in (7, 8))
    where = hidden["hidden"]
    assert torch.equal(where, again)
    assert not torch.equal(where, other)
    assert not where[~mask].any()
    assert 0.25 < where[mask].float().mean() < 0.55
    assert not hidden["inputs"][where].any()
    assert torch.equal(hidden["inputs"][~where], batch["inputs"][~where])
    assert torch.equal(hidden["whole"], batch["inputs"])

    found = task.compute(model, hidden)
    logits = model(hidden["inputs"], mask=mask)[where]
    expected = F.cross_entropy(logits, ids[where])
    torch.testing.assert_close(found.loss, 6 * expected)
    right = (logits.argmax(-1) == ids[where]).float().mean()
    torch.testing.assert_close(found.sums["accuracy"], 6 * right)
    assert (task.terms(hidden), task.tokens(batch)) == (6, 180)
    junk = {**hidden, "whole": hidden["whole"].where(where, 3), "targets": batch["targets"] + 1}
    torch.testing.assert_close(task.compute(model, junk).loss, found.loss)


def test_evaluation_hides_the_same_every_time():
    task, _, model = make_task()
    batch = {"inputs": torch.randint(1, 16, (4, 40)), "targets": torch.zeros(4)}
    assert torch.equal(task.compute(model, batch).loss, task.compute(model, batch).loss)


@pytest.mark.parametrize(("height", "width"), [(16, 24), (18, 25)])
def test_whole_patches_of_images_are_hidden_and_predicted(height, width):
    task, config, model = make_task(name="pretrain/cifar10")
    images = 1 + torch.rand(3, 3, height, width)
    batch = {"inputs": images, "targets": torch.zeros(3, dtype=torch.int64)}
    hidden = task.training_batch(batch, config, 3)
    rows, columns = -(-height // 4), -(-width // 4)
    where = hidden["hidden"].reshape(3, rows, columns)
    for b in range(3):
        for r in range(rows):
            for c in range(columns):
                place = (b, slice(None), slice(4 * r, 4 * r + 4), slice(4 * c, 4 * c + 4))
                assert torch.equal(hidden["inputs"][place], images[place] * ~where[b, r, c])
                seen = F.pad(images, (0, 3, 0, 3))[place].flatten()
                if r < height // 4 and c < width // 4:
                    assert torch.equal(hidden["whole"][b, r * columns + c], seen)
    outputs = model(hidden["inputs"])[:, 1:][hidden["hidden"]]
    expected = 3 * F.mse_loss(outputs, hidden["whole"][hidden["hidden"]])
    torch.testing.assert_close(task.compute(model, hidden).loss, expected)
    assert task.tokens(batch) == 3 * rows * columns
    assert task.flops(model, batch) == 3 * model.flops_per_image(height, width)


def test_hidden_numbers_of_pairs_and_of_sequences():
    task, config, model = make_task(name="lra/image_cpu")
    batch = {"inputs": 1 + torch.rand(2, 20, 1), "targets": torch.zeros(2)}
    hidden = task.training_batch(batch, config, 0)
    assert torch.equal(hidden["inputs"] == 0, hidden["hidden"].unsqueeze(-1))
    assert task.compute(model, hidden).sums == {}
    pairs = ("model.name=lra_retrieval", "data.name=lra_retrieval")
    task, config, model = make_task(*pairs, name="pretrain/text")
    ids = torch.randint(1, model.head.out_features, (3, 2, 20))
    hidden = task.training_batch({"inputs": ids, "targets": torch.zeros(3)}, config, 0)
    logits = model(hidden["inputs"]).reshape(3, 2, 20, -1)
    expected = 3 * F.cross_entropy(logits[hidden["hidden"]], ids[hidden["hidden"]])
    torch.testing.assert_close(task.compute(model, hidden).loss, expected)


@pytest.mark.parametrize(
    ("first", "second"), [("lra/listops_cpu", "lra/listops_cpu"), ("pretrain/cifar10", "small/cifar10")]
)
def test_the_classifier_starts_from_all_but_the_head(first, second, tmp_path):
    data = ["data.name=listops"]
    if "cifar10" in first:
        data = [f"data.path={write_cifar10(tmp_path / 'images')}"]
    config = load_config(first, [*data, *HIDING, *SMALL, *QUICK])
    result = fit(config, get_task(config.recipe), tmp_path / "first", reporter=LineReporter([].append))
    assert result.metrics["loss"] > 0
    config = load_config(second, [*data, *SMALL])
    model = get_task(config.recipe).build_model(config, None)
    origin = load_initial(model, str(tmp_path / "first"), print)
    assert origin.loaded > 10
    assert all(name.startswith("head.") for name in origin.fresh)


@pytest.mark.parametrize("name", list_configs("pretrain/*"))
def test_both_stages_have_the_same_model(name):
    second = {"pretrain/cifar10": "small/cifar10", "pretrain/text": "lra/text_cpu"}[name]
    a, b = (load_config(one, ["data.path=somewhere"]) for one in (name, second))
    assert (a.recipe, a.model, a.data) == ("masked_prediction", b.model, b.data)


def test_class_tokens_are_refused():
    with pytest.raises(ConfigError, match=r"with pooling=cls: it takes image models.*use pooling=mean"):
        make_task("model.pooling=cls")
