"""The page: shows what the folders hold, survives what they lack, and is safe whatever they contain."""

from __future__ import annotations

import json
import re

import pytest

from tests.report.folders import bench, write_bench, write_run
from tests.report.reading import Reading, complaints
from tost.errors import ConfigError, StorageError
from tost.report import Insight, RunRecord, read_bench, read_runs, render, write_report

NASTY = "</pre></td><script>alert(1)</script>\"' onmouseover=x <img src=x onerror=y> &lt; $\\q$ \u202e \x00 javascript:"


@pytest.fixture
def two(tmp_path):
    ours = write_run(tmp_path / "tost", accuracy=0.953)
    theirs = write_run(tmp_path / "vit", accuracy=0.871, model="vit_mini")
    return [ours, theirs]


def page_with(folders, **content):
    return Reading(render(read_runs(folders), benchmarks={"b.json": bench(**content)})).text


def pictures(page):
    return [image["alt"] for image in Reading(page).named("img")]


def test_page_shows_what_the_folders_hold(two, tmp_path):
    page = render(read_runs(two), benchmarks={"b.json": read_bench(write_bench(tmp_path / "b.json"))})
    assert complaints(page) == []
    shown = Reading(page).text
    for fact in ("95.3 %", "87.1 %", "123,456", "0.4321", "512.0 MB", "1 min 5 s", "A CPU", "seed 3", "77 comparisons"):
        assert fact in shown, fact
    assert "tost (lra_image) 95.3 %, vit (vit_mini) 87.1 %" in shown
    assert "tost train demo/digits" in shown
    assert "op tssa" in pictures(page)[-1]
    assert "sdpa from 0.0064 to 0.0256" in pictures(page)[-1]
    assert re.findall(r"<tr class=best><th scope=\"row\">(\w+)</th>", page) == ["tost"]
    assert "prefers-color-scheme: dark" in page
    assert "width=device-width" in page


def test_runs_of_one_data_set_share_charts(two, tmp_path):
    other = write_run(tmp_path / "text", recipe="language_modeling", data="stdlib_bytes")
    losses = [alt for alt in pictures(render(read_runs([*two, other]))) if alt.startswith("Loss")]
    assert len(losses) == 2
    assert "tost, validation" in losses[0]
    assert "vit, validation" in losses[0]
    assert "text, validation" in losses[1]


def test_rates_of_the_layers_and_their_changes_are_charts(two):
    shown = [alt for alt in pictures(render(read_runs(two))) if "compression term" in alt]
    assert len(shown) == 4
    assert "tost: compression term by layer" in shown[0]
    assert "tost: change of the compression term by the attention, below 0: compresses: step 10" in shown[1]
    assert "from 0.15 to -0.15" in shown[1]


def test_page_says_whether_the_comparison_is_fair(two):
    assert "differ in nothing but the model" in render(read_runs(two))
    config = two[1] / "config.yaml"
    config.write_text(config.read_text().replace("steps: 40", "steps: 80"))
    assert "differ not only in the model but also in train.steps." in render(read_runs(two))


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json", "env.json", "config.yaml"])
@pytest.mark.parametrize("content", [None, "", "{", "[1, 2]\n", '{"step": "x"}\n', "\x00\xff garbage: [\n"])
def test_missing_and_damaged_files_are_skipped_with_a_note(tmp_path, name, content):
    run = write_run(tmp_path / "run", steps=10)
    if content is None:
        (run / name).unlink()
    else:
        (run / name).write_text(content)
    (record,) = read_runs([run])
    assert name in " ".join(record.problems)
    if content in (None, "{"):
        page = render([record])
        assert complaints(page) == []
        assert 'class="warning"' in page


def test_numbers_that_are_none_are_not_drawn(tmp_path):
    run = write_run(tmp_path / "run", final={"accuracy": float("nan"), "loss": 10**400}, parameters="many")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "step": 41, "loss": NaN}\n{"kind": "evaluation", "step": 41, "loss": Infinity}\n')
    page = render(read_runs([run]))
    assert complaints(page) == []
    assert not re.search(r"\bnan\b|\binf\b", Reading(page).text, flags=re.IGNORECASE)


def test_unfinished_and_resumed_runs_are_marked(tmp_path):
    run = write_run(tmp_path / "run", status="interrupted")
    (run / "log.txt").write_text("resumed from step-00000010 at step 10\n")
    shown = Reading(render(read_runs([run]))).text
    assert "Not finished: run." in shown
    assert "since it was resumed" in shown


