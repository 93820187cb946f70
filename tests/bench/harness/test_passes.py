from __future__ import annotations

import torch
from torch import nn

from tost.bench.harness.passes import layer_trial


def test_a_trial_leaves_no_gradient_behind():
    layer, x = nn.Linear(12, 12), torch.randn(2, 16, 12, requires_grad=True)
    trial = layer_trial(layer, x, torch.ones(2, 16, 12))
    trial.run()
    assert x.grad is not None
    assert layer.weight.grad is not None
    trial.reset()
    assert x.grad is None
    assert layer.weight.grad is None


def test_forward_runs_record_no_graph():
    layer, x = nn.Linear(12, 12), torch.randn(2, 16, 12)
    assert not layer_trial(layer, x, None).run().requires_grad
