"""Files and tables from made-up measurements."""

from __future__ import annotations

import json

import pytest

from tests.bench.reports import RED, report
from tost.bench.harness.report import plain
from tost.bench.harness.timing import Plan, Spread
from tost.bench.ops.cases import Case, Mode, Op
from tost.bench.ops.run import KeptRow, OpsResults, Row, _flat, growth
from tost.bench.ops.tables import (
    OpsMeasurement,
    all_tables,
    brief_tables,
    growth_table,
    ops_page,
    ops_pictures,
    ratio_table,
)

ABOUT = {"plan": plain(Plan()), "contenders": {"limit": "the projections", "tost": "our layer"}}


def around(value: float) -> Spread:
    return Spread(median=value, lower=0.9 * value, upper=1.1 * value, count=30)


def row(tokens: int, contender: str, ratio: float, *, mode: Mode = Mode.FWD, batch: int = 1) -> Row:
    limit_seconds = 1e-5 * tokens
    return Row(
        **vars(Case(op=Op.TSSA, batch=batch, tokens=tokens, width=384, heads=8, mode=mode)),
        contender=contender,
        **_flat("seconds", around(limit_seconds * ratio)),
        repeats=30,
        **_flat("ratio_to_limit", around(ratio)),
        ratio_of_medians=ratio,
        warmup_runs=3,
        first_run_seconds=1.0,
        kept_bytes=1_000_000 if mode is Mode.FWD_BWD else None,
    )


@pytest.fixture
def measurements():
    rows = []
    for tokens, sdpa in ((1024, 6.0), (4096, 24.0), (65536, 384.0)):
        rows += [row(tokens, "limit", 1.0), row(tokens, "tost", 1.05)]
        if tokens < 65536:
            rows.append(row(tokens, "sdpa", sdpa))
        else:
            rows.append(Row(**vars(rows[-1].case), contender="sdpa", note="skipped: about 250 s per run"))
    rows += [row(196, name, 1.2, mode=Mode.FWD_BWD, batch=8) for name in ("limit", "tost")]
    shape = {name: value for name, value in vars(rows[0].case).items() if name != "mode"}
    kept = [KeptRow(**shape, implementation="native", bytes=1_700_000, input_bytes=1_600_000)]
    return OpsResults(rows=rows, operator_kept_bytes=kept, growth=growth(rows))


def ops_report(results: OpsResults, **changes):
    return report("ops", results, about=ABOUT, **changes)


def test_ratio_table(measurements):
    table = ratio_table(measurements.rows)
    assert table.headers == ("op", "d/H", "pass", "tokens", "limit", "tost", "sdpa")
    assert table.rows[0] == ("tssa", "384/8", "fwd", "1x1024", "10.2 ms", "1.05 (0.95-1.16)", "6.00")
    assert table.rows[2] == ("tssa", "384/8", "fwd", "1x65536", "655 ms", "1.05 (0.95-1.16)", "-")
    assert table.notes == ("tssa fwd 1x65536 d=384 H=8 float32, sdpa: skipped: about 250 s per run",)


def test_growth_compares_the_time_per_token(measurements):
    factors = {item.contender: (item.from_tokens, item.to_tokens, item.factor) for item in growth(measurements.rows)}
    assert factors["tost"] == (4096, 65536, pytest.approx(1.0))
    assert "sdpa" not in factors  # it was not measured beyond 4,096
    short = [item for item in growth([row(256, "sdpa", 1.0), row(1024, "sdpa", 4.0)]) if item.contender == "sdpa"]
    assert short[0].factor == pytest.approx(4.0)
    assert growth_table(measurements.growth).rows == (("tssa", "fwd", "4096 to 65536", "1.00", "1.00"),)


def test_tables_of_nothing_are_left_out(measurements):
    assert all_tables(OpsResults()) == brief_tables(OpsResults()) == []
    assert len(all_tables(measurements)) == 5
    for table in all_tables(measurements):
        assert all(len(cells) == len(table.headers) for cells in table.rows)


