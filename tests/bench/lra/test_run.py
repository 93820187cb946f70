"""Mixers in one encoder: what is measured, what is left out, how it is told; times come from a clock of our own."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import count

import pytest
import torch

from tests.bench.reports import RED, report
from tost.bench.harness import timing
from tost.bench.harness.timing import Trial, spread
from tost.bench.lra import run as bench_lra
from tost.bench.lra.cases import BENCHMARK, MIXERS, LraCase, LraScale, Work
from tost.bench.lra.run import (
    LraResults,
    LraRow,
    LraStep,
    Trainer,
    Usage,
    check_encoder,
    expected_seconds,
    measure_lra,
    step_in_process,
    take_step,
)
from tost.bench.lra.tables import LraMeasurement, lra_findings, lra_page, lra_pictures, lra_tables
from tost.errors import ConfigError, TostError

TINY = LraScale(
    lengths=(16, 32),
    mixers=("tssa", "softmax"),
    repeats=3,
    sizes={"embed_dim": 16, "depth": 1, "num_heads": 2, "mlp_ratio": 1.0},
)


class FakeClock:
    """Moves only when a trial runs: softmax takes quadratic time, the others linear."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def build(self, scale, case, name):
        seconds = 1e-4 * case.tokens**2 if name == "softmax" else 2e-3 * case.tokens

        def run():
            self.now += seconds

        return Trial(run), 1000


