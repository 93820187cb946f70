"""Attention layers side by side: what is measured, what it costs on paper, what is left out; times are made up."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.models.tiny import count_products
from tost.bench.attention import run as bench_attention
from tost.bench.attention.cases import (
    CAUSAL_CONTENDERS,
    CONTENDERS,
    PAPER_TOKENS,
    SUMMARIES,
    AttentionScale,
    Figure,
    Point,
    Shape,
)
from tost.bench.attention.cost import layer_cost, point_cost
from tost.bench.attention.layers import TextbookAttention, build_layer, build_layers, check_layers
from tost.bench.attention.run import PointUsage, Roofline, measure_attention, measure_pairs
from tost.bench.harness import timing
from tost.bench.harness.device import choose_device, free_bytes
from tost.bench.harness.report import plain
from tost.errors import ConfigError, TostError
from tost.models import model_options, token_flops

ROOF = Roofline(flops_per_second=1e9, bytes_per_second=1e8)
TINY = AttentionScale(
    shapes={Figure.TOKENS: Shape(tokens=(16, 32, 64), widths=(8,), heads=2, depth=2)}, limit_bytes=10**9
)
point = partial(Point, figure=Figure.TOKENS, contender="tost", tokens=1000, width=384, heads=8, depth=12)


def at_half_the_peak(job, *, timeout, limit_bytes):
    """Every point takes twice its operations over the machine's rate."""
    seconds = 2 * point_cost(job.point).flops / ROOF.flops_per_second
    return PointUsage(seconds=(seconds, seconds), peak_bytes=job.point.tokens, kept_bytes=None, weight_bytes=7)


def measure(scale, in_process=at_half_the_peak, clock=lambda: 0.0):
    return list(measure_attention(scale, ROOF, watch=lambda _: None, in_process=in_process, clock=clock))


def test_the_papers_figures():
    shapes = AttentionScale().shapes
    assert set(shapes) == set(Figure)
    tokens, width, large, causal = (shapes[figure] for figure in list(Figure)[:4])
    assert (tokens.heads, tokens.widths, tokens.depth, max(tokens.tokens)) == (8, (384,), 12, 16_384)
    assert (width.heads, width.tokens, width.depth) == (8, (4096,), 12)
    assert (large.heads, large.widths, large.depth) == (32, (4096,), 1)
    assert (causal.heads, causal.widths, causal.depth) == (12, (768,), 12)
    assert PAPER_TOKENS in tokens.tokens
    assert PAPER_TOKENS in shapes[Figure.ALONE].tokens
    assert shapes[Figure.ALONE].passes == (False, True)
    assert AttentionScale().on("cuda").shapes[Figure.LARGE].depth == 12
    assert next(iter(shapes)) is Figure.ALONE, "what is asked for comes before the time can run out"


def test_points_are_complete_and_in_order():
    points = AttentionScale().points
    assert len(points) == len(set(points))
    assert {p.contender for p in points} == set(SUMMARIES)
    for figure in Figure:
        mine = [p for p in points if p.figure is figure]
        assert [p.contender for p in mine[: len(figure.contenders)]] == list(figure.contenders)
        for name in figure.contenders:
            line = [p.position for p in mine if p.contender == name and not p.training]
            assert line == sorted(set(line))
            assert len(line) > 2


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(ConfigError, match=r"gpt2-sdpa: not in the figure tokens; it has tost, vit-sdpa"):
        point(contender="gpt2-sdpa")
    with pytest.raises(ConfigError, match="multiple of the heads"):
        point(width=100)
    with pytest.raises(ConfigError, match="at least 1"):
        point(tokens=0)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no CUDA device"):
            choose_device("cuda")
        assert choose_device("auto") == ("cpu", None)
    assert free_bytes("cpu") > 0


@pytest.mark.parametrize("contender", CONTENDERS)
def test_operations_by_hand(contender):
    N, C, H, D = 1000, 384, 8, 48
    flops = {
        "tost": 4 * N * C**2 + N * (8 * C + 7 * H),
        "vit-sdpa": 8 * N * C**2 + 4 * N**2 * C + 5 * N**2 * H,
        "vit-textbook": 8 * N * C**2 + 4 * N**2 * C + 5 * N**2 * H,
        "crate": 4 * N * C**2 + 4 * N**2 * C + 5 * N**2 * H,
        "xcit": 8 * N * C**2 + 4 * N * C * D + 6 * N * C + 6 * H * D**2,
    }
    moved = {
        "tost": 2 * (2 * N * C + C**2) + 4 * N * C + 2 * N * H,
        "vit-sdpa": 6 * N * C + 4 * C**2 + 4 * N * C,
        "vit-textbook": 6 * N * C + 4 * C**2 + 6 * N * C + 4 * N**2 * H,
        "crate": 2 * (2 * N * C + C**2) + 2 * N * C,
        "xcit": 6 * N * C + 4 * C**2 + 10 * N * C + 4 * H * D**2,
    }
    cost = layer_cost(point(contender=contender))
    assert cost.flops == flops[contender]
    assert cost.moved == 4 * moved[contender]
    assert point_cost(point(contender=contender)).flops == 12 * flops[contender]
    step = layer_cost(point(contender=contender, training=True))
    again = 2 * N**2 * C if contender in ("vit-sdpa", "crate") else 0  # half of the forward products
    assert step.flops == 3 * flops[contender] + again