def test_json_holds_every_number_and_where_it_comes_from(measurements):
    content = json.loads(json.dumps(ops_report(measurements).to_json(), allow_nan=False))
    assert content["environment"]["revision"] == "abc123"
    assert content["command"] == "tost bench ops"
    assert content["gate"]["passed"]
    assert content["plan"]["repeats"] >= 20
    first = content["rows"][1]
    assert (first["op"], first["mode"], first["tokens"], first["contender"]) == ("tssa", "fwd", 1024, "tost")
    assert (first["repeats"], first["warmup_runs"]) == (30, 3)
    assert first["ratio_to_limit_lower_quartile"] < first["ratio_to_limit_median"] == 1.05
    skipped = next(entry for entry in content["rows"] if entry["note"])
    assert (skipped["seconds_median"], skipped["repeats"]) == (None, 0)
    assert content["operator_kept_bytes"][0]["bytes"] == 1_700_000
    assert "mode" not in content["operator_kept_bytes"][0]


def test_a_red_gate_leaks_no_speed(measurements, tmp_path):
    red = ops_report(measurements, gate=RED)
    content = red.to_json()
    assert content["rows"] == content["growth"] == content["operator_kept_bytes"] == []
    assert not content["complete"]
    with pytest.raises(ValueError, match="only behind a green gate"):
        ops_page(red)
    with pytest.raises(ValueError, match="only behind a green gate"):
        OpsMeasurement.write(red, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_markdown_page(measurements):
    page = ops_page(ops_report(measurements))
    assert "Example 9000 (8-core), 4 threads | torch 2.9 | tost 0.1 (abc123) | gate: 1 check passed" in page
    assert "![Time relative to the limit by number of tokens](ops_example-9000-8-core-4t_202605.svg)" in page
    assert "| tssa | 384/8 | fwd | 1x1024 | 10.2 ms | 1.05 (0.95-1.16) | 6.00 |" in page
    assert "skipped: about 250 s" in page
    assert "interrupted" not in page
    assert "- **tost**: our layer" in page
    assert "interrupted before the end" in ops_page(ops_report(measurements, complete=False))


def test_files_of_a_complete_report(measurements, tmp_path):
    paths = OpsMeasurement.write(ops_report(measurements), tmp_path / "new" / "folder")
    stem = "ops_example-9000-8-core-4t_202605"
    assert [path.name for path in paths] == [f"{stem}.json", f"{stem}.md", f"{stem}.svg"]
    assert sorted(path.name for path in paths[0].parent.iterdir()) == [path.name for path in paths]
    assert json.loads(paths[0].read_text())["complete"]
    assert f"]({stem}.svg)" in paths[1].read_text()
    assert paths[2].read_text().startswith("<?xml")


def test_partial_report_leaves_a_complete_one_alone(measurements, tmp_path):
    complete = OpsMeasurement.write(ops_report(measurements), tmp_path)
    before = [path.read_bytes() for path in complete]
    (partial,) = OpsMeasurement.write(ops_report(OpsResults(rows=measurements.rows[:3]), complete=False), tmp_path)
    assert partial.name.endswith(".partial.json")
    assert not json.loads(partial.read_text())["complete"]
    assert [path.read_bytes() for path in complete] == before
    OpsMeasurement.write(ops_report(measurements), tmp_path)
    assert not partial.exists()


def test_plot_is_reproducible_and_names_the_machine(measurements):
    image = ops_pictures(ops_report(measurements))
    assert image == ops_pictures(ops_report(measurements))
    assert image != ops_pictures(ops_report(measurements, accelerator="another machine"))


def test_plot_of_batches_only_is_empty_but_legal(measurements):
    batches = OpsResults(rows=[entry for entry in measurements.rows if entry.batch > 1])
    assert ops_pictures(ops_report(batches))[".svg"].startswith(b"<?xml")
