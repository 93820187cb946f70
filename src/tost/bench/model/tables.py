"""Tables and the page of a comparison of whole models."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tost._text import Table
from tost.bench.harness.gate import GateResult
from tost.bench.harness.measurement import Measurement, page
from tost.bench.harness.report import Report
from tost.bench.harness.table import cell, columns, with_quartiles
from tost.bench.model.cases import ModelScale
from tost.bench.model.run import ModelResults, ModelRow, check_model, measure_models
from tost.bench.ops import gate
from tost.bench.ops.cases import Op

_INTRODUCTION = """\
The models took turns on the same images; a ratio compares two passes of one round. Medians, with quartiles in brackets.
Peak memory is the growth of a fresh process during its first pass, weights not included, with a C library that returns
freed memory at once."""


def model_tables(results: ModelResults) -> list[Table]:
    """Return one table per pass: images per second, how much slower than the first model, peak memory."""
    tables = []
    for training, what in ((False, "Inference"), (True, "Training step without optimizer")):
        chosen = [row for row in results.rows if row.case.training is training]
        if not chosen:
            continue
        subject = chosen[0].model
        cells: list[tuple[str, Callable[[ModelRow], str]]] = [
            ("images", lambda row: f"{row.case.batch} x {row.case.image_size} px"),
            ("model", lambda row: row.model),
            ("parameters", lambda row: f"{row.parameters:,}"),
            ("images/s", lambda row: f"{row.case.batch / row.seconds.median:.2f}"),
            (f"time / {subject}", lambda row: with_quartiles(row.ratio)),
            ("peak MB", lambda row: cell(row.peak_bytes, ".0f", scale=1e-6)),
        ]
        tables.append(columns(f"{what}: {subject} against others", chosen, cells, labels=2))
    return tables


def model_page(report: Report[ModelResults]) -> str:
    """Return a report as a Markdown page.

    Raises:
        ValueError: The gate is red.
    """
    return page("Whole image models against each other", report, _INTRODUCTION, *model_tables(report.results))


class ModelMeasurement(Measurement[ModelScale, ModelResults]):
    """The benchmark `tost bench model`."""

    results = ModelResults
    checked = "the operators and the first model with the reference"

    tables, page = staticmethod(model_tables), staticmethod(model_page)

    def check(self) -> GateResult:
        """Compare the operators and the first model with the reference."""
        return gate.run_gate([Op.TSSA]).plus(check_model(self.scale.models[0]))

    def measure(self, results: ModelResults, watch: Callable[[str], None]) -> Iterator[str]:
        """Measure all cases."""
        for rows in measure_models(self.scale, watch=watch):
            results.rows += rows
            yield ", ".join(f"{row.model} {row.seconds.median:.3g} s" for row in rows)
