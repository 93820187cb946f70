"""The task of the probes: only the tokens that ask count."""

import pytest
import torch
import torch.nn.functional as F

from tost.data.dataset import IGNORED
from tost.recipes import get_task, load_config


def test_loss_and_accuracy_are_those_of_the_answers():
    targets = torch.tensor([[IGNORED, 2, IGNORED], [0, IGNORED, 1]])
    logits = torch.randn(2, 3, 4, requires_grad=True)
    task, batch = get_task("token_prediction"), {"inputs": torch.zeros(2, 3, dtype=torch.int64), "targets": targets}
    found = task.compute(lambda inputs: logits, batch)
    expected = F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=IGNORED, reduction="sum")
    torch.testing.assert_close(found.loss, expected)
    asked = targets != IGNORED
    right = (logits.argmax(dim=-1) == targets)[asked].sum()
    assert (task.terms(batch), found.sums["accuracy"]) == (3, right)
    assert task.metrics({"loss": 6.0, "accuracy": 2.0}, 3) == {"loss": 2.0, "accuracy": 2 / 3}
    found.loss.backward()
    assert not logits.grad[~asked].any()


@pytest.mark.parametrize("name", ["recall", "brackets", "induction", "most_frequent", "selective_copy"])
def test_probes_run_with_models_of_text(name):
    config = load_config("probes/recall", [f"data.name={name}", "model.mixer=mingru"])
    assert (config.recipe, config.model.options["max_length"]) == ("token_prediction", 256)
    assert config.model.options["vocab_size"] == config.data.shape().vocab_size
