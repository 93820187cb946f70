"""Learning rates against the published forms, written out again here."""

import math

import pytest
import torch

from tost.train.config import ScheduleConfig
from tost.train.optim import learning_rate


def rates(total, peak=1.0, **config):
    schedule = ScheduleConfig(**config)
    return [learning_rate(step, config=schedule, peak=peak, total=total) for step in range(total + 5)]


def test_cosine_is_nanogpt():
    lr = rates(600, peak=6e-4, name="cosine", warmup_steps=20, min_lr=6e-5)
    assert lr[0] == pytest.approx(6e-4 / 21)
    assert lr[19] == pytest.approx(6e-4 * 20 / 21)
    assert lr[20] == pytest.approx(6e-4)
    assert lr[310] == pytest.approx(3.3e-4)
    assert lr[600] == lr[604] == pytest.approx(6e-5)


def test_older_nanogpt_starts_at_zero():
    lr = rates(600, peak=6e-4, name="cosine", warmup_steps=20, min_lr=6e-5, warmup_first_step="zero")
    assert lr[0] == 0
    assert lr[10] == pytest.approx(3e-4)


def test_inverse_sqrt_is_fairseq():
    lr = rates(1000, name="inverse_sqrt", warmup_steps=100, warmup_first_step="zero", warmup_from=1e-7)
    assert lr[0] == 1e-7
    assert lr[50] == pytest.approx(1e-7 + 50 * (1 - 1e-7) / 100)
    assert lr[400] == pytest.approx(0.5)


def test_official_long_range_arena_is_inverse_sqrt_from_zero():
    peak = 0.05 / math.sqrt(1000)
    lr = rates(5000, peak=peak, name="inverse_sqrt", warmup_steps=1000, warmup_first_step="zero")
    expected = [0.05 * min(1, t / 1000) / math.sqrt(max(t, 1000)) for t in range(5000)]
    assert lr[:5000] == pytest.approx(expected)
    assert peak == pytest.approx(1.581e-3, rel=1e-3)


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


def test_constant_without_warm_up():
    assert set(rates(10, name="constant")) == {1.0}


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


def test_linear_can_start_behind_the_warm_up_too():
    lr = rates(100, name="linear", warmup_steps=10, decay_from="start")
    assert lr[10:100] == pytest.approx([(100 - t) / 100 for t in range(10, 100)])
    assert lr[9] == pytest.approx(10 / 11)


def test_lag_shifts_whole_epochs():
    plain, late = (by_epoch(9, 3, name="cosine", lag=lag) for lag in (0, 4))
    assert late == [plain[0]] * 4 + plain[:5]
