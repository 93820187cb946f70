"""Tables and the Markdown page of a measurement of language models at work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from tost._text import Table
from tost.bench.generate.cases import GenerateScale, Part
from tost.bench.generate.quality import measure_quality
from tost.bench.generate.run import (
    OUR_LIMIT,
    OURS,
    TORCH_LIMIT,
    GenerateResults,
    GenerateRow,
    check_generation,
    measure_generation,
)
from tost.bench.harness.gate import Check
from tost.bench.harness.measurement import Measurement, page
from tost.bench.harness.report import Report
from tost.bench.harness.table import MISSING, cell, grouped, with_quartiles
from tost.bench.ops.cases import Op

__all__ = ["GenerateMeasurement", "generate_page", "generate_tables"]

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
    return Table(
        title="A token, by context (batch 1)",
        headers=(
            *("context", "contender", "ms/token", "/ torch's limit", "/ our limit"),
            *(f"/ {OURS}, same context", f"/ {OURS}, {first}", "state kB"),
        ),
        rows=tuple(
            (
                f"{row.tokens:,}" if row.tokens else MISSING,
                row.contender,
                f"{1e3 * row.median:.2f}",
                _ratio(row, TORCH_LIMIT),
                _ratio(row, OUR_LIMIT),
                _ratio(row, f"{OURS} at {row.tokens}"),
                _ratio(row, f"{OURS} at {first}"),
                cell(row.state_bytes, ".1f", scale=1e-3),
            )
            for row in rows
        ),
        labels=2,
    )


def _batch(rows: Sequence[GenerateRow]) -> Table:
    first = rows[0]
    base = first.batch / first.median
    return Table(
        title=f"Several texts at a time, and matrices in fewer bits ({OURS})",
        headers=("weights", "texts", "ms/step", "tokens/s", f"tokens/s / {first.weights}, {first.batch}"),
        rows=tuple(
            (
                row.weights,
                str(row.batch),
                f"{1e3 * row.median:.2f}",
                f"{row.batch / row.median:.1f}",
                f"{row.batch / row.median / base:.2f}",
            )
            for row in rows
        ),
        labels=2,
    )


def _prefill(rows: Sequence[GenerateRow]) -> Table:
    return Table(
        title="Reading a prompt (batch 1)",
        headers=("tokens", "contender", "seconds", "tokens/s", f"/ {OURS}"),
        rows=tuple(
            (
                f"{row.tokens:,}",
                row.contender,
                f"{row.median:.2f}",
                f"{row.tokens / row.median:.0f}",
                _ratio(row, OURS),
            )
            for row in rows
        ),
        labels=2,
    )


def _train(rows: Sequence[GenerateRow]) -> Table:
    others = list(dict.fromkeys(row.contender for row in rows if row.contender != OURS))
    peaks = {(row.tokens, row.contender): row.peak_bytes for row in rows}

    def memory(row: GenerateRow, other: str) -> str:
        mine, theirs = row.peak_bytes, peaks.get((row.tokens, other))
        return f"{mine / theirs:.2f}" if mine and theirs else MISSING

    return Table(
        title="Forward, loss and backward on one text (batch 1)",
        headers=(
            *("tokens", "contender", "seconds"),
            *(f"time / {other}" for other in others),
            "peak MB",
            *(f"peak / {other}" for other in others),
        ),
        rows=tuple(
            (
                f"{row.tokens:,}",
                row.contender,
                f"{row.median:.2f}",
                *(_ratio(row, other) for other in others),
                cell(row.peak_bytes, ".0f", scale=1e-6),
                *(memory(row, other) for other in others),
            )
            for row in rows
        ),
        labels=2,
    )


def _quality(rows: Sequence[GenerateRow]) -> Table:
    exact = rows[0].loss or 0.0
    return Table(
        title=f"What fewer bits cost: loss of {rows[0].contender} on {rows[0].tokens:,} tokens",
        headers=("weights", "loss, nats/token", "difference"),
        rows=tuple((row.weights, f"{row.loss:.4f}", f"{(row.loss or 0.0) - exact:+.5f}") for row in rows),
        labels=1,
    )


def _ratio(row: GenerateRow, other: str) -> str:
    return with_quartiles(row.ratios.get(other))


class GenerateMeasurement(Measurement[GenerateScale, GenerateResults]):
    """The benchmark `tost bench generate`."""

    results = GenerateResults
    operators = (Op.CAUSAL_TSSA,)
    checked = "operators, prompts and tokens with the reference"

    tables = staticmethod(generate_tables)
    page = staticmethod(generate_page)

    def check(self) -> list[Check]:
        """Compare prompts and tokens with the reference."""
        return check_generation()

    @property
    def steps(self) -> int:
        """One step per part; two lengths of training are two steps."""
        counts = {Part.TRAIN: len(self.scale.train_tokens), Part.QUALITY: int(self.scale.source is not None)}
        return sum(counts.get(part, 1) for part in self.scale.part)

    def measure(self, results: GenerateResults, watch: Callable[[str], None]) -> Iterator[str]:
        """Measure all parts."""
        for rows in measure_generation(self.scale, watch=watch):
            results.rows += rows
            yield ", ".join(f"{row.contender} {row.median:.3g} s" for row in rows)
        source, text = self.scale.source, self.scale.text
        if source is not None and text is not None and Part.QUALITY in self.scale.part:
            watch(f"quality: the loss of {source} on {text}")
            rows = measure_quality(source, text, tokens=_QUALITY_TOKENS)
            results.rows += rows
            yield ", ".join(f"{row.weights} {row.loss:.4f}" for row in rows)
