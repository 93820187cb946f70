"""`tost report` as a user types it."""

from __future__ import annotations

import pytest

from tests.report.folders import write_bench, write_run
from tests.report.reading import complaints


@pytest.fixture
def finished(tmp_path):
    return write_run(tmp_path / "run")


def test_report_writes_a_page_and_says_where(run, finished, tmp_path):
    bench = write_bench(tmp_path / "bench.json")
    out = tmp_path / "page.html"
    outcome = run("report", str(finished), "--out", str(out), "--analyses", "none", "--bench", str(bench))
    assert outcome.code == 0, outcome.err
    assert outcome.out == f"{out}\n"
    page = out.read_text(encoding="utf-8")
    assert complaints(page) == []
    assert "tost report run --out page.html" in page, "the command, without the folders of this machine"


def test_page_lies_in_the_first_run_by_default(run, finished):
    outcome = run("report", str(finished), "--analyses", "none")
    assert outcome.out == f"{finished / 'report.html'}\n"
    assert (finished / "report.html").is_file()


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["nowhere"], "there is no folder"),
        (["{run}", "--analyses", "coding-rat"], "did you mean 'coding-rate'?"),
        (["{run}", "--analyses", "none,heads"], "is not clear"),
        (["{run}", "--bench", "nowhere.json"], "cannot read nowhere.json"),
        (["{run}", "--bench", "{run}/metrics.jsonl"], "is not JSON"),
        (["{run}", "--out", "page.pdf"], "not the name of a page"),
        (["{run}/config.yaml"], "there is no folder"),
        ([], "RUN..."),
    ],
)
def test_mistakes_exit_2_and_say_what_to_do(refuse, finished, arguments, hint):
    refuse(hint, "report", *(argument.format(run=finished) for argument in arguments))
    assert not (finished / "report.html").exists()
