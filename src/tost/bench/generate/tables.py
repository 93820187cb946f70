"""Tables and the Markdown page of a measurement of language models at work."""

from __future__ import annotations

from collections.abc import Sequence

from tost.bench.generate.cases import Part
from tost.bench.generate.run import OUR_LIMIT, OURS, TORCH_LIMIT, GenerateReport, GenerateRow
from tost.bench.harness.timing import Spread
from tost.bench.ops.tables import Table, markdown_table

__all__ = ["generate_markdown", "generate_tables"]

_MISSING = "-"


def generate_tables(rows: Sequence[GenerateRow]) -> list[Table]:
    """Return one table per part that was measured."""
    builders = {Part.DECODE: _decode, Part.BATCH: _batch, Part.PREFILL: _prefill, Part.TRAIN: _train}
    builders |= {Part.QUALITY: _quality}
    return [build(chosen) for part, build in builders.items() if (chosen := [row for row in rows if row.part is part])]


def generate_markdown(report: GenerateReport) -> str:
    """Return a report as a Markdown page.

    Raises:
        ValueError: The gate is red.
    """
    if not report.gate.passed:
        raise ValueError(f"{report.gate.summary}; speeds are shown only behind a green gate.")
    environment = report.environment
    lines = [
        "# Language models at work",
        "",
        f"{environment.summary} | {report.gate.summary}",
        "",
        f"Made by `{report.command}` on {environment.measured[:10]}. Contenders took turns; a ratio compares two times",
        "of one round. Medians, with quartiles in brackets. All models have the base size, fresh weights and float32",
        "arithmetic. Peak memory is the growth of a fresh process during the step, weights not included.",
    ]
    for table in generate_tables(report.rows):
        lines += ["", f"## {table.title}", "", *markdown_table(table)]
        if table.notes:
            lines += ["", *(f"- {note}" for note in table.notes)]
    return "\n".join(lines) + "\n"


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
                f"{row.tokens:,}" if row.tokens else _MISSING,
                row.contender,
                f"{1e3 * row.median:.2f}",
                _ratio(row, TORCH_LIMIT),
                _ratio(row, OUR_LIMIT),
                _ratio(row, f"{OURS} at {row.tokens}"),
                _ratio(row, f"{OURS} at {first}"),
                _MISSING if row.state_bytes is None else f"{row.state_bytes / 1e3:.1f}",
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
        return f"{mine / theirs:.2f}" if mine and theirs else _MISSING

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
                _MISSING if row.peak_bytes is None else f"{row.peak_bytes / 1e6:.0f}",
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
    return _with_quartiles(row.ratios[other]) if other in row.ratios else _MISSING


def _with_quartiles(value: Spread) -> str:
    if value.count == 1:
        return f"{value.median:.2f}"
    return f"{value.median:.2f} ({value.lower:.2f}-{value.upper:.2f})"
