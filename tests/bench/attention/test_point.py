"""One point in a process: what comes back, how failures are told, and the machine's own peaks. No time is asserted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tost.bench.attention import run as attention_run
from tost.bench.attention.cases import CONTENDERS, AttentionScale, Device, Figure, Point
from tost.bench.attention.cost import Cost
from tost.bench.attention.run import Job, Machine, Roofline, Work, measure_point, measure_roofline, point_in_process
from tost.errors import TostError

SMALL = Point(figure=Figure.ALONE, contender="tost", tokens=64, width=16, heads=2, depth=1)
JOB = Job(point=SMALL, scale=AttentionScale(device=Device.CPU, pass_seconds=0.01, most_repeats=4))
LONGER = replace(JOB, scale=replace(JOB.scale, pass_seconds=2.0))


def test_a_fresh_process_measures_a_point():
    # Large enough for its memory to be seen beside what a process needs anyway.
    point = replace(SMALL, contender="vit-textbook", tokens=1024, width=64, heads=4)
    outcome = point_in_process(replace(JOB, point=point), timeout=600.0)
    scores = 4 * 1024**2 * 4
    assert len(outcome.seconds) in (1, 3, 4)
    assert min(outcome.seconds) > 0
    assert 1.8 * scores < outcome.peak_bytes < 3 * scores, "scores and weights are in memory together"
    assert outcome.weight_bytes == 4 * (4 * 64 * 64 + 4 * 64)
    assert outcome.kept_bytes is None


def test_failures_of_a_process_are_told_in_a_few_words():
    # More scores than the limit allows, though the forecast was not asked.
    greedy = replace(JOB, point=replace(SMALL, contender="vit-textbook", tokens=8192))
    with pytest.raises(TostError, match=r"N=8192 d=16 K=2 1 layer: out of memory$"):
        point_in_process(greedy, timeout=600.0, limit_bytes=50_000_000)


def test_a_process_that_takes_too_long_is_ended():
    with pytest.raises(TostError, match=r"1 layer: ended after 0 s$"):
        point_in_process(JOB, timeout=0.01)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("contender", CONTENDERS)
def test_every_contender_can_be_measured(contender, training, monkeypatch):
    monkeypatch.setattr(attention_run, "keep_freed_memory", lambda: None)
    outcome = measure_point(replace(JOB, point=replace(SMALL, contender=contender, training=training)))
    assert (outcome.kept_bytes is None) is not training
    assert outcome.peak_bytes >= 0
    assert len(outcome.seconds) >= 1


def test_whole_models_can_be_measured(monkeypatch):
    monkeypatch.setattr(attention_run, "keep_freed_memory", lambda: None)
    sizes = {"tokens": 32, "width": 16, "heads": 2, "depth": 2, "vocab_size": 64}
    for name in Figure.BASE.contenders:
        outcome = measure_point(replace(JOB, point=Point(figure=Figure.BASE, contender=name, **sizes)))
        assert outcome.weight_bytes > 0


def test_slow_passes_are_timed_once_and_fast_ones_often(monkeypatch):
    monkeypatch.setattr(attention_run, "keep_freed_memory", lambda: None)
    times = iter([3.0])
    monkeypatch.setattr(attention_run, "timed", lambda trial: next(times))
    assert measure_point(LONGER).seconds == (3.0,)
    times = iter([0.5, 9.0, 0.4, 0.41, 0.42, 0.43])
    assert measure_point(LONGER).seconds == (0.4, 0.41, 0.42, 0.43)
    times = iter([1.5, 9.0, 1.0, 1.1, 1.2])
    assert measure_point(LONGER).seconds == (1.0, 1.1, 1.2), "three at least"


def test_a_step_leaves_no_gradient_behind():
    work = Work(replace(SMALL, training=True))
    work.trial.run()
    assert work.x.grad is not None
    assert all(parameter.grad is not None for parameter in work.layers.parameters())
    work.trial.reset()
    assert work.x.grad is None
    assert all(parameter.grad is None for parameter in work.layers.parameters())


def test_kept_bytes_of_the_textbook_are_the_weights_of_all_pairs():
    textbook = replace(SMALL, contender="vit-textbook", tokens=512, training=True)
    tost = replace(textbook, contender="tost")
    kept = {point.contender: Work(point).kept() for point in (textbook, tost)}
    assert kept["vit-textbook"] > 2 * 512**2 * 4
    assert kept["tost"] < 0.1 * kept["vit-textbook"]
    assert Work(SMALL).kept() is None


def test_the_roofline_takes_the_larger_of_both_bounds():
    roof = Roofline(flops_per_second=100.0, bytes_per_second=10.0)
    assert roof.bound(Cost(products=600, elementwise=200, moved=30, held=0)) == 8.0
    assert roof.bound(Cost(products=100, elementwise=0, moved=30, held=0)) == 3.0


def test_the_machine_has_peaks():
    roof = measure_roofline(Machine(size=64, megabytes=1))
    assert roof.flops_per_second > 1e6
    assert roof.bytes_per_second > 1e6


def test_quick_is_small():
    points = AttentionScale.quick().points
    assert len(points) <= 45
    assert max(point.tokens * point.width * point.depth for point in points) <= 512 * 256
