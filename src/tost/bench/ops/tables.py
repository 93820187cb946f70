"""Tables, the page and the picture of the attention layers. All of it is computed from the rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tost._text import Table, grouped
from tost.bench.harness.gate import GateResult
from tost.bench.harness.measurement import Measurement, page
from tost.bench.harness.plot import Line, Panel, Style, draw
from tost.bench.harness.report import Report, plain
from tost.bench.harness.table import MISSING, cell, pivot, with_quartiles
from tost.bench.ops import gate
from tost.bench.ops.cases import Mode, Op, OpsScale
from tost.bench.ops.contenders import CONTENDERS, LIMIT
from tost.bench.ops.run import Growth, KeptRow, OpsResults, Row, growth, measure_case, measure_kept

_NAMES = [contender.name for contender in CONTENDERS]
_STYLES = {
    "tost": Style("tost", "#D55E00", "o"),
    "tost-torch": Style("tost, plain PyTorch", "#E69F00", "s"),
    "paper eager": Style("paper's listing", "#0072B2", "^"),
    "paper compiled": Style("paper's listing, compiled", "#56B4E9", "v"),
    "xca": Style("cross-covariance (XCA)", "#009E73", "P"),
    "sdpa": Style("softmax attention (SDPA)", "#000000", "D"),
}
# Their last points are labelled with the time itself, so that the reader sees how long the ratios last.
_TIMED = ("tost", "sdpa")
_OP_TITLES = {Op.TSSA: "TSSA", Op.CAUSAL_TSSA: "causal TSSA"}
_MODE_TITLES = {Mode.FWD: "forward", Mode.FWD_BWD: "forward + backward"}
_RATIO_TICKS = (0.5, 1, 1.5, 2, 3, 5, 10, 20, 50, 100, 200, 500)
_INTRODUCTION = """\
Each contender ran up to {warmup} times untimed; then came at least {repeats} rounds in which each ran once, in shuffled
order. A ratio compares two runs of one round. Medians, with quartiles in brackets."""


def brief_tables(results: OpsResults) -> list[Table]:
    """Return what fits on a terminal: ratios, memory of the operators, growth. Empty tables are left out."""
    built = [ratio_table(results.rows), _operator_memory(results.operator_kept_bytes), growth_table(results.growth)]
    return [table for table in built if table.rows]


def all_tables(results: OpsResults) -> list[Table]:
    """Return every table of a report. Empty ones are left out."""
    with_memory = [row for row in results.rows if row.kept_bytes is not None]
    memory_title, time_title = "Megabytes kept for the backward pass by the layer", "Milliseconds of one run"
    built = [
        ratio_table(results.rows),
        growth_table(results.growth),
        _operator_memory(results.operator_kept_bytes),
        _by_case(memory_title, with_memory, lambda row: cell(row.kept_bytes, ".1f", scale=1e-6)),
        _by_case(time_title, results.rows, lambda row: with_quartiles(row.seconds, _milliseconds)),
    ]
    return [table for table in built if table.rows]


def ratio_table(rows: Sequence[Row]) -> Table:
    """Return the main table: the limit in milliseconds, every contender as a multiple of it."""

    def ratio(row: Row) -> str:
        if row.ratio is None or row.seconds is None:
            return MISSING
        if row.contender == LIMIT:
            return f"{_milliseconds(row.seconds.median)} ms"
        return with_quartiles(row.ratio, _short) if row.contender == "tost" else _short(row.ratio.median)

    notes = [f"{row.label}, {row.contender}: {row.note}" for row in rows if row.note]
    return _by_case("Time relative to the limit", rows, ratio, notes)


def growth_table(found: Sequence[Growth]) -> Table:
    """Return how the time per token grows with the length, one column per contender."""
    cells = [
        ((item.op, item.mode, f"{item.from_tokens} to {item.to_tokens}"), item.contender, _short(item.factor))
        for item in found
    ]
    return pivot("Growth of the time per token (1 is linear cost)", ["op", "pass", "tokens"], cells, order=_NAMES)


def _operator_memory(rows: Sequence[KeptRow]) -> Table:
    cells = []
    for row in rows:
        shape = (row.op, f"{row.width}/{row.heads}", f"{row.batch}x{row.tokens}", f"{row.input_bytes / 1e6:.1f}")
        cells.append((shape, row.implementation, f"{row.bytes / 1e6:.1f} ({row.bytes / row.input_bytes:.1f}x)"))
    title = "Megabytes kept for the backward pass by the operator alone (times its input)"
    return pivot(title, ["op", "d/H", "tokens", "input"], cells, labels=3)


def _by_case(title: str, rows: Sequence[Row], text: Callable[[Row], str], notes: Sequence[str] = ()) -> Table:
    """Lay out one line per case and one column per contender that appears."""
    cells = [
        ((row.op, f"{row.width}/{row.heads}", row.mode, f"{row.batch}x{row.tokens}"), row.contender, text(row))
        for row in rows
    ]
    return pivot(title, ["op", "d/H", "pass", "tokens"], cells, order=_NAMES, notes=notes)


def _milliseconds(seconds: float) -> str:
    value = 1000 * seconds
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}"


def _short(ratio: float) -> str:
    return f"{ratio:.1f}" if ratio >= 10 else f"{ratio:.2f}"


def ops_page(report: Report[OpsResults]) -> str:
    """Return a report as a Markdown page.

    Raises:
        ValueError: The gate is red.
    """
    introduction = _INTRODUCTION.format(**report.about["plan"])
    contenders = [f"**{name}**: {summary}" for name, summary in report.about["contenders"].items()]
    picture = f"![Time relative to the limit by number of tokens]({report.stem}.svg)"
    tables = all_tables(report.results)
    return page("Attention layers against their limit", report, introduction, contenders, picture, *tables)


def ops_pictures(report: Report[OpsResults]) -> dict[str, bytes]:
    """Draw the time of single sequences relative to the limit by number of tokens, one panel per operator and pass."""
    shown = [row for row in report.results.rows if row.batch == 1 and row.ratio]
    panels = []
    for title, rows in grouped(shown, _panel_title).items():
        contenders = grouped(rows, lambda row: row.contender)
        lines = [_line(name, line) for name, line in contenders.items() if name != LIMIT]
        sizes, level = sorted({row.tokens for row in rows}), "the two projections alone"
        panels.append(Panel(title=title, lines=lines, sizes=sizes, level=level, ticks=_RATIO_TICKS, unit="x"))
    below = ["tokens", f"{report.machine} | medians and quartiles"]
    return {".svg": draw(panels, below=below, beside="time relative to the layer's two projections")}


def _panel_title(row: Row) -> str:
    return f"{_OP_TITLES[row.op]}, {_MODE_TITLES[row.mode]} (d={row.width}, H={row.heads}, {row.dtype})"


def _line(name: str, rows: Sequence[Row]) -> Line:
    found = sorted((row.tokens, row.ratio, row.seconds_median or 0.0) for row in rows if row.ratio)
    seconds = found[-1][2]
    end = f"{seconds:.2g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
    return Line(
        style=_STYLES[name],
        points=[(tokens, ratio.median) for tokens, ratio, _ in found],
        quartiles=[(ratio.lower, ratio.upper) for _, ratio, _ in found],
        bold=name == "tost",
        end=end if name in _TIMED else "",
    )


class OpsMeasurement(Measurement[OpsScale, OpsResults]):
    """The benchmark `tost bench ops`."""

    results = OpsResults
    checked = "every implementation with the reference"
    draws = True

    tables, page, pictures = staticmethod(brief_tables), staticmethod(ops_page), staticmethod(ops_pictures)

    def check(self) -> GateResult:
        """Compare every implementation with the reference."""
        return gate.run_gate(self.scale.op, block_size=self.scale.block_size)

    def about(self) -> dict[str, Any]:
        """Return the plan and what each contender is."""
        contenders = {contender.name: contender.summary for contender in CONTENDERS}
        return {"plan": plain(self.scale.plan), "contenders": contenders}

    def measure(self, results: OpsResults, watch: Callable[[str], None]) -> Iterator[str]:
        """Measure all cases."""
        plan = self.scale.plan
        contenders = [contender for contender in CONTENDERS if self.scale.compile or not contender.compiled]
        for case in self.scale.cases:
            watch(case.label)
            rows = measure_case(case, plan=plan, contenders=contenders)
            kept = measure_kept(case, seed=plan.seed) if case.mode is Mode.FWD_BWD else []
            results.rows += rows
            results.operator_kept_bytes += kept
            results.growth = growth(results.rows)
            shown = [f"{row.contender} {row.ratio.median:.2f}" for row in rows if row.ratio and row.contender != LIMIT]
            yield f"times the limit: {', '.join(shown)}"
