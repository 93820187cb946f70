"""Tables and the Markdown page of a measurement of language models at work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from tost._text import Table, grouped
from tost.bench.generate import run
from tost.bench.generate.cases import GenerateScale, Part
from tost.bench.generate.quality import measure_quality
from tost.bench.generate.run import OUR_LIMIT, OURS, TORCH_LIMIT, GenerateResults, GenerateRow, check_generation
from tost.bench.harness.gate import GateResult
from tost.bench.harness.measurement import Measurement, page
from tost.bench.harness.report import Report
from tost.bench.harness.table import MISSING, cell, columns, with_quartiles
from tost.bench.ops import gate
from tost.bench.ops.cases import Op

Cells = list[tuple[str, Callable[[GenerateRow], str]]]

_QUALITY_TOKENS = 1 << 16
_INTRODUCTION = """\
Contenders took turns; a ratio compares two times of one round. Medians, with quartiles in brackets. All models have the
base size, fresh weights and float32 arithmetic. Peak memory is the growth of a fresh process during the step, weights
not included."""


def generate_tables(results: GenerateResults) -> list[Table]:
    """Return one table per part that was measured."""
    builders = {Part.DECODE: _decode, Part.BATCH: _batch, Part.PREFILL: _prefill, Part.TRAIN: _train}
    builders |= {Part.QUALITY: _quality}
    by_part = grouped(results.rows, lambda row: row.part)
    return [build(by_part[part]) for part, build in builders.items() if part in by_part]


def generate_page(report: Report[GenerateResults]) -> str:
    """Return a report as a Markdown page.

    Raises:
        ValueError: The gate is red.
    """
    return page("Language models at work", report, _INTRODUCTION, *generate_tables(report.results))


def _decode(rows: Sequence[GenerateRow]) -> Table:
    first = next(row.tokens for row in rows if row.contender == OURS)
    cells: Cells = [
        ("context", lambda row: f"{row.tokens:,}" if row.tokens else MISSING),
        ("contender", lambda row: row.contender),
        ("ms/token", lambda row: f"{1e3 * row.median:.2f}"),
        ("/ torch's limit", lambda row: _ratio(row, TORCH_LIMIT)),
        ("/ our limit", lambda row: _ratio(row, OUR_LIMIT)),
        (f"/ {OURS}, same context", lambda row: _ratio(row, f"{OURS} at {row.tokens}")),
        (f"/ {OURS}, {first}", lambda row: _ratio(row, f"{OURS} at {first}")),
        ("state kB", lambda row: cell(row.state_bytes, ".1f", scale=1e-3)),
    ]
    return columns("A token, by context (batch 1)", rows, cells, labels=2)


def _batch(rows: Sequence[GenerateRow]) -> Table:
    first = rows[0]
    base = first.batch / first.median
    cells: Cells = [
        ("weights", lambda row: row.weights),
        ("texts", lambda row: str(row.batch)),
        ("ms/step", lambda row: f"{1e3 * row.median:.2f}"),
        ("tokens/s", lambda row: f"{row.batch / row.median:.1f}"),
        (f"tokens/s / {first.weights}, {first.batch}", lambda row: f"{row.batch / row.median / base:.2f}"),
    ]
    return columns(f"Several texts at a time, and matrices in fewer bits ({OURS})", rows, cells, labels=2)


def _prefill(rows: Sequence[GenerateRow]) -> Table:
    cells: Cells = [
        ("tokens", lambda row: f"{row.tokens:,}"),
        ("contender", lambda row: row.contender),
        ("seconds", lambda row: f"{row.median:.2f}"),
        ("tokens/s", lambda row: f"{row.tokens / row.median:.0f}"),
        (f"/ {OURS}", lambda row: _ratio(row, OURS)),
    ]
    return columns("Reading a prompt (batch 1)", rows, cells, labels=2)


def _train(rows: Sequence[GenerateRow]) -> Table:
    others = list(dict.fromkeys(row.contender for row in rows if row.contender != OURS))
    peaks = {(row.tokens, row.contender): row.peak_bytes for row in rows}

    def memory(row: GenerateRow, other: str) -> str:
        mine, theirs = row.peak_bytes, peaks.get((row.tokens, other))
        return f"{mine / theirs:.2f}" if mine and theirs else MISSING

    cells: Cells = [
        ("tokens", lambda row: f"{row.tokens:,}"),
        ("contender", lambda row: row.contender),
        ("seconds", lambda row: f"{row.median:.2f}"),
        *((f"time / {other}", partial(_ratio, other=other)) for other in others),
        ("peak MB", lambda row: cell(row.peak_bytes, ".0f", scale=1e-6)),
        *((f"peak / {other}", partial(memory, other=other)) for other in others),
    ]
    return columns("Forward, loss and backward on one text (batch 1)", rows, cells, labels=2)


def _quality(rows: Sequence[GenerateRow]) -> Table:
    exact = rows[0].loss or 0.0
    cells: Cells = [
        ("weights", lambda row: row.weights),
        ("loss, nats/token", lambda row: f"{row.loss:.4f}"),
        ("difference", lambda row: f"{(row.loss or 0.0) - exact:+.5f}"),
    ]
    return columns(f"What fewer bits cost: loss of {rows[0].contender} on {rows[0].tokens:,} tokens", rows, cells)


def _ratio(row: GenerateRow, other: str) -> str:
    return with_quartiles(row.ratios.get(other))


class GenerateMeasurement(Measurement[GenerateScale, GenerateResults]):
    """The benchmark `tost bench generate`."""

    results = GenerateResults
    checked = "operators, prompts and tokens with the reference"

    tables, page = staticmethod(generate_tables), staticmethod(generate_page)

    def check(self) -> GateResult:
        """Compare operators, prompts and tokens with the reference."""
        return gate.run_gate([Op.CAUSAL_TSSA]).plus(check_generation())

    @property
    def steps(self) -> int:
        """One step per part; two lengths of training are two steps."""
        counts = {Part.TRAIN: len(self.scale.train_tokens), Part.QUALITY: int(self.scale.source is not None)}
        return sum(counts.get(part, 1) for part in self.scale.part)

    def measure(self, results: GenerateResults, watch: Callable[[str], None]) -> Iterator[str]:
        """Measure all parts."""
        for rows in run.measure_generation(self.scale, watch=watch):
            results.rows += rows
            yield ", ".join(f"{row.contender} {row.median:.3g} s" for row in rows)
        source, text = self.scale.source, self.scale.text
        if source is not None and text is not None and Part.QUALITY in self.scale.part:
            watch(f"quality: the loss of {source} on {text}")
            rows = measure_quality(source, text, tokens=_QUALITY_TOKENS)
            results.rows += rows
            yield ", ".join(f"{row.weights} {row.loss:.4f}" for row in rows)