def test_wrong_results_have_no_speed(two, tmp_path):
    content = read_bench(write_bench(tmp_path / "b.json", passed=False))
    assert content["rows"] == []
    page = render(read_runs(two), benchmarks={"b.json": content})
    assert "Gate: red" in page
    assert "seconds" not in page


def test_any_measurement_becomes_a_table(two):
    row = {"model": "tost_mini", "case": {"batch": 8}, "seconds": {"median": 0.25, "count": 3}, "peak_bytes": 5_000_000}
    shown = page_with(two, theme="model", rows=[row])
    assert "model case batch seconds median peak_bytes tost_mini 8 250 ms 5.0 MB" in shown


@pytest.mark.parametrize("row", [{}, {"tokens": None}, {"tokens": 10, "width": "x"}, {"seconds": 3, "tokens": True}])
def test_rows_that_make_no_sense_do_no_harm(two, row):
    assert "Gate: green" in page_with(two, rows=[row, {"tokens": 10**400, "seconds": {"median": "x"}}])


@pytest.mark.parametrize("content", ["", "[]", '{"rows": []}', "{" * 50_000, '{"theme": 3}'])
def test_what_is_no_measurement_is_refused(tmp_path, content):
    (tmp_path / "b.json").write_text(content)
    with pytest.raises(ConfigError, match="tost bench"):
        read_bench(tmp_path / "b.json")


def test_nothing_from_outside_is_obeyed(tmp_path):
    record = RunRecord(
        name=NASTY,
        folder=tmp_path,
        config={"recipe": NASTY, "model": {"name": NASTY, "mixer": NASTY}, "data": {"name": NASTY, "path": NASTY}},
        config_text=NASTY,
        environment={"command": [NASTY], "versions": {NASTY: NASTY}, "native": {NASTY: NASTY}, "cpu": NASTY},
        summary={"status": NASTY, "final": {NASTY: 1.0}},
        steps=({"kind": "step", "step": 1, "loss": 1.0, "unit": NASTY, "tokens_per_second": 1.0},),
        evaluations=({"kind": "evaluation", "step": 1, "loss": 1.0, NASTY: 2.0},),
        problems=(NASTY,),
    )
    rows = [{NASTY: NASTY, "op": NASTY, "contender": NASTY, "tokens": n, "seconds": 1.0} for n in (1, 2)]
    measured = bench(theme=NASTY, rows=rows, command=NASTY, environment={"cpu": NASTY, "torch": NASTY})
    page = render([record], benchmarks={NASTY: measured}, insights={NASTY: Insight(verdicts=[NASTY])}, command=[NASTY])
    assert complaints(page) == []
    assert Reading(page).text.count("<script>") > 15, "shown as text"
    assert "\x00" not in page
    assert "\u202e" not in page


def test_names_are_unique(tmp_path):
    runs = [write_run(tmp_path / arm / "seed0", steps=1) for arm in ("a", "b")]
    assert [run.name for run in read_runs(runs)] == ["a/seed0", "b/seed0"]
    assert [run.name for run in read_runs([runs[0], runs[0]])] == ["seed0"], "the same run is shown once"


def test_write_report_refuses_wrong_folders_places_and_names(tmp_path, two):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    page = tmp_path / "page.html"
    for folders, out, analyses, error, hint in (
        ([tmp_path / "nowhere"], page, (), ConfigError, "there is no folder"),
        ([tmp_path / "empty"], page, (), ConfigError, "holds no run"),
        (two, tmp_path, (), ConfigError, "not the name of a page"),
        (two, page, ("coding-rates",), ConfigError, "coding-rate"),
        (two, tmp_path / "file" / "page.html", (), StorageError, "cannot write"),
    ):
        with pytest.raises(error, match=hint):
            write_report(folders, out, analyses=analyses)
    assert not page.exists()


def test_a_run_without_checkpoints_gets_a_page_and_a_later_page_replaces_it(tmp_path, two):
    out = tmp_path / "new" / "page.html"
    write_report(two, out)
    page = out.read_text(encoding="utf-8")
    assert complaints(page) == []
    assert "The model could not be loaded" in page
    summary = json.loads((two[0] / "summary.json").read_text())
    (two[0] / "summary.json").write_text(json.dumps(summary | {"final": {"accuracy": 0.111, "loss": 1.0}}))
    write_report(two, out, analyses=())
    assert "11.1 %" in out.read_text(encoding="utf-8")
    assert [entry.name for entry in out.parent.iterdir()] == ["page.html"], "nothing temporary is left"
