"""Tables, sentences, pictures and files about attention layers, from rows made by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.bench.reports import RED, report
from tost.bench.attention.cases import BENCHMARK, CONTENDERS, PAPER_TOKENS, AttentionScale, Figure, Point, Shape
from tost.bench.attention.cost import point_cost
from tost.bench.attention.run import AttentionResults, AttentionRow, Pair, Roofline
from tost.bench.attention.tables import (
    AttentionMeasurement,
    attention_findings,
    attention_page,
    attention_pictures,
    attention_tables,
    detail_table,
    figure_title,
    growth_table,
    relative_table,
)
from tost.bench.harness.timing import spread

SCALE = AttentionScale(shapes={Figure.TOKENS: Shape(tokens=(4096, PAPER_TOKENS), widths=(384,), heads=8)})


def row(contender, tokens, seconds, peak, *, figure=Figure.TOKENS, training=False, note="", width=384, **more):
    point = Point(figure=figure, contender=contender, tokens=tokens, width=width, heads=8, depth=12, training=training)
    cost = point_cost(point)
    times = spread([seconds]) if seconds else None
    bound = cost.flops / 1e11
    return AttentionRow(
        **vars(point),
        flops=cost.flops,
        product_flops=cost.products,
        bytes_moved=cost.moved,
        roofline_seconds=bound,
        seconds=times,
        times_roofline=seconds / bound if seconds else None,
        peak_bytes=peak,
        note=note,
        **more,
    )


ROWS = [
    row("tost", 4096, 0.2, 10_000_000, weight_bytes=2_000_000),
    row("vit-sdpa", 4096, 2.0, 20_000_000),
    row("vit-textbook", 4096, 4.0, 400_000_000),
    row("tost", PAPER_TOKENS, 0.5, 25_000_000),
    row("vit-sdpa", PAPER_TOKENS, 12.0, 50_000_000),
    row("vit-textbook", PAPER_TOKENS, None, None, note="predicted 212 s"),
]


def attention_report(rows=ROWS, **changes):
    roof = Roofline(flops_per_second=1e11, bytes_per_second=1e10)
    about = AttentionMeasurement(SCALE).about()
    return report("attention", AttentionResults(roofline=roof, rows=list(rows)), about=about, **changes)


def test_brief_tables_show_time_and_memory_and_what_is_missing():
    times, memory = attention_tables(AttentionResults(rows=ROWS))
    assert times.headers == ("contender", "4,096", "10,000")
    assert times.rows[0] == ("tost", "200", "500")
    assert times.rows[2] == ("vit-textbook", "4,000", "predicted 212 s")
    assert times.notes == ("tokens: vit-textbook N=10000 d=384 K=8 12 layers: predicted 212 s",)
    assert memory.rows[2] == ("vit-textbook", "400", "-")
    assert memory.rows[1] == ("vit-sdpa", "20.0", "50.0")


def test_details_stand_beside_the_cost_on_paper():
    table = detail_table(ROWS)
    by_name = {(line[0], line[1]): dict(zip(table.headers[2:5], line[2:5], strict=True)) for line in table.rows}
    assert by_name["10,000", "vit-textbook"] == {"depth": "12", "ms": "predicted 212 s", "passes": "-"}
    fused = table.rows[4]
    assert fused[5] == "24.0"
    assert fused[7] == "2.00"
    assert fused[9:11] == (f"{ROWS[4].flops / 1e9:,.0f}", f"{ROWS[4].bytes_moved / 1e9:.3g}")
    assert fused[12] == f"{12.0 / (ROWS[4].flops / 1e11):.2f}"
    assert all(len(line) == len(table.headers) for line in table.rows)


def test_growth_is_the_slope_between_the_largest_sizes():
    rows = [row("tost", n, 1e-4 * n, 1000 * n) for n in (1024, 2048, 4096)]
    rows += [row("vit-sdpa", n, 1e-8 * n**2, 1000 * n) for n in (2048, 4096)]
    rows += [row("tost", 4096, 1e-7 * d**2, 100 * d, figure=Figure.WIDTH, width=d) for d in (384, 768)]
    table = growth_table(rows)
    assert table.rows == (
        ("tost", "O(p n)", "O(p)", "1.00", "1.00", "2.00", "1.00"),
        ("vit-sdpa", "O(p n^2)", "O(n^2)", "2.00", "1.00", "-", "-"),
    )
    assert growth_table([]).rows == ()


def test_whole_models_stand_beside_the_papers_table():
    base = {"figure": Figure.BASE, "width": 768}
    rows = [
        row("tost", 4096, 3.0, 100, weight_bytes=400, **base),
        row("gpt2-sdpa", 4096, 5.0, 500, weight_bytes=500, **base),
        row("gpt2-textbook", 4096, None, None, note="predicted 99 s", **base),
    ]
    table = relative_table(rows)
    assert table.rows[0] == ("4,096", "gpt2-sdpa", "0.60", "0.50", "0.60", "0.41")
    assert table.rows[1][:4] == ("4,096", "gpt2-textbook", "-", "-")
    other = [replace(each, tokens=2048) for each in rows]
    assert relative_table(other).rows[0][4:] == ("-", "-")


def test_findings_say_whether_the_goals_are_reached():
    alone = {"figure": Figure.ALONE}
    rows = [
        row("tost", PAPER_TOKENS, 0.04, 30, **alone),
        row("vit-textbook", PAPER_TOKENS, 4.0, 6000, **alone),
        row("tost", PAPER_TOKENS, 0.1, 60, training=True, kept_bytes=10, **alone),
        row("vit-textbook", PAPER_TOKENS, 9.0, 5940, training=True, kept_bytes=710, **alone),
    ]
    times = {"tost": spread([0.04]), "vit-sdpa": spread([1.2])}
    pairs = [
        Pair(tokens=PAPER_TOKENS, training=step, seconds=times, ratio=spread([r]))
        for step, r in ((False, 30.0), (True, 29.9))
    ]
    said = attention_findings(AttentionResults(rows=rows, pairs=pairs))
    assert said[0].endswith("30.0 (30.0-30.0) times as long as ToST, in turns; the goal of at least 30 is reached.")
    assert said[1].endswith("the goal of at least 30 is NOT reached.")
    assert "forward: the textbook's attention takes 200 times the peak memory of ToST" in said[2]
    assert said[2].endswith("the goal of at least 100 is reached.")
    assert "takes 99 times" in said[3]
    assert "NOT reached. It keeps 71.0 times the bytes" in said[3]
    missing = [rows[0], replace(rows[1], peak_bytes=None, note="predicted 30.0 GB")]
    assert attention_findings(AttentionResults(rows=missing))[0].endswith("memory was not compared: predicted 30.0 GB.")
    short = [replace(each, tokens=512) for each in rows[:2]]
    assert "goal" not in attention_findings(AttentionResults(rows=short))[0]


def test_findings_quote_the_paper_at_its_length():
    (sentence,) = attention_findings(AttentionResults(rows=ROWS))
    assert "vit-sdpa takes 24.0 times the time and 2.00 times the memory of ToST" in sentence
    assert "vit-textbook takes - times the time" in sentence
    assert "The paper has about 10 times" in sentence
    assert attention_findings(AttentionResults(rows=ROWS[:3])) == []


def test_the_page_has_everything_and_nothing_behind_a_red_gate():
    page = attention_page(attention_report())
    assert page.count("_tokens.svg") == 1
    assert "predicted 212 s" in page
    assert "100 GFLOP/s" in page
    assert "10.0 GB/s" in page
    assert "ms / roofline" in page
    assert "## Growth" in page
    step = row("tost", 4096, 1.0, 5, figure=Figure.ALONE, training=True, kept_bytes=46_400_000)
    assert "| tost | 46.4 |" in attention_page(attention_report([step]))
    red = attention_report(gate=RED)
    with pytest.raises(ValueError, match="green gate"):
        attention_page(red)
    with pytest.raises(ValueError, match="green gate"):
        AttentionMeasurement.write(red, None)
    hidden = red.to_json()
    assert (hidden["rows"], hidden["pairs"], hidden["roofline"]) == ([], [], None)


def test_files(tmp_path):
    (partial,) = AttentionMeasurement.write(attention_report(complete=False), tmp_path)
    assert partial.name.endswith(".partial.json")
    paths = AttentionMeasurement.write(attention_report(), tmp_path)
    assert [path.suffix for path in paths] == [".json", ".md", ".svg"]
    assert not partial.exists()
    content = json.loads(paths[0].read_text())
    assert content["rows"][5]["note"] == "predicted 212 s"
    assert content["scale"]["shapes"]["tokens"]["heads"] == 8
    assert content["contenders"]["tost"]
    assert paths[2].name in paths[1].read_text()
    assert "<svg" in paths[2].read_text()
    assert BENCHMARK.theme(AttentionScale(limit_seconds=9)) == "attention"
    assert BENCHMARK.theme(AttentionScale(figure=(Figure.BASE,))) == "attention-selection"


def test_pictures_are_reproducible_and_name_what_is_missing():
    def pictures(rows):
        return attention_pictures(attention_report(rows))

    assert pictures(ROWS) == pictures(ROWS)
    assert b"not measured: ViT, textbook at 10,000" in pictures(ROWS)["_tokens.svg"]
    assert pictures([row(name, 4096, 1.0, None, figure=Figure.WIDTH) for name in CONTENDERS])
    assert pictures([row("tost", 4096, 1.0, 5, figure=Figure.ALONE, training=step) for step in (False, True)])
    assert pictures([replace(each, seconds=None, peak_bytes=None, note="predicted 99 s") for each in ROWS])


def test_titles():
    assert figure_title(ROWS) == "12 attention layers, d=384, K=8, forward"
    wide = row("tost", 4096, 1.0, 1, figure=Figure.WIDTH)
    assert figure_title([wide]) == "12 attention layers, n=4,096, K=8, forward"
    causal = row("tost", 4096, 1.0, 1, figure=Figure.CAUSAL)
    assert figure_title([causal]) == "12 causal attention layers, d=384, K=8, forward"
    shallow = replace(causal, depth=1)
    assert figure_title([shallow]) == "1 causal attention layer (12 in the paper), d=384, K=8, forward"
    whole = row("tost", 4096, 1.0, 1, figure=Figure.BASE)
    assert figure_title([whole]) == "Whole models of 12 layers, d=384, K=8, forward"
    step = row("tost", 4096, 1.0, 1, figure=Figure.ALONE, training=True)
    assert figure_title([step]).endswith("forward and backward")
