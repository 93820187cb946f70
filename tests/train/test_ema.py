import torch
from torch import nn

from tost.train.optim import WeightAverage


def test_average_follows_the_formula_and_is_lent_and_returned():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    average = WeightAverage(model, decay=0.9)
    expected = model.weight.detach().clone()
    for _ in range(3):
        with torch.no_grad():
            model.weight.add_(torch.randn(2, 3))
        average.update()
        expected = 0.9 * expected + 0.1 * model.weight.detach()
    torch.testing.assert_close(average.average["weight"], expected)
    kept = model.weight.detach().clone()
    with average.applied():
        torch.testing.assert_close(model.weight.detach(), expected)
    assert torch.equal(model.weight, kept)
    torch.testing.assert_close(average.average["weight"], expected)


def test_average_round_trips_and_leaves_frozen_parameters_out():
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    average = WeightAverage(model, decay=0.5)
    assert list(average.average) == ["weight"]
    average.load({"weight": torch.ones(2, 3)})
    assert torch.equal(average.average["weight"], torch.ones(2, 3))
