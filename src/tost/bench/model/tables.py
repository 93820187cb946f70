"""Tables and the Markdown page of a comparison of whole models."""

from __future__ import annotations

from collections.abc import Sequence

from tost.bench.harness.timing import Spread
from tost.bench.model.run import ModelReport, ModelRow
from tost.bench.ops.tables import Table, markdown_table

__all__ = ["model_markdown", "model_tables"]


def model_tables(rows: Sequence[ModelRow]) -> list[Table]:
    """Return one table per pass: images per second, how much slower than the first model, peak memory."""
    tables = []
    for training in (False, True):
        chosen = [row for row in rows if row.case.training is training]
        if not chosen:
            continue
        subject = chosen[0].model
        tables.append(
            Table(
                title=f"{'Training step without optimiser' if training else 'Inference'}: {subject} against others",
                headers=("images", "model", "parameters", "images/s", f"time / {subject}", "peak MB"),
                rows=tuple(
                    (
                        f"{row.case.batch} x {row.case.image_size} px",
                        row.model,
                        f"{row.parameters:,}",
                        f"{row.case.batch / row.seconds.median:.2f}",
                        _with_quartiles(row.ratio),
                        "-" if row.peak_bytes is None else f"{row.peak_bytes / 1e6:.0f}",
                    )
                    for row in chosen
                ),
                labels=2,
            )
        )
    return tables


def model_markdown(report: ModelReport) -> str:
    """Return a report as a Markdown page.

    Raises:
        ValueError: The gate is red.
    """
    if not report.gate.passed:
        raise ValueError(f"{report.gate.summary}; speeds are shown only behind a green gate.")
    environment = report.environment
    lines = [
        "# Whole image models against each other",
        "",
        f"{environment.summary} | {report.gate.summary}",
        "",
        f"Made by `{report.command}` on {environment.measured[:10]}. The models took turns on the same images; a ratio",
        "compares two passes of one round. Medians, with quartiles in brackets. Peak memory is the growth of a fresh",
        "process during its first pass, weights not included, with a C library that returns freed memory at once.",
    ]
    for table in model_tables(report.rows):
        lines += ["", f"## {table.title}", "", *markdown_table(table)]
    return "\n".join(lines) + "\n"


def _with_quartiles(value: Spread) -> str:
    return f"{value.median:.2f} ({value.lower:.2f}-{value.upper:.2f})"
