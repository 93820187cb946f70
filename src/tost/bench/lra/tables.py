"""Tables, sentences and files of a comparison of mixers. All of it is computed from the rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tost.bench.harness.files import require_green, write_measurement
from tost.bench.lra.plot import draw_lra
from tost.bench.lra.run import LraReport, LraRow, Work
from tost.bench.ops.tables import Table, markdown_table

__all__ = ["lra_findings", "lra_markdown", "lra_tables", "write_lra"]

_MISSING = "-"


def lra_tables(rows: Sequence[LraRow]) -> list[Table]:
    """Return a table per quantity, one row per mixer, one column per length; then Path-X. Empty ones are left out."""
    steps = [row for row in rows if row.case.work is Work.STEP]
    built = [
        _by_length("Training steps per second in the same encoder", steps, _steps_per_second),
        _by_length("Time of a step over that of the first mixer", steps, _ratio),
        _by_length("Peak memory of a step, MB", steps, _megabytes),
    ]
    for work, name in ((Work.FWD, "forward"), (Work.FWD_BWD, "forward and backward")):
        alone = [row for row in rows if row.case.work is work]
        built.append(_by_length(f"Mixer alone with its projections, {name}, ms", alone, _milliseconds))
        built.append(_by_length(f"Mixer alone, {name}, over the first mixer", alone, _ratio))
    built.append(_pathx(rows))
    return [table for table in built if any(cell != _MISSING for row in table.rows for cell in row[1:])]


def lra_findings(rows: Sequence[LraRow]) -> list[str]:
    """Say how far the first mixer is ahead of the next one, or behind it, at every length."""
    said = []
    for work, what in (
        (Work.STEP, "Training steps"),
        (Work.FWD, "Mixer alone, forward"),
        (Work.FWD_BWD, "Mixer alone, forward and backward"),
    ):
        if parts := _against_next(rows, work, lambda row: row.seconds.median if row.seconds else None):
            said.append(f"{what}: time of the next fastest over that of {rows[0].mixer}: {', '.join(parts)}.")
    if parts := _against_next(rows, Work.STEP, lambda row: row.peak_bytes):
        said.append(f"Peak memory of the next smallest over that of {rows[0].mixer}: {', '.join(parts)}.")
    return said


def _against_next(rows: Sequence[LraRow], work: Work, value: Callable[[LraRow], float | None]) -> list[str]:
    """Return by length the least value of the other mixers over that of the first."""
    parts = []
    for tokens, group in _lengths([row for row in rows if row.case.work is work]).items():
        own = value(group[0])
        others = [(number, row.mixer) for row in group[1:] if (number := value(row))]
        if own and others:
            least, name = min(others)
            parts.append(f"{least / own:.2f}x at {tokens:,} tokens ({name})")
    return parts


def lra_markdown(report: LraReport, *, plot: str | None = None) -> str:
    """Return a report as a Markdown page.

    Args:
        report: The measurement.
        plot: File name of its plot, shown above the tables.

    Raises:
        ValueError: The gate is red.
    """
    require_green(report.gate)
    environment, scale = report.environment, report.scale
    load = "" if environment.load is None else f" (load average {environment.load:g} at the start)"
    lines = [
        "# Long-range mixers in one encoder",
        "",
        f"{environment.summary} | {report.gate.summary}",
        "",
        f"Made by `{report.command}` on {environment.measured[:10]}{load}. The encoder of the Text task: 4 blocks of",
        "width 256 with 4 heads and MLPs of 1024, no dropout, batch 1, full sequences. A step is forward, backward and",
        f"AdamW. The mixers took turns, {scale.repeats} rounds of steps, fewer for slow ones; a ratio compares two",
        "runs of one round. Medians, with quartiles in brackets. Peak memory is the growth of a fresh process during",
        "its first step: what is kept for the backward pass, gradients and AdamW's moments, but not the weights; its C",
        "library returns freed memory at once.",
        f"The mixers are those of `--form {scale.form}`; S4 and S4D have 4 states, their setting for this task.",
    ]
    if plot:
        lines += ["", f"![Steps per second, memory and time of the mixers by number of tokens]({plot})"]
    lines += ["", *(f"- {sentence}" for sentence in lra_findings(report.rows))]
    for table in lra_tables(report.rows):
        lines += ["", f"## {table.title}", "", *markdown_table(table)]
        lines += ["", *(f"- {note}" for note in table.notes)] if table.notes else []
    return "\n".join(lines) + "\n"


def write_lra(report: LraReport, folder: Path) -> list[Path]:
    """Write the files of a report: JSON, Markdown and a plot; of one that is not complete, ``<stem>.partial.json``.

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
            ".md": lra_markdown(report, plot=f"{report.stem}.svg"),
            ".svg": draw_lra(report.rows, caption=report.environment.summary),
        },
    )


def _lengths(rows: Sequence[LraRow]) -> dict[int, list[LraRow]]:
    found: dict[int, list[LraRow]] = {}
    for row in rows:
        found.setdefault(row.case.tokens, []).append(row)
    return found


def _by_length(title: str, rows: Sequence[LraRow], cell: Callable[[LraRow], str]) -> Table:
    lengths = sorted(_lengths(rows))
    cells = {(row.mixer, row.case.tokens): cell(row) for row in rows}
    names = dict.fromkeys(row.mixer for row in rows)
    return Table(
        title=title,
        headers=("mixer", *(f"{tokens:,}" for tokens in lengths)),
        rows=tuple((name, *(cells.get((name, tokens), _MISSING) for tokens in lengths)) for name in names),
        labels=1,
        notes=tuple(row.note for row in rows if row.note) if cell in (_steps_per_second, _milliseconds) else (),
    )


def _pathx(rows: Sequence[LraRow]) -> Table:
    chosen = [row for row in rows if row.case.work is Work.PATHX]
    sizes = "".join(f": {row.case.batch} x {row.case.tokens:,} tokens" for row in chosen[:1])
    return Table(
        title=f"A training step of the Path-X model{sizes}",
        headers=("mixer", "seconds", "peak MB", "whole process MB"),
        rows=tuple(
            (
                row.mixer,
                _MISSING if row.seconds is None else f"{row.seconds.median:.2f}",
                _megabytes(row),
                _MISSING if row.process_bytes is None else f"{row.process_bytes / 1e6:.0f}",
            )
            for row in chosen
        ),
        labels=1,
        notes=("one step each, the first of a fresh process",) if chosen else (),
    )


def _steps_per_second(row: LraRow) -> str:
    return _MISSING if row.seconds is None else f"{1 / row.seconds.median:.3g}"


def _milliseconds(row: LraRow) -> str:
    return _MISSING if row.seconds is None else f"{1e3 * row.seconds.median:.1f}"


def _megabytes(row: LraRow) -> str:
    return _MISSING if row.peak_bytes is None else f"{row.peak_bytes / 1e6:.0f}"


def _ratio(row: LraRow) -> str:
    if row.ratio is None:
        return _MISSING
    return f"{row.ratio.median:.2f} ({row.ratio.lower:.2f}-{row.ratio.upper:.2f})"
