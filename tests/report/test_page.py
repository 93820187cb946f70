"""The page: says what the folders say, survives what they lack, and is safe whatever they contain."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.report.folders import bench, write_bench, write_run
from tests.report.reading import Reading, complaints
from tost._text import byte_size, duration, number, percent, rounded
from tost.errors import ConfigError, StorageError
from tost.report import (
    BenchRecord,
    Content,
    Finding,
    Insight,
    Passage,
    Request,
    RunRecord,
    charts,
    read_bench,
    read_runs,
    render,
    write_report,
)
from tost.report.charts import Axis, Series, line_chart, thinned
from tost.report.html import text
from tost.report.runs import processor

NASTY = "</pre></td><script>alert(1)</script>\"' onmouseover=x <img src=x onerror=y> &lt; \u202e \x00 javascript:"


@pytest.fixture
def two(tmp_path):
    ours = write_run(tmp_path / "tost", accuracy=0.953)
    theirs = write_run(tmp_path / "vit", accuracy=0.871, model="vit_mini")
    return [ours, theirs]


def page_of(folders, **parts) -> str:
    return render(Content(runs=read_runs(folders), **parts))


def test_page_says_what_the_folders_say(two, tmp_path):
    measured = read_bench(write_bench(tmp_path / "bench.json"))
    page = page_of(two, benchmarks=[measured])
    assert complaints(page) == []
    told = Reading(page).text
    for fact in ("95.3 %", "87.1 %", "123,456", "0.4321", "512.0 MB", "1 min 5 s", "A CPU, 2 threads", "seed 3"):
        assert fact in told, fact
    assert "tost (lra_image) 95.3 %, vit (vit_mini) 87.1 %" in told
    assert "tost train demo/digits" in told
    assert "77 comparisons" in told
    assert "12.5x" in told, "softmax attention takes 2.5e-5 / 2e-6 times as long"


def test_runs_of_one_data_set_share_charts_and_others_do_not(two, tmp_path):
    other = write_run(tmp_path / "text", recipe="language_modeling", data="stdlib_bytes")
    page = page_of([*two, other])
    drawn = [a["aria-label"] for a in Reading(page).named("svg") if a.get("role") == "img"]
    losses = [label for label in drawn if label.startswith("Loss")]
    assert len(losses) == 2
    assert "tost, validation" in losses[0]
    assert "vit, validation" in losses[0]
    assert "text, validation" in losses[1]


def test_the_best_run_is_marked(two):
    marked = re.findall(r"<tr class=best><th scope=\"row\">(\w+)</th>", page_of(two))
    assert marked == ["tost"]


def test_page_says_whether_the_comparison_is_fair(two):
    assert "differ in nothing but the model" in page_of(two)
    config = two[1] / "config.yaml"
    config.write_text(config.read_text().replace("steps: 40", "steps: 80"))
    assert "differ not only in the model but also in train.steps." in page_of(two)


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json", "env.json", "config.yaml"])
@pytest.mark.parametrize("content", [None, "", "{", "[1, 2]\n", '{"step": "x"}\n', "\x00\xff garbage: [\n"])
def test_missing_and_damaged_files_cost_their_part_only(tmp_path, name, content):
    run = write_run(tmp_path / "run")
    if content is None:
        (run / name).unlink()
    else:
        (run / name).write_text(content)
    page = page_of([run])
    assert complaints(page) == []
    assert name in " ".join(read_runs([run])[0].problems)
    assert "warning" in page
    assert "Traceback" not in page


def test_numbers_that_are_none_are_not_drawn(tmp_path):
    run = write_run(tmp_path / "run", final={"accuracy": float("nan"), "loss": 10**400}, parameters="many")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "step": 41, "loss": NaN}\n{"kind": "evaluation", "step": 41, "loss": Infinity}\n')
    page = page_of([run])
    assert complaints(page) == []
    assert not re.search(r'[" ]nan\b|\binf\b', page.partition("</style>")[2], flags=re.IGNORECASE)


def test_unfinished_run_is_called_so(tmp_path):
    run = write_run(tmp_path / "run", status="interrupted")
    (run / "log.txt").write_text("resumed from step-00000010 at step 10\n")
    told = Reading(page_of([run])).text
    assert "Not finished: run." in told
    assert "since it was resumed" in told


def test_red_gate_shows_no_speed(two, tmp_path):
    record = read_bench(write_bench(tmp_path / "b.json", passed=False))
    assert record.rows == ()
    page = page_of(two, benchmarks=[record])
    told = Reading(page).text
    assert "Gate: red" in told
    assert "12.5" not in told
    assert "softmax / ToST" not in told


def test_unknown_kind_of_measurement_becomes_a_table(two, tmp_path):
    rows = [{"model": "tost_mini", "case": {"batch": 8}, "seconds": {"median": 0.25}, "peak_bytes": 5_000_000}]
    file = write_bench(tmp_path / "b.json", theme="model", rows=rows)
    told = Reading(page_of(two, benchmarks=[read_bench(file)])).text
    assert "tost_mini 8 250 ms 5.0 MB" in told


def attention_row(contender, tokens, seconds, *, width=384, training=False, note=""):
    sizes = {"tokens": tokens, "width": width, "heads": 8, "depth": 12}
    timed = None if seconds is None else {"median": seconds, "lower": seconds, "upper": seconds, "count": 1}
    peak = None if seconds is None else 1000 * tokens
    said = {"figure": "tokens", "contender": contender, "training": training, "note": note}
    return {**said, **sizes, "seconds": timed, "peak_bytes": peak}


@pytest.mark.parametrize("theme", ["attention", "attention-quick", "attention-selection"])
def test_efficiency_figures_are_drawn_and_summed_up(two, tmp_path, theme):
    rows = [attention_row("vit-sdpa", n, n * n / 1e6) for n in (1000, 4000, 8000)]
    rows += [attention_row("tost", n, n / 1e4) for n in (1000, 4000, 8000)]
    rows += [attention_row("vit-textbook", 1000, 2.0), attention_row("vit-textbook", 4000, None, note="predicted 99 s")]
    rows += [attention_row("tost", 1000, 0.5, training=True)]
    file = write_bench(tmp_path / "b.json", theme=theme, rows=rows)
    page = page_of(two, benchmarks=[read_bench(file)])
    told = Reading(page).text
    assert complaints(page) == []
    assert "12 attention layers, width 384, 8 heads, forward, 8,000 tokens: ToST takes 800 ms" in told
    assert "80.0 times as long" in told
    assert "4,000 400 ms, 4.0 MB 16 s, 4.0 MB predicted 99 s" in told
    assert "forward and backward: time" in told
    assert "forward: memory" in told


@pytest.mark.parametrize("broken", [{}, {"tokens": None}, {"tokens": 10, "width": "x"}, {"seconds": 3}])
def test_rows_of_efficiency_figures_that_make_no_sense_are_left_out(two, tmp_path, broken):
    rows = [broken, {**attention_row("tost", 1000, 0.1), **broken, "peak_bytes": True}]
    file = write_bench(tmp_path / "b.json", theme="attention", rows=rows)
    assert complaints(page_of(two, benchmarks=[read_bench(file)])) == []


def test_measurement_without_rows_is_one_row(two, tmp_path):
    content = bench(theme="train", ratio={"median": 1.25, "lower": 1.0, "count": 7})
    del content["rows"]
    (tmp_path / "b.json").write_text(json.dumps(content))
    told = Reading(page_of(two, benchmarks=[read_bench(tmp_path / "b.json")])).text
    assert "ratio median 1.25" in told
    assert "ratio count" not in told


@pytest.mark.parametrize("content", ["", "[]", '{"rows": []}', "{" * 50_000, '{"theme": 3}'])
def test_what_is_no_measurement_is_refused(tmp_path, content):
    file = tmp_path / "b.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match="tost bench"):
        read_bench(file)


def test_nothing_that_comes_from_outside_is_obeyed(tmp_path):
    """Every text that a page can hold, as nasty as it gets."""
    record = RunRecord(
        name=NASTY,
        folder=tmp_path,
        config={"recipe": NASTY, "model": {"name": NASTY, "mixer": NASTY}, "data": {"name": NASTY, "path": NASTY}},
        config_text=NASTY,
        environment={"command": [NASTY], "versions": {NASTY: NASTY}, "native": {NASTY: NASTY}, "cpu": NASTY},
        summary={"status": NASTY, "final": {NASTY: 1.0}},
        steps=({"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.5}),
        evaluations=({"step": 2, "loss": 1.0, NASTY: 0.25},),
        problems=(NASTY,),
    )
    rows = [
        {"op": NASTY, "mode": NASTY, "batch": 1, "width": 1, "heads": 1, "dtype": NASTY, "tokens": n} for n in (1, 2)
    ]
    timed = [{**row, "contender": NASTY, "seconds_median": 0.5} for row in rows]
    measured = [
        BenchRecord(
            tmp_path / "b", theme, NASTY, {"cpu": NASTY}, {"passed": True, "checks": NASTY}, rows, True, {NASTY: NASTY}
        )
        for theme, rows in (
            ("ops" + NASTY, tuple(timed)),
            ("attention", tuple({**attention_row(NASTY, n, 0.5, note=NASTY), "figure": NASTY} for n in (1, 2))),
            ("attention", (attention_row("tost", 1, None, note=NASTY),)),
            (NASTY, ({NASTY: NASTY},)),
        )
    ]
    insight = Insight(NASTY, NASTY, (Finding(NASTY, {NASTY: NASTY}, [{NASTY: NASTY}], b"x", NASTY, NASTY),), (NASTY,))
    passage = Passage(NASTY, NASTY, 3, 1.0, NASTY)
    page = render(Content([record], measured, [insight], {NASTY: [passage]}, [NASTY]))
    assert complaints(page) == []
    assert "<script" not in page
    assert "\u202e" not in page
    assert "alert(1)" in Reading(page).text, "it is shown, as text"


@given(st.text(st.characters(codec="utf-8")))
def test_text_is_inert_and_keeps_what_can_be_shown(value):
    shown = Reading(f'<p title="{text(value)}">{text(value)}</p>')
    assert [tag for tag, _ in shown.elements] == ["p"]
    assert shown.named("p")[0].keys() == {"title"}
    if value.isprintable():
        assert shown.named("p")[0]["title"] == value


def test_one_thread_is_not_several():
    assert processor({"cpu": "A CPU", "threads": 1}) == "A CPU, 1 thread"
    assert processor({"threads": "many"}) == "unknown, ? threads"


@given(st.floats() | st.integers() | st.none() | st.booleans() | st.text(max_size=5))
def test_numbers_are_written_whatever_they_are(value):
    for write in (number, duration, percent, rounded, byte_size):
        assert not re.search("nan|inf", write(value), flags=re.IGNORECASE)


finite = st.floats(-1e30, 1e30)


@given(st.lists(st.lists(st.tuples(finite, finite), max_size=30).map(sorted), max_size=4), st.booleans(), st.booleans())
def test_charts_stay_inside_their_frame(lines, log_x, log_y):
    series = [Series(f"line {i}", points, i) for i, points in enumerate(lines)]
    drawn = line_chart(series, title="t", x=Axis("x", log=log_x), y=Axis("y", log=log_y))
    assert not re.search(r"\bnan\b|\binf\b", drawn)
    for path in re.findall(r'class="line" d="M([^"]+)"', drawn):
        places = [tuple(map(float, pair.split())) for pair in path.split("L") if "H" not in pair]
        assert all(charts.LEFT <= x <= charts.WIDTH - charts.RIGHT for x, _ in places)
        assert all(charts.TOP <= y <= charts.HEIGHT - charts.BOTTOM for _, y in places)


def test_higher_values_are_drawn_higher():
    drawn = line_chart([Series("a", [(0, 1), (1, 2), (2, 4)], 0)], title="t", x=Axis("x"), y=Axis("y", log=True))
    (path,) = re.findall(r'class="line" d="M([^"H]+)"', drawn)
    heights = [float(pair.split()[1]) for pair in path.split("L")]
    assert heights[0] > heights[1] > heights[2]
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.2), "equal factors, equal distances"


@given(st.lists(st.tuples(finite, st.floats(-5, 5)), max_size=2000), st.integers(1, 300))
def test_thinning_keeps_the_mean(points, most):
    found = thinned(points, most)
    assert len(found) <= most
    if points and len(points) % most == 0:
        before, after = (sum(y for _, y in p) / len(p) for p in (points, found))
        assert after == pytest.approx(before, abs=1e-9)


def test_pictures_that_do_not_fit_are_left_out(two):
    big = Finding("heads", {"a": "1"}, picture=b"p" * 400_000)
    content = Content(runs=read_runs(two), insights=[Insight("tost", findings=(big, big, big))])
    page = render(content, largest=1_000_000)
    assert len(page.encode()) < 1_000_000
    assert page.count("data:image/png") == 1
    assert page.count("The picture is left out") == 2
    assert complaints(page) == []


def test_names_are_told_apart(tmp_path):
    runs = [write_run(tmp_path / arm / "seed0") for arm in ("a", "b")]
    assert [run.name for run in read_runs(runs)] == ["a/seed0", "b/seed0"]
    assert [run.name for run in read_runs([runs[0], runs[0]])] == ["seed0"], "the same run is shown once"


def test_write_report_refuses_what_is_no_run(tmp_path):
    (tmp_path / "empty").mkdir()
    for folder, hint in ((tmp_path / "nowhere", "there is no folder"), (tmp_path / "empty", "holds no run")):
        with pytest.raises(ConfigError, match=hint):
            write_report(Request(runs=(folder,)), tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_write_report_refuses_places_and_names(tmp_path, two):
    with pytest.raises(ConfigError, match="not the name of a page"):
        write_report(Request(runs=tuple(two)), tmp_path)
    with pytest.raises(ConfigError, match="coding-rate"):
        write_report(Request(runs=tuple(two), analyses=("coding-rates",)), tmp_path / "page.html")
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot write"):
        write_report(Request(runs=tuple(two), analyses=()), tmp_path / "file" / "page.html")


def test_a_run_without_checkpoints_still_gets_a_page(tmp_path, two):
    file = write_report(Request(runs=tuple(two)), tmp_path / "new" / "page.html")
    page = file.read_text(encoding="utf-8")
    assert complaints(page) == []
    assert "The model could not be looked into" in page
    assert [entry.name for entry in file.parent.iterdir()] == ["page.html"], "nothing temporary is left"


def test_a_later_page_replaces_an_earlier_one(tmp_path, two):
    out = tmp_path / "page.html"
    write_report(Request(runs=tuple(two), analyses=()), out)
    summary = json.loads((two[0] / "summary.json").read_text())
    (two[0] / "summary.json").write_text(json.dumps(summary | {"final": {"accuracy": 0.111, "loss": 1.0}}))
    write_report(Request(runs=tuple(two), analyses=()), out)
    assert "11.1 %" in out.read_text()