def test_products_agree_with_what_torch_counts():
    for figure, contenders in ((Figure.TOKENS, CONTENDERS), (Figure.CAUSAL, ("tost", "gpt2-textbook"))):
        for name in contenders:
            small = Point(figure=figure, contender=name, tokens=24, width=16, heads=2, depth=3)
            found = count_products(build_layers(small), torch.randn(1, 24, 16))
            assert found == point_cost(small).products, name


def test_whole_models_agree_with_their_own_count():
    for contender, name in (("tost", "tost_lm_base"), ("gpt2-textbook", "gpt2_base")):
        whole = Point(figure=Figure.BASE, contender=contender, tokens=4096, width=768, heads=12, depth=12)
        counted = token_flops(model_options(name, {"max_length": 4096}))
        head = 2 * 768 * 50_304  # once for each token there, for the last one here
        assert point_cost(whole).products == 4096 * (counted.products - head) + head
        assert point_cost(whole).elementwise >= 4096 * counted.statistics


def test_causal_attention_needs_half_of_the_scores():
    fused, textbook = (
        Point(figure=Figure.CAUSAL, contender=name, tokens=4096, width=768, heads=12, depth=1)
        for name in CAUSAL_CONTENDERS[1:]
    )
    projections = 8 * 4096 * 768**2
    assert layer_cost(textbook).products - projections == 4 * 4096**2 * 768
    assert layer_cost(fused).products - projections == 2 * 4096 * 4097 * 768


def test_layers_compute_what_their_names_say(monkeypatch):
    checks = check_layers()
    assert {check.name.removeprefix("layer ") for check in checks} == set(SUMMARIES) - {"tost"}
    assert all(check.passed for check in checks)
    monkeypatch.setattr(TextbookAttention, "_attend", lambda self, q, k, v, mask: v)
    assert [check.name for check in check_layers() if not check.passed] == ["layer vit-textbook"]


def test_textbook_layers_refuse_what_they_do_not_have():
    x, mask = torch.randn(1, 4, 16), torch.ones(1, 4, dtype=torch.bool)
    for figure, name in ((Figure.TOKENS, "vit-textbook"), (Figure.CAUSAL, "gpt2-textbook")):
        layer = build_layer(Point(figure=figure, contender=name, tokens=4, width=16, heads=2, depth=1))
        with pytest.raises(ValueError, match="takes no mask"):
            layer(x, mask)
    with pytest.raises(ValueError, match="keeps no state"):
        layer.forward_with_state(x)


def test_whole_models_differ_in_their_attention_only():
    small = {"figure": Figure.BASE, "tokens": 12, "width": 16, "heads": 2, "depth": 2, "vocab_size": 32}
    ids = torch.randint(32, (1, 12))
    results = []
    for name in CAUSAL_CONTENDERS:
        torch.manual_seed(0)
        with torch.no_grad():
            results.append(build_layers(Point(contender=name, **small))(ids))
    tost, fused, textbook = results
    assert tost.shape == fused.shape == (1, 32)
    torch.testing.assert_close(textbook, fused)
    assert not torch.allclose(tost, fused)


def test_values_do_not_fade_from_layer_to_layer():
    for figure in (Figure.TOKENS, Figure.CAUSAL):
        for name in figure.contenders:
            layers = build_layers(Point(figure=figure, contender=name, tokens=64, width=48, heads=4, depth=12))
            with torch.no_grad():
                assert layers(torch.randn(1, 64, 48)).square().mean() > 1e-6, f"{name}: slow numbers"


def test_rows_have_measured_and_counted_numbers():
    rows = measure(TINY)
    assert [(row.tokens, row.contender) for row in rows] == [(n, c) for n in (16, 32, 64) for c in CONTENDERS]
    row, cost = rows[0], point_cost(TINY.points[0])
    assert (row.flops, row.product_flops, row.bytes_moved) == (cost.flops, cost.products, cost.moved)
    assert row.roofline_seconds == max(cost.flops / 1e9, cost.moved / 1e8)
    assert row.seconds.count == 2
    assert row.times_roofline == pytest.approx(row.seconds.median / row.roofline_seconds)
    content = plain(row)
    assert (content["contender"], content["flops"], content["peak_bytes"]) == ("tost", row.flops, 16)
    assert content["times_roofline"] == row.times_roofline


