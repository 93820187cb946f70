"""Result files: JSON with every number, a Markdown page made from it. No number passes through a human hand."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from tost.bench.harness.environment import Environment
from tost.bench.harness.files import require_green, write_measurement
from tost.bench.harness.gate import GateResult
from tost.bench.harness.timing import Plan, Spread
from tost.bench.ops.contenders import CONTENDERS
from tost.bench.ops.plot import draw
from tost.bench.ops.run import KeptRow, Measurements, Row
from tost.bench.ops.tables import all_tables, growth, markdown_table

__all__ = ["OpsReport", "markdown", "write_report"]


@dataclass(frozen=True, kw_only=True)
class OpsReport:
    """A measurement together with everything needed to judge it."""

    theme: str
    environment: Environment
    gate: GateResult
    plan: Plan
    command: str
    measurements: Measurements

    @property
    def stem(self) -> str:
        """File name without its ending: theme, hardware and month."""
        return f"{self.theme}_{self.environment.slug}_{self.environment.month}"

    @property
    def headline(self) -> str:
        """One line: where this was measured, with which versions, behind which gate."""
        return f"{self.environment.summary} | {self.gate.summary}"

    @property
    def complete(self) -> bool:
        """Whether everything was measured."""
        return self.measurements.complete

    def to_json(self) -> dict[str, object]:
        """Return one object of plain types; times are in seconds."""
        # A red gate must not leak a speed, not even into a file.
        shown = self.measurements if self.gate.passed else Measurements()
        return {
            "theme": self.theme,
            "complete": shown.complete,
            "command": self.command,
            "environment": asdict(self.environment),
            "gate": self.gate.to_json(),
            "plan": asdict(self.plan),
            "contenders": {contender.name: contender.summary for contender in CONTENDERS},
            "rows": [_row_to_json(row) for row in shown.rows],
            "operator_kept_bytes": [_kept_to_json(row) for row in shown.kept],
            "growth": [{**asdict(item), "factor": item.factor} for item in growth(shown.rows)],
        }


def markdown(report: OpsReport, *, plot: str | None = None) -> str:
    """Return a report as a Markdown page.

    Args:
        report: The measurement.
        plot: File name of its plot, shown above the tables.

    Returns:
        The text of the page.

    Raises:
        ValueError: The gate is red.
    """
    require_green(report.gate)
    plan, environment = report.plan, report.environment
    ending = "." if report.measurements.complete else ", interrupted before the end."
    load = "" if environment.load is None else f" (load average {environment.load:g} at the start)"
    lines = [
        "# Attention layers against their limit",
        "",
        report.headline,
        "",
        f"Made by `{report.command}` on {environment.measured[:10]}{load}{ending}",
        f"Each contender ran up to {plan.warmup} times untimed; then came at least {plan.repeats} rounds in which each",
        "ran once, in shuffled order. A ratio compares two runs of one round. Medians, with quartiles in brackets.",
        "",
        *(f"- **{contender.name}**: {contender.summary}" for contender in CONTENDERS),
    ]
    if plot:
        lines += ["", f"![Time relative to the limit by number of tokens]({plot})"]
    for table in all_tables(report.measurements):
        lines += ["", f"## {table.title}", "", *markdown_table(table)]
        if table.notes:
            lines += ["", *(f"- {note}" for note in table.notes)]
    return "\n".join(lines) + "\n"


def write_report(report: OpsReport, folder: Path) -> list[Path]:
    """Write the files of a report, as `write_measurement` does: JSON, Markdown and a plot.

    Args:
        report: A measurement behind a green gate.
        folder: Where to write; made if missing.

    Returns:
        The files written.

    Raises:
        ValueError: The gate is red.
    """
    return write_measurement(
        report,
        folder,
        lambda: {
            ".md": markdown(report, plot=f"{report.stem}.svg"),
            ".svg": draw(report.measurements.rows, caption=report.environment.summary),
        },
    )


def _row_to_json(row: Row) -> dict[str, object]:
    warmup = row.warmup
    return {
        **asdict(row.case),
        "contender": row.contender,
        **_spread_to_json("seconds", row.seconds),
        "repeats": row.seconds.count if row.seconds else 0,
        **_spread_to_json("ratio_to_limit", row.ratio),
        "ratio_of_medians": row.ratio_of_medians,
        "warmup_runs": warmup.runs if warmup else 0,
        "first_run_seconds": warmup.first_seconds if warmup else None,
        "kept_bytes": row.kept,
        "note": row.note,
    }


def _spread_to_json(name: str, spread: Spread | None) -> dict[str, float | None]:
    return {
        f"{name}_median": spread.median if spread else None,
        f"{name}_lower_quartile": spread.lower if spread else None,
        f"{name}_upper_quartile": spread.upper if spread else None,
    }


def _kept_to_json(row: KeptRow) -> dict[str, object]:
    # What is kept does not depend on the pass, so the mode would only mislead.
    case = {name: value for name, value in asdict(row.case).items() if name != "mode"}
    return {**case, "implementation": row.implementation, "bytes": row.bytes, "input_bytes": row.input_bytes}
