from __future__ import annotations

import pytest
import torch

from tost.bench import attention
from tost.bench.attention import Attention, Job, Point, Usage, build_trial, measure_point, point_cost
from tost.errors import TostError


def test_standard_points_are_the_papers_figures():
    points = Attention(device="cpu").points
    assert {point.figure for point in points} == set(attention.FIGURES)
    assert all(point.depth == 12 for point in points if point.figure in ("tokens", "width", "causal", "base"))
    assert {point.training for point in points if point.figure == "alone"} == {False, True}


@pytest.mark.parametrize("contender", [*attention.CONTENDERS, *attention.CAUSAL_CONTENDERS[1:]])
def test_cost_of_softmax_grows_with_the_square_and_of_the_others_linearly(contender):
    figure = "causal" if contender.startswith("gpt2") else "tokens"
    short, long = (point_cost(Point(figure, contender, tokens=N, width=64, heads=4, depth=1)) for N in (8192, 16_384))
    growth = long.flops / short.flops
    assert growth == pytest.approx(2, rel=0.01) if contender in ("tost", "xcit") else growth > 3.9


def test_flops_of_a_softmax_layer_equal_those_that_torch_counts():
    from torch.utils.flop_counter import FlopCounterMode

    point = Point("tokens", "vit-textbook", tokens=32, width=16, heads=2, depth=3)
    layers, x, _ = build_trial(point, "cpu")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        layers(x)
    assert counter.get_total_flops() == point_cost(point).products


def test_every_baseline_equals_its_definition():
    assert all(check.passed for check in attention.check_layers())


@pytest.mark.parametrize("contender", attention.CAUSAL_CONTENDERS)
def test_whole_models_give_the_logits_of_the_next_token(contender):
    point = Point("base", contender, tokens=20, width=16, heads=2, depth=2, vocab_size=31)
    model, ids, _ = build_trial(point, "cpu")
    assert model(ids).shape == (1, 31)


def test_a_point_is_measured_with_memory_of_the_backward_pass():
    point = Point("alone", "vit-sdpa", tokens=128, width=16, heads=2, depth=1, training=True)
    usage = measure_point(Job(point, "cpu", pass_seconds=0.01, most_repeats=4))
    assert 1 <= len(usage.seconds) <= 4
    assert usage.kept_bytes > 0
    assert usage.weight_bytes == 4 * (4 * 16 * 16 + 16) or usage.weight_bytes > 0


@pytest.fixture
def results(monkeypatch):
    """Return what a measurement holds whose passes take the time of their operations at 1 GFLOP/s."""

    def in_process(function, job, *, label, **options):
        if job.point.contender == "crate":
            raise TostError(f"{label}: out of memory")
        cost = point_cost(job.point)
        return Usage([cost.flops / 1e9] * 3, cost.held, cost.held if job.point.training else None, 1000)

    monkeypatch.setattr(attention, "run_in_process", in_process)

    def measure(**options):
        bench, found = Attention(device="cpu", quick=True, **options), {"rows": []}
        assert len(list(bench.measure(found, lambda line: None))) == bench.steps
        return bench, found

    return measure


def test_tables_and_pictures(results, monkeypatch):
    bench, found = results()
    rows = {(row["figure"], row["contender"], row["tokens"], row["training"]): row for row in found["rows"]}
    assert rows["tokens", "crate", 256, False]["note"].startswith("out of memory (predicted")
    tables = {table.title: table for table in bench.tables(found)}
    assert len(tables) == 7 + 2
    growth = {row[0]: row for row in tables["Growth, between the two largest sizes measured"].rows}
    assert float(growth["tost"][3]) == pytest.approx(1, abs=0.05)
    monkeypatch.setattr(Attention, "check", lambda self: attention.Gate([attention.Check("", 0.0, 1.0)]))
    report = bench.open_report()
    report.results = found
    assert set(bench.pictures(report)) == {f"_{figure}.svg" for figure in attention.FIGURES}
    assert "## Whole base models, relative to GPT-2" in report.page()


@pytest.mark.parametrize(
    ("limits", "note"),
    [
        ({"limit_bytes": 2}, "predicted 0.0 GB"),
        ({"limit_bytes": 1}, "predicted 0.0 GB"),
        ({"total_seconds": 0.0}, "no time left"),
    ],
)
def test_points_beyond_a_limit_are_skipped_with_a_forecast(results, limits, note):
    _, found = results(figure=("tokens",), **limits)
    assert all(row["note"].startswith(note) and row["seconds"] is None for row in found["rows"])


@pytest.mark.slow
def test_a_real_measurement_in_processes():
    bench, found = Attention(figure=("alone",), device="cpu", quick=True), {"rows": []}
    assert len(list(bench.measure(found, lambda line: None))) == bench.steps
    assert all(row["seconds"] and row["peak_bytes"] >= 0 for row in found["rows"])