@pytest.fixture
def clock(monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr(bench_lra, "_build", clock.build)
    monkeypatch.setattr(timing.gc, "collect", lambda: 0)  # nothing is built, so there is nothing to tidy away
    return clock


@pytest.fixture(scope="module")
def measured():
    with pytest.MonkeyPatch.context() as patch:
        clock = FakeClock()
        patch.setattr(bench_lra, "_build", clock.build)
        patch.setattr(timing.gc, "collect", lambda: 0)
        return measure(TINY, clock)


def use(step):
    return Usage(seconds=2.0, peak_bytes=step.tokens * step.batch, process_bytes=10**8 + step.tokens, loss=0.7)


def measure(scale, clock, in_process=use):
    return [
        row for rows in measure_lra(scale, watch=lambda _: None, in_process=in_process, clock=clock) for row in rows
    ]


def lra_report(rows, **changes):
    return report("lra", LraResults(rows=list(rows)), about=LraMeasurement(TINY).about(), **changes)


def test_expectations_by_hand():
    assert expected_seconds([], 100) == 0
    assert expected_seconds([(100, 1.0)], 200) == 4.0, "with nothing to compare, quadratic"
    assert expected_seconds([(100, 1.0), (200, 2.0)], 400) == pytest.approx(4.0)
    assert expected_seconds([(100, 1.0), (150, 9.0), (200, 4.0)], 400) == pytest.approx(16.0)
    assert expected_seconds([(100, 1.0), (200, 0.5)], 400) == 1.0, "never less than linear"
    assert expected_seconds([(100, 1.0), (200, 64.0)], 400) == 256.0, "never more than quadratic"


def test_every_mixer_in_every_case(measured):
    rows = measured
    expected = [(work, n, m) for work in list(Work)[:3] for n in (16, 32) for m in TINY.mixers]
    expected += [(Work.PATHX, 16_384, m) for m in TINY.mixers]
    assert [(row.case.work, row.case.tokens, row.mixer) for row in rows] == expected
    steps = {(row.mixer, row.case.tokens): row for row in rows if row.case.work is Work.STEP}
    assert steps["softmax", 32].seconds.median == pytest.approx(0.1024)
    assert steps["softmax", 32].ratio.median == pytest.approx(1.6)
    assert steps["tssa", 32].ratio.median == 1
    assert (steps["tssa", 32].peak_bytes, steps["tssa", 32].process_bytes) == (32, 10**8 + 32)
    assert [row.peak_bytes for row in rows if row.case.work is Work.FWD] == [None] * 4
    assert [(row.peak_bytes, row.seconds.median) for row in rows[-2:]] == [(2 * 16_384, 2.0)] * 2


def test_short_work_is_repeated_more_often_and_slow_mixers_less(clock):
    rows = measure(replace(TINY, mixer_seconds=0.5, lengths=(16, 100)), clock)
    counts = {(row.case.work, row.mixer, row.case.tokens): row.seconds.count for row in rows}
    assert counts[Work.STEP, "tssa", 16] == 3
    assert counts[Work.FWD, "tssa", 16] == 4, "a quarter of a second over 0.032 + 0.0256"
    assert counts[Work.STEP, "softmax", 100] == 3


def test_what_would_take_too_long_is_left_out_and_says_so(clock):
    scale = replace(TINY, lengths=(16, 32, 64), skip_seconds=0.3, memory_seconds=0.5, pathx=False)
    rows = measure(scale, clock)
    (skipped,) = [row for row in rows if row.case.work is Work.STEP and row.seconds is None]
    assert (skipped.mixer, skipped.case.tokens, skipped.ratio) == ("softmax", 64, None)
    assert "softmax not timed, about 0 s per run expected from shorter ones" in skipped.note
    assert skipped.peak_bytes == 64, "one step is affordable"
    stricter = measure(replace(scale, memory_seconds=0.35), clock)
    assert next(row for row in stricter if row.note).peak_bytes is None
    first = lra_tables(LraResults(rows=rows))[0]
    assert first.rows[1][3] == "-"
    assert first.notes == (skipped.note,)


def test_what_is_measured_is_checked_first():
    with pytest.raises(ConfigError, match=r"sofmax: not a mixer; the mixers are: tssa, softmax"):
        LraScale(mixers=("tssa", "sofmax"))
    with pytest.raises(ConfigError, match="ascending"):
        LraScale(lengths=(32, 16))
    assert LraScale().mixers == MIXERS
    assert len(LraScale().cases) == 16


def row(mixer, work, tokens, seconds, peak=None, base=1.0):
    case = LraCase(work=work, tokens=tokens)
    return LraRow(mixer=mixer, case=case, seconds=spread([seconds]), ratio=spread([seconds / base]), peak_bytes=peak)


def test_findings_compare_with_the_next_best():
    rows = [
        row("tssa", Work.STEP, 4096, 1.0, peak=100),
        row("linear", Work.STEP, 4096, 1.3, peak=150),
        row("s4d", Work.STEP, 4096, 1.25, peak=120),
        row("tssa", Work.FWD, 4096, 0.1, base=0.1),
        row("linear", Work.FWD, 4096, 0.2, base=0.1),
    ]
    assert lra_findings(LraResults(rows=rows)) == [
        "Training steps: time of the next fastest over that of tssa: 1.25x at 4,096 tokens (s4d).",
        "Mixer alone, forward: time of the next fastest over that of tssa: 2.00x at 4,096 tokens (linear).",
        "Peak memory of the next smallest over that of tssa: 1.20x at 4,096 tokens (s4d).",
    ]
    assert lra_tables(LraResults(rows=rows))[0].rows == (("tssa", "1"), ("linear", "0.769"), ("s4d", "0.8"))
    behind = [row("tssa", Work.STEP, 64, 2.0), row("linear", Work.STEP, 64, 1.0)]
    assert lra_findings(LraResults(rows=behind)) == [
        "Training steps: time of the next fastest over that of tssa: 0.50x at 64 tokens (linear)."
    ]


def test_files(measured, tmp_path):
    rows = measured
    paths = LraMeasurement.write(lra_report(rows), tmp_path)
    assert [path.suffix for path in paths] == [".json", ".md", ".svg"]
    content = json.loads(paths[0].read_text())
    assert len(content["rows"]) == len(rows)
    assert content["encoder"]["embed_dim"] == 16
    page = paths[1].read_text()
    assert all(f"## {table.title}" in page for table in lra_tables(LraResults(rows=rows)))
    assert f"({paths[2].name})" in page
    assert paths[2].read_bytes() == lra_pictures(lra_report(rows))[".svg"]
    (partial,) = LraMeasurement.write(lra_report(rows, complete=False), tmp_path / "other")
    assert partial.name.endswith(".partial.json")
    assert BENCHMARK.theme(TINY) == "lra-selection"
    assert BENCHMARK.theme(LraScale(repeats=9)) == "lra"


def test_a_red_gate_leaks_no_speed(measured):
    red = lra_report(measured, gate=RED)
    assert red.to_json()["rows"] == []
    for shown in (lra_page, lambda report: LraMeasurement.write(report, None)):
        with pytest.raises(ValueError, match="green gate"):
            shown(red)


def test_gate_compares_the_encoder_with_the_reference(monkeypatch):
    assert all(check.passed for check in check_encoder())
    created = bench_lra.create_model
    calls = count()

    def other(name, **options):
        model = created(name, **options)
        if next(calls) == 0:
            torch.nn.init.constant_(model.blocks[0].attention.temperature, 1.5)
        return model

    monkeypatch.setattr(bench_lra, "create_model", other)
    assert not any(check.passed for check in check_encoder())


def test_real_work_of_every_mixer():
    scale = replace(TINY, mixers=MIXERS, lengths=(20,), memory=False, pathx=False, mixer_seconds=0.01)
    rows = [row for rows in measure_lra(scale, watch=lambda _: None) for row in rows]
    assert [row.mixer for row in rows] == [*MIXERS] * 3
    assert all(row.seconds.median > 0 and row.parameters for row in rows)


def test_a_step_changes_the_weights_and_leaves_no_gradients():
    trainer = Trainer(LraStep(model="lra_text", options=TINY.options("tssa"), tokens=16, batch=2))
    before = trainer.model.embedding.weight.clone()
    assert trainer.step() > 0
    assert not torch.equal(before, trainer.model.embedding.weight)
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


def test_a_step_tells_what_it_used():
    step = LraStep(model="lra_text", options=TINY.options("tssa"), tokens=64)
    usage = take_step(step)
    assert usage.seconds > 0
    assert usage.process_bytes > usage.peak_bytes >= 0
    assert usage.loss == pytest.approx(0.7, abs=0.6)


@pytest.mark.slow
def test_memory_of_a_step_grows_with_its_length():
    options = TINY.options("tssa")
    short, long = (
        step_in_process(LraStep(model="lra_text", options=options, tokens=tokens)) for tokens in (64, 40_000)
    )
    assert long.peak_bytes > short.peak_bytes + 5e6
    assert long.process_bytes > long.peak_bytes
    with pytest.raises(TostError, match=r"lra_text .*'mixer': 'tsa'.*: failed with code 1: "):
        step_in_process(LraStep(model="lra_text", options={"mixer": "tsa"}, tokens=8))
