"""Throughput, time left and utilization from a clock that the test holds in its hand."""

import pytest

from tost.train.metrics import (
    WINDOW,
    Progress,
    StepRecord,
    format_count,
    format_duration,
    format_line,
)


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_progress_derives_everything_from_step_times():
    clock = Clock()
    progress = Progress(steps=100, tokens_per_step=600, flops_per_step=3e9, peak_flops=1e10, clock=clock)
    assert progress.tokens_per_second == 0
    assert progress.mfu is None
    for _ in range(4):
        clock.now += 0.5
        progress.step_done()
    assert progress.seconds_per_step == 0.5
    assert progress.tokens_per_second == 1200
    assert progress.mfu == pytest.approx(0.6)
    assert progress.eta_seconds(40) == 30


def test_a_pause_does_not_count_and_old_steps_are_forgotten():
    clock = Clock()
    progress = Progress(steps=1000, tokens_per_step=1, clock=clock)
    for _ in range(WINDOW):
        clock.now += 9.0
        progress.step_done()
    for _ in range(WINDOW):
        clock.now += 1.0
        progress.step_done()
    assert progress.seconds_per_step == 1.0
    clock.now += 500
    progress.pause()
    assert progress.seconds_per_step == 0
    clock.now += 2.0
    progress.step_done()
    assert progress.seconds_per_step == 2.0
    assert progress.mfu is None


def test_line_has_fixed_fields():
    record = StepRecord(120, 2000, 3.41234, 2.9e-4, 0.834, 41234, 0.392, 0.4, 3_100_000_000, 724)
    assert format_line(record) == (
        "step  120/2000 | loss 3.4123 | lr 2.90e-04 | gnorm 0.83 | "
        "41.2k tok/s | 0.392 s/step | mem 3.10 GB | eta 12m04s"
    )
    assert "gnorm -" in format_line(StepRecord(1, 9, 1.0, 0.1, None, 1, 1, None, 1, 1))


def test_numbers_are_readable():
    assert [format_duration(s) for s in (0.4, 41, 724, 11_220)] == ["0s", "41s", "12m04s", "3h07m"]
    assert [format_count(x) for x in (12, 41_234, 1.3e6, 2.5e9, 1.22e12)] == ["12", "41.2k", "1.3M", "2.5G", "1.22T"]
