"""Tables, sentences and the picture of a comparison of mixers. All of it is computed from the rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tost._text import Table, grouped
from tost.bench.harness.gate import GateResult
from tost.bench.harness.measurement import Measurement, page
from tost.bench.harness.plot import Panel, Style, draw, lines_of
from tost.bench.harness.report import Report
from tost.bench.harness.table import cell, columns, pivot, with_quartiles, without_empty
from tost.bench.lra.cases import LraScale, Work
from tost.bench.lra.run import ENCODER, LraResults, LraRow, check_encoder, measure_lra
from tost.bench.ops import gate
from tost.bench.ops.cases import Op
from tost.models import model_options

Value = Callable[[LraRow], float | None]

# It has eight colours, so relatives share one and differ in their lines.
_STYLES = {
    "tssa": Style("TSSA", "#D55E00", "o"),
    "softmax": Style("softmax", "#000000", "D"),
    "reformer": Style("Reformer", "#999999", "X", "--"),
    "bigbird": Style("BigBird", "#999999", "P"),
    "linformer": Style("Linformer", "#E69F00", "s"),
    "linear": Style("Linear Transformer", "#0072B2", "^"),
    "performer": Style("Performer", "#56B4E9", "v"),
    "nystrom": Style("Nystromformer", "#CC79A7", "<"),
    "s4": Style("S4", "#009E73", ">"),
    "s4d": Style("S4D", "#009E73", "*", "--"),
}
_INTRODUCTION = """\
The encoder of the Text task: 4 blocks of width 256 with 4 heads and MLPs of 1024, no dropout, batch 1, full sequences.
A step is forward, backward and AdamW. The mixers took turns, {repeats} rounds of steps, fewer for slow ones; a ratio
compares two runs of one round. Medians, with quartiles in brackets. Peak memory is the growth of a fresh process during
its first step: what is kept for the backward pass, gradients and AdamW's moments, but not the weights; its C library
returns freed memory at once. The mixers are those of `--form {form}`; S4 and S4D have 4 states, their setting for this
task."""


def _seconds(row: LraRow) -> float | None:
    return row.seconds.median if row.seconds else None


def _milliseconds(row: LraRow) -> float | None:
    return 1e3 * row.seconds.median if row.seconds else None


def _steps_per_second(row: LraRow) -> float | None:
    return 1 / row.seconds.median if row.seconds else None


def _megabytes(row: LraRow) -> float | None:
    return row.peak_bytes / 1e6 if row.peak_bytes else None


def lra_tables(results: LraResults) -> list[Table]:
    """Return a table per quantity, one row per mixer, one column per length; then Path-X. Empty ones are left out."""
    by_work = grouped(results.rows, lambda row: row.case.work)
    steps = by_work.get(Work.STEP, [])
    built = [
        _by_length("Training steps per second in the same encoder", steps, _steps_per_second, ".3g", notes=True),
        _ratios("Time of a step over that of the first mixer", steps),
        _by_length("Peak memory of a step, MB", steps, _megabytes, ".0f"),
    ]
    for work, name in ((Work.FWD, "forward"), (Work.FWD_BWD, "forward and backward")):
        alone, title = by_work.get(work, []), f"Mixer alone with its projections, {name}, ms"
        built.append(_by_length(title, alone, _milliseconds, ".1f", notes=True))
        built.append(_ratios(f"Mixer alone, {name}, over the first mixer", alone))
    return without_empty([*built, _pathx(by_work.get(Work.PATHX, []))])


def _by_length(title: str, rows: Sequence[LraRow], value: Value, form: str, *, notes: bool = False) -> Table:
    cells = [((row.mixer,), f"{row.case.tokens:,}", cell(value(row), form)) for row in rows]
    return pivot(title, ["mixer"], cells, notes=[row.note for row in rows if row.note] if notes else ())


def _ratios(title: str, rows: Sequence[LraRow]) -> Table:
    return pivot(title, ["mixer"], [((row.mixer,), f"{row.case.tokens:,}", with_quartiles(row.ratio)) for row in rows])


def _pathx(rows: Sequence[LraRow]) -> Table:
    sizes = "".join(f": {row.case.batch} x {row.case.tokens:,} tokens" for row in rows[:1])
    cells: list[tuple[str, Callable[[LraRow], str]]] = [
        ("mixer", lambda row: row.mixer),
        ("seconds", lambda row: cell(_seconds(row), ".2f")),
        ("peak MB", lambda row: cell(_megabytes(row), ".0f")),
        ("whole process MB", lambda row: cell(row.process_bytes, ".0f", scale=1e-6)),
    ]
    notes = ["one step each, the first of a fresh process"]
    return columns(f"A training step of the Path-X model{sizes}", rows, cells, notes=notes)


def lra_findings(results: LraResults) -> list[str]:
    """Return how far the first mixer is ahead of the next one, or behind it, at every length."""
    sentences, rows = [], results.rows
    for work, what in (
        (Work.STEP, "Training steps"),
        (Work.FWD, "Mixer alone, forward"),
        (Work.FWD_BWD, "Mixer alone, forward and backward"),
    ):
        if parts := _against_next(rows, work, _seconds):
            sentences.append(f"{what}: time of the next fastest over that of {rows[0].mixer}: {', '.join(parts)}.")
    if parts := _against_next(rows, Work.STEP, _megabytes):
        sentences.append(f"Peak memory of the next smallest over that of {rows[0].mixer}: {', '.join(parts)}.")
    return sentences


def _against_next(rows: Sequence[LraRow], work: Work, value: Value) -> list[str]:
    """Return by length the least value of the other mixers over that of the first."""
    parts = []
    chosen = [row for row in rows if row.case.work is work]
    for tokens, group in grouped(chosen, lambda row: row.case.tokens).items():
        own = value(group[0])
        others = [(number, row.mixer) for row in group[1:] if (number := value(row))]
        if own and others:
            least, name = min(others)
            parts.append(f"{least / own:.2f}x at {tokens:,} tokens ({name})")
    return parts


def lra_page(report: Report[LraResults]) -> str:
    """Return a report as a Markdown page.

    Raises:
        ValueError: The gate is red.
    """
    picture = f"![Steps per second, memory and time of the mixers by number of tokens]({report.stem}.svg)"
    parts = [_INTRODUCTION.format(**report.about["scale"]), picture, lra_findings(report.results)]
    return page("Long-range mixers in one encoder", report, *parts, *lra_tables(report.results))


def lra_pictures(report: Report[LraResults]) -> dict[str, bytes]:
    """Draw steps per second, memory and each mixer alone by number of tokens."""
    rows = report.results.rows
    panels = [
        _panel("training steps per second", rows, Work.STEP, _steps_per_second),
        _panel("peak memory of a step, MB", rows, Work.STEP, _megabytes),
        _panel("mixer alone, forward, ms", rows, Work.FWD, _milliseconds),
        _panel("mixer alone, forward and backward, ms", rows, Work.FWD_BWD, _milliseconds),
    ]
    return {".svg": draw(panels, below=["tokens", f"{report.machine} | medians"], legend_columns=5)}


def _panel(title: str, rows: Sequence[LraRow], work: Work, value: Value) -> Panel:
    chosen = [row for row in rows if row.case.work is work]
    lines = lines_of(_STYLES, [(row.mixer, row.case.tokens, value(row)) for row in chosen], bold="tssa")
    return Panel(title=title, lines=lines, sizes=sorted({row.case.tokens for row in chosen}))


class LraMeasurement(Measurement[LraScale, LraResults]):
    """The benchmark `tost bench lra`."""

    results = LraResults
    checked = "the operator and an encoder with the reference"
    draws = True

    def check(self) -> GateResult:
        """Compare the operator and an encoder with the reference."""
        return gate.run_gate([Op.TSSA]).plus(check_encoder())

    def about(self) -> dict[str, Any]:
        """Return the scale and the encoder."""
        encoder = model_options(ENCODER, dict(self.scale.sizes)).model_dump(mode="json")
        return {**super().about(), "encoder": encoder}

    def measure(self, results: LraResults, watch: Callable[[str], None]) -> Iterator[str]:
        """Measure all cases; see `measure_lra`."""
        for rows in measure_lra(self.scale, watch=watch):
            results.rows += rows
            yield ", ".join(f"{row.mixer} {row.seconds.median:.3g} s" for row in rows if row.seconds)

    tables, findings = staticmethod(lra_tables), staticmethod(lra_findings)
    page, pictures = staticmethod(lra_page), staticmethod(lra_pictures)
