"""Learning rates against the published forms, written out again here."""

import math

import pytest
import torch

from tost.train.config import ScheduleConfig
from tost.train.schedule import learning_rate


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
