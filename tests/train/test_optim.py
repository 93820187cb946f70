"""Which parameters decay, the average of the weights, and learning rates against the published forms."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tost
from tost.train.config import OptimConfig, ScheduleConfig
from tost.train.optim import WeightAverage, build_optimizer, learning_rate, parameter_groups, set_rate


def model():
    return torch.nn.Sequential(
        torch.nn.Embedding(5, 8), tost.CausalTSSAttention(8, 2, 16, in_bias=True), torch.nn.LayerNorm(8)
    )


def names(module, groups, decay):
    by_id = {id(p): name for name, p in module.named_parameters()}
    return {by_id[id(p)] for group in groups if bool(group["weight_decay"]) == decay for p in group["params"]}


def test_temperature_bias_and_vectors_do_not_decay():
    module = model()
    groups = parameter_groups(module, OptimConfig(lr=1e-3, weight_decay=0.1))
    assert names(module, groups, True) == {"0.weight", "1.proj_in.weight", "1.proj_out.weight"}
    assert "1.temperature" in names(module, groups, False)
    assert "1.position_bias" in names(module, groups, False)
    assert sum(len(group["params"]) for group in groups) == len(list(module.parameters()))


class Exempting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.cls_token = torch.nn.Parameter(torch.zeros(1, 1, 4))
        self.inner = torch.nn.Linear(4, 4)
        self.inner.cls_token = torch.nn.Parameter(torch.zeros(1, 1, 4))
        self.temperature = torch.nn.Parameter(torch.ones(2))

    def no_weight_decay(self):
        return {"cls_token", "temperature"}


@pytest.mark.parametrize(
    ("options", "spared"),
    [
        ({}, {"cls_token", "inner.bias", "temperature"}),
        ({"decay_statistics": True}, {"cls_token", "inner.bias"}),
        ({"decay_all": True}, set()),
    ],
)
def test_the_model_can_exempt_parameters_by_their_full_name(options, spared):
    module = Exempting()
    groups = parameter_groups(module, OptimConfig(lr=1e-3, weight_decay=0.1, **options))
    assert names(module, groups, False) == spared
    assert names(module, groups, True) == {name for name, _ in module.named_parameters()} - spared


def test_image_models_spare_tokens_positions_and_vectors():
    for name in ("tost_mini", "vit_mini", "crate_mini"):
        with torch.device("meta"):
            module = tost.create_model(name, num_classes=10)
        groups = parameter_groups(module, OptimConfig(lr=1e-3, weight_decay=0.1))
        spared = names(module, groups, False)
        assert "cls_token" in spared
        assert {n for n, p in module.named_parameters() if p.dim() < 2} <= spared
        assert "head.weight" in names(module, groups, True)


def test_what_learns_slowly_has_its_own_rate_only_if_one_is_given():
    module = tost.create_model("lra_image", embed_dim=16, depth=1, max_length=16, mixer="s4")
    kernels = {id(p) for name, p in module.named_parameters() if name in module.slow_parameters()}
    assert kernels
    plain = parameter_groups(module, OptimConfig(lr=1e-2, weight_decay=0.1))
    assert all("scale" not in group for group in plain)
    optimizer = build_optimizer(module, OptimConfig(lr=1e-2, weight_decay=0.1, slow_lr=1e-3))
    set_rate(optimizer, 5e-3)
    for group in optimizer.param_groups:
        slow = {id(p) in kernels for p in group["params"]}
        assert len(slow) == 1
        assert group["lr"] == pytest.approx(5e-4 if slow.pop() else 5e-3)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(module.parameters()))


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


def rates(total, peak=1.0, **config):
    schedule = ScheduleConfig(**config)
    return [learning_rate(step, config=schedule, peak=peak, total=total) for step in range(total + 5)]


COSINE = {"peak": 6e-4, "name": "cosine", "warmup_steps": 20, "min_lr": 6e-5}
FAIRSEQ = {"name": "inverse_sqrt", "warmup_steps": 100, "warmup_first_step": "zero", "warmup_from": 1e-7}
FORMS = {
    "nanoGPT": (COSINE, {0: 6e-4 / 21, 19: 6e-4 * 20 / 21, 20: 6e-4, 310: 3.3e-4, 600: 6e-5, 604: 6e-5}),
    "older nanoGPT": ({**COSINE, "warmup_first_step": "zero"}, {0: 0, 10: 3e-4}),
    "inverse_sqrt of fairseq": (FAIRSEQ, {0: 1e-7, 50: 1e-7 + 50 * (1 - 1e-7) / 100, 400: 0.5}),
}


@pytest.mark.parametrize(("config", "expected"), FORMS.values(), ids=FORMS)
def test_rates_are_those_of_the_published_code(config, expected):
    lr = rates(600, **config)
    assert {step: lr[step] for step in expected} == pytest.approx(expected)


def test_linear_is_fairseq():
    lr = rates(1000, name="linear", warmup_steps=100, warmup_first_step="zero", warmup_from=1e-7)
    expected = [(1000 - t) / 900 for t in range(100, 1000)]
    assert lr[100:1000] == pytest.approx(expected)
    assert lr[1000] == 0


def test_one_cycle_is_torch():
    total, warmup = 200, 30
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    torch_schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=1.0, total_steps=total, pct_start=warmup / total, anneal_strategy="linear"
    )
    expected = []
    for _ in range(total):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if len(expected) < total:
            torch_schedule.step()
    assert rates(total, name="one_cycle", warmup_steps=warmup)[:total] == pytest.approx(expected)
    assert expected[0] == pytest.approx(1 / 25)


def by_epoch(total, epoch, **config):
    """The rate of each epoch; it may not change inside one."""
    steps = rates(total * epoch, epoch_steps=epoch, **config)
    found = [steps[e * epoch : (e + 1) * epoch] for e in range(total)]
    assert all(len(set(inside)) == 1 for inside in found)
    return [inside[0] for inside in found]


@pytest.mark.parametrize(("epochs", "warmup"), [(400, 5), (12, 3), (6, 0)])
def test_per_epoch_cosine_is_timm_stepped_after_each_epoch(epochs, warmup):
    """As DeiT and XCiT drive timm's scheduler: the first two epochs run at the starting rate."""
    import tost._torchvision  # noqa: F401  timm imports torchvision

    # isort: split
    from timm.scheduler import CosineLRScheduler

    peak, low, start = 2e-3, 1e-5, 1e-6
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    timm = CosineLRScheduler(optimizer, t_initial=epochs, lr_min=low, warmup_t=warmup, warmup_lr_init=start)
    expected = []
    for epoch in range(epochs):
        expected.append(optimizer.param_groups[0]["lr"])
        timm.step(epoch)
    config = {"warmup_first_step": "zero", "warmup_from": start, "decay_from": "start"} if warmup else {}
    ours = by_epoch(epochs, 7, peak=peak, name="cosine", warmup_steps=warmup * 7, min_lr=low, lag=1, **config)
    assert ours == pytest.approx(expected, rel=1e-12)
    if warmup:
        assert ours[0] == ours[1] == start


def test_per_epoch_cosine_two_epochs_late_is_the_fine_tuning_loop():
    epochs, peak = 200, 1e-4
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    annealing = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    expected = []
    for epoch in range(epochs):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        with pytest.warns(UserWarning, match="epoch parameter"):
            annealing.step(epoch - 1)
    ours = by_epoch(epochs, 4, peak=peak, name="cosine", lag=2)
    assert ours[:1] + ours[2:] == pytest.approx(expected[:1] + expected[2:], rel=1e-9)
    # The loop asked for epoch -1 once, whose cosine is that of epoch 1: 0.006 % below the peak.
    assert ours[1] == pytest.approx(expected[1], rel=1e-4)
    assert ours[:3] == [peak] * 3