def test_what_would_take_too_long_says_what_was_predicted():
    last = point_cost(replace(TINY.points[-4], contender="vit-sdpa")).flops * 2 / 1e9
    asked = []

    def watched(job, *, timeout, limit_bytes):
        asked.append((job.point.contender, job.point.tokens))
        return at_half_the_peak(job, timeout=timeout, limit_bytes=limit_bytes)

    rows = measure(replace(TINY, limit_seconds=0.99 * last), watched)
    left_out = [row for row in rows if row.note]
    assert [(row.contender, row.tokens) for row in left_out] == [("vit-sdpa", 64), ("vit-textbook", 64)]
    assert all(row.seconds is None and row.peak_bytes is None for row in left_out)
    assert not {(row.contender, row.tokens) for row in left_out} & set(asked)
    slow = measure(replace(TINY, limit_seconds=0.0))
    assert {row.note for row in slow} == {"predicted 0 s"}


def test_prediction_takes_the_rate_of_the_point_before():
    def slower(job, *, timeout, limit_bytes):
        seconds = 212.0 * point_cost(job.point).flops / point_cost(replace(job.point, tokens=64)).flops
        return PointUsage(seconds=(seconds,), peak_bytes=1, kept_bytes=None, weight_bytes=1)

    rows = measure(replace(TINY, limit_seconds=200.0), slower)
    assert {row.note for row in rows if row.tokens == 64} == {"predicted 212 s"}
    assert not any(row.note for row in rows if row.tokens < 64)


def test_what_would_need_too_much_memory_is_not_tried():
    rows = measure(replace(TINY, limit_bytes=60_000))
    notes = {(row.contender, row.tokens): row.note for row in rows if row.note}
    assert notes == {("vit-textbook", 64): "predicted 0.0 GB"}
    standard = {p: point_cost(p) for p in AttentionScale().points}
    needed = {
        p.contender: cost.held for p, cost in standard.items() if p.figure is Figure.TOKENS and p.tokens == 16_384
    }
    assert needed["vit-textbook"] > 2 * 8 * 16_384**2 * 4
    assert max(held for name, held in needed.items() if name != "vit-textbook") < 1e9


def test_the_whole_has_a_limit_too():
    ticks = iter([0.0, 1.0] + [1e4] * 100)
    rows = measure(replace(TINY, total_seconds=100.0), clock=lambda: next(ticks))
    assert not rows[0].note
    assert all(row.note.startswith("no time left, predicted") for row in rows[1:])


def test_failures_are_rows():
    def fails(job, *, timeout, limit_bytes):
        if job.point.contender == "vit-textbook":
            raise TostError(f"{job.point.label}: out of memory")
        return at_half_the_peak(job, timeout=timeout, limit_bytes=limit_bytes)

    rows = measure(TINY, fails)
    notes = [row.note for row in rows if row.contender == "vit-textbook"]
    assert all(note.startswith("out of memory (predicted ") for note in notes)
    assert len(notes) == 3
    assert sum(1 for row in rows if row.seconds) == 12


class FakeWork:
    """Softmax attention takes forty times as long as ToST."""

    now = 0.0

    def __init__(self, point, device="cpu"):
        self.seconds = {"tost": 0.1, "vit-sdpa": 4.0}[point.contender] * (3 if point.training else 1)

    @property
    def trial(self):
        return timing.Trial(self.run)

    def run(self):
        FakeWork.now += self.seconds


def test_pairs_take_turns(monkeypatch):
    monkeypatch.setattr(bench_attention, "Work", FakeWork)
    monkeypatch.setattr(timing.gc, "collect", lambda: 0)  # nothing is built, so there is nothing to tidy away
    scale = AttentionScale()
    forward, step = measure_pairs(scale, watch=lambda _: None, clock=lambda: FakeWork.now)
    assert (forward.tokens, forward.training, step.training) == (PAPER_TOKENS, False, True)
    assert forward.ratio.median == pytest.approx(40)
    assert (forward.seconds["tost"].count, forward.seconds["vit-sdpa"].count) == (25, 5)
    without = replace(scale, figure=(Figure.TOKENS,)).on("cpu")
    assert list(measure_pairs(without, watch=lambda _: None)) == []


def test_a_row_without_a_time_has_no_distance():
    (row, *_) = measure(replace(TINY, limit_seconds=0.0))
    assert row.times_roofline is None
    assert plain(row)["seconds"] is None
